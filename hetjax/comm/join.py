"""How a process becomes one of several: it joins the others in `jax.distributed`.

`process_info` says which process it is. On TPU pods JAX knows that by itself.
"""

import contextlib
import logging
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hetjax import process_info
from hetjax.comm import gpus, hosts, runtime
from hetjax.comm import key_value_store as store_lib
from hetjax.liveness import blocking_waits, failure_detector, stall_reporter

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides proxies while JAX's client is made: gRPC would ask them for the coordinator's address,
    whatever NO_PROXY says. It does not look again later."""
    names = [name for name in os.environ if name.lower().endswith("_proxy")]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


@_without_proxies()
def join(member: process_info.ProcessInfo | None) -> None:
    """Makes this process part of its run. Call it before JAX is used for the first time.

    If `member` is None nothing happens, except on a TPU pod, which JAX knows by itself.

    Raises:
        ValueError: the port of process 0 is taken, or JAX is in use already. If the others do not
            come in time, the process ends with a message and exit code 2, because nothing can
            interrupt JAX's wait for them.
    """
    import jax

    from hetjax.comm import membership

    own, is_child = runtime.current(), process_info.is_child()
    if not is_child and own.membership is None:
        own.membership = membership.of_environment()
    if not is_child and own.seats:
        _detect_failures()
        if own.membership is not None and own.membership.carrier.shares_gpus:
            _take_gpu([gpus.visible()] * own.seats, own.process_id)
        return
    if member is None:
        own.is_alone = True
        if is_child or len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) < 2:
            return
        jax.distributed.initialize()
    if member is None or jax.distributed.is_initialized():
        _detect_failures()
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    text = os.environ.get("HETJAX_START_SECS", "300")
    if not text.isdecimal() or not (start_secs := int(text)):
        raise ValueError(f"HETJAX_START_SECS is {text!r}; it must be whole seconds, 1 or more")
    options: dict[str, Any] = {
        "initialization_timeout": start_secs + 60,
        "cluster_detection_method": member.finder or "deactivate",
    }
    if member.coordinator is not None:
        host, port = hosts.address_of(member.coordinator)
        is_local = host in hosts.LOOPBACK
        if is_local:
            options["coordinator_bind_address"] = member.coordinator
        if member.process_id == 0:
            _check_port(host if is_local else "0.0.0.0", port)
    try:
        with _patience(member, start_secs):
            jax.distributed.initialize(
                member.coordinator, member.num_processes, member.process_id, **options
            )
    except (RuntimeError, ValueError) as error:
        raise ValueError(_not_joined(member, str(error).splitlines()[0])) from error
    _detect_failures()
    _tell_hosts()
    if len(processes := own_machine()) == own.num_processes:
        runtime.meet_at_loopback()
    seen = [own.hosts[process].gpus for process in processes]
    _take_gpu(seen, processes.index(member.process_id), is_guess=member.finder is not None)


def _take_gpu(seen: Sequence[Sequence[str]], index: int, *, is_guess: bool = False) -> None:
    """Leaves this process one GPU of those that it sees; arguments as of `gpus.own`."""
    import jax

    name = "jax_cuda_visible_devices"
    jax.config.update(name, gpus.own(seen, index, chosen=jax.config.read(name), is_guess=is_guess))


def _detect_failures() -> None:
    """Begins to watch the other processes of this one's run; later calls do nothing."""
    own, beacons = runtime.current(), os.environ.get("HETJAX_BEACONS")
    if isinstance(own.detector, failure_detector.FailureDetector):
        return
    store = store_lib.KeyValueStore("endings")
    directory = pathlib.Path(beacons) if beacons else None
    about = own.process_id, own.num_processes, store, directory
    roster = own.membership or runtime.Joined()
    own.detector = detector = failure_detector.FailureDetector(*about, roster)
    detector.begin()


def _tell_hosts() -> None:
    """Tells all processes on which machine each of them is, and which GPUs it sees there."""
    own, here = runtime.current(), hosts.own_host()
    if own.hosts:
        return
    asked = range(own.num_processes), float("inf")  # they may load their data first
    what = "say on which machine it is"
    told = store_lib.KeyValueStore("hosts").gather(own.process_id, here, *asked, what=what)
    own.hosts = {process: hosts.Host(*host) for process, host in told.items()}


def machines() -> list[list[int]]:
    """The processes of each machine, in order; [] where they have not told each other.

    Processes in two network namespaces are on two machines.
    """
    found: dict[str, list[int]] = {}
    for process, host in runtime.current().hosts.items():
        found.setdefault(host.machine, []).append(process)
    return list(found.values())


def own_machine() -> list[int]:
    """The processes of this machine, in order, this one too; [] as of `machines`."""
    own = runtime.current().process_id
    return next((processes for processes in machines() if own in processes), [])


