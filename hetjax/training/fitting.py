"""`fit`: the one seam that the command line, a notebook and a test share."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from hetjax import mesh as mesh_lib
from hetjax import reported, starting, types
from hetjax.config import experiment as config_lib
from hetjax.data import sources
from hetjax.inputs import refusals as inputs
from hetjax.local import rules
from hetjax.losses import batch_loss, stateful
from hetjax.losses import loss as losses_lib
from hetjax.records import checkpoint_manager, evaluations, results, summary
from hetjax.records import evaluate as evaluate_lib
from hetjax.records import workdir as workdir_lib
from hetjax.rounds import run as run_lib
from hetjax.training import driver
from hetjax.training import steps as training
from hetjax.writers import background
from hetjax.writers import records as writer_records


@jax.transfer_guard("allow")
def fit(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation,
    source: Any,
    *,
    eval_source: Any = None,
    eval_sources: Mapping[str, Any] | None = None,
    metrics_fn: evaluate_lib.MetricsFn | None = None,
    callbacks: Sequence[Callable[[reported.RoundReport], Any]] = (),
    model_state: types.PyTree | None = None,
    state_reduce: Mapping[str, str] | None = None,
    frozen: types.PyTree | None = None,
    values: Any = None,
    writers: Sequence[writer_records.Writer] = (),
    workdir: str | pathlib.Path | None = None,
    resume: bool | str = True,
    init_state: types.TrainState | results.FitResult | None = None,
    progress: bool = True,
    raise_on_interrupt: bool = True,
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
            and `hetjax.linen_loss` make one from a Flax model. Of a loss over all examples of a
            round: `hetjax.batch_loss`.
        params: a pytree of arrays.
        optimizer: any optax optimiser; gradient clipping in its chain acts on the gradient of
            the whole round. Schedules: `hetjax.scale_by_progress`.
        source: the examples: a dict of NumPy arrays, or anything with `__len__` and
            `__getitem__`. What `__getitem__` draws from a random generator is read anew in each
            epoch; what it draws from the index is one view for all. In several processes each is
            given all examples, or with `data={"sharing": "process_local"}` a part of its own.
        eval_source: evaluated every `eval_every` epochs, and every `eval_every_rounds` rounds if
            that is given; same form.
        eval_sources: several such sets by name, `{"val": …, "test": …}`, in its place.
        metrics_fn: `(params, examples) -> {name: f32[B]}` for them. By default the training loss,
            with dropout if that has any; `hetjax.nnx_metrics` and `linen_metrics` evaluate
            without. The best parameters are those of the lowest loss of the first set; fields
            `best_by="accuracy", best_mode="max"` say otherwise. With the field `ema=0.999` an
            average of the parameters is evaluated too, as `ema_accuracy`.
        callbacks: each is called with the `RoundReport` of a round while the next one computes.
            One that returns True or `hetjax.STOP` ends the run after that one; the run is
            finished then.
        writers: trackers that get the line of each round, such as
            `[hetjax.writers.tensorboard("DIR")]`, `wandb`, `mlflow`, `csv`, or objects of your
            own; they write in threads of their own.
        model_state: of a model that keeps state which training changes and gradients do not, such
            as running statistics: a pytree of arrays. `loss_fn` is then `(params, state, examples,
            rng) -> (losses, new_state)`, or with a fifth argument `mask f32[B]`, 0 for padding;
            and `metrics_fn` is `(params, state, examples)`. Each microbatch begins at the round's
            state, and a round changes it by the mean of their changes, weighted by examples. What
            `nnx_loss` and `linen_loss` make of a model with such variables brings its own.
        state_reduce: `{"path": "mean" or "sum"}`, for leaves of the state whose changes are added
            up over microbatches. Integers and booleans have no mean: all microbatches of a round
            make the same of them, or the run stops.
        frozen: arrays that training does not change, such as a teacher's parameters: a pytree.
            `loss_fn` and `metrics_fn` name it, `def loss_fn(params, batch, rng, *, frozen)`. They
            lie on each device once, and are no constants of a program. What `nnx_loss(wrt=…)` and
            `linen_loss(wrt=…)` make brings its own.
        values: what losses need and no example has, such as a weight that anneals:
            `values(progress) -> pytree`, of the epochs done, f[]; or a pair `(initial, update)`
            with `update(values, params, progress, metrics) -> values` after each round: at the new
            parameters, `metrics` with `loss`, `finite` and those of the loss. Both are traced.
            `loss_fn` and `metrics_fn` name them, `def loss_fn(params, batch, rng, *, values)`.
            A round's numbers among them are in its report.
        workdir: gets `config.json`, `metrics.jsonl`, `summary.json`, `report.html` and
            `checkpoints`; `hetjax.load` reads them. The same call replaces those
            of a finished run. One run at a time holds it.
        resume: go on from the newest checkpoint in `workdir` where there is one of this
            configuration that is not at the run's end, or that has fewer `epochs` or
            `max_rounds`; else begin at the beginning. The number of workers may have changed. A
            run that began with another loss, optimiser, rule, initial parameters or data is
            refused; 'force' goes on with it. 'overwrite' begins anew, whatever run the workdir
            holds.
        init_state: another result, to begin with its parameters, optimiser's state and progress,
            and with its quotas; or its `state`, without these. `params` may be None then.
        progress: show a progress bar.
        raise_on_interrupt: raise KeyboardInterrupt after Ctrl-C, and SystemExit(128 + n) after the
            signal n (SIGTERM, SIGHUP, SIGUSR1, SIGUSR2), once all files are written, so that a
            sweep stops, too; False: return the result so far. A handler that the program has for
            the signal is called in the place of SystemExit.
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
            With `slices={"data": 2, "model": 2}`, axes and their sizes, a worker is several
            devices; `shard` says how arrays lie on them: a pytree of `PartitionSpec`, a function
            of path and shape, or `hetjax.slices.fsdp()`.

    Returns:
        Last and best parameters, state, summary and history.

    Raises:
        KeyboardInterrupt: after Ctrl-C; its `result` is the one so far, whose
            `summary["interrupted"]` is true. SystemExit likewise, after other signals.
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
    if params is None and init_state is not None:
        params = jax.device_get(mesh_lib.own_row(results.train_of(init_state).params))
    params, model_state, frozen = mesh_lib.auto((params, model_state, frozen))
    written = _checked(optimizer, callbacks, writers, resume)
    loss_fn = stateful.of(loss_fn, model_state, state_reduce)
    source, directory = sources.as_source(source), workdir_lib.absolute(workdir)
    eval_sets = evaluations.sets_of(eval_source, eval_sources, metrics_fn)
    batch_loss.check_evaluation(loss_fn, metrics_fn, is_asked=bool(eval_sets))
    with contextlib.ExitStack() as stack:
        begins = stack.enter_context(starting.Starting(shown=progress))
        run = stack.enter_context(
            run_lib.Run(
                loss_fn,
                params,
                optimizer,
                source,
                workers=workers,
                per_example_rng=per_example_rng,
                rule=rule,
                frozen=frozen,
                values=values,
                asking=[metrics_fn],
                config=config,
                solved=functools.partial(checkpoint_manager.solved_in, directory, resume=resume),
                begins=begins,
                **fields,
            )
        )
        setup, model = run.setup, params
        if isinstance(loss_fn, stateful.StatefulLoss):
            model = types.Model(params, loss_fn.model_state)
            metrics_fn = None if metrics_fn is None else evaluate_lib.of_model(metrics_fn)
        evaluate = evaluations.Evaluations(setup, metrics_fn, eval_sets, model, progress=progress)
        best, may_lead = (run.config.best_by, run.config.best_mode), setup.where.may_lead
        judge = evaluations.judge(evaluate.names, *best) if may_lead else evaluations.Judge()
        task = training.Training(
            run,
            init_state,
            summary=summary.TrainingSummary(setup, started=started, judge=judge, begins=begins),
            evaluate=evaluate,
        )
        drives = driver.Driver(
            stack,
            task,
            directory=directory,
            resume=resume,
            progress=progress,
            callbacks=callbacks,
            writers=written,
        )
        result = drives.drive()
    return drives.unless_stopped(result, raises=raise_on_interrupt)


def _checked(optimizer: Any, callbacks: Any, writers: Any, resume: Any) -> list[Any]:
    """The writers, when all of them can be what they are."""
    inputs.check_callbacks(callbacks)
    if optimizer is None:
        raise ValueError("fit: optimizer is None; only hetjax.Run takes that")
    checkpoint_manager.check_resume(resume, caller="fit")
    return background.check(writers)
