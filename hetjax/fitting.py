"""`fit`: the one seam that the command line, a notebook and a test share."""

import contextlib
import functools
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import optax

from hetjax import config as config_lib
from hetjax import driver, types
from hetjax.data import sources
from hetjax.records import evaluate, record, summary
from hetjax.records import keeper as keeper_lib
from hetjax.rounds import arguments, rules
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import run as run_lib


def fit(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation,
    source: Any,
    *,
    eval_source: Any = None,
    metrics_fn: evaluate.MetricsFn | None = None,
    callbacks: Sequence[driver.Callback] = (),
    workdir: str | pathlib.Path | None = None,
    resume: bool = True,
    progress: bool = True,
    workers: int | None = None,
    per_example_rng: bool = False,
    rule: rules.LocalRule | None = None,
    config: config_lib.ExperimentConfig | None = None,
    **fields: Any,
) -> driver.FitResult:
    """Trains a model of your own on workers that are not equal.

    Args:
        loss_fn: `(params, examples, rng) -> losses f32[B]`, one number an example, or
            `(losses, weights)`, or a `hetjax.Losses` with metrics: an update descends
            `sum(weights * losses) / sum(weights)` over its round, both f32[B] or both f32[B, T];
            `data.weighting` says whose examples count how much. `hetjax.nnx_loss`
            and `hetjax.linen_loss` make one from a Flax model.
        params: a pytree of arrays.
        optimizer: any optax optimiser; gradient clipping in its chain acts on the gradient of
            the whole round. Schedules: `hetjax.scale_by_progress`.
        source: the examples: a dict of NumPy arrays, or anything with `__len__` and
            `__getitem__`.
        eval_source: evaluated every `eval_every` epochs; same form.
        metrics_fn: `(params, examples) -> {name: f32[B]}` for it. The best parameters are those
            of the lowest `loss` there, if it has one. By default the training loss, with
            dropout if that has any; `hetjax.nnx_metrics` and `linen_metrics` evaluate without.
        callbacks: called with each `RoundReport` while the next round computes; True ends the
            run after that one.
        workdir: gets `config.json`, `metrics.jsonl`, `summary.json`, `report.html` and
            `checkpoints`; those of a finished run of the same configuration are replaced.
        resume: go on from the newest checkpoint in `workdir` where there is one of this
            configuration that is not at the run's end; else begin at the beginning. The number
            of workers may have changed.
        progress: show a progress bar.
        workers: their number; by default one for each device.
        per_example_rng: the loss gets a key for each example, `key[B]`.
        rule: what a worker does with its microbatches, and what it hands to the synchronisation; by
            default it adds up gradients.
        config: a checked configuration; or give `fields`.
        **fields: fields of the configuration, groups as dicts: `epochs=5, budget=32,
            cluster={"num_workers": 4}, quota={"policy": "adaptive"}`. `quota`, `ordering`,
            `reducer` and `gate` are each a part, such as `hetjax.quota.adaptive(min_gain=0.05)`,
            a name, or a dict whose first field may be a part; `cluster` is an
            `emulate.EmulatedCluster` or a dict. By default there is a worker for each device.

    Returns:
        Last and best parameters, state, summary and history. After Ctrl-C too:
        `summary["interrupted"]` is true then.

    Raises:
        ValueError: what was given cannot be run; said before anything is computed.
        NonFiniteError: a loss or gradient was not finite; its `result` holds the state before.

    Example:
        >>> import numpy as np, optax
        >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        >>> data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], np.float32)}
        >>> def loss_fn(params, batch, rng):
        ...     return (batch["x"] @ params - batch["y"]) ** 2
        >>> result = fit(
        ...     loss_fn, np.zeros(3, np.float32), optax.sgd(0.2), data, epochs=40,
        ...     microbatch_size=4, budget=4, cluster={"num_workers": 1}, progress=False,
        ... )
        >>> np.round(result.params, 2).tolist()
        [1.0, -2.0, 3.0]

    References:
        Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
        environment", 2021, arXiv 2111.08272. The quotas' cost model, exact solver and change
        detection are hetjax's own.
    """
    started = time.perf_counter()
    arguments.check(params, optimizer, callbacks)
    if optimizer is None:
        raise ValueError("fit: optimizer is None; rounds without an update are for hetjax.Run")
    eval_source = None if eval_source is None else sources.as_source(eval_source)
    if workdir is not None:
        workdir = pathlib.Path(workdir).absolute()  # a callback may change the directory
    restarted = int(os.environ.get("HETJAX_ATTEMPT", "0")) > 0
    kept = functools.partial(keeper_lib.kept_solutions, workdir, resume=resume, restarted=restarted)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            run_lib.Run(
                loss_fn,
                params,
                optimizer,
                source,
                workers=workers,
                per_example_rng=per_example_rng,
                rule=rule,
                config=config,
                solved=kept,
                **fields,
            )
        )
        parts = run.parts
        metrics_fn = metrics_fn or evaluate.metrics_of_loss(loss_fn)
        start = keeper_lib.find(
            workdir, run.recorded, parts=parts, resume=resume, restarted=restarted
        )
        keeper = None
        if workdir is not None:
            keeper = stack.enter_context(contextlib.closing(keeper_lib.Keeper(workdir, parts)))
        recorder = record.Recorder(
            workdir if parts.leads else None,
            run.recorded,
            num_examples=run.config.epochs * parts.stream.num_examples,
            progress=progress and parts.leads,
            lines=start.lines,
        )
        stack.callback(recorder.close)
        state, best_params = run.init(), None
        told = summary.Summary(parts, started=started)
        if start.saved is not None:
            state, best_params = run.go_on(start.saved)
            told.restore(start.saved.about["summary"], start.lines)
            told.examples_recomputed = start.examples_recomputed
        result = driver.Driver(
            run,
            state,
            recorder=recorder,
            evaluator=_evaluator(run, metrics_fn, eval_source, params),
            callbacks=callbacks,
            summary=told,
            best_params=best_params,
            keeper=keeper,
        ).drive()
        parts.meeting.close()  # not after an error: who failed is to be the first that is gone
        return result


def _evaluator(
    run: run_lib.Run, metrics_fn: evaluate.MetricsFn, source: Any, params: types.PyTree
) -> evaluate.Evaluator | None:
    """Of the process that evaluates; None in the others, and where there are no examples for it."""
    if source is None or not run.parts.leads:
        return None
    return evaluate.Evaluator(
        metrics_fn,
        source,
        params,
        run.parts.own_device,
        on_batch=lambda: run.beacons.at("evaluating"),
    )
