"""Making the training state, and taking one worker's part out of it."""

import jax
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
