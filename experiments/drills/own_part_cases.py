"""The cases of `own_parts`: parts that return what they must not, and what is to be said of it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from experiments.drills import own_part_makers as makers
from experiments.drills.own_part_makers import DATA, Change
from hetjax import simulate, topology
from hetjax.cluster import emulate
from hetjax.topology import graphs


class Case(NamedTuple):
    """One part with one mutation."""

    name: str  # part/function/mutation
    train: Callable[[str], Any]  # in a local form
    says: tuple[str, ...]  # of the message
    forms: tuple[str, ...] = ("virtual", "stepped", "fused")
    is_told: bool = False  # by a line on stderr, since nothing depends on it


def fit(form: str, **fields: Any) -> Any:
    fields = {
        "epochs": 2,
        "microbatch_size": makers.SIZE,
        "budget": makers.BUDGET,
        "progress": False,
        "loss_over": "microbatch",
        "cluster": {"secs_per_microbatch": makers.SPEEDS, "clock": "virtual"},
        **fields,
    }
    data, params = fields.pop("data_given", DATA), np.zeros(3, np.float32)
    return hetjax.fit(makers.loss_fn, params, optax.sgd(0.01), data, local=form, **fields)


def _policy() -> list[Case]:
    must = "whole numbers, one for each worker, from 0 to its cap, whose sum is total"
    keeps = "keeps the structure, shapes and dtypes"

    def quotas(change: Change) -> Change:
        return lambda made: (change(made[0]), made[1])

    changes: dict[str, tuple[Change, str, str]] = {
        "init/text": (lambda s: "fast", "is a str", "a checkpoint holds arrays and numbers"),
        "init/an object": (lambda s: object(), "is a object", "a checkpoint holds arrays"),
        "assign/no pair": (lambda made: made[0], "int64[4] [2, 2, 2, 2] and no pair", must),
        "assign/None": (lambda made: None, "None and no pair", must),
        "assign/shape": (quotas(lambda q: q[:2]), "int64[2] [2, 2]", must),
        "assign/type": (quotas(lambda q: q / 1), "float64[4] [2.0, 2.0, 2.0, 2.0]", must),
        "assign/truths": (quotas(lambda q: q > 0), "bool[4] [True", must),
        "assign/NaN": (quotas(lambda q: q * np.nan), "float64[4] [nan, ", must),
        "assign/negative": (quotas(lambda q: np.array([9, -1, 0, 0])), "[9, -1, 0, 0]", must),
        "assign/sum": (quotas(lambda q: q + 1), "int64[4] [3, 3, 3, 3]", must),
        "assign/lists": (quotas(lambda q: [[1], [2, 3]]), "[[1], [2, 3]]", must),
        "assign/growing": (
            lambda made: (made[0], made[1]._replace(seen=(*made[1].seen, 1.0))),
            "state/seen/0 float64[], where init made nothing",
            keeps,
        ),
        "observe/growing": (
            lambda state: state._replace(weights=np.append(state.weights, 1.0)),
            "state/weights float64[5], where init made float64[4]",
            keeps,
        ),
        "observe/type": (
            lambda state: state._replace(rounds=0.5),
            "state/rounds float64[], where init made int64[]",
            keeps,
        ),
        "observe/None": (lambda state: None, "state/weights gone", keeps),
        "of_epochs/None": (lambda made: None, "None", "must return a hetjax.quota.QuotaPolicy"),
    }
    private = {
        "proportions/shape": (lambda made: made[:3], "(1.0, 1.0, 1.0)", "4 numbers, one for each"),
        "proportions/NaN": (lambda made: (np.nan, *made[1:]), "(nan, 1.0", "0 or more and not all"),
        "proportions/negative": (lambda made: (-1.0, *made[1:]), "(-1.0, ", "0 or more and not"),
    }
    cases = [_part("policy", "quota", makers.own_policy, *item) for item in changes.items()]
    data = {"data": {"sharing": "private"}}
    cases += [
        _part("policy", "quota", makers.own_policy, *item, **data) for item in private.items()
    ]
    absent = emulate.EmulatedCluster(makers.SPEEDS, changes=(emulate.Change(1, 0, present=False),))
    over = quotas(lambda q: np.array([2, 2, 2, 2]))
    name, says = "assign/for an absent one", ("caps=[0, 8, 8, 8]", must)
    return [
        *cases,
        _part("policy", "quota", makers.own_policy, name, (over, *says), cluster=absent),
    ]


def _part(
    part: str,
    group: str,
    make: Callable[..., Any],
    name: str,
    what: tuple[Change, str, str],
    /,
    **fields: Any,
) -> Case:
    """A case of a part that is made by `make(function, change)` and given as `group`."""
    (change, *says), function = what, name.split("/")[0]

    def train(form: str) -> Any:
        return fit(form, **{group: make(function, change)}, **fields)

    return Case(f"{part}/{name}", train, (make.__name__, function, *says))


def _order() -> list[Case]:
    must, signs = "each of the numbers 0 to 36 once", "i8[2] of 1, -1 and 0"

    def four(change: Change) -> Change:
        return lambda made: (*made[:3], change(made[3]))

    changes: dict[str, tuple[Change, str, str]] = {}
    for function in ("init", "place"):
        changes |= {
            f"{function}/shorter": (makers.with_order(lambda o: o[:-1]), "int32[36]", must),
            f"{function}/repeated": (makers.with_order(np.zeros_like), "it has 0 37 times", must),
            f"{function}/out of range": (makers.with_order(lambda o: o + 1), "it has 37 at", must),
            f"{function}/negative": (makers.with_order(lambda o: o - 1), "it has -1 at", must),
            f"{function}/type": (makers.with_order(lambda o: o / 1), "float64[37]", must),
            f"{function}/NaN": (makers.with_order(lambda o: o * np.nan), "float64[37]", must),
            f"{function}/None": (lambda state: None, "None", "a permutation of the numbers"),
        }
    changes |= {
        "place/growing": (
            lambda state: state._replace(seed=(*state.seed, 1)),
            "state/seed/1 int64[], where init made nothing",
            "keeps the structure",
        ),
        "balances/None": (lambda made: None, "None", "must return True or False"),
        "make_observer/None": (lambda made: None, "None", "hetjax.ordering.Observer"),
        "observe/shape": (four(lambda s: s[:, None]), "int8[2, 1]", signs),
        "observe/type": (four(lambda s: s / 2), "float32[2]", signs),
        "observe/three": (lambda made: made[:3], "", signs),
    }
    return [_part("order", "ordering", makers.own_order, *item) for item in changes.items()]


def _gate() -> list[Case]:
    must = "the seconds into the round at which it closes: 0 or more, infinite for never"
    answers = "must return True or False"
    changes: dict[str, tuple[Change, str, str]] = {
        "closes_at/NaN": (lambda made: made * np.nan, "float64[] nan", must),
        "closes_at/negative": (lambda made: made - 1e9, "float64[] -", must),
        "closes_at/shape": (lambda made: np.stack([made, made]), "float64[2]", must),
        "closes_at/text": (lambda made: "soon", "soon", must),
        "closes_at/None": (lambda made: None, "None", must),
        "closes_at/another moment": (lambda made: made * 2, "leaves [", "at the same moment"),
        "closes_at/never": (lambda made: made * np.inf, "leaves [", "at the same moment"),
        "is_open/None": (lambda made: None, "None", answers),
        "is_open/NaN": (lambda made: np.nan, "nan", answers),
        "is_open/truths": (lambda made: np.array([made, made]), "bool[2]", answers),
        "open/None": (lambda made: None, "None", "begin(quotas), is_open() ->"),
    }
    cases = [_part("gate", "gate", makers.own_gate, *item) for item in changes.items()]
    return [case._replace(forms=("virtual", "stepped")) for case in cases]


def _reducer() -> list[Case]:
    changes: dict[str, tuple[Change, str, str]] = {
        "make/None": (lambda made: None, "None", "must make a"),
        "collective/shape": (makers.of_sums(lambda x: x.sum()), "made sums float32[", "must"),
        "collective/broadcast": (makers.of_sums(lambda x: x[None]), "1, 3] of sums", "must"),
        "collective/type": (makers.of_sums(lambda x: x.astype(jnp.float16)), "float16", "must"),
        "collective/a dict": (lambda made: {"sums": made[0]}, "sums['sums']", "must"),
        "collective/unequal": (
            lambda made: jax.tree.map(lambda x: x * (1 + made[1]), made[0]),
            "",
            "keeps_replicas_equal",
        ),
    }
    return [_part("reducer", "reducer", makers.own_reducer, *item) for item in changes.items()]


def _rule() -> list[Case]:
    def sums(change: Change) -> Change:
        return lambda made: (made[0], change(made[1]), made[2])

    def weight(change: Change) -> Change:
        return lambda made: (made[0], made[1], change(made[2]))

    changes: dict[str, tuple[Change, str, str]] = {
        "begin/no pair": (lambda made: made[1][0], "", "must"),
        "finish/broadcasts": (sums(lambda g: g.sum()), "[]", "must"),
        "finish/shorter": (sums(lambda g: g[:1]), "[1]", "must"),
        "finish/a dict": (sums(lambda g: {"g": g}), "g", "must"),
        "finish/two": (lambda made: made[:2], "", "must"),
        "finish/weight of a shape": (weight(lambda w: jnp.stack([w, w])), "[2]", "must"),
        "finish/weight NaN": (weight(lambda w: w * jnp.nan), "nan", "must"),
        "add/shape": (lambda made: (made[0], (made[1][0][:1], made[1][1])), "[1]", "must"),
    }
    return [_part("rule", "rule", makers.own_rule, *item) for item in changes.items()]


def _cluster() -> list[Case]:
    must = "finite seconds from the round's start, none before the one before it"
    changes: dict[str, tuple[Change, str, str]] = {
        "present_at/shape": (lambda made: made[:2], "bool[2]", "must return bool[4]"),
        "present_at/type": (lambda made: made * 1.0, "float64[4]", "must return bool[4]"),
        "microbatch_ends/shape": (lambda made: made[:1], "float64[1]", must),
        "microbatch_ends/NaN": (lambda made: made * np.nan, "[nan", must),
        "microbatch_ends/negative": (lambda made: -made, "[-", must),
        "microbatch_ends/backwards": (lambda made: made[::-1], "float64[2]", must),
    }

    def simulated(function: str, change: Change, form: str) -> Any:
        return simulate.simulate(
            "equal", makers.OwnCluster(function, change), budget=8, num_rounds=3
        )

    cases = [
        Case(
            f"cluster/{name}",
            functools.partial(simulated, name.split("/")[0], change),
            ("OwnCluster", name.split("/")[0], *says),
            (),
        )
        for name, (change, *says) in changes.items()
    ]
    own = Case(
        "cluster/a class/in fit", lambda form: fit(form, cluster=makers.OwnCluster()), ("OwnClus",)
    )
    return [*cases, own]


def _callback() -> list[Case]:
    answers = {"text": "stop", "NaN": np.nan, "two truths": np.array([True, True]), "a number": 1}
    shown = {"text": "'stop'", "NaN": "nan", "two truths": "bool[2] [True, True]", "a number": "1"}
    return [
        Case(
            f"callback/it/{name}",
            lambda form, answer=answer: fit(form, callbacks=[makers.own_callback(answer)]),
            ("own_callback_fn", f"returned {shown[name]}", "only True or hetjax.STOP"),
            is_told=True,
        )
        for name, answer in answers.items()
    ]


def _metrics() -> list[Case]:
    must = "one real number an example, [37]"

    def loss(change: Change) -> Change:
        return lambda made: {"loss": change(made["loss"])}

    changes: dict[str, tuple[Change, str, str]] = {
        "a list": (lambda made: [made["loss"]], "list", "must return a dict"),
        "one number": (loss(lambda m: m.mean()), "()", must),
        "shape": (loss(lambda m: m[:-1]), "(36,)", must),
        "a float": (loss(lambda m: 1.0), "shape ()", must),
        "complex": (loss(lambda m: m * 1j), "complex", must),
        "weights": (loss(lambda m: (m, m[:1])), "(1,)", must),
        "of means": (
            loss(lambda m: hetjax.OfMeans(lambda mean: "good", m)),
            "good",
            "must return one number",
        ),
    }
    return [
        Case(
            f"metrics_fn/it/{name}",
            lambda form, change=change: fit(
                form, eval_source=DATA, metrics_fn=makers.own_metrics(change)
            ),
            ("own_part_cases" if name == "of means" else "own_metrics_fn", "metrics_fn", *says),
        )
        for name, (change, *says) in changes.items()
    ]


def _source() -> list[Case]:
    same = "every example of a source must have the same structure, shapes and dtypes"
    changes: dict[str, tuple[Change, str, str]] = {
        "__getitem__/shape": (lambda made: made | {"x": made["x"][:2]}, "[2]", same),
        "__getitem__/type": (lambda made: made | {"y": 1}, "int32", same),
        "__getitem__/text": (lambda made: made | {"y": "one"}, "str", "number"),
        "__getitem__/None": (lambda made: None, "None", "number"),
        "__getitems__/too few": (lambda made: made[:-1], "list", "must return a list of"),
        "__getitems__/no list": (lambda made: iter(made), "iterator", "must return a list of"),
    }

    def trained(function: str, change: Change, form: str) -> Any:
        source = makers.OwnSource(function, change)
        return fit(form, data_given=source, data={"feed": "resident"})

    return [
        Case(
            f"source/{name}",
            functools.partial(trained, name.split("/")[0], change),
            ("OwnSource", *says)
            if name.startswith("__getitems__")
            else ("OwnSource", "example 5", *says),
        )
        for name, (change, *says) in changes.items()
    ]


def _graph() -> list[Case]:
    makes: dict[str, tuple[Callable[[], Any], str, str]] = {
        "edges/shape": (lambda: np.zeros((3, 3), int), "(3, 3)", "pairs of whole numbers"),
        "edges/type": (lambda: np.array([[0.0, 1.0]]), "float64", "pairs of whole numbers"),
        "edges/out of range": (lambda: np.array([[0, 9]]), "0-9", "are 0 to 3"),
        "edges/itself": (lambda: np.array([[1, 1]]), "1-1", "leave it out"),
        "edges/apart": (lambda: np.array([[0, 1], [2, 3]]), "worker 2", "add an edge"),
    }
    cases = [
        Case(
            f"graph/{name}",
            lambda form, edges=edges: fit(
                form,
                reducer={
                    "name": "d_psgd",
                    "graph": graphs.Graph("own_graph", makers.WORKERS, edges()),
                },
            ),
            ("own_graph", "edge", *says),
        )
        for name, (edges, *says) in makes.items()
    ]
    phases = {
        "phases/no permutation": (([0, 0, 1, 2],), "[0, 0, 1, 2]", "each of the workers 0 to 3"),
        "phases/NaN": (([np.nan, 1, 2, 3],), "nan", "each of the workers 0 to 3"),
    }
    cases += [
        Case(
            f"graph/{name}",
            lambda form, given=given: fit(
                form, reducer=topology.d_psgd(graph=graphs.PeriodicGraph("own_graph", 4, given))
            ),
            ("own_graph", "phase", *says),
        )
        for name, (given, *says) in phases.items()
    ]
    three = Case(
        "graph/workers/of three",
        lambda form: fit(form, reducer=topology.d_psgd(graph=graphs.ring(3))),
        ("graph", "3", "4"),
    )
    return [*cases, three]


CASES: tuple[Case, ...] = (
    *_policy(),
    *_order(),
    *_gate(),
    *_reducer(),
    *_rule(),
    *_cluster(),
    *_callback(),
    *_metrics(),
    *_source(),
    *_graph(),
)
