"""Starts a program as local workers and looks after them.

    python -m hetjax.launch --workers=4 [--cpus=1,0.5,0.25,0.25] -- python -m experiments.train …

The command behind `--` runs once for each worker. Its environment has the worker's number, the
number of workers, the coordinator's address and the number of the attempt (HETJAX_PROCESS_ID,
HETJAX_NUM_PROCESSES, HETJAX_COORDINATOR, HETJAX_ATTEMPT). When a worker dies or hangs all are
started again, and a program that saves checkpoints goes on from the last. Exit codes: 0 all
finished, 1 the restarts are spent, 2 bad input, 130 ended by Ctrl-C, 143 ended by SIGTERM.
"""

import argparse
import math
import os
import shutil
import sys
from collections.abc import Sequence

from hetjax.launcher import cpu_shares, supervisor
from hetjax.processes import join

_FLAGS = {
    "max_restarts": "how often all may be started again (%(default)s)",
    "heartbeat_secs": "what hangs is noticed within two of these (%(default)s)",
    "start_secs": "how long a worker may take to start and compile (%(default)s); inf for programs "
    "that do not say what they do",
    "grace_secs": "between SIGTERM and SIGKILL (%(default)s); three times as long to end the round "
    "and save when the launcher itself gets SIGTERM",
    "host": "where the coordinator listens (%(default)s: for nobody else)",
    "port": "the coordinator's port until the first restart (a free one)",
}
"""Help of the flags that are fields of `supervisor.Options`, which has their types and defaults."""


def parse(argv: Sequence[str]) -> supervisor.Options:
    """Reads the command line; exits with code 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m hetjax.launch",
        usage="python -m hetjax.launch --workers=N [options] -- COMMAND …",
        description="Starts a command as N local workers, each held to its share of the "
        "processor, and restarts all when one dies or hangs.",
        allow_abbrev=False,
    )
    cpus = "share of one core of each worker: 1,0.5,… (no limits)"
    parser.add_argument("--cpus", default="", help=cpus)
    for name, text in _FLAGS.items():
        default = getattr(supervisor.Options, name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--workers", type=int, required=True, help="how many processes")

    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    flags, command = vars(parser.parse_args(argv[:cut])), tuple(argv[cut + 1 :])
    try:
        num_workers = flags.pop("workers")
        flags["cpus"] = _read_cpus(flags["cpus"], num_workers)
        options = supervisor.Options(command, num_workers, **flags)
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher and returns its exit code."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        return supervisor.supervise(options)
    except OSError as error:
        print(f"hetjax.launch: the workers cannot be started: {error}", file=sys.stderr)
        return 1


def _read_cpus(text: str, num_workers: int) -> tuple[float, ...]:
    if not text:
        return ()
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--cpus={text}: must be numbers, as in --cpus=1,0.5,0.25") from None
    if len(shares) != num_workers:
        raise ValueError(f"--cpus={text}: {len(shares)} shares for --workers={num_workers}")
    try:
        cpu_shares.check_shares(shares, len(cpu_shares.available_cores()) or os.cpu_count() or 1)
    except ValueError as error:
        raise ValueError(f"--cpus={text}: {error}") from None
    return shares


def _check(options: supervisor.Options) -> None:
    if options.num_workers < 1:
        raise ValueError(f"--workers={options.num_workers}: must be 1 or more")
    for name in ("heartbeat_secs", "start_secs"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name}={getattr(options, name):g}: must be above 0")
    for name in ("max_restarts", "grace_secs"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(f"--{name}={getattr(options, name):g}: must be 0 or more")
    if not options.command or shutil.which(options.command[0]) is None:
        raise ValueError(f"{' '.join(options.command)!r} is no command; put one behind --")
    if not 0 <= options.port < 1 << 16:
        raise ValueError(f"--port={options.port}: must be from 0 (a free one) to 65535")
    try:
        join.find_port(options.host, options.port)
    except OSError as error:
        raise ValueError(
            f"--host={options.host} --port={options.port}: nobody can listen there ({error})"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
