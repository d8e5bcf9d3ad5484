"""Optimisers whose parameters are not the point to judge: what is evaluated and handed out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import hetjax
from tests.rounds import test_optimizers as given

RATE = given.RATE


class Averaged(NamedTuple):
    """The state of an optimiser of one's own, which judges Polyak's average."""

    count: jax.Array
    mean: dict

    def eval_params(self, params):
        return jax.tree.map(
            lambda mean, now: jnp.where(self.count > 0, mean, now), *self[1:], params
        )


def averaged():
    def update(grads, state, params):
        count, steps = state.count + 1, optax.tree.scale(-RATE, grads)
        now = optax.apply_updates(params, steps)
        mean = jax.tree.map(lambda a, b: a + (b - a) / count, state.mean, now)
        return steps, Averaged(count, mean)

    return optax.GradientTransformation(lambda p: Averaged(jnp.zeros((), int), p), update)


def free(state, params):
    return contrib.schedule_free_eval_params(state, params)


def of_part(state, params, part="w"):
    return {**params, part: free(state._replace(z=state.z[part]), params[part])}


FREE = contrib.schedule_free_sgd
WITHIN = {  # the optimiser, and of its state and parameters the point to judge
    "chain": (lambda: optax.chain(optax.clip(1.0), FREE(RATE)), lambda s, p: free(s[1], p)),
    "named_chain": (
        lambda: optax.named_chain(("a", optax.clip(1.0)), ("b", FREE(RATE))),
        lambda s, p: free(s["b"], p),
    ),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(FREE)(learning_rate=RATE),
        lambda s, p: free(s.inner_state, p),
    ),
    "masked": (
        lambda: optax.masked(FREE(RATE), given.PART),
        lambda s, p: of_part(s.inner_state, p),
    ),
    "partition": (
        lambda: optax.partition({"one": optax.sgd(RATE), "two": FREE(RATE)}, given.WHOLE),
        lambda s, p: of_part(s.inner_states["two"].inner_state, p, "b"),
    ),
    "apply_if_finite": (
        lambda: optax.apply_if_finite(FREE(RATE), 3),
        lambda s, p: free(s.inner_state, p),
    ),
    "MultiSteps": (
        lambda: optax.MultiSteps(FREE(RATE), 2, accumulator_dtype=np.float64),
        lambda s, p: free(s.inner_opt_state, p),
    ),
    "sam": (
        lambda: contrib.sam(FREE(RATE), optax.sgd(0.1)),
        lambda s, p: free(s.opt_state, s.cache if s.steps_since_sync else p),
    ),
    "own": (lambda: optax.chain(optax.clip(9.0), averaged()), lambda s, p: s[1].eval_params(p)),
}


@pytest.mark.parametrize(
    ("name", "local"),
    [*((name, "virtual") for name in WITHIN), ("chain", "stepped"), ("masked", "fused")],
)
def test_the_point_to_judge_is_found_in_what_wraps_it(name, local, float64, tmp_path, capsys):
    maker, point = WITHIN[name]
    after, seen = given.plain(maker(), given.PARAMS), []
    points = [point(state, params) for params, state in after]
    average = given.PARAMS
    for each in points[1:]:
        average = jax.tree.map(lambda a, b: a + 0.25 * (b - a), average, each)
    fields = {**given.FIELDS, "local": local, "ema": 0.75, "workdir": tmp_path}
    fields |= {"callbacks": [lambda r: seen.append(r.params())], "eval_source": given.DATA}
    found = hetjax.fit(given.loss_fn, given.PARAMS, maker(), given.DATA, **fields)
    losses = [float(jnp.mean(given.loss_fn(each, given.DATA, None))) for each in points[1:]]
    assert [line["eval"]["test_loss"] for line in found.history] == pytest.approx(losses, rel=1e-6)
    best = points[1 + int(np.argmin(losses))]
    saved = hetjax.load(tmp_path)
    for each in (found, saved):
        given.assert_close(each.params, points[-1])
        given.assert_close(each.best_params, best)
        given.assert_close(each.ema_params, average)
    for each in (seen[-1], jax.tree.map(lambda x: x[0], found.state.params)):
        given.assert_close(each, after[-1][0])  # those that are trained
    assert "evaluated and returned" in capsys.readouterr().err


@pytest.mark.parametrize("maker", [lambda: FREE(RATE), given.sam])
def test_the_point_of_replicas_is_the_mean_of_theirs(maker, float64, tmp_path):
    fields = {**given.FIELDS, "reducer": {"name": "matcha", "graph": "ring"}, "local": "virtual"}
    fields |= {"workdir": tmp_path, "eval_source": given.DATA}
    found = hetjax.fit(given.loss_fn, given.PARAMS, maker(), given.DATA, **fields)
    rows = jax.tree.map(np.asarray, (found.state.opt_state, found.state.params))
    judge = given.JUDGED["sam" if maker is given.sam else "schedule_free"]
    each = [judge(*jax.tree.map(lambda x, w=w: x[w], rows)) for w in range(3)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *each)
    given.assert_close(found.params, mean)
    given.assert_close(hetjax.load(tmp_path).params, mean)
    value = float(jnp.mean(given.loss_fn(mean, given.DATA, None)))
    assert found.summary["test_loss"] == pytest.approx(value, rel=1e-6)
    worst = max(float(jnp.mean(given.loss_fn(point, given.DATA, None))) for point in each)
    assert found.summary["worst_test_loss"] == pytest.approx(worst, rel=1e-6)


def test_a_point_that_is_not_found_is_told(capsys):
    of_run = given.loss_fn, given.PARAMS, optax.flatten(FREE(RATE)), given.DATA
    hetjax.fit(*of_run, local="virtual", **given.FIELDS)
    told = "schedule_free_eval_params of ScheduleFreeState is not found in such a state"
    assert told in capsys.readouterr().err
