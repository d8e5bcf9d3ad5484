"""What a local rule returns: each of its functions, wrong in each way, before the first round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.local import gradients, rules
from hetjax.losses import loss as losses_lib
from tests.own_parts import hessian_product
from tests.rounds import problems

DATA, WEIGHTS = problems.classification(64, np.float32), problems.initial_weights(np.float32)
LOSS = problems.softmax_loss


def own(begin=None, add=None, finish=None, **others):
    """Gradients of one's own; each function gives its results to the one that spoils them."""

    def begin_right(shared, worker):
        return worker, (jnp.zeros_like(shared.params), jnp.zeros(()))

    def add_right(shared, worker, sums, microbatch, rng):
        weighted = losses_lib.masked(LOSS, microbatch, rng)
        grads, weight = jax.grad(lambda p: [x.sum() for x in weighted(p)], has_aux=True)(
            shared.params
        )
        return worker, (sums[0] + grads, sums[1] + weight)

    def finish_right(shared, worker, sums):
        return worker, *sums

    def spoilt(right, spoil):
        return right if spoil is None else lambda *given: spoil(*right(*given))

    made = map(spoilt, (begin_right, add_right, finish_right), (begin, add, finish))
    return hetjax.LocalRule(*made, **others)


def run(rule, local="virtual", **fields):
    """Up to its first round, and nothing of that."""
    with problems.run(DATA, rule=rule, local=local, **fields) as made:
        made.init()


def keeping(**spoilt):
    """A rule that keeps a number for each worker."""
    return own(**spoilt, init=lambda params: jnp.zeros(2), traits=rules.Traits(keeps_worker=True))


