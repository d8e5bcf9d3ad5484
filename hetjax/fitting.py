"""`fit`: the one seam that the command line, a notebook and a test share."""

import contextlib
import functools
import pathlib
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from hetjax import driver, starting, types
from hetjax.config import experiment as config_lib
from hetjax.data import sources
from hetjax.records import evaluate as evaluate_lib
from hetjax.records import evaluations, lock, record, results, summary
from hetjax.records import fingerprint as fingerprint_lib
from hetjax.records import keeper as keeper_lib
from hetjax.rounds import inputs, programs, rules, run_records
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import run as run_lib
from hetjax.rounds import state as state_lib


def fit(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation,
    source: Any,
    *,
    eval_source: Any = None,
    eval_sources: Mapping[str, Any] | None = None,
    metrics_fn: evaluate_lib.MetricsFn | None = None,
    callbacks: Sequence[driver.Callback] = (),
    workdir: str | pathlib.Path | None = None,
    resume: bool | str = True,
    init_state: types.TrainState | None = None,
    progress: bool = True,
    raise_on_interrupt: bool = False,
    workers: int | None = None,
    per_example_rng: bool = False,
    rule: rules.LocalRule | None = None,
    config: config_lib.ExperimentConfig | None = None,
    **fields: Any,
) -> results.FitResult:
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
            `__getitem__`. What `__getitem__` draws from a random generator is read anew in each
            epoch; what it draws from the index is one view for all.
        eval_source: evaluated every `eval_every` epochs, and every `eval_every_rounds` rounds if
            that is given; same form.
        eval_sources: several such sets by name, `{"val": …, "test": …}`, in its place.
        metrics_fn: `(params, examples) -> {name: f32[B]}` for them. By default the training loss,
            with dropout if that has any; `hetjax.nnx_metrics` and `linen_metrics` evaluate
            without. The best parameters are those of the lowest loss of the first set; fields
            `best_by="accuracy", best_mode="max"` say otherwise.
        callbacks: each is called with the `RoundReport` of a round while the next one computes.
            One that returns True or `hetjax.STOP` ends the run after that one; the run is
            finished then.
        workdir: gets `config.json`, `metrics.jsonl`, `summary.json`, `report.html` and
            `checkpoints`; `hetjax.load` reads them. The same call replaces those
            of a finished run. One run at a time holds it.
        resume: go on from the newest checkpoint in `workdir` where there is one of this
            configuration that is not at the run's end, or that has fewer `epochs` or
            `max_rounds`; else begin at the beginning. The number of workers may have changed. A
            run that began with another loss, optimiser, rule, initial parameters or data is
            refused; 'force' goes on with it. 'overwrite' begins anew, whatever run the workdir
            holds.
        init_state: parameters, optimiser's state and progress to begin with, such as the `state`
            of another result; `params` may be None then.
        progress: show a progress bar.
        raise_on_interrupt: raise KeyboardInterrupt after Ctrl-C, and SystemExit after SIGTERM,
            once all files are written; by default the result so far is returned.
        workers: their number; by default one for each device.
        per_example_rng: the loss gets a key for each example, `key[B]`.
        rule: what a worker does with its microbatches, and what it hands to the synchronisation; by
            default it adds up gradients. If it has `losses`, they are those of `loss_fn`; by
            `loss_fn` a run is evaluated in any case.
        config: a checked configuration; or give `fields`.
        **fields: fields of the configuration, groups as dicts: `epochs=5, budget=32,
            cluster={"num_workers": 4}, quota={"policy": "adaptive"}`. `quota`, `ordering`,
            `reducer` and `gate` are each a part, such as `hetjax.quota.adaptive(min_gain=0.05)`,
            a name, or a dict whose first field may be a part; `cluster` is an
            `emulate.EmulatedCluster` or a dict. By default there is a worker for each device.

    Returns:
        Last and best parameters, state, summary and history. After Ctrl-C too, unless
        `raise_on_interrupt`: `summary["interrupted"]` is true then.

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
    params = params if init_state is None or params is not None else _params_of(init_state)
    _check(optimizer, callbacks, resume)
    source, workdir = sources.as_source(source), _absolute(workdir)
    eval_sets = evaluations.sets_of(eval_source, eval_sources, metrics_fn)
    with contextlib.ExitStack() as stack:
        begins = stack.enter_context(starting.Starting(shown=progress))
        kept = functools.partial(keeper_lib.kept_solutions, workdir, resume=resume)
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
                begins=begins,
                **fields,
            )
        )
        fingerprint: dict[str, Any] = {}
        if workdir is not None and run.parts.leads:
            stack.enter_context(lock.held(record.made_directory(workdir)))
            began = params if init_state is None else init_state
            fingerprint = fingerprint_lib.make(loss_fn, began, optimizer, source, parts=run.parts)
        start = keeper_lib.find(
            workdir,
            run.recorded,
            parts=run.parts,
            fingerprint=fingerprint,
            resume=resume,
        )
        keeper = keeper_lib.make(workdir, run.parts, fingerprint=fingerprint)
        stack.enter_context(keeper or contextlib.nullcontext())
        recorder = record.Recorder(
            workdir if run.parts.leads else None,
            run.recorded,
            num_examples=_num_examples(run),
            progress=progress and run.parts.leads,
            lines=start.lines,
        )
        stack.callback(recorder.close)
        evaluate, judge = _evaluations(run, metrics_fn, eval_sets, params, progress=progress)
        told = summary.Summary(run.parts, started=started, judge=judge, begins=begins)
        begun = _begin(run, start, told, init_state)
        result = driver.Driver(
            run,
            *begun,
            recorder=recorder,
            evaluate=evaluate,
            callbacks=callbacks,
            summary=told,
            keeper=keeper,
        ).drive()
        run.parts.meeting.close()  # not after an error: who failed is to be the first that is gone
    return result if not raise_on_interrupt else _uninterrupted(result)


