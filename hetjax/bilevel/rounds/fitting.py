"""`fit_bilevel`: outer steps on unequal workers until they are done, with records."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from hetjax import parts, starting, types
from hetjax.bilevel import machine, per_example, trajectory
from hetjax.bilevel.problem import LOWER, UPPER, Bilevel
from hetjax.bilevel.rounds import outer_report, results, summary
from hetjax.bilevel.rounds import outer_steps as outer_steps_lib
from hetjax.bilevel.rounds import run as run_lib
from hetjax.inputs import refusals as inputs
from hetjax.losses import named as named_lib
from hetjax.records import checkpoint_manager, evaluations
from hetjax.records import workdir as workdir_lib
from hetjax.training import driver
from hetjax.writers import background, records

MetricsFn = Callable[[types.PyTree, types.PyTree], dict[str, Any]]
"""`(y, examples) -> {name: f32[B]}`."""


@jax.transfer_guard("allow")
def fit_bilevel(
    problem: Bilevel,
    x: types.PyTree,
    y: types.PyTree,
    estimator: machine.Estimator,
    optimizer: optax.GradientTransformation,
    *,
    upper_source: Any,
    lower_source: Any,
    outer_steps: int,
    upper: Mapping[str, Any] | None = None,
    lower: Mapping[str, Any] | None = None,
    eval_source: Any = None,
    eval_sources: Mapping[str, Any] | None = None,
    metrics_fn: MetricsFn | None = None,
    eval_every: int = 1,
    callbacks: Sequence[Callable[[outer_report.OuterReport], Any]] = (),
    writers: Sequence[records.Writer] = (),
    workdir: str | pathlib.Path | None = None,
    resume: bool | str = True,
    replay: str | pathlib.Path | None = None,
    progress: bool = True,
    raise_on_interrupt: bool = True,
    best_by: str = "",
    best_mode: str = "min",
    workers: int | None = None,
    frozen: types.PyTree = (),
    **fields: Any,
) -> results.BilevelResult:
    """Solves a bilevel problem on workers that are not equal.

    Every sum that the estimator asks for is a round. The level's quotas say how many microbatches
    each worker does. The sums are added up and divided once, so the hypergradient is that of one
    device whatever the quotas are. A request for a new batch takes the examples that come next in
    the level's order. One for a batch that is held does the same examples once more, and no gate
    closes it.

    Args:
        problem: `hetjax.bilevel.Bilevel(upper, lower)`; losses `(x, y, examples) -> f[B]`, one
            number an example, or `(losses, weights)`. What is added to the loss of each example,
            such as a ridge, is added to their mean.
        x: the upper variable. Leaves marked as `hetjax.bilevel.PerExample` live with their example.
        y: the lower variable, where it begins.
        estimator: `value_gap(…)`, `implicit(…)` or `unroll(…)` of `hetjax.bilevel`. With a reducer
            that gossips only a `value_gap`; a gate goes with all.
        optimizer: of x, any optax optimiser without a random key in its state. It is given F as
            `value`, and the number of outer steps before as `progress`.
        upper_source, lower_source: the examples of each level, as `fit` takes them.
        outer_steps: hypergradients, each with an update of x.
        upper, lower: fields of one level: `budget`, `microbatch_size`, `quota`, `gate`, `ordering`,
            `data`, `seed`, such as `{"budget": 8}`. Without `budget` a request takes as many
            microbatches as the set has: the whole set, where the data are shared.
        eval_source: evaluated every `eval_every` outer steps, and at the end.
        eval_sources: several such sets by name, in its place.
        metrics_fn: `(y, examples) -> {name: f32[B]}` for them; by default the upper loss.
        eval_every: outer steps between two evaluations, at which the best x and y are kept, too.
        callbacks: each is called with the `OuterReport` of a step; one that returns True or
            `hetjax.STOP` ends the run after the step, or after the next one where several
            processes take part.
        writers: as for `fit`; they get the line of each outer step.
        workdir: gets `config.json`, `metrics.jsonl`, a file of each level's rounds, `summary.json`,
            `report.html` and `checkpoints`; `hetjax.load` reads them.
        resume: as for `fit`.
        replay: the workdir of a run whose quotas are taken, in place of the policy's.
        progress: show a progress bar.
        raise_on_interrupt: as for `fit`.
        best_by: the metric by which x and y are the best; by default the upper loss.
        best_mode: 'min' or 'max', which of its values is the best.
        workers: their number; by default one for each device.
        frozen: arrays that losses and metrics name, as for `fit`: `(x, y, examples, *, frozen)`.
        **fields: of the configuration, for both levels, as for `fit`: `quota`, `gate`, `reducer`,
            `cluster`, `ordering`, `microbatch_size`, `budget`, `local`, `seed`, …

    Returns:
        x, y, the best of both, summary and history.

    Raises:
        ValueError: what was given cannot be run; said before anything is computed.
        NonFiniteError: a loss or derivative was not finite; names the request and the examples.
        KeyboardInterrupt, SystemExit: as of `fit`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from hetjax import bilevel
        >>> rng = np.random.default_rng(0)
        >>> inputs = rng.normal(size=(96, 3))
        >>> data = {"inputs": inputs, "targets": inputs @ np.ones(3) + rng.normal(size=96)}
        >>> train, validation = ({k: v[part] for k, v in data.items()}
        ...                      for part in (slice(0, 32), slice(32, 96)))
        >>> def upper(x, y, batch):
        ...     return (batch["inputs"] @ y - batch["targets"]) ** 2
        >>> def lower(x, y, batch):  # x: the logarithm of a ridge
        ...     return upper(x, y, batch) + jnp.exp(x) * jnp.sum(y**2)
        >>> result = fit_bilevel(
        ...     bilevel.Bilevel(upper, lower), np.float32(1.0), np.zeros(3, np.float32),
        ...     bilevel.implicit(bilevel.descent(optax.sgd(0.1)), 20), optax.sgd(0.5),
        ...     upper_source=validation, lower_source=train, outer_steps=20, workers=1,
        ...     progress=False,
        ... )
        >>> bool(result.x < 0.0)
        True

    References:
        Liu, Gao, Zhang, Meng, Lin, "Investigating bi-level optimization for learning and vision
        from a unified perspective", 2021, arXiv 2101.11517.
    """
    started = time.perf_counter()
    _check_given(callbacks, resume, outer_steps=outer_steps, eval_every=eval_every)
    of_level = {UPPER: dict(upper or {}), LOWER: dict(lower or {})}
    if replay is not None:
        for name, own in of_level.items():
            own["replay"] = str(pathlib.Path(replay).expanduser() / outer_steps_lib.FILES[name])
    written = background.check(writers)
    sets = evaluations.sets_of(eval_source, eval_sources, metrics_fn, caller="fit_bilevel")
    directory = workdir_lib.absolute(workdir)
    with contextlib.ExitStack() as stack:
        begins = stack.enter_context(starting.Starting(shown=progress))
        run = stack.enter_context(
            run_lib.BilevelRun(
                problem,
                x,
                y,
                estimator,
                optimizer,
                upper_source=upper_source,
                lower_source=lower_source,
                begins=begins,
                workers=workers,
                frozen=frozen,
                solved=functools.partial(checkpoint_manager.solved_in, directory, resume=resume),
                **of_level,
                **fields,
            )
        )
        evaluate = _evaluations(run, metrics_fn, sets, progress=progress)
        judge = summary.BY_UPPER_LOSS
        if best_by and run.setup.where.leads:
            judge = evaluations.judge(evaluate.names, best_by=best_by, best_mode=best_mode)
        task = outer_steps_lib.OuterSteps(
            run,
            outer_steps=outer_steps,
            eval_every=eval_every,
            evaluate=evaluate,
            has_sets=bool(sets),
            summary=summary.BilevelSummary(run, started=started, judge=judge, begins=begins),
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


def _check_given(callbacks: Any, resume: Any, **counts: Any) -> None:
    inputs.check_callbacks(callbacks)
    checkpoint_manager.check_resume(resume, caller="fit_bilevel")
    for name, count in counts.items():
        parts.integer(at_least=1).check(f"fit_bilevel: {name}", count)


def _evaluations(
    run: run_lib.BilevelRun, metrics_fn: MetricsFn | None, sets: dict[str, Any], *, progress: bool
) -> evaluations.Evaluations:
    loss = named_lib.giving(run.problem.upper, 3)
    metrics_fn = named_lib.giving(metrics_fn, 2)
    if sets and metrics_fn is None and any(r.level == UPPER for r in per_example.split(run.x)[1]):
        raise ValueError(
            "fit_bilevel: x has PerExample leaves of the upper level; evaluate by a metrics_fn"
        )

    def metrics(params: types.PyTree, examples: types.PyTree) -> dict[str, Any]:
        if metrics_fn is not None:
            return metrics_fn(params["y"], examples)
        x = params["x"].x if isinstance(params["x"], trajectory.Learned) else params["x"]
        found = loss(x, params["y"], examples)
        return {"loss": found[:2] if isinstance(found, tuple) else found}

    params = {"x": per_example.plain(run.x), "y": run.y0}
    return evaluations.Evaluations(run.setup, metrics, sets, params, progress=progress)
