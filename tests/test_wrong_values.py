"""What a part gets that returns, in a run, what it must not: its name, the value, what is right."""

import numpy as np
import optax
import pytest

import hetjax
from hetjax import ordering, simulate
from hetjax.cluster import emulate
from tests.own_parts import gate, local_sgd, order, policy

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(37, 3)).astype(np.float32),
    "y": RNG.normal(size=37).astype(np.float32),
}
SPEEDS = (1.0, 2.0, 3.0, 6.0)


def loss_fn(params, batch, rng):
    return (batch["x"] @ params - batch["y"]) ** 2


def fit(**fields):
    cluster = {"secs_per_microbatch": SPEEDS, "clock": "virtual"}
    how = {"epochs": 2, "microbatch_size": 2, "budget": 8, "loss_over": "microbatch"}
    how |= {"progress": False, "cluster": cluster, "local": "virtual", **fields}
    return hetjax.fit(loss_fn, np.zeros(3, np.float32), optax.sgd(0.01), DATA, **how)


def changed(part, function, change):
    """The part, with `change` of what its function returns."""
    made = getattr(part, function)
    return part._replace(**{function: lambda *given: change(made(*given))})


def of_observer(change):
    """Random reshuffling that balances, with `change` of what its observer sees."""
    inner = ordering.pair_balance()

    def make_observer(sizes):
        return changed(inner.make_observer(sizes), "observe", change)

    return inner._replace(make_observer=make_observer)


class Backwards(emulate.EmulatedCluster):
    def microbatch_ends(self, round, worker, count):
        return super().microbatch_ends(round, worker, count)[::-1]


class Silent(gate.Counting):
    def is_open(self):
        return None


def of_text(params, batch):
    return {"loss": hetjax.OfMeans(lambda mean: "good", loss_fn(params, batch, None))}


POLICY, ORDER, GATE = policy.one_at_a_time(), order.rotated(), gate.after(4)
RULE = local_sgd.local_sgd(loss_fn, optax.sgd(0.1))
ABSENT = emulate.EmulatedCluster(SPEEDS, changes=(emulate.Change(1, 0, present=False),))
WRONG = {
    "quotas of one who is absent": (
        {
            "quota": changed(POLICY, "assign", lambda made: (np.full(4, 2), made[1])),
            "cluster": ABSENT,
            "local": "stepped",
        },
        r"caps=\[0, 8, 8, 8\]\) returned",
    ),
    "a policy's state that grows": (
        {"quota": changed(POLICY, "observe", lambda s: s._replace(weights=np.ones(5)))},
        r"observe.*state/weights float64\[5\], where init made float64\[4\]",
    ),
    "an order that repeats": (
        {"ordering": changed(ORDER, "init", lambda s: s._replace(order=np.zeros_like(s.order)))},
        r"init.*without 1; its order must be a permutation i32\[37\]",
    ),
    "signs of another shape": (
        {"ordering": of_observer(lambda made: (*made[:3], made[3][:, None]))},
        r"observe.*int8\[2, 1\].*signs i8\[2\]",
    ),
    "a moment that is none": (
        {"gate": changed(GATE, "closes_at", lambda made: made * np.nan)},
        r"closes_at.*float64\[\] nan.*must return seconds",
    ),
    "metrics of means that are text": (
        {"eval_source": DATA, "metrics_fn": of_text},
        "good.*must return one number",
    ),
    "a weight that is NaN": (
        {"rule": changed(RULE, "finish", lambda made: (*made[:2], made[2] * np.nan))},
        "finish.*nan",
    ),
    "a gate that answers neither yes nor no": (
        {"gate": GATE._replace(open=lambda board, clock: Silent(4, board)), "local": "stepped"},
        r"is_open.*None, must be True or False",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_a_sentence_that_names_it(name):
    fields, message = WRONG[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        fit(**fields)


def test_microbatches_that_end_backwards_are_refused():
    with pytest.raises(ValueError, match=r"(?s)microbatch_ends.*finite, ascending"):
        simulate.simulate("equal", Backwards(SPEEDS), budget=8, num_rounds=3)


def test_two_answers_of_a_callback_are_told(capfd):
    fit(callbacks=[lambda line: np.array([True, True])])
    assert "returned bool[2] [True, True]" in capfd.readouterr().err