def _num_examples(run: run_lib.Run) -> int:
    """That the run will process, at most."""
    config = run.config
    of_epochs = config.epochs * run.parts.stream.num_examples
    return min(of_epochs, config.max_rounds * programs.nominal_examples(config) or of_epochs)


def _begin(
    run: run_lib.Run,
    start: keeper_lib.Start,
    told: summary.Summary,
    init_state: types.TrainState | None,
) -> tuple[run_records.RunState, types.PyTree]:
    """The state that a run begins or goes on with, and the best parameters so far."""
    state, best_params = run.init(train=init_state), None
    if start.saved is not None:
        state, best_params = run.go_on(start.saved)
        told.restore(start.saved.about, start.lines)
        told.stopped_by = start.stopped_by
        told.examples_recomputed = start.examples_recomputed
    return state, best_params


def _params_of(state: types.TrainState) -> types.PyTree:
    return jax.device_get(state_lib.own_row(state.params))


def _check(optimizer: Any, callbacks: Any, resume: Any) -> None:
    inputs.check_callbacks(callbacks)
    if optimizer is None:
        raise ValueError("fit: optimizer is None; rounds without an update are for hetjax.Run")
    keeper_lib.check_resume(resume, caller="fit")


def _absolute(workdir: str | pathlib.Path | None) -> pathlib.Path | None:
    """Where it is, though a callback may change the directory."""
    return None if workdir is None else pathlib.Path(workdir).expanduser().absolute()


def _uninterrupted(result: results.FitResult) -> results.FitResult:
    """The result, unless a signal ended its run: then what Python raises for that signal."""
    stopped_by = result.summary["stopped_by"]
    if stopped_by == "SIGINT":
        raise KeyboardInterrupt
    if stopped_by == "SIGTERM":
        raise SystemExit(128 + signal.SIGTERM)
    return result


def _evaluations(
    run: run_lib.Run,
    metrics_fn: evaluate_lib.MetricsFn | None,
    sets: dict[str, Any],
    params: types.PyTree,
    *,
    progress: bool,
) -> tuple[evaluations.Evaluations, evaluations.Judge]:
    """Of the process that evaluates; the others have none."""
    if not run.parts.leads:
        return evaluations.Evaluations({}), evaluations.Judge()
    of_loss = evaluate_lib.metrics_of_loss(
        run.parts.loss_fn, per_example_rng=run.parts.per_example_rng
    )
    metrics_fn = metrics_fn or of_loss
    of_sets = evaluations.Evaluations(
        {
            name: evaluate_lib.Evaluator(
                metrics_fn,
                source,
                params,
                run.parts.own_device,
                on_batch=lambda: run.beacons.at("evaluating"),
                progress=progress,
            )
            for name, source in sets.items()
        }
    )
    config = run.config
    return of_sets, evaluations.judge(
        of_sets.names, best_by=config.best_by, best_mode=config.best_mode
    )
