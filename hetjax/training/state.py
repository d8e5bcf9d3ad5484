"""Making the training state, and taking one worker's part out of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.ordering import ordering


def make_train_state(
    params: types.PyTree,
    optimizer: optax.GradientTransformation,
    *,
    num_workers: int,
    mesh: Mesh | None = None,
    signs: ordering.Signs | None = None,
) -> types.TrainState:
    """The state before the first round: the same parameters on every worker.

    Args:
        params: a pytree of arrays without worker axis.
        optimizer: any optax optimiser.
        num_workers: W, the length of the leading axis of every leaf.
        mesh: where to put the rows; None puts all of them on the default device.
        signs: the ordering's device part, if it takes signs.
    """
    row = types.TrainState(
        params=params,
        opt_state=optimizer.init(params),
        running_sum=() if signs is None else signs.init(params),
        progress_rounds=np.zeros((), np.float32),
    )
    state = mesh_lib.add_worker_axis(row, num_workers)
    return jax.device_put(state) if mesh is None else mesh_lib.place(state, mesh)


def worker_params(state: types.TrainState, worker: int = 0) -> types.PyTree:
    """The parameters of one worker, without worker axis, where they lie."""

    def take(leaf: jax.Array) -> jax.Array:
        if len(leaf.addressable_shards) == leaf.shape[0]:
            return leaf.addressable_data(worker)[0]
        return leaf[worker]

    return jax.tree.map(take, state.params)


@jax.jit
def _mean_and_distance(params: types.PyTree) -> tuple[types.PyTree, jax.Array, jax.Array]:
    def wide(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

    mean = jax.tree.map(lambda x: jnp.mean(wide(x), axis=0), params)
    squares = jax.tree.map(lambda x, m: jnp.sum(jnp.square(wide(x) - m[None])), params, mean)
    num_workers = jax.tree.leaves(params)[0].shape[0]
    distance = jnp.sqrt(sum(jax.tree.leaves(squares)) / num_workers)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(m)) for m in jax.tree.leaves(mean)))
    return jax.tree.map(lambda m, x: m.astype(x.dtype), mean, params), distance, norm


def consensus(state: types.TrainState, device: jax.Device) -> tuple[types.PyTree, dict[str, float]]:
    """The mean of the replicas, on `device`, and how far they are from it.

    Returns:
        parameters without worker axis; and `distance`, the root mean square over the workers of
        the Euclidean distance from the mean, and `relative`, that over the mean's norm.
    """
    mean, distance, norm = _mean_and_distance(state.params)
    relative = float(distance) / max(float(norm), 1e-30)
    return jax.device_put(mean, device), {"distance": float(distance), "relative": relative}
