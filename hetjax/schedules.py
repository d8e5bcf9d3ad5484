"""Learning rates that follow the examples processed, not the number of updates.

Gates and absent workers change how many rounds an epoch has. A schedule by examples does not depend
on that.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from hetjax import types


class ScaleByProgressState(NamedTuple):
    learning_rate: jax.Array  # f32[]: of the last update; before the first, that at progress 0


def scale_by_progress(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Multiplies by `-learning_rate(progress)`: the last link of an optax chain.

    The sync phase gives `progress`. It counts nominal rounds: examples processed over the examples
    of a full round. It equals the step count while all rounds are full.

    Args:
        learning_rate: a number, or a function of the progress, f32[], such as an optax
            schedule.

    Returns:
        An optax transformation whose update takes `progress`.

    Raises:
        ValueError: (of its update) no progress was given, as outside of hetjax.

    Example:
        >>> import optax
        >>> optimizer = optax.chain(
        ...     optax.scale_by_adam(), scale_by_progress(optax.cosine_decay_schedule(1e-3, 500))
        ... )
    """
    schedule = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)

    def init(params: types.PyTree) -> ScaleByProgressState:
        return ScaleByProgressState(jnp.asarray(schedule(jnp.zeros(())), jnp.float32))

    def update(
        updates: types.PyTree,
        state: ScaleByProgressState,
        params: types.PyTree | None = None,
        *,
        progress: jax.Array | None = None,
        **extra: object,
    ) -> tuple[types.PyTree, ScaleByProgressState]:
        if progress is None:
            raise ValueError("scale_by_progress: pass progress= to the optimizer's update")
        rate = schedule(progress)
        with jax.numpy_dtype_promotion("standard"):  # the rate is float32, whatever the parameters
            scaled = jax.tree.map(lambda u: (-rate * u).astype(jnp.result_type(u)), updates)
        return scaled, ScaleByProgressState(jnp.asarray(rate, jnp.float32))

    return optax.GradientTransformationExtraArgs(init, update)
