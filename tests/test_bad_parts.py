"""What bad parts get: the contract, what was given and an example, before anything is computed."""

import numpy as np
import optax
import pytest

import hetjax
from hetjax import quota, topology
from hetjax.local import gradients
from tests.own_parts import gate, hessian_product, order, policy, reducer
from tests.rounds import problems

DATA, WEIGHTS = problems.classification(61, np.float32), problems.initial_weights(np.float32)
LOSS = problems.softmax_loss


def make(**fields):
    fields = {"workers": 4, "microbatch_size": 4, "budget": 8, **fields}
    return hetjax.Run(LOSS, WEIGHTS, fields.pop("optimizer", optax.sgd(0.1)), DATA, **fields)


def mixing(facts):
    return topology.d_psgd().make(facts)


RULE = r"it must be a hetjax\.LocalRule"
POLICY, ORDER, GATE = policy.one_at_a_time(), order.rotated(), gate.after(3)
REDUCER, HESSIAN = (
    topology.Reducer(mixing, keeps_replicas_equal=True),
    hessian_product.hessian_product(LOSS),
)
REFUSED = [  # what is no part, what a part makes, what contradicts another, what is of another part
    ({"quota": None}, "quota: got None, which has no init, assign, observe"),
    ({"quota": GATE}, "quota: got a Gate, which has no init, assign, "),
    (
        {"quota": POLICY._replace(assign=lambda state: 0)},
        r"got a QuotaPolicy, whose assign\(state\) does not take 3 arguments",
    ),
    ({"quota": "tests.own_parts.order:rotated"}, "rotated' makes an Ordering, which has no a"),
    ({"ordering": order.rotated}, "got the function rotated, .*call it, "),
    ({"reducer": REDUCER._replace(make=lambda: 0)}, r"whose make\(\) does not take 1 argument"),
    ({"rule": gradients.gradient_sums}, f"rule: got a function; call it, if .*{RULE}"),
    ({"reducer": REDUCER._replace(make=lambda facts: 3)}, r"its make\(facts\) made 3, must make a"),
    (
        {"ordering": ORDER._replace(make_observer=lambda sizes: 3)},
        r"its make_observer\(sizes\) made 3; it must make a hetjax\.ordering\.Observer",
    ),
    ({"gate": GATE._replace(open=lambda board, clock: 3)}, "3 without begin, is_open, finished"),
    (
        {"ordering": "d_grab", "reducer": "d_psgd"},
        "'d_grab' does not work with reducer.name='d_psgd'; take all_reduce, ring",
    ),
    ({"ordering": ORDER._replace(coordinated=True)}, "coordinated=True and has no make_observer"),
    ({"reducer": REDUCER._replace(gossips=True)}, "gossips=True, is_plain_sum=False, keeps_repl"),
    (
        {"reducer": reducer.rounded_sum()._replace(keeps_replicas_equal=False, is_plain_sum=True)},
        "says gossips=False, is_plain_sum=True, keeps_replicas_equal=False",
    ),
    ({"reducer": REDUCER._replace(keeps_replicas_equal=False)}, "says gossips=False, but its"),
    ({"ordering": "d_grab", "rule": HESSIAN, "optimizer": None}, "the order balances gradients"),
    ({"gate": GATE, "local": "fused"}, "got 'tests.own_parts.gate:after' with local='fused'"),
    (
        {"gate": "first", "quota": quota.static((1, 1, 1, 0)), "budget": 3},
        "got 'first', but worker 3 has a quota of 0",
    ),
    ({"gate": {"quorum": 3}}, "has no such option. It is one of 'quorum'"),
    ({"quota": {"policy": "adaptive", "band": 0.1}}, "no such option.* It is one of 'dead_band'"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_used_is_told_when_the_run_is_made(fields, message):
    with pytest.raises(ValueError, match=message) as raised:
        make(**fields)
    assert " at 0x" not in str(raised.value)  # no addresses for a person to read over


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (np.full(4, 8), r"int64\[4\] \[8, 8, 8, 8\]"),
        (np.array([4, 4]), r"int64\[2\] \[4, 4\]"),
        (np.full(4, 2.0), r"float64\[4\] \[2\.0, 2\.0, 2\.0, 2\.0\]"),
    ],
)
def test_quotas_that_are_none_are_shown_with_what_they_must_be(made, shown):
    own = POLICY._replace(assign=lambda state, total, caps: (made, state))
    message = rf"total=8, caps=\[8, 8, 8, 8\]\) returned {shown}; quotas are whole"
    with make(quota=own) as run:
        state = run.init()
        with pytest.raises(ValueError, match=message):
            run.round(state)


# --- States ---


def test_a_state_that_is_none_and_a_closed_run_are_told():
    with make() as run:
        state = run.init()
        with pytest.raises(ValueError, match="Run: got a TrainState"):
            run.round(state.train)
    with pytest.raises(ValueError, match="this run is closed"):
        run.round(state)


def test_values_of_a_round_of_other_shapes_than_at_the_beginning_are_told():
    with make(optimizer=None, rule=HESSIAN) as run:
        state = run.init(given=np.zeros_like(WEIGHTS))
        with pytest.raises(ValueError, match=r"given has no arrays, .*began with .*\[5, 3\]"):
            run.round(state)
        with pytest.raises(ValueError, match=r"shapes \[3\], .*began with .*\[5, 3\]"):
            run.round(state, given=np.zeros(3, np.float32))
        run.round(state, given=np.ones_like(WEIGHTS))
