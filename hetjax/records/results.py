"""What came of a run: its parameters and numbers, as `fit` returns them and a workdir has them."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from hetjax import paths, types
from hetjax.checkpoints import checkpoint, leaves
from hetjax.config import files
from hetjax.records import workdir as workdir_lib
from hetjax.report import cards, series, words
from hetjax.rounds import resume
from hetjax.rounds import state as state_lib

_MOST_METRICS = 3  # that a result shows


@dataclasses.dataclass(frozen=True, repr=False)
class SavedRun:
    """A run, as its workdir has it; parameters as they were given, without worker axis."""

    params: types.PyTree
    """After the last round; the mean of the replicas where the reducer gossips. Of an optimiser
    that is judged elsewhere, as schedule-free training is, those to evaluate."""
    best_params: types.PyTree
    """At the best evaluation (`best_by`, `best_mode`); `params` where there was none, as in
    processes that do not lead."""
    summary: dict[str, Any]
    """As `summary.json`; empty where the run is not at its end."""
    history: list[dict[str, Any]]
    """As `metrics.jsonl`, a dict a round."""
    config: dict[str, Any]
    """As `config.json`."""
    workdir: pathlib.Path | None
    """None: nothing was kept."""
    model_state: types.PyTree = dataclasses.field(default=(), kw_only=True)
    """Of the model, as `params`; () where it keeps none."""
    best_model_state: types.PyTree = dataclasses.field(default=(), kw_only=True)
    """Of the model, as `best_params`."""
    ema_params: types.PyTree = dataclasses.field(default=None, kw_only=True)
    """The average of the parameters by `ema`, after the last round, as `params`; None without."""
    ema_model_state: types.PyTree = dataclasses.field(default=(), kw_only=True)
    """The average of the model's state, as `ema_params`; () where there is none."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}\n{words.aligned(self._rows())}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the same numbers, and pictures of the run."""
        return cards.of_run(
            type(self).__name__,
            self._rows(),
            summary=self.summary,
            history=self.history,
            rounds=self._rounds(),
        )

    def _rows(self) -> list[tuple[str, str]]:
        rows = summary_rows(self.summary) if self.summary else [("rounds", str(len(self.history)))]
        sizes = [np.size(leaf) for leaf in jax.tree.leaves(self.params)]
        rows.append(("parameters", f"{sum(sizes):,} in {len(sizes)} arrays"))
        if self.workdir is not None:
            rows.append(("report", str(self.workdir / "report.html")))
        return rows

    def _rounds(self) -> list[dict[str, Any]]:
        """Of both levels of a bilevel problem."""
        return []


@dataclasses.dataclass(frozen=True, repr=False)
class FitResult(SavedRun):
    """What `fit` returns."""

    state: types.TrainState
    """Of all workers: every leaf has a worker axis in front, `[num_workers, ...]`, unlike `params`.
    `fit(..., init_state=…)` goes on from it as it is. `jax.tree.map(lambda leaf: leaf[0],
    result.state.opt_state)` takes the axis off: rows are equal unless the reducer gossips, but for
    `memory` and `worker`, which are each worker's own. In several processes an array reaches over
    all of them, and `leaf.addressable_data(0)[0]` is the row of this one's first worker."""
    learned: dict[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)
    """What the quota policy knows; `fit(..., init_state=result)` goes on with it."""


def of_models(last: types.Model, best: types.Model, average: types.Model) -> dict[str, Any]:
    """Those fields of a result that are models: what it has reached, its best, and by `ema`."""
    models = {"": last, "best_": best, "ema_": average}
    params = {f"{whose}params": model.params for whose, model in models.items()}
    return params | {f"{whose}model_state": model.state for whose, model in models.items()}


def train_of(given: Any) -> Any:
    """The training state of a result; a state as it is."""
    return given.state if isinstance(given, FitResult) else given


def load(
    workdir: str | pathlib.Path, *, like: types.PyTree = None, like_state: types.PyTree = None
) -> SavedRun:
    """A run of `fit` or of `experiments.train`, from its workdir; it may still be running.

    Args:
        workdir: of the run. Parameters are those of its newest checkpoint, on the host.
        like: parameters of the same model, for their containers: arrays or shapes. Without them
            dicts stand for named tuples and for classes that JAX knows, such as Equinox modules.
        like_state: the same of the model's state.

    Raises:
        ValueError: there is no run, or no whole checkpoint of it, or it is of another model.

    Example:
        >>> run = hetjax.load("runs/mnist")  # doctest: +SKIP
        >>> model = hetjax.nnx_model(model, run.best_params)  # doctest: +SKIP
    """
    workdir = paths.on_disk(workdir)
    directory = workdir / resume.DIRECTORY
    if not (workdir / "config.json").is_file():
        raise ValueError(
            f"load: {str(workdir)!r} holds no config.json; give a directory that was workdir="
        )
    saved = checkpoint.newest(directory, mend=False) if directory.is_dir() else None
    if saved is None:
        raise ValueError(
            f"load: {str(workdir)!r} holds no whole checkpoint; one is written when the run ends"
        )
    model = _model(saved, resume.judged_in(saved.arrays), "train/model_state")
    average = types.Model(None, ())
    if any(name.startswith(resume.AVERAGE) for name in saved.arrays):
        average = _model(saved, f"{resume.AVERAGE}params", f"{resume.AVERAGE}state")
        average = state_lib.narrowed(average, model)
    if np.ndim(saved.arrays["train/progress_rounds"]):  # of replicas that differ
        model, average = state_lib.mean_of_rows((model, average))
    best = _model(saved, "best_params", "best_model_state") if saved.about["has_best"] else model
    given = (types.Model(*map(_within, (like, like_state), x)) for x in (model, best, average))
    summary = workdir / "summary.json"
    return SavedRun(
        **of_models(*given),
        summary=files.read_json(summary) if summary.is_file() else {},
        history=workdir_lib.whole_lines(workdir / workdir_lib.METRICS)[0],
        config=files.read_json(workdir / "config.json"),
        workdir=workdir,
    )


