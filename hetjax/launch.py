"""Starts a program as local workers and looks after them.

    python -m hetjax.launch --workers=4 [--cpus=1,0.5,0.25,0.25] -- python -m experiments.train …

The command behind `--` runs once for each worker. Its environment has the worker's number, the
number of workers, the coordinator's address and the number of the attempt (HETJAX_PROCESS_ID,
HETJAX_NUM_PROCESSES, HETJAX_COORDINATOR, HETJAX_ATTEMPT). When a worker dies or hangs all are
started again, and a program that saves checkpoints goes on from the last. With --runtime=apart the
others go on, and `--add=RUNDIR [--cpus=SHARE]` and `--remove=RUNDIR:WORKER` change the membership
while a run goes on. Exit codes: 0 all finished, 1 the restarts are spent, 2 bad input, 128 + n
ended by the signal n: 130 by Ctrl-C, 143 by SIGTERM, and so on (SIGHUP, SIGUSR1, SIGUSR2).
"""

import argparse
import math
import os
import shutil
import sys
from collections.abc import Sequence

from hetjax import messages
from hetjax.comm import join
from hetjax.launcher import cpu_shares, supervisor


def parse(argv: Sequence[str]) -> supervisor.Options:
    """Reads the command line; exits with code 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m hetjax.launch",
        usage="python -m hetjax.launch --workers=N [options] -- COMMAND …",
        description="Starts a command as N local workers, each held to its share of the "
        "processor, and restarts all when one dies or hangs. --add=RUNDIR [--cpus=SHARE] and "
        "--remove=RUNDIR:WORKER change the membership of a run apart.",
        allow_abbrev=False,
    )
    cpus = "share of one core of each worker: 1,0.5,… (no limits)"
    parser.add_argument("--cpus", default="", help=cpus)
    # The fields of `supervisor.Options`, which has their types and defaults.
    flags_of_options = {
        "max_restarts": "how often all may be started again (%(default)s)",
        "heartbeat_secs": "what hangs is noticed within two of these (%(default)s)",
        "start_secs": "how long a worker may take to start and compile (%(default)s); inf for "
        "programs that do not say what they do",
        "grace_secs": "between SIGTERM and SIGKILL (%(default)s); three times as long to end the "
        "round when the launcher itself gets it or the like, and longer while a worker saves",
        "host": "where the coordinator listens (%(default)s: only for this machine)",
        "port": "the coordinator's port until the first restart (a free one)",
        "max_workers": "seats of a run apart, for workers that come later (--workers)",
        "late_secs": "how long workers of a run apart wait at least for one that makes no progress "
        "(10, or HETJAX_LATE_SECS)",
    }
    for name, text in flags_of_options.items():
        default = getattr(supervisor.Options, name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    runtime = "joined: one JAX for all; apart: workers come and go (%(default)s)"
    parser.add_argument("--runtime", choices=("joined", "apart"), default="joined", help=runtime)
    parser.add_argument("--workers", type=int, required=True, help="how many processes")

    cut = argv.index("--") if "--" in argv else len(argv)
    flags, command = vars(parser.parse_args(argv[:cut])), tuple(argv[cut + 1 :])
    try:
        num_workers = flags.pop("workers")
        flags["is_apart"] = flags.pop("runtime") == "apart"
        flags["cpus"] = _read_cpus(flags["cpus"], num_workers)
        options = supervisor.Options(command, num_workers, **flags)
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher and returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    own = argv[: argv.index("--")] if "--" in argv else argv
    if any(word.split("=")[0] in ("--add", "--remove") for word in own):
        return _change(argv)
    options = parse(argv)
    make = None
    if options.is_apart:
        from hetjax.launcher import elastic  # it needs NumPy

        make = elastic.ElasticSupervisor
    try:
        return supervisor.supervise(options, make)
    except OSError as error:
        print(f"hetjax.launch: the workers cannot be started: {error}", file=sys.stderr)
        return 1


def _change(argv: Sequence[str]) -> int:
    """Asks the launcher of a run apart for another worker, or for one less."""
    from hetjax.launcher import seats

    parser = argparse.ArgumentParser(prog="python -m hetjax.launch", allow_abbrev=False)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--add", metavar="RUNDIR", help="fill a free seat")
    which.add_argument("--remove", metavar="RUNDIR:WORKER", help="end a worker after its round")
    parser.add_argument("--cpus", type=float, help="the new worker's share of a core (1)")
    flags = parser.parse_args(argv)
    directory, request = flags.add, {"cpus": flags.cpus}
    if flags.remove:
        directory, _, worker = flags.remove.rpartition(":")
        if not worker.isdecimal():
            parser.error(f"--remove={flags.remove}: must be RUNDIR:WORKER, a number")
        request = {"remove": int(worker)}
    try:
        print(seats.ask(directory, request))
    except ValueError as error:
        parser.error(str(error))
    return 0


def _read_cpus(text: str, num_workers: int) -> tuple[float, ...]:
    if not text:
        return ()
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--cpus={text}: must be numbers, as in --cpus=1,0.5,0.25") from None
    if len(shares) != num_workers:
        raise ValueError(f"--cpus={text}: {len(shares)} shares for --workers={num_workers}")
    with messages.as_mistake(f"--cpus={text}: "):
        cpu_shares.check_shares(shares, len(cpu_shares.available_cores()) or os.cpu_count() or 1)
    return shares


def _check(options: supervisor.Options) -> None:
    if options.num_workers < 1:
        raise ValueError(f"--workers={options.num_workers}: must be 1 or more")
    for name in ("max_workers", "late_secs"):
        if getattr(options, name) and not options.is_apart:
            raise ValueError(f"--{name}={getattr(options, name):g}: needs --runtime=apart")
    if 0 < options.max_workers < options.num_workers:
        raise ValueError(f"--max_workers={options.max_workers}: must be at least --workers")
    if options.is_apart:
        from hetjax.launcher import seats

        seats.directory_of_runs()
    for name in ("heartbeat_secs", "start_secs"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name}={getattr(options, name):g}: must be above 0")
    for name in ("max_restarts", "grace_secs", "late_secs"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(f"--{name}={getattr(options, name):g}: must be 0 or more")
    if not options.command or shutil.which(options.command[0]) is None:
        raise ValueError(f"{' '.join(options.command)!r} is no command; put one behind --")
    if not 0 <= options.port < 1 << 16:
        raise ValueError(f"--port={options.port}: must be from 0 (a free one) to 65535")
    cannot = f"--host={options.host} --port={options.port}: no process can listen there ("
    with messages.as_mistake(cannot, OSError, after=")"):
        join.find_port(options.host, options.port)


if __name__ == "__main__":
    sys.exit(main())
