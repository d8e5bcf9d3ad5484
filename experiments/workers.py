"""How many workers of a run does this process have, before JAX is used?"""

from hetjax import process_info
from hetjax.comm import runtime


def own_workers(num_workers: int, local: str, member: process_info.ProcessInfo | None) -> int:
    """How many of a run's workers a process has, each on a device of its own.

    Args:
        num_workers: of the run.
        local: the local form, as the configuration names it.
        member: which process this is; None: it is alone.

    Raises:
        ValueError: the workers cannot be shared out among the processes.
    """
    if local == "virtual" and member is not None:
        raise ValueError(
            f"local: 'virtual' plays all workers in one process; this run has "
            f"{member.num_processes}"
        )
    if local == "virtual" or runtime.current().seats:
        return 1
    num_processes = 1 if member is None else member.num_processes
    if num_workers % num_processes:
        raise ValueError(
            f"cluster.num_workers={num_workers} must be a multiple of {num_processes}, the "
            "processes of this run"
        )
    return num_workers // num_processes