def _within(like: types.PyTree, tree: types.PyTree) -> types.PyTree:
    """A tree of arrays in the containers of another one."""
    if like is None or not jax.tree.leaves(tree):
        return tree
    on_host = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), like)
    return leaves.unflatten(on_host, leaves.flatten(tree))


def _model(saved: checkpoint.Saved, params: str, state: str) -> types.Model:
    """Parameters and state of what was saved by these names."""
    form = saved.about.get("model_state")  # which a bilevel run has not
    found = () if form is None else leaves.build(form, saved.arrays, state)
    return types.Model(leaves.build(saved.about["form"], saved.arrays, params), found)


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The few lines that a person reads at the end of a run."""
    if "outer_steps" in summary:
        return _bilevel_rows(summary)
    if not summary["rounds"]:
        return [("note", "interrupted before the first round was done")]
    rows = _evaluated(summary)
    loss = summary["train_loss"]
    rows.append(("loss, last epoch", "none" if loss is None else f"{loss:.4f}"))
    rows.append(("rounds", f"{summary['rounds']:,} in {summary['epochs']:.4g} epochs"))
    rows.append(("quotas", " ".join(map(str, summary["quotas"]))))
    if series.has_clock(summary) and summary["round_secs_mean"] is not None:
        emulated = ", emulated" if summary["emulated"] else ""
        mean, median = summary["round_secs_mean"], summary["round_secs_median"]
        rows.append((f"mean round{emulated}", f"{mean * 1e3:.2f} ms (median {median * 1e3:.2f})"))
        if "optimal_round_secs" in summary:
            optimal, equal = summary["optimal_round_secs"], summary["equal_split_secs"]
            share = summary["fraction_of_optimum"]
            rows.append(("exact optimum", f"{optimal * 1e3:.2f} ms: {share:.1%} of it reached"))
            rows.append(("equal split", f"{equal * 1e3:.2f} ms: {equal / mean:.2f}x as long"))
        rows.append(("waiting", f"{summary['waiting_fraction']:.1%} of the workers' time"))
    kinds = ("processed", "missing", "duplicated", "dropped")
    counts = [(summary.get(f"examples_{kind}"), kind) for kind in kinds]
    rows.append(("examples", ", ".join(f"{n} {kind}" for n, kind in counts if n is not None)))
    return [*rows, *(("note", text) for text in _notes(summary))]


def _bilevel_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = _evaluated(summary)
    steps, levels = summary["outer_steps"], summary["levels"]
    for name in ("gap", "residual"):
        if summary.get(name) is not None:
            rows.append((name, f"{summary[name]:.4g}"))
    rows.append(("outer steps", f"{steps:,} in {summary['rounds']:,} rounds"))
    each = summary["step_secs_mean"]
    rows.append(("mean step", f"{each * 1e3:.2f} ms{', emulated' * summary['emulated']}"))
    rows.append(("waiting", f"{summary['waiting_fraction'] or 0:.1%} of the workers' time"))
    for name, of_level in levels.items():
        text = "{examples_processed} processed, {examples_missing} missing, "
        text += "{examples_duplicated} duplicated; {examples_revisited} revisits"
        rows.append((f"{name} examples", text.format(**of_level)))
    if summary["stopped_by"]:
        rows.append(("note", f"ended by {summary['stopped_by']} after {steps} outer steps"))
    return rows


def _evaluated(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The metrics of the last evaluation, each with its value at the best one."""
    at_best = [name for name in summary if name.startswith("best_") and name != "best_step"]
    names = [name.removeprefix("best_") for name in at_best]
    set_name, _, metric = str(summary.get("judged_by") or "test_").partition("_")
    names = names or [name for name in summary if name.startswith(f"{set_name}_")]
    # What the best is judged by comes first, of every set, and their losses last.
    names = sorted(names, key=lambda n: (not n.endswith(f"_{metric}"), n.endswith("_loss")))
    rows = []
    for name in [each for each in names[:_MOST_METRICS] if each in summary]:
        value, best = summary[name], summary.get(f"best_{name}")
        text = _number(name, value)
        if best is not None and best != value:
            text += f" ({_number(name, best)} at the best)"
        rows.append((name.replace("_", " "), text))
    return sorted(rows, key=lambda row: not row[0].endswith("accuracy"))


def _number(name: str, value: float | None) -> str:
    """None, as JSON has what is not finite, is said to be so."""
    if value is None:
        return "not finite"
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"


def _notes(summary: dict[str, Any]) -> list[str]:
    notes = []
    if summary["stopped_by"]:
        notes.append(f"ended by {summary['stopped_by']} after {summary['epochs']:.4g} epochs")
    elif summary["interrupted"]:
        notes.append(f"the run ended early, after {summary['epochs']:.2f} epochs")
    elif summary["examples_never_processed"]:
        unseen = summary["examples_never_processed"]
        notes.append(f"{unseen} examples were never processed: their worker did nothing")
    if without := summary.get("rounds_without_update"):
        notes.append(f"{without} rounds made no update: they had no weight above 0")
    if told := words.overruns(summary):
        notes.append(told)
    return notes
