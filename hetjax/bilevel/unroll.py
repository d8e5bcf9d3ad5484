"""The explicit gradient: differentiates the lower steps that were made.

With `y_{t+1} = Psi_t(x, y_t)`, adjoints `a_T = d_y F(x, y_T)`, `a_t = (d_y Psi_t)' a_{t+1}`, the
hypergradient is `d_x F + sum_t (d_x Psi_t)' a_{t+1}`. Psi is an optimiser around a gradient. So an
adjoint goes through the optimiser by `jax.vjp`, and through the gradient by a product that is
asked for. Reverse mode holds the trajectory and asks for its batches again. Forward mode carries
`Z_t = d y_t / d x`.
"""

from hetjax import parts
from hetjax.bilevel import forwards, machine, reverse
from hetjax.bilevel import lower as lower_lib

_NEEDS_ALL = "the way back goes through the steps as all workers made them"
_MODES = {
    "reverse": reverse.Reverse,
    "forward": forwards.Forward,
    "displacement": forwards.Displaced,
}
_OPTIONS = {"mode": tuple(_MODES), "start": ("warm", "cold", "learned"), "pick": ("last", "worst")}


def unroll(
    lower: lower_lib.Lower,
    num_steps: int,
    *,
    back: int | None = None,
    mode: str = "reverse",
    checkpoint: bool = False,
    start: str = "warm",
    pick: str = "last",
) -> machine.Estimator:
    """Differentiates `num_steps` lower steps.

    Args:
        lower: the steps, from `descent` or `aggregate`.
        num_steps: T.
        back: K, how many of the last steps are differentiated; by default all. 0: the gradients
            of all steps count as constant, and there are no second derivatives. x gets what it does
            to the steps itself, as a learning rate does (first-order Meta-SGD).
        mode: 'reverse': memory grows with K. 'forward': memory and time grow with how many numbers
            x has. 'displacement': no derivative; the start's gradient is the start less the point
            where the steps ended (Reptile).
        checkpoint: reverse mode holds every sqrt(T)-th step, and makes the others once more.
        start: 'warm': where the last hypergradient ended. 'cold': at the y that is given.
            'learned': x is a `Learned`, and its start gets a gradient.
        pick: 'last'; or 'worst', the iterate with the highest upper loss, 1 to T.

    Returns: an estimator.

    Raises:
        ValueError: options contradict each other. The message says which.

    References:
        Franceschi, Donini, Frasconi, Pontil, "Forward and reverse gradient-based hyperparameter
        optimization", 2017, arXiv 1703.01785; Shaban, Cheng, Hatch, Boots, "Truncated
        back-propagation for bilevel optimization", 2018, arXiv 1810.10667; Liu, Liu, Zeng, Zhang,
        "Towards gradient-based bilevel optimization with non-convex followers and beyond", 2021,
        arXiv 2110.00455 (learned start and worst iterate).
    """
    lower_lib.check(lower, "unroll")
    back = num_steps if back is None else back
    _check(num_steps, back, checkpoint=checkpoint, mode=mode, start=start, pick=pick)
    kind = reverse.Checkpointed if checkpoint else _MODES[mode]
    made = kind(lower, num_steps, back, start, pick)
    return machine.Estimator(made.begin, made.program, made.end, needs_all=_NEEDS_ALL)


def _check(num_steps: int, back: int, *, checkpoint: bool, **chosen: str) -> None:
    for name, given in chosen.items():
        parts.choice(*_OPTIONS[name]).check(f"unroll: {name}", given)
    if num_steps < 1 or not 0 <= back <= num_steps:
        raise ValueError(
            f"unroll: {num_steps} steps, back={back}; give at least 1 step, and back from 0 to all"
        )
    is_whole, is_learned = back == num_steps, chosen["start"] == "learned"
    of_last = is_whole and chosen["pick"] == "last"
    if chosen["mode"] == "forward" and (not is_whole or checkpoint or is_learned):
        raise ValueError("unroll: mode='forward' goes without back, checkpoint, start='learned'")
    if chosen["mode"] == "displacement" and (checkpoint or not (of_last and is_learned)):
        raise ValueError(
            "unroll: mode='displacement' is for start='learned', without back, checkpoint, pick"
        )
    if checkpoint and not of_last:
        raise ValueError("unroll: checkpoint goes without back and pick='worst'")