STAYS = "each of worker and sums must keep its tree, shapes and types from call to call"
LIKE = "in a run that updates the contribution must have the parameters' tree and shapes"
NUMBER = r"must be one number, float32\[\] or wider"
WRONG = {
    "begin: one thing": (own(begin=lambda w, s: s[0]), r"begin, .*float32\[5, 3\]; .*\(worker, s"),
    "begin: kept row": (
        keeping(begin=lambda w, s: (w.sum(), s)),
        rf"begin, .* worker float32\[\] where float32\[2\] is due; {STAYS}",
    ),
    "add: broadcasts": (
        own(add=lambda w, s: (w, (s[0].sum(), s[1]))),
        rf"add, .*returned sums\[0\] float32\[\] where float32\[5, 3\] is due; {STAYS}",
    ),
    "add: whole numbers": (
        own(add=lambda w, s: (w, (s[0], s[1].astype(jnp.int32)))),
        rf"add, .*sums\[1\] int32\[\] where float32\[\] is due; {STAYS}",
    ),
    "add: another worker": (
        keeping(add=lambda w, s: ({"mine": w}, s)),
        rf"add, .*worker {{'mine': float32\[2\]}} where float32\[2\] is due; {STAYS}",
    ),
    "finish: a sum": (
        own(finish=lambda w, g, n: (w, g.sum(), n)),
        rf"finish, .*contribution float32\[\] where float32\[5, 3\] is due; {LIKE}",
    ),
    "finish: a dict": (
        own(finish=lambda w, g, n: (w, {"g": g}, n)),
        rf"finish, .*contribution {{'g': float32\[5, 3\]}} where float32\[5, 3\] is due; {LIKE}",
    ),
    "finish: two": (own(finish=lambda w, g, n: (g, n)), r"finish, .*\(worker, contribution, weig"),
    "finish: whole numbers": (
        own(finish=lambda w, g, n: (w, g.astype(jnp.int32), n)),
        r"finish, .*contribution int32\[5, 3\]; .*all of it must be floating point",
    ),
    "finish: counts": (
        own(finish=lambda w, g, n: (w, g, n.astype(jnp.int32))),
        rf"finish, .*weight int32\[\]; weight {NUMBER}",
    ),
    "finish: kept row": (
        keeping(finish=lambda w, g, n: (w[:1], g, n)),
        rf"finish, .*worker float32\[1\] where float32\[2\] is due; {STAYS}",
    ),
    "loss_sum: losses": (
        own(reads=rules.Reads(loss_sum=lambda sums: sums[0])),
        rf"loss_sum, .*a loss float32\[5, 3\]; a loss {NUMBER}",
    ),
    "own_sums: whole numbers": (
        own(reads=rules.Reads(own_sums=lambda sums: {"seen": sums[1].astype(jnp.int32)})),
        r"own_sums, .*'seen': int32\[\]}; .*all of it must be floating point",
    ),
    "metric_sums: another": (
        own(reads=rules.Reads(metrics=("a",), metric_sums=lambda sums: {"b": sums})),
        r"metric_sums, .*'b': .*must return {name: \(weighted sum, weight\)} of a",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_contract_is_refused_before_the_first_round(name):
    rule, message = WRONG[name]
    with pytest.raises(ValueError, match=rf"^rule: its {message}"):
        run(rule)


@pytest.mark.parametrize(
    ("local", "name"), [("stepped", "add: broadcasts"), ("fused", "finish: a sum")]
)
def test_every_local_form_refuses_it(local, name, tmp_path):
    rule, message = WRONG[name]
    with pytest.raises(ValueError, match=rf"^rule: its {message}"):
        problems.fit(DATA, WEIGHTS, rule=rule, workdir=tmp_path, local=local, epochs=1)


@pytest.mark.parametrize("name", list(WRONG)[::7])
def test_a_step_of_ones_own_refuses_it_when_it_is_traced(name):
    rule, message = WRONG[name]
    ids = np.arange(48).reshape(4, 3, 4)
    step, *given = problems.own_step(ids, DATA, WEIGHTS, optax.sgd(0.1), rule=rule)
    with pytest.raises(ValueError, match=rf"^rule: its {message}"):
        jax.eval_shape(step, *given, np.full(4, 3, np.int32), jax.random.key(0))


def test_sums_that_begin_as_a_number_of_python_keep_its_type(float64, tmp_path):
    """0.0 is float64 here, and what is added to it float32."""
    rule = own()

    def begin(shared, worker):
        return worker, (jnp.zeros_like(shared.params), 0.0)

    fields = {"epochs": 1, "local": "virtual", "workdir": tmp_path}
    with jax.numpy_dtype_promotion("standard"):
        result = problems.fit(DATA, WEIGHTS, rule=rule._replace(begin=begin), **fields)
    plain = problems.fit(DATA, WEIGHTS, epochs=1, local="virtual")
    np.testing.assert_allclose(result.params, plain.params, rtol=1e-6)


def test_a_rule_that_takes_evidence_is_told_whose_it_was():
    right = gradients.gradient_sums(LOSS)

    def take(*given):
        worker, sums = right.observed.take(*given)
        return worker, sums._replace(weight_sum=sums.weight_sum[None])

    message = (
        r"its take, .*sums\.weight_sum float32\[1\] where float32\[\] is due; "
        rf"{STAYS}. It was given what observe of the order 'd_grab' returned"
    )
    with pytest.raises(ValueError, match=rf"^rule: {message}"):
        run(right._replace(observed=right.observed._replace(take=take)), ordering="d_grab")


@pytest.mark.parametrize(("local", "nonfinite"), [("virtual", "stop"), ("stepped", "skip")])
def test_a_weight_that_is_no_number_is_refused_after_its_round(local, nonfinite):
    """Also where a microbatch of the round was skipped; it would be divided by 1 without a word."""
    rule = own(finish=lambda w, g, n: (w, g, n * jnp.nan))
    data = {name: leaf.copy() for name, leaf in DATA.items()}
    if nonfinite == "skip":
        data["x"][::8] = np.nan
    message = r"^rule: finish, .*, returned the weight nan of worker \d in round 0"
    with pytest.raises(ValueError, match=message):
        problems.fit(data, WEIGHTS, rule=rule, epochs=1, local=local, nonfinite=nonfinite)


@pytest.mark.parametrize("local", ["virtual", "stepped"])
def test_rounds_without_update_contribute_any_tree_of_numbers(local):
    of_rounds = {
        "tree": own(finish=lambda w, g, n: (w, {"norm": jnp.sum(g**2), "part": g[:1]}, n)),
        "counts": own(finish=lambda w, g, n: (w, n.astype(jnp.int32), n)),
    }
    with problems.run(DATA, rule=own(), local=local, rules=of_rounds) as made:
        state, _ = made.round(made.init())
        state, report = made.round(state, kind="tree")
        assert jax.tree.map(jnp.shape, report.mean) == {"norm": (4,), "part": (4, 1, 3)}
        with pytest.raises(ValueError, match=r"finish, .*contribution int32\[\]; .*floating"):
            made.round(state, kind="counts")
    with problems.run(DATA, optimizer=None, rule=of_rounds["tree"], local=local) as made:
        assert made.round(made.init())[1].mean["norm"].shape == (4,)


def test_what_a_round_is_given_decides_the_shapes():
    """So the contract is asked where they are known: under names of one's own too."""

    def begin(shared, worker):
        return worker, (shared.given["along"] * 0, jnp.zeros(()))

    rule = hessian_product.hessian_product(LOSS)
    named = rule._replace(
        begin=begin,
        add=lambda shared, *others: rule.add(shared._replace(given=shared.given["along"]), *others),
    )
    common = {"optimizer": None, "local": "virtual"}
    with problems.run(rule=rule, **common) as one, problems.run(rule=named, **common) as other:
        given = {"along": WEIGHTS}
        mean = one.round(one.init(given=WEIGHTS), given=WEIGHTS)[1].mean
        found = other.round(other.init(given=given), given=given)[1].mean
        np.testing.assert_array_equal(mean, found)


def test_the_contract_costs_no_trace():
    traced = []

    def noting(*returned):
        traced.append(1)
        return returned

    run(own(add=noting), "stepped")
    assert len(traced) == 1  # of all four workers
