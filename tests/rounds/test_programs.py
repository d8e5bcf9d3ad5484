"""The compiled programs: when they are compiled, what is in their loops, and a round as one."""

import jax
import numpy as np
import optax
import pytest

from tests.rounds import problems

LOCAL = ["stepped", "fused", "virtual"]
IDS = np.arange(24).reshape(4, 3, 2)


def count_compilations(train):
    """How many programs were compiled between the first round's report and the end."""
    counts = []

    def on_event(name, duration, **kwargs):
        del duration, kwargs
        counts.append(name == "/jax/core/compile/backend_compile_duration")

    started = []
    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        train(lambda line: started.append(sum(counts)) if line.round == 0 else None)
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
    return started[0], sum(counts) - started[0]


@pytest.mark.parametrize("feed", ["resident", "streamed"])
@pytest.mark.parametrize("local", LOCAL)
def test_a_change_of_quotas_compiles_nothing(local, feed, tmp_path):
    totals = problems.round_totals(203, epochs=2, microbatch_size=4, budget=8)
    problems.write_trace(tmp_path / "trace", totals, num_workers=4)

    fields = {"local": local, "data": {"feed": feed}, "replay": str(tmp_path / "trace")}

    def train(callback):
        problems.train(203, epochs=2, callbacks=[callback], **fields)

    before, after = count_compilations(train)
    assert before > 0  # or the listener heard nothing
    assert after == 0


def test_no_collective_is_inside_the_fused_loop():
    step, *given = problems.own_step(IDS, *problems.given(24), optax.sgd(0.1))
    jaxpr = jax.make_jaxpr(step)(*given, np.zeros(4, np.int32), jax.random.key(0))
    collectives = {"psum", "psum_invariant", "all_gather", "ppermute", "all_to_all"}

    def primitives(jaxpr, inside_loop=False):
        for equation in jaxpr.eqns:
            yield equation.primitive.name, inside_loop
            inside = inside_loop or equation.primitive.name == "while"
            for value in equation.params.values():
                for inner in value if isinstance(value, tuple | list) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from primitives(inner, inside)

    found = list(primitives(jaxpr.jaxpr))
    assert ("dot_general", True) in found  # the walk does reach the loop's body
    assert any(name in collectives for name, _ in found)
    assert not any(name in collectives for name, inside in found if inside)


def test_make_train_step_trains_in_a_loop_of_ones_own():
    data, weights = problems.given(24)
    step, *given = problems.own_step(IDS, data, weights, optax.sgd(0.3))
    counts = np.array([3, 0, 1, 2], np.int32)
    state, metrics, signs = jax.jit(step)(*given, counts, jax.random.key(0))
    used = np.concatenate([IDS[w, :c].reshape(-1) for w, c in enumerate(counts)])
    batch = {name: x[used] for name, x in data.items()}
    gradient = jax.grad(lambda w: problems.softmax_loss(w, batch, None).mean())(weights)
    np.testing.assert_allclose(state.params[2], weights - 0.3 * gradient, rtol=1e-5, atol=1e-6)
    assert metrics.microbatches_done.tolist() == [3, 0, 1, 2]
    assert metrics.example_count.tolist() == [6, 0, 2, 4]
    assert signs == ()
