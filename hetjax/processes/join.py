"""One run of several processes: who belongs to it.

Who this process is says, in this order: arguments, the launcher (`hetjax.launch`), a scheduler's
environment (SLURM, MPI, Kubernetes, TPU pods). Without any, it is alone. The engine is
`jax.distributed`.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hetjax import compiled
from hetjax.processes import notices, waits, watch

SHARED_MEMORY = "HETJAX_SHARED_MEMORY"  # a directory for processes of one machine alone
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_START_SECS = 300
_LAUNCHER = ("HETJAX_PROCESS_ID", "HETJAX_NUM_PROCESSES")
_SCHEDULERS = (  # (process id, number of processes), in the environment of each process
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


class Place(NamedTuple):
    """Of a process in its run."""

    process_id: int
    num_processes: int
    coordinator: str | None  # host:port of process 0; None: JAX finds it


def find_place(
    process_id: int | None = None,
    num_processes: int | None = None,
    coordinator: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> Place | None:
    """Who this process is; None where it is alone. Starts nothing.

    Args:
        process_id: from 0; together with `num_processes`, or neither.
        num_processes: of the run.
        coordinator: host:port where process 0 listens; the same for all.
        environment: where the launcher and schedulers leave theirs.

    Raises:
        ValueError: the numbers do not fit together, or nobody says where process 0 listens.
    """
    coordinator = coordinator or environment.get("HETJAX_COORDINATOR")
    if (process_id is None) != (num_processes is None):
        raise ValueError(
            f"--process_id is {process_id} and --num_processes {num_processes}; give both, and "
            "--coordinator=HOST:PORT, or none of them"
        )
    if process_id is None or num_processes is None:
        found = _from_environment(environment)
        if found is None:
            return None
        process_id, num_processes = found
    elif coordinator is None:
        raise ValueError(
            "--coordinator is missing: HOST:PORT where process 0 listens, the same for all "
            "processes, such as --coordinator=10.0.0.1:7000"
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process_id is {process_id}; it must be from 0 to {num_processes - 1} with "
            f"--num_processes={num_processes}"
        )
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--coordinator is {coordinator!r}; it must be HOST:PORT")
    return Place(process_id, num_processes, coordinator) if num_processes > 1 else None


def _from_environment(environment: Mapping[str, str]) -> tuple[int, int] | None:
    for id_name, number_name in (_LAUNCHER, *_SCHEDULERS):
        number = environment.get(number_name, "")
        if not number.isdecimal():
            continue
        if id_name in environment and (int(number) > 1 or id_name == _LAUNCHER[0]):
            return int(environment[id_name]), int(number)
    return None


def join(place: Place | None) -> None:
    """Makes this process part of its run; before JAX is used for the first time.

    Where `place` is None nothing happens, but on a TPU pod, which JAX knows by itself.

    Raises:
        ValueError: the port of process 0 is taken, or JAX is in use already. Where the others
            do not come in time, the process ends with a message and exit code 2: JAX waits for
            them in a way that nothing can interrupt.
    """
    import jax

    if place is None:
        if len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
            jax.distributed.initialize()
            watch.begin()
        return
    if jax.distributed.is_initialized():
        watch.begin()
        return
    if "HETJAX_ATTEMPT" in os.environ:
        compiled.write_from_all_processes()
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM from us
    start_secs = _read_start_secs()
    options: dict[str, Any] = {"initialization_timeout": start_secs + 60}
    if place.coordinator is not None:
        options["cluster_detection_method"] = "deactivate"
        host, _, port = place.coordinator.rpartition(":")
        is_loopback = host in _LOOPBACK
        if is_loopback:
            options["coordinator_bind_address"] = place.coordinator
        if place.process_id == 0:
            _check_port(host.strip("[]") if is_loopback else "0.0.0.0", int(port))
    try:
        with _patience(place, start_secs):
            jax.distributed.initialize(
                place.coordinator, place.num_processes, place.process_id, **options
            )
    except (RuntimeError, ValueError) as error:
        raise ValueError(_not_joined(place, str(error).splitlines()[0])) from error
    watch.begin()


@contextlib.contextmanager
def _patience(place: Place, start_secs: int) -> Iterator[None]:
    """Says every ten seconds who is waited for, and ends this process after `start_secs`.

    JAX 0.10.2 would abort with a stack trace when its own time is over.
    """
    joined, began = threading.Event(), time.monotonic()

    def wait() -> None:
        while True:
            left = start_secs - (time.monotonic() - began)
            if joined.wait(min(notices.PERIOD_SECS, max(left, 0.0))):
                return
            if left <= notices.PERIOD_SECS:
                _give_up(place, start_secs)
            _say_waiting(place, time.monotonic() - began)

    threading.Thread(target=wait, name="hetjax-join", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def _say_waiting(place: Place, secs: float) -> None:
    who = f"the other {place.num_processes - 1} processes to join"
    if place.process_id:
        where = place.coordinator or "the address that the scheduler gives"
        who = f"process 0 to listen at {where}"
        if _listens(place.coordinator):
            who = "the other processes to join; process 0 is there"
    me = f"process {place.process_id} of {place.num_processes}"
    notices.say(f"{me} has waited {secs:.0f} s for {who}")


def _listens(coordinator: str | None) -> bool:
    if coordinator is None:
        return False
    host, _, port = coordinator.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        return True
    return False


def _read_start_secs() -> int:
    text = os.environ.get("HETJAX_START_SECS", str(_START_SECS))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"HETJAX_START_SECS is {text!r}; it must be whole seconds, 1 or more, that the "
            "processes of a run wait for each other"
        )
    return int(text)


def _give_up(place: Place, start_secs: int) -> None:
    reason = f"not all processes were there after {start_secs} s (HETJAX_START_SECS)"
    print(_not_joined(place, reason), file=sys.stderr, flush=True)
    os._exit(2)


def _not_joined(place: Place, reason: str) -> str:
    return (
        f"process {place.process_id} of {place.num_processes} cannot join its run at "
        f"{place.coordinator or 'the address that the scheduler gives'}: {reason}. Are all "
        "processes started, with the same --coordinator=HOST:PORT, and can process 0 be reached "
        "there?"
    )


def join_processes(
    process_id: int | None = None,
    num_processes: int | None = None,
    coordinator: str | None = None,
) -> Place | None:
    """Makes this process part of a run of several; before JAX is used for the first time.

    Without arguments the launcher's or a scheduler's environment says who it is; a process that
    nobody started so is alone, and nothing happens.

    When a process exits it waits, 300 s at most, until all have come to their end: process 0 is
    the coordinator of the others, and ends with them. Where one raises, or comes to its exit while
    another waits for it, all end, and each says which process it was and what it raised. A
    program that leaves by `os._exit` does not wait, and may take the others with it.

    Args:
        process_id: from 0.
        num_processes: of the run.
        coordinator: host:port where process 0 listens; the same for all.

    Returns:
        its place in the run, or None.

    Raises:
        ValueError: the arguments do not fit together, or process 0 was not found.
    """
    place = find_place(process_id, num_processes, coordinator)
    join(place)
    return place


def check_joined() -> None:
    """Refuses to train alone in a process that the launcher started as one of several.

    One that has joined by JAX alone is watched from now on, as by `join_processes`.

    Raises:
        ValueError: it has not joined the others.
    """
    import jax

    number = os.environ.get("HETJAX_NUM_PROCESSES", "1")
    if number != "1" and not jax.distributed.is_initialized():
        raise ValueError(
            f"this process was started as one of {number}, and has not joined the others: call "
            "hetjax.join_processes() at the beginning of the program, before JAX is used"
        )
    if jax.distributed.is_initialized():
        watch.begin()
        with waits.Wait("start its devices"):
            jax.local_devices()


def find_port(host: str, port: int = 0) -> int:
    """Returns `port` if a process can listen there, or for 0 a port that is free now.

    Raises:
        OSError: nobody can listen there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        if port:  # connections of an earlier run that are not quite over do not matter
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener.getsockname()[1]


def _check_port(host: str, port: int) -> None:
    """Refuses a port that is taken, of which JAX 0.10.2 dies by a segmentation fault."""
    try:
        find_port(host, port)
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen at {host}:{port}: {error.strerror}. Is another run still "
            "going on there? Give all processes a --coordinator=HOST:PORT with a port that is free"
        ) from error


def own_workers(num_workers: int, local: str, place: Place | None) -> int:
    """How many of a run's workers a process has, each on a device of its own.

    Args:
        num_workers: of the run.
        local: who calls the workers' function, as the configuration says.
        place: of the process; None: it is alone.

    Raises:
        ValueError: workers cannot be shared out among the processes.
    """
    if local == "virtual":
        if place is not None:
            raise ValueError(
                f"local: got 'virtual', which plays all workers in one process, and this run has "
                f"{place.num_processes}. Start one process, or set local='stepped'"
            )
        return 1
    num_processes = 1 if place is None else place.num_processes
    if num_workers % num_processes:
        raise ValueError(
            f"cluster.num_workers={num_workers} with {num_processes} processes: each has the same "
            f"number of workers. Set --config.cluster.num_workers={num_processes}, or a multiple"
        )
    return num_workers // num_processes
