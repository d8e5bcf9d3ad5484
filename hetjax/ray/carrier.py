"""Reaches the referee, and moves arrays, by Ray: calls of an actor, and the object store."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax.comm import carrier

_ANSWER_SECS = 10.0  # for an answer; the referee's own waits are shorter
_SOON_SECS = 0.05  # in which contributions usually come
_LOOK_SECS = 0.2  # after which a wait for others looks whether they are still wanted


class RayCarrier(carrier.Carrier):
    """As of `comm.carrier`. Ray counts who knows a handle, and its store spills to the disk.

    Args:
        host: the actor of the referee's host.
    """

    shares_gpus = outlives = False  # Ray gives each its own
    lost_secs = 25.0

    def __init__(self, host: Any) -> None:
        self._host = host

    def call(self, method: str, *args: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._host, method).remote(*args), timeout=_ANSWER_SECS)
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, OSError) as error:
            is_late = isinstance(error, ray.exceptions.GetTimeoutError)
            is_final = isinstance(error, ray.exceptions.ActorDiedError | OSError) and not is_late
            words = f"no answer for {_ANSWER_SECS:.0f} s" if is_late else str(error).splitlines()[0]
            raise carrier.LostRefereeError(words, is_final=is_final) from error

    def put(self, piece: np.ndarray) -> Any:
        import ray

        try:
            return ray.put(piece)
        except (ray.exceptions.RayError, OSError) as error:  # the node has lost its store
            raise carrier.LostRefereeError(str(error), is_final=True) from error

    def take(
        self, handles: Sequence[Any], over: tuple[int, int], moved: Callable[[int], None]
    ) -> list[np.ndarray] | None:
        import ray

        left, changed, secs = list(handles), None, _SOON_SECS
        try:
            while left:
                # By itself: a wait for both would hear of no answer until an object is there.
                _, left = ray.wait(left, num_returns=len(left), timeout=secs)
                if changed is not None and ray.wait([changed], timeout=0)[0]:
                    if ray.get(changed):
                        return None
                    changed = None
                if left and changed is None:
                    changed, secs = self._host.changed.remote(*over), _LOOK_SECS
            taken = ray.get(list(handles))
        except ray.exceptions.RayError:
            return None  # who had put it up is gone, or the referee is
        except OSError as error:
            raise carrier.LostRefereeError(str(error), is_final=True) from error
        moved(sum(piece.nbytes for piece in taken))
        return taken
