"""What an estimator says that it costs, what it asks for on the host, and jit, vmap and scan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import bilevel
from tests.bilevel import identities, problems, walking

SGD = bilevel.descent(optax.sgd(0.3))
BOTH = bilevel.aggregate(optax.sgd(0.3))
RATED = bilevel.descent(lambda x: optax.sgd(jnp.exp(x["rate"])))
DYNAMIC = bilevel.dynamic(0.5)
DIFFERENCES = bilevel.implicit(SGD, 4, solve=bilevel.cg(3), cross="fd")
BARRIER = bilevel.barrier(lambda k: 0.1, lambda k: 0.5, ridge=0.01, upper_ridge=0.02)
Cost = bilevel.Cost

# Each option once, and its calls written down: losses, gradients, Hessian and cross products.
ESTIMATORS = {
    "unroll": (bilevel.unroll(SGD, 7), Cost(0, 8, 7, 7)),
    "unroll, 0 back": (bilevel.unroll(SGD, 7, back=0), Cost(0, 8, 0, 0)),
    "unroll, 0 back, rate in x": (bilevel.unroll(RATED, 7, back=0), Cost(0, 8, 0, 0)),
    "unroll, checkpoints": (bilevel.unroll(SGD, 7, checkpoint=True), Cost(0, 15, 7, 7)),
    "unroll, forward": (bilevel.unroll(SGD, 7, mode="forward"), Cost(0, 8, 7 * 7, 0)),
    "unroll, worst": (bilevel.unroll(SGD, 7, pick="worst"), None),
    "aggregate": (bilevel.unroll(BOTH, 5), Cost(0, 11, 10, 10)),
    "aggregate, checkpoints": (bilevel.unroll(BOTH, 5, checkpoint=True), Cost(0, 21, 10, 10)),
    "cg": (bilevel.implicit(SGD, 4, solve=bilevel.cg(3)), Cost(0, 5, 4, 1)),
    "cg, differences": (DIFFERENCES, Cost(0, 7, 4, 0)),
    "neumann": (bilevel.implicit(SGD, 4, solve=bilevel.neumann(3, 0.1)), Cost(0, 5, 3, 1)),
    "scaled": (bilevel.implicit(SGD, 4, solve=bilevel.scaled(0.1)), Cost(0, 5, 0, 1)),
    "one step": (bilevel.implicit(SGD, 4, solve=bilevel.one_step()), Cost(0, 5, 0, 1)),
    "rank one": (bilevel.implicit(SGD, 4, solve=bilevel.rank_one()), Cost(0, 6, 0, 0)),
    "gap": (bilevel.value_gap(SGD, 4), Cost(0, 4 + 2 * 4 + 3, 0, 0)),
    "gap, central": (bilevel.value_gap(SGD, 4, central=True), Cost(0, 2 * 8 + 3, 0, 0)),
    "gap, barrier": (bilevel.value_gap(SGD, 4, multiplier=BARRIER), Cost(1, 4 + 2 * 4 + 3, 0, 0)),
    "gap, dynamic": (bilevel.value_gap(SGD, 4, multiplier=DYNAMIC), Cost(0, 4 + 3, 0, 0)),
}
WARM = ["unroll", "cg", "neumann", "gap", "gap, barrier", "gap, dynamic"]


def check_batches(program, notes):
    """The numbers of the new ones are 0, 1, 2, ...; nobody asks for one that is not there yet."""
    for level, number in bilevel.machine.num_batches(program).items():
        own, seen = [note for note in notes if note.what.level == level], set()
        assert [note.batch for note in own if note.what.is_new] == list(range(number))
        for note in own:
            assert note.what.is_new == (note.batch not in seen), note
            seen.add(note.batch)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_cost_is_the_number_of_calls_and_the_host_finds_the_same(name, float64):
    """A batch is new once and held afterwards."""
    estimator, cost = ESTIMATORS[name]
    case, state = problems.mlp(), None
    for _ in range(2 if name in WARM else 1):
        jitted = walking.jitted(case.problem, estimator, case.x, case.y, state=state)
        on_host, notes = walking.on_host(case.problem, estimator, case.x, case.y, state=state)
        check_batches(estimator.program(case.x), notes)
        calls = walking.counted(notes)
        assert jitted.info.cost == on_host.info.cost
        if cost is None:  # fewer steps back than are announced
            chosen = int(on_host.info.step_chosen)
            assert calls == Cost(7, 8, chosen, chosen)
            assert on_host.info.cost == Cost(7, 8, 7, 7)
        else:
            assert calls == on_host.info.cost == cost
        assert walking.apart(jitted._replace(info=()), on_host._replace(info=())) < 1e-14
        assert walking.apart(jitted.info, on_host.info) < 1e-12
        state = jitted.state


@pytest.mark.parametrize("name", ["unroll, worst", "cg"])
def test_mapped_over_tasks_it_is_the_loop_over_them(name, float64):
    """The worst iterate of each task is another one."""
    estimator, _ = ESTIMATORS[name]
    p1, rng = problems.quadratic(), np.random.default_rng(5)
    shifts, starts = rng.normal(size=(2, 4, len(p1.y)))

    def one(shift, start):
        batches = bilevel.Batches(shift, -shift)
        return bilevel.hypergradient(p1.problem, estimator, p1.x, start, batches)

    mapped = jax.jit(jax.vmap(one))(shifts, 3 * starts)
    one = jax.jit(one)
    tasks = [one(*task) for task in zip(shifts, 3 * starts, strict=True)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tasks)
    assert walking.apart(mapped, stacked) < 1e-12


@pytest.mark.parametrize("name", ["unroll", "cg", "gap, barrier"])
def test_scanned_upper_steps_are_the_loop_of_them(name, float64):
    """The state goes from one hypergradient to the next in the carry."""
    estimator, _ = ESTIMATORS[name]
    p1 = problems.quadratic()
    problem = p1.problem
    x, result = walking.descended(problem, estimator, p1.x, p1.y, tx=optax.sgd(0.1), num_steps=5)
    loop, state = p1.x, None
    for _ in range(5):
        grad_x, state, _ = walking.jitted(problem, estimator, loop, p1.y, state=state)
        loop = loop - 0.1 * grad_x
    last = walking.jitted(problem, estimator, loop, p1.y, state=state)
    assert walking.apart((loop, last), (x, result)) < 1e-12


def test_a_stack_has_a_batch_for_each_request(float64):
    """An implicit gradient takes the one after its steps; a value gap goes on counting with y."""
    p1, rng = problems.quadratic(), np.random.default_rng(6)
    stack = rng.normal(size=(9, len(p1.y)))
    batches = bilevel.Batches(None, bilevel.Stack(stack))

    def stepped(y, shift, multiplier=None):
        gradient = p1.A @ y - p1.B @ p1.x - p1.c - shift
        if multiplier is None:
            return y - identities.STEP * gradient
        return y - identities.STEP * ((y - p1.t) + multiplier * gradient) / multiplier

    lower, y, z = bilevel.descent(optax.sgd(identities.STEP)), p1.y, p1.y
    for shift in stack[:4]:
        z = stepped(z, shift)
    implied = bilevel.implicit(lower, 4, solve=bilevel.cg(5))
    found = walking.jitted(p1.problem, implied, p1.x, p1.y, batches)
    np.testing.assert_allclose(found.state.y, z, rtol=1e-13)
    np.testing.assert_allclose(found.grad_x, p1.through(z - p1.t), rtol=1e-10)
    for shift in stack[4:8]:
        y = stepped(y, shift, 5.0)
    gap = bilevel.value_gap(lower, 4, multiplier=5.0)
    found = walking.jitted(p1.problem, gap, p1.x, p1.y, batches)
    np.testing.assert_allclose(found.state.memory, (y, z), rtol=1e-13)

    def loss(y):
        return 0.5 * y @ p1.A @ y - (p1.B @ p1.x + p1.c + stack[8]) @ y

    assert float(found.info.gap) == pytest.approx(loss(y) - loss(z), rel=1e-12)
