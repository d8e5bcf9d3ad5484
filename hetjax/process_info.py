"""Who is this process in a run of several, and where do the processes meet?

The arguments say it; or else the launcher (`hetjax.launch`), or else the variables that an engine
leaves in the environment of each process. Of several engines the one nearest to the process counts.
torchrun is started inside the jobs of all others, and mpirun inside Slurm's. So their processes
inherit variables that are about another process. A process that finds no size above 1 is alone. So
is a child of a member, such as a reader of data, which inherits all that the member was told.
"""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

JOINED = "HETJAX_JOINED"
"""The variable in which a member leaves its process id to its children."""

_OF_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_LOCALID")  # for JAX
_ALONE = "one that is to train alone says --process_id=0 --num_processes=1"


class ProcessInfo(NamedTuple):
    """Which process of its run this one is, of how many, and where they meet."""

    process_id: int
    num_processes: int
    coordinator: str | None  # host:port of process 0; None: JAX finds it
    finder: str | None = None  # JAX's name of what finds it then: "slurm", "ompi"


class _Claim(NamedTuple):
    """What one engine says."""

    name: str  # of the variable with the process's number
    process_id: int | None
    num_processes: int | None  # None: the engine does not say
    coordinator: str | None = None
    finder: str | None = None


def is_imported_anew() -> bool:
    """Whether multiprocessing starts this process now: it imports the script of its parent."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def is_child(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is no member of a run, but was started by one, or imports its script.

    Example:
        >>> is_child({"HETJAX_JOINED": "1"}), is_child({})
        (True, False)
    """
    return is_imported_anew() or environment.get(JOINED, "") not in ("", str(os.getpid()))


def find(
    process_id: int | None = None,
    num_processes: int | None = None,
    coordinator: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> ProcessInfo | None:
    """Who this process is; None where it is alone. Starts nothing.

    A child of a member is one by its arguments alone, and by none while it imports the script.

    Args:
        process_id: from 0; together with `num_processes`, or neither.
        num_processes: of the run.
        coordinator: host:port where process 0 listens; the same for all.
        environment: where the launcher and other engines leave theirs.

    Raises:
        ValueError: the numbers do not fit together, or nothing says how many processes there are or
            where process 0 listens.

    Example:
        >>> find(environment={"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_PROCID": "0",
        ...                   "JAX_COORDINATOR_ADDRESS": "node1:7000"})
        ProcessInfo(process_id=1, num_processes=4, coordinator='node1:7000', finder=None)
    """
    if is_imported_anew() or (process_id is None and is_child(environment)):
        return None
    for name in ("HETJAX_COORDINATOR", "JAX_COORDINATOR_ADDRESS"):
        coordinator = coordinator or environment.get(name)
    if (process_id is None) != (num_processes is None):
        raise ValueError(
            f"--process_id is {process_id} and --num_processes {num_processes}; give both or none"
        )
    finder = None
    if process_id is None or num_processes is None:
        if (found := _of_variables(environment, coordinator)) is None:
            return None
        process_id, num_processes, coordinator, finder = found
    elif coordinator is None and num_processes > 1:
        raise ValueError("--coordinator is missing: HOST:PORT where process 0 listens")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process_id is {process_id}; it must be from 0 to {num_processes - 1}")
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--coordinator is {coordinator!r}; it must be HOST:PORT")
    info = ProcessInfo(process_id, num_processes, coordinator, finder)
    return info if num_processes > 1 else None


def _of_variables(environment: Mapping[str, str], coordinator: str | None) -> ProcessInfo | None:
    """Who this process is, as the first engine says."""
    own, size = _numbers(environment, "HETJAX_PROCESS_ID", "HETJAX_NUM_PROCESSES")
    if own is not None and size is not None:
        return ProcessInfo(own, size, coordinator)
    for claim in _claims(environment):
        if claim.process_id is None:
            continue
        if claim.num_processes == 1:
            return None
        said = f"{claim.name} says that this is process {claim.process_id}"
        if claim.num_processes is None:
            raise ValueError(
                f"{said}, and nothing says of how many: give all --num_processes and "
                f"--coordinator; {_ALONE}"
            )
        if not (coordinator or claim.coordinator or claim.finder):
            raise ValueError(
                f"{said} of {claim.num_processes}, and nothing says where process 0 listens: give "
                f"all --coordinator=HOST:PORT; {_ALONE}"
            )
        finder = None if coordinator else claim.finder
        where = coordinator or claim.coordinator
        return ProcessInfo(claim.process_id, claim.num_processes, where, finder)
    return None


def _claims(environment: Mapping[str, str]) -> Iterator[_Claim]:
    """What the engines say, the nearest to the process first.

    Variables may be set where no engine started the process: `WORLD_SIZE=1` in a notebook, or the
    step of a shell in an allocation of Slurm's. So those with size 1 say nothing.
    """
    by_torch = _numbers(environment, "RANK", "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in environment:  # torchrun itself may listen at MASTER_PORT
        yield _Claim("torchrun's RANK", *by_torch, _master(environment, beside=1))
    by_slurm = _numbers(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    slurm = "slurm" if all(name in environment for name in _OF_SLURM) else None
    is_of_srun = environment.get("PMIX_NAMESPACE", "").startswith("slurm.pmix.")
    # mpirun's processes inherit Slurm's variables from the daemon that started them.
    if "OMPI_COMM_WORLD_RANK" in environment:
        by_mpi = _numbers(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        ompi = "ompi" if "OMPI_MCA_orte_hnp_uri" in environment else None
        yield _Claim("Open MPI's OMPI_COMM_WORLD_RANK", *by_mpi, None, ompi)
    elif "PMI_RANK" in environment:
        by_pmi = _numbers(environment, "PMI_RANK", "PMI_SIZE")
        yield _Claim("PMI_RANK", *by_pmi, None, slurm if by_pmi == by_slurm else None)
    elif "PMIX_RANK" in environment and not is_of_srun:
        yield _Claim("PMIX_RANK", _number(environment, "PMIX_RANK"), None)
    elif (by_slurm[1] or 1) > 1:
        yield _Claim("Slurm's SLURM_PROCID", *by_slurm, None, slurm)
    by_jax = _numbers(environment, "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    if (by_jax[1] or 1) > 1:
        yield _Claim("JAX_PROCESS_ID", *by_jax)
    if (by_torch[1] or 1) > 1:
        yield _Claim("RANK", *by_torch, _master(environment))
    is_pod = len(environment.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1  # JAX knows by itself
    if "JOB_COMPLETION_INDEX" in environment and not is_pod:
        index, size = _number(environment, "JOB_COMPLETION_INDEX"), by_jax[1] or by_torch[1]
        yield _Claim("Kubernetes' JOB_COMPLETION_INDEX", index, size, _master(environment))
    ray_train: Any = sys.modules.get("ray.train")  # its environment says nothing
    with contextlib.suppress(Exception):  # this process is no worker of it
        its = ray_train.get_context()
        yield _Claim("Ray Train", its.get_world_rank(), its.get_world_size())


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _numbers(
    environment: Mapping[str, str], process_id: str, num_processes: str
) -> tuple[int | None, int | None]:
    return _number(environment, process_id), _number(environment, num_processes)


def _master(environment: Mapping[str, str], *, beside: int = 0) -> str | None:
    """The address of MASTER_ADDR and MASTER_PORT, `beside` ports further."""
    host, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT")
    if not host or port is None:
        return None
    port += beside if port + beside < 1 << 16 else -beside
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