@contextlib.contextmanager
def _patience(member: process_info.ProcessInfo, start_secs: int) -> Iterator[None]:
    """Says every ten seconds who is waited for, and ends this process after `start_secs`.

    JAX 0.10.2 would abort with a stack trace when its own time is over.
    """
    joined, began = threading.Event(), time.monotonic()
    who = f"process {member.process_id} of {member.num_processes}"

    def wait() -> None:
        secs = 0.0
        while not joined.wait(max(0.0, min(stall_reporter.PERIOD_SECS, start_secs - secs))):
            secs = time.monotonic() - began
            if secs >= start_secs:
                reason = f"not all were there after {start_secs} s (HETJAX_START_SECS)"
                print(_not_joined(member, reason), file=sys.stderr, flush=True)
                os._exit(2)
            logger.warning(f"{who} has waited {secs:.0f} s for {_waited_for(member)}")

    threading.Thread(target=wait, name="hetjax-join", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def _waited_for(member: process_info.ProcessInfo) -> str:
    others = f"the other {member.num_processes - 1} processes to join"
    if not member.process_id:
        return others
    coordinator = member.coordinator or runtime.current().coordinator_address
    return f"process 0 at {coordinator or 'an address that JAX looks for'}, or {others}"


def _not_joined(member: process_info.ProcessInfo, reason: str) -> str:
    address = member.coordinator or runtime.current().coordinator_address or "no address"
    return (
        f"process {member.process_id} of {member.num_processes} cannot join its run at "
        f"{address}: {reason}. Are all started, with one --coordinator=HOST:PORT?"
    )


def join_processes(
    process_id: int | None = None, num_processes: int | None = None, coordinator: str | None = None
) -> process_info.ProcessInfo | None:
    """Makes this process part of a run of several. Call it before JAX is used for the first time.

    Without arguments the environment that the launcher or another engine has left says which
    process it is (`process_info`). A process not started so is alone, and nothing happens. So
    is one with `num_processes` 1, whatever its environment says, and a child of a process that has
    joined: a reader of data, or a worker of a pool, which imports the script anew.

    When a process exits it waits, 300 s at most, until all have come to their end. Process 0
    coordinates the others and ends with them. If one raises, or comes to its exit while another
    waits for it, all end, and each says which process it was and what it raised. A program that
    leaves by `os._exit` does not wait, and may take the others with it.

    Args:
        process_id: from 0.
        num_processes: of the run.
        coordinator: host:port where process 0 listens; the same for all.

    Returns:
        Which member of the run this process is, or None.

    Raises:
        ValueError: the arguments do not fit together, the environment does not say enough, or
            process 0 was not found.
    """
    import jax

    own = runtime.current()
    # JAX's own call counts, and an engine's membership, whatever the environment says.
    is_joined = jax.distributed.is_initialized() or own.membership is not None
    if is_joined and not process_info.is_child():
        found = own.process_id, own.num_processes, own.coordinator_address
        member: process_info.ProcessInfo | None = process_info.ProcessInfo(*found)
    else:
        member = process_info.find(process_id, num_processes, coordinator)
    join(member)
    return member


def check_joined() -> None:
    """Refuses to train alone in a process that the launcher started as one of several.

    If another engine did, training alone may be meant, and it only says so. A process that has
    joined by JAX alone is watched from now on, as by `join_processes`.

    Raises:
        ValueError: this process has not joined the others, or cannot be reached by them.
    """
    import jax

    own = runtime.current()
    if process_info.is_imported_anew():
        raise ValueError(
            "another process started this one, which imports the script anew: put what trains "
            "under `if __name__ == '__main__':`"
        )
    if own.seats:
        return
    if jax.distributed.is_initialized():
        _detect_failures()
        _tell_hosts()
        with blocking_waits.Wait("start its devices"):
            jax.local_devices()
        if (said := hosts.unreachable(own.hosts)) and jax.default_backend() == "cpu":
            raise ValueError(said)
        return
    number = os.environ.get("HETJAX_NUM_PROCESSES", "1")
    if number != "1" and not process_info.is_child():
        raise ValueError(
            f"this process was started as one of {number}, and has not joined the others: call "
            "hetjax.join_processes() before JAX is used"
        )
    if own.is_alone:
        return
    own.is_alone = True  # so it is said once
    try:
        member = process_info.find()
        seen = member and f"is process {member.process_id} of {member.num_processes}"
    except ValueError as error:
        seen = f"is one of several ({error})"
    if seen:
        logger.warning(
            f"this process trains alone, and by its environment it {seen}: call "
            "hetjax.join_processes() before JAX is used, or with (0, 1) if that is meant"
        )


def leads() -> bool:
    """Whether this process writes what its run leaves: the only one, process 0 of several.

    In a run apart (`--runtime=apart`) the first worker that lives, once the run has begun. A
    newcomer does not. Before this process has joined, the launcher has said which it is. A child of
    a member, such as a reader of data, does not lead.
    """
    if process_info.is_child():
        return False
    own = runtime.current()
    if own.membership is not None:
        return own.membership.leads
    started_as = {os.environ.get(f"HETJAX_{name}", "0") for name in ("PROCESS_ID", "START")}
    return own.process_id == 0 and started_as == {"0"}


def find_port(host: str, port: int = 0) -> int:
    """Returns `port` if a process can listen there; for 0, a port that is free now.

    Raises:
        OSError: no process can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        return listener.getsockname()[1]


def _check_port(host: str, port: int) -> None:
    """Refuses a port that is taken: JAX 0.10.2 would die by a segmentation fault."""
    try:
        find_port(host, port)
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen at {host}:{port}: {error.strerror}; give all processes a "
            "--coordinator=HOST:PORT that is free"
        ) from error
