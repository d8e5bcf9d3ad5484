"""A microbatch that is not finite: which operation made it so, at which line of the user's."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.local import nonfinite
from tests.rounds import gangs, problems

FEW = {"epochs": 1, "local": "virtual"}


def log_of_what_is_bad(weights, batch, rng):
    losses = problems.softmax_loss(weights, batch, rng)
    return losses + jnp.log(losses * (1 - batch["bad"]))  # here


def log_of_less_than_0(weights, batch, rng):
    losses = problems.softmax_loss(weights, batch, rng)
    return jnp.log(losses * (1 - 2 * batch["bad"]))


def overflow(weights, batch, rng):
    losses = problems.softmax_loss(weights, batch, rng)
    large = jnp.exp(200 * losses * batch["bad"])  # here
    return losses + large / large - 1


def all_masked(weights, batch, rng):
    hidden = jnp.where(batch["bad"][:, None] > 0, -jnp.inf, batch["x"] @ weights)
    return hidden[:, 0] - jax.nn.logsumexp(hidden, axis=1)  # here


def line_of(function):
    """`FILE:LINE, in FUNCTION` of the line of a function that says so."""
    return f"{function.__code__.co_filename}:{_line_in(function)}, in {function.__name__}"


def _line_in(function):
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if line.rstrip().endswith("# here"))


def examples(num=64):
    data = problems.classification(num, np.float32)
    bad = np.zeros(num, np.float32)
    bad[_third(num)] = 1
    return {**data, "bad": bad}


def _third(num):
    """The id of the first example of the third microbatch of 4."""
    return np.random.default_rng((0, 0)).permutation(num)[8]


def message_of(loss_fn, data=None, **fields):
    fields, data = {**FEW, "loss_fn": loss_fn, **fields}, examples() if data is None else data
    with pytest.raises(hetjax.NonFiniteError) as raised:
        problems.fit(data, problems.initial_weights(np.float32), **fields)
    assert raised.value.result.summary["interrupted"]
    return str(raised.value)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (log_of_what_is_bad, "number that is not finite, infinite, is made by log in "),
        (overflow, "number that is not finite, infinite, is made by exp in "),
        (all_masked, "NaN is made by sub in "),
    ],
)
def test_the_operation_and_its_line_are_named(loss_fn, words):
    said = message_of(loss_fn)
    assert f"The first {words}{line_of(loss_fn)}. " in said
    assert f"microbatch 0 is not finite (examples [{_third(64)}, " in said


def test_an_operation_of_a_derivative_is_named_by_the_line_that_it_is_of():
    def loss_fn(weights, batch, rng):
        small = problems.softmax_loss(weights, batch, rng) * 1e-30 * (1 - batch["bad"])
        return small * 1e30 * (1e25 * batch["bad"] + 1) * (1e25 * batch["bad"] + 1)  # here

    said = message_of(loss_fn)
    assert f"is made by mul in the derivative of {line_of(loss_fn)}" in said


def test_constants_that_are_infinite_are_made_by_nobody():
    def masked(x):
        return jax.nn.log_softmax(jnp.where(x > 0, x, -jnp.inf)) + jnp.zeros(()) / x.sum() * x[0]

    assert nonfinite.search(masked, jnp.array([2.0, -1.0])) == []
    names = [each.name for each in nonfinite.search(masked, jnp.array([-1.0, 1.0]))]
    assert names[0] == "div"


NAN = np.array([1, np.nan, 1], np.float32)


@jax.jit
def looped(x):
    return jax.lax.scan(lambda total, each: (total + each, None), x, NAN)[0]  # here


SOURCES = {  # what is added to the losses, given the state; which operation takes it; whence
    "array": (lambda state: jnp.asarray(NAN).sum(), "reduce_sum", "a constant"),
    "literal": (lambda state: jnp.float32(np.nan) * 2, "mul", "a constant"),
    "loop": (lambda state: looped(jnp.float32(1)), "slice", "a constant"),
    "beside a mask": (
        lambda state: jax.nn.softmax(jnp.array([0, -jnp.inf])).sum() + jnp.asarray(NAN)[1],
        "slice",
        "a constant",
    ),
    "state": (lambda state: state["scale"].sum(), "reduce_sum", r"the .*'scale'"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_no_operation_makes_is_told_by_where_it_comes_from(name):
    added, operation, source = SOURCES[name]
    begun = {"scale": NAN if name == "state" else np.ones(3, np.float32)}

    def loss_fn(weights, state, batch, rng):
        return problems.softmax_loss(weights, batch, rng) + added(state), state

    said = message_of(loss_fn, model_state=begun)
    where = f"it comes from {source}.* which .*{operation} in .*test_nonfinite.py.* takes. Make"
    assert re.search(f"It is NaN, and no operation makes it: {where} that finite", said), said


def test_a_loss_over_a_round_that_is_not_finite_is_told_so():
    loss_fn = hetjax.batch_loss(lambda w, b, rng: b["x"] @ w, lambda w, e, mask: e.sum() * NAN[1])
    said = message_of(loss_fn, budget=2)
    assert "it comes from the values given to the round 'cotangents'" in said


def test_parameters_that_were_given_are_not_laid_on_an_update():
    with pytest.raises(hetjax.NonFiniteError, match="or they were given"):
        problems.fit(examples(), np.full((5, 3), np.nan, np.float32), **FEW)


def test_loops_and_branches_are_looked_into():
    @jax.jit
    @jax.checkpoint
    def looped(x):
        def step(carry, one):
            halved = jax.lax.cond(one > 1, lambda c: c / (one - 3), lambda c: c / 2, carry)  # here
            return halved, one

        return jax.lax.scan(step, x, jnp.arange(5.0))[0]

    (found,) = nonfinite.search(jax.value_and_grad(looped), jnp.float32(1))[:1]
    assert found.name == "div"
    assert found.place.split(":")[1].split(",")[0] == str(_line_in(looped))


@pytest.mark.parametrize("fields", [{"local": "stepped"}, {"local": "fused"}, {"debug": True}])
def test_in_all_forms_and_in_debugging(fields):
    said = message_of(log_of_what_is_bad, budget=4, cluster={"num_workers": 2}, **fields)
    assert line_of(log_of_what_is_bad) in said


def test_at_most_ten_ids_are_shown():
    said = message_of(log_of_what_is_bad, examples(64), microbatch_size=32, budget=2)
    shown = re.search(r"\(examples \[(.*?)\] and 22 more\)", said)
    assert len(shown[1].split(",")) == 10


def test_with_state_and_a_mask():
    def with_state(weights, state, batch, rng, mask):
        return log_of_what_is_bad(weights, batch, rng), {"mean": state["mean"] + mask.sum()}

    said = message_of(with_state, model_state={"mean": np.zeros((), np.float32)})
    assert line_of(log_of_what_is_bad) in said


def test_examples_and_parameters_that_were_not_finite_before_are_named():
    data = examples()
    data["x"][3, 0] = np.nan
    said = message_of(problems.softmax_loss, data)
    assert "The examples themselves are not finite: 'x'." in said
    said = message_of(problems.softmax_loss, optimizer=optax.sgd(float("inf")))
    assert "were not finite before: the update before made them so" in said


def test_a_view_is_repeated_as_it_was_in_its_epoch():
    views = {}

    def view(example, rng):  # an example is bad in its second epoch alone
        number = rng.integers(2**31)
        known = views.setdefault(example["x"].tobytes(), [])
        known += [] if number in known else [number]
        return {**example, "bad": np.float32(known.index(number) > 0)}

    text = message_of(log_of_what_is_bad, hetjax.augmented(examples(), view), epochs=2)
    assert "is made by log" in text


def test_debug_nans_names_the_operation_and_leaves_finite_runs_alone():
    data, weights = examples(), problems.initial_weights(np.float32)
    with jax.debug_nans(True):
        fields = {**FEW, "reducer": "d_psgd"}
        assert np.isfinite(problems.fit(data, weights, **fields).params).all()
        assert line_of(log_of_what_is_bad) in message_of(log_of_what_is_bad)
        with pytest.raises(FloatingPointError, match="encountered in log"):  # where pdb may look
            problems.fit(data, weights, loss_fn=log_of_less_than_0, debug=True, **FEW)


@pytest.mark.slow
def test_each_process_names_its_own_and_debugs_and_stops_as_one(tmp_path):
    done = gangs.run("tests.rounds.debugged_processes", 2, tmp_path)
    for code, said in done:
        assert code == 143, said  # of a signal that process 1 alone got
        assert said.count("named: ") == 1, said
        assert line_of(log_of_what_is_bad) in said
        assert "worker 2's microbatch" in said
        assert "debugged as one" in said
        assert "the result so far has " in said
