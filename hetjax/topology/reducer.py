"""What a reducer is: what others may ask of it, and the reduction that it makes for a run.

A `Reducer` is what a user gives: how sums and parameters are to be reduced, in any run. A
`Reduction` is what it makes for one run: the functions that do so on that run's devices. NumPy
alone.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from hetjax import parts
from hetjax.topology import gossip as gossip_lib
from hetjax.topology import links

logger = logging.getLogger(__name__)

PyTree = Any


class RunFacts(NamedTuple):
    """What a run gives a reducer."""

    num_workers: int
    seed: int = 0  # of what it draws
    solve_once: gossip_lib.SolveOnce = gossip_lib.solve_here  # for what it solves in floating point


class Mixing(NamedTuple):
    """How the parameters of the workers are averaged; `active` is bool[M], the same on all."""

    gossip: gossip_lib.Gossip
    collective: Callable[[PyTree, Any, str], PyTree]
    """`(params, active, axis_name) -> params`, leaves without worker axis."""

    array: Callable[[PyTree, Any], PyTree]
    """`(params, active) -> params`, leaves `[num_workers, ...]`. `jax.vmap` of `collective` will
    not do: all workers would have to take part in an exchange, but a matching leaves some out."""

    before_update: bool
    """True: the update, computed at the parameters as they were, is added to the mixed ones
    (D-PSGD). False: the updated parameters are mixed (MATCHA)."""


class Reduction(NamedTuple):
    """What a `Reducer` makes for one run: functions that reduce on that run's devices.

    They make of the workers' sums those that each worker updates from. The weight of all workers'
    examples, which divides the sums, is not among them. So without `mixing` the result has to be
    the total, or what stands for it, and not the mean.
    """

    collective: Callable[[PyTree, str], PyTree]
    """`(sums, axis_name) -> sums`, leaves without worker axis, of the same shapes and types."""

    array: Callable[[PyTree], PyTree] | None = None
    """`sums -> sums`, leaves `[num_workers, ...]`; None: `jax.vmap` of `collective`."""

    mixing: Mixing | None = None
    """How parameters are averaged; None: the sums are those of all workers."""

    keeps_replicas_equal: bool = True  # as its `Reducer` says, which sets this
    is_plain_sum: bool = False  # the same
    wire: str = "float32"  # the same
    num_workers: int = 1  # the same
    name: str = "reducer"  # what messages call it

    def check(self, given: PyTree, made: PyTree) -> None:
        """Checks what `collective` or `array` made of the sums, only by shapes and types.

        Args:
            given: the sums, a pytree of arrays.
            made: what was made of them.

        Raises:
            ValueError: they differ from those of the sums that it was given.
        """
        import jax

        from hetjax import trees

        for path, was, now in trees.unlike(given, made):
            raise ValueError(
                f"{self.name}: its collective(sums, axis_name) or array(sums) made {now} of "
                f"sums{jax.tree_util.keystr(path)} {was}, must keep structure, shapes and types"
            )

    def active(self, round_index: int) -> Any:
        """The exchanges of a round, where it gossips: bool[M]; else ()."""
        return () if self.mixing is None else self.mixing.gossip.active(round_index)

    def copies_sent(self, active: Any, present: int | None = None) -> float:
        """Copies of the parameters that all workers together send in a round.

        Args:
            active: bool[M], which matchings the round uses; () without gossip.
            present: workers that take part, of a sum; None: all.
        """
        if self.mixing is not None:
            return float(self.mixing.gossip.sends(active).sum())
        return 2.0 * ((present or self.num_workers) - 1)  # all around a ring


class Reducer(NamedTuple):
    """What a user gives: what a synchronisation does with workers' sums and parameters, in any run.

    `for_run` makes the `Reduction` of it, which does so on the devices of one run.
    """

    make: Callable[[RunFacts], Reduction]
    """`facts -> Reduction`: what runs on the devices; here JAX may be imported."""

    keeps_replicas_equal: bool
    """All workers have the same parameters after a synchronisation if they had them before."""

    gossips: bool = False
    """Each worker updates from its own gradients and averages its parameters with its
    neighbours'; the `Reduction` has a `mixing`."""

    is_plain_sum: bool = False
    """It is the sum over all workers and nothing else, which may be computed in any way."""

    wire: str = "float32"
    """Of the numbers of a contribution to a plain sum, one of `wires.WIRES`."""

    network: Callable[[RunFacts, float, links.LinkModel], links.Network] | None = None
    """`(facts, param_bytes, link) -> Network`: what it costs on links, for the simulator."""

    most_workers: int | None = None
    """The most that it can plan for; None: any number."""

    made_by: parts.Made | None = None

    def tell_if_alone(self, num_workers: int) -> None:
        """Says that it averages nothing where it gossips and there is one worker."""
        if self.gossips and num_workers == 1:
            logger.warning(f"the reducer {parts.named(self)} has no neighbour: there is one worker")

    def for_run(self, facts: RunFacts) -> Reduction:
        """What runs on the devices, for a run of these facts.

        Raises:
            ValueError: `make` made no reduction, or one that differs from what the reducer says.
        """
        made = self.make(facts)
        if not hasattr(made, "collective") or not hasattr(made, "array"):
            raise ValueError(
                f"reducer: {parts.named(self)}: its make(facts) made {parts.shown(made)}, must "
                "make a hetjax.topology.Reduction"
            )
        if (made.mixing is not None) != self.gossips:
            raise ValueError(
                f"reducer: {parts.named(self)} says gossips={self.gossips}, but its make(facts) "
                f"made a Reduction whose mixing is {parts.shown(made.mixing)}"
            )
        return made._replace(
            keeps_replicas_equal=self.keeps_replicas_equal,
            is_plain_sum=self.is_plain_sum,
            wire=self.wire,
            num_workers=facts.num_workers,
            name=f"reducer: {parts.named(self)}",
        )
