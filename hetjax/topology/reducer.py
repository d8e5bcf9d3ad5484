"""What a reducer is: how it is made for a run, and what others may ask of it. NumPy alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from hetjax import parts
from hetjax.topology import gossip as gossip_lib
from hetjax.topology import links

if TYPE_CHECKING:
    from hetjax.topology import reducers


class Facts(NamedTuple):
    """What a run gives a reducer."""

    num_workers: int
    seed: int = 0  # of what is drawn
    solve_once: gossip_lib.SolveOnce = gossip_lib.solve_here  # what is solved in floating point


class Reducer(NamedTuple):
    """What a synchronisation does with the workers' sums and parameters."""

    make: Callable[[Facts], "reducers.Reduction"]
    """`facts -> Reduction`: what runs on the devices; here JAX may be imported."""

    keeps_replicas_equal: bool
    """All workers have the same parameters after a synchronisation if they had them before."""

    gossips: bool = False
    """Each worker updates from its own gradients and averages its parameters with its
    neighbours'; the `Reduction` has a `mixing`."""

    is_plain_sum: bool = False
    """The sum over all workers and nothing else: it may be taken in any way there is."""

    network: Callable[[Facts, float, links.LinkModel], links.Network] | None = None
    """`(facts, param_bytes, link) -> Network`: what it costs on links, for the simulator."""

    most_workers: int | None = None
    """That it can plan for; None: any number."""

    made_by: parts.Made | None = None

    def for_run(self, facts: Facts) -> "reducers.Reduction":
        """What runs on the devices, for a run of these facts.

        Raises:
            ValueError: `make` made no reduction, or one that is not what the reducer says.
        """
        made = self.make(facts)
        if not hasattr(made, "collective") or not hasattr(made, "array"):
            raise ValueError(
                f"reducer: {parts.named(self)}: its make(facts) made {parts.shown(made)}; it must "
                "make a hetjax.topology.Reduction(collective, array)"
            )
        if (made.mixing is not None) != self.gossips:
            has, says = ("a", False) if made.mixing is not None else ("no", True)
            raise ValueError(
                f"reducer: {parts.named(self)} says gossips={says}, and its make(facts) made a "
                f"Reduction with {has} mixing; set gossips={not says}, or give the Reduction "
                f"{'no mixing' if made.mixing is not None else 'a mixing'}"
            )
        return made._replace(
            keeps_replicas_equal=self.keeps_replicas_equal,
            is_plain_sum=self.is_plain_sum,
            num_workers=facts.num_workers,
            name=f"reducer: {parts.named(self)}",
        )
