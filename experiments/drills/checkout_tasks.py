"""What an arm of `checkouts` does in one checkout; each task leaves what is compared.

A task gets the arm and a directory of its own. A run of `fit` or `fit_bilevel` that is compared
lies in `run` there, with all its files; a task returns arrays, and lines of rounds without files.
"""

import pathlib
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import hetjax
from experiments.drills import checkout_problems as problems

Arm = dict[str, Any]


class Found(NamedTuple):
    """What a task returns, beside what lies in its directory."""

    arrays: dict[str, np.ndarray]
    told: dict[str, Any]
    """JSON: `rounds`, `is_virtual` of them, and `counts`; {} where the workdir has all."""


def cut_and_resumed(arm: Arm, own: pathlib.Path) -> Found:
    """Trains until a signal in a callback ends the run, and goes on to the end."""
    cut = trained(arm, own / "run", interrupter(arm))
    if not cut.summary["interrupted"]:
        raise ValueError(f"the run was over after {len(cut.history)} lines, before its cut")
    return Found(returned(trained(arm, own / "run")), {})


def interrupter(arm: Arm) -> Callable[[Any], None]:
    """A callback that presses Ctrl-C after the arm's round or outer step."""

    def interrupt(line: Any) -> None:
        if (line.step if "estimator" in arm else line.round) == arm["cut_round"]:
            signal.raise_signal(signal.SIGINT)

    return interrupt


def returned(result: Any) -> dict[str, np.ndarray]:
    """Last and best parameters."""
    return named(params=result.params, best_params=result.best_params)


def named(**trees: Any) -> dict[str, np.ndarray]:
    """Their arrays, as this process has them."""
    return {
        f"{name}/{index}": _own_array(leaf)
        for name, tree in trees.items()
        for index, leaf in enumerate(jax.tree.leaves(tree))
    }


def _own_array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.stack([np.asarray(shard.data) for shard in leaf.addressable_shards])
    return np.asarray(leaf)


def trained(arm: Arm, workdir: pathlib.Path, *callbacks: Any, **more: Any) -> Any:
    """One call of `fit`, or of `fit_bilevel` where the arm has an estimator."""
    common = {"workdir": workdir, "callbacks": callbacks, "progress": False}
    common["raise_on_interrupt"] = False
    if "estimator" in arm:
        return _trained_in_two_levels(arm, {**common, **arm["fields"], **more})
    data = problems.examples(arm["num_examples"], spoiled=arm.get("spoiled", 0))
    common["eval_source"] = data
    if arm.get("has_sets"):
        del common["eval_source"]
        common["eval_sources"] = {"val": problems.examples(30), "test": problems.examples(17)}
        common["metrics_fn"] = problems.metrics
    if arm.get("spoiled"):
        common["eval_source"] = problems.examples(arm["num_examples"])
    return hetjax.fit(
        problems.LOSSES[arm.get("loss", "plain")],
        problems.params(arm["model"]),
        problems.OPTIMIZERS[arm["optimizer"]],
        data,
        **{**common, **arm["fields"], **more},
    )


def _trained_in_two_levels(arm: Arm, given: dict[str, Any]) -> Any:
    problem, x, y, estimator = problems.two_levels(arm["estimator"])
    upper, lower = problems.levels()
    return hetjax.fit_bilevel(
        problem,
        x,
        y,
        estimator,
        problems.OF_UPPER[arm["optimizer"]],
        upper_source=upper,
        lower_source=lower,
        eval_sources={"val": upper, "train": lower},
        metrics_fn=problems.bilevel_metrics,
        **given,
    )


# A loop of one's own


def looped(arm: Arm, own: pathlib.Path) -> Found:
    """Rounds of `Run` one by one: updates, products, and products of a batch that is held."""
    kinds, first = arm["kinds"], problems.params(arm["model"])
    rule = problems.hessian_product()
    rules = {"rules": {"product": rule}} if kinds == ["main", "product"] else {}
    if kinds == ["product"]:
        rules = {"rule": rule}
    vectors, report = _vectors(first), None
    arrays: dict[str, np.ndarray] = {}
    rounds: list[dict[str, Any]] = []
    with hetjax.Run(
        problems.plain_loss,
        first,
        problems.OPTIMIZERS[arm["optimizer"]] if "main" in kinds else None,
        problems.examples(arm["num_examples"]),
        **rules,
        **arm["fields"],
    ) as run:
        state = run.init() if "main" in kinds else run.init(given=vectors[0])
        for vector in vectors:
            for asked in _asked(kinds, vector):
                again = report.done if report and asked.is_again else None
                state, report = run.round(state, **asked.given, again=again)
                params, consensus = run.params(state)
                of_round = {"params": params, "train": train_of(state)}
                of_round |= {"mean": report.mean, "own": report.own, "done": report.done}
                index = len(rounds)
                arrays |= named(**{f"{name} of {index}": it for name, it in of_round.items()})
                line = report.read().to_plain()
                rounds.append(line | {"consensus": consensus and _floats(consensus)})
    is_virtual = arm["fields"]["cluster"].get("clock") == "virtual"
    return Found(arrays, {"rounds": rounds, "is_virtual": is_virtual})


def _vectors(params: Any) -> list[Any]:
    """That products are taken with."""
    rng = np.random.default_rng(3)
    return [
        jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), params)
        for _ in range(3)
    ]


class _Asked(NamedTuple):
    """What `Run.round` is given; `is_again`: the microbatches of the round before, once more."""

    given: dict[str, Any]
    is_again: bool = False


def _asked(kinds: list[str], vector: Any) -> list[_Asked]:
    if kinds == ["main"]:
        return [_Asked({}), _Asked({})]
    if kinds == ["product"]:
        return [_Asked({"given": vector}), _Asked({"given": vector}, is_again=True)]
    product = {"kind": "product", "given": vector}
    return [_Asked({}), _Asked(product), _Asked(product, is_again=True)]


def _floats(values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def train_of(state: Any) -> dict[str, Any]:
    """What a state of `Run` has of parameters and of what is kept beside them, by name."""
    train = getattr(state, "train", state)
    return {
        name: getattr(train, name)
        for name in ("params", "memory", "opt_state", "worker", "progress_rounds")
        if hasattr(train, name)
    }
