"""A learning rate that is a number of the optimiser's state: another one compiles nothing."""

import jax
import jax.numpy as jnp
import net
import numpy as np
import optax

import hetjax

hetjax.use_cpu_workers(4)

data, params = net.data, np.zeros((8, 2), np.float32)
settings = {"epochs": 2, "microbatch_size": 8, "budget": 16}


def loss_fn(params, batch, rng):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params, batch["y"])


compiled, started = [], []  # what no cache had, and what was compiled or loaded
listen = jax.monitoring.register_event_listener
listen(lambda event, **_: compiled.append(event) if "cache_misses" in event else None)
listen = jax.monitoring.register_event_duration_secs_listener
listen(lambda event, secs, **_: started.append(event) if "backend_compile" in event else None)

for rate in (0.01, 0.1, 1.0):  # each `fit` loads its programs, after the first one
    compiled.clear()
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    result = hetjax.fit(loss_fn, params, optimizer, data, progress=False, **settings)
assert not compiled

with hetjax.Run(loss_fn, params, optimizer, data, **settings) as run:  # which has its programs
    for rate in (0.01, 0.1, 1.0):
        state, _ = run.init(), started.clear()
        now = optax.tree.get(state.train.opt_state, "learning_rate")
        after = optax.tree.set(state.train.opt_state, learning_rate=jnp.full_like(now, rate))
        state = state._replace(train=state.train._replace(opt_state=after))
        while not run.done(state):
            state, report = run.round(state)
assert not started
np.testing.assert_allclose(run.params(state)[0], result.params, atol=1e-5)
