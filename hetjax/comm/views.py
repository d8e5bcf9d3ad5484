"""What the referee of a run decides of a round, and what it has members do (`comm/referee.py`)."""

from typing import Any, NamedTuple

FIRST = -1  # the view that names the members that begin
JOINED = "joined"  # of `MembershipView.changes`


class Member(NamedTuple):
    """A start of a process: the worker of that rank. Later starts have higher incarnations."""

    rank: int
    incarnation: int


class MembershipView(NamedTuple):
    """What was decided of a round."""

    round_index: int
    sum: tuple[Member, ...]  # of those contributions, by rank
    told: tuple[Any, ...]  # what each of these told when it was ready
    members: tuple[Member, ...]  # of the next round; the one that came first is first, and leads
    joining: tuple[Member, ...] = ()  # get the state in which the next round begins
    changes: tuple[tuple[Member, str], ...] = ()  # that came or went since the last view, and how


class Order(NamedTuple):
    """What a member is to do; `kind` is one of

    `compute`, and then tell that it is ready; `wait`; `donate`, the state in which the round
    begins; `receive` it, from `what`; `held`: it counts as one that has it, or leads at the end;
    `take` the
    contributions of `what` = (attempt, members, what they told, where their contributions lie), and
    add them, or a slice of them; `gather` the slices of `what` = (attempt, members, where their
    slices lie); `apply` the sum, by `what`, the view; `add` the contributions of `what` = (view,
    where they lie, whether it does for all), or `read` the sum of `what` = (view, where it lies),
    and apply it; `leave`: it is no member; `lack`, and tell it of the round `what`; `ended`: no
    member has the state; `over`.
    """

    kind: str
    what: Any = None
