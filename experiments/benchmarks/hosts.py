"""What does a round cost on two hosts, and under other engines than hetjax's launcher?

    python -m experiments.benchmarks.hosts --data_dir=DIR [--only=GROUP,…] [--repeats=3]

experiments/results/processes/hosts.md keeps the tables. Groups: hosts, engines, leftovers. CIFAR-10
has to be in DIR. Each arm is a run of its own, of four processes of one worker each with equal
quotas, and arms take turns. Two hosts are namespaces of this machine (`engine_hosts.py`), which
share its cores, so that only what the link costs is another machine's. That needs root.
"""

import contextlib
import functools
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import app, flags, logging

from experiments.benchmarks import host_leftovers, launched_runs, processes
from experiments.benchmarks.rows import Row, print_tables
from experiments.comparisons import kept
from experiments.drills import engine_gangs, engine_hosts, engine_slurm

# Other programs have flags of these names too, and tests import several of them.
_ONLY = flags.DEFINE_list("only", [], "Groups to run; all if empty.", allow_override=True)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Directory of the data sets.", allow_override=True
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each arm.", 1, allow_override=True)

RATES = {"1gbit": 1e9, "100mbit": 1e8}  # bits a second, each way
SKIPPED, ROUNDS, ROUNDS_PER_EPOCH, TURNS = 4, 24, 8, 4


class Measured(NamedTuple):
    """Medians of a run's rounds, but for the first ones."""

    round_secs: float
    local_secs: float
    exchange_secs: float
    link_bytes: float = 0.0  # a round, of the host that sends more


def of_lines(lines: Sequence[Mapping[str, Any]], link_bytes: float = 0.0) -> Measured:
    """What the lines of steady rounds in a `metrics.jsonl` say.

    Raises:
        ValueError: none of them is full.
    """
    if not (steady := [line for line in lines if line["full"]]):
        raise ValueError(f"{len(lines)} rounds were done, and none of them is full")
    names = Measured._fields[:3]
    return Measured(*(statistics.median(line[name] for line in steady) for name in names))._replace(
        link_bytes=link_bytes
    )


def command(
    task: processes.Task, workdir: pathlib.Path, num_rounds: int = 20 * ROUNDS
) -> list[str]:
    """Of each process of a run of this task, without its number; by default it is to be ended."""
    rounds = (num_rounds // ROUNDS_PER_EPOCH, ROUNDS_PER_EPOCH)
    workers = engine_gangs.NUM_WORKERS
    return launched_runs.task_command(task, "equal", rounds, workers, workdir, _DATA_DIR.value)


@contextlib.contextmanager
def _started(
    task: processes.Task, rate: str | None
) -> Iterator[tuple[engine_hosts.ByHand, engine_hosts.Hosts | None, pathlib.Path]]:
    directory = pathlib.Path(tempfile.mkdtemp(dir=launched_runs.directory()))
    workdir = directory / "run"
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(engine_hosts.Hosts(directory, rate)) if rate else None
        run = engine_hosts.ByHand(
            command(task, workdir),
            workdir,
            log=directory / "log",
            hosts=hosts,
            environment=launched_runs.environment(),
        )
        yield stack.enter_context(run), hosts, workdir


def by_hand(task: processes.Task) -> Measured:
    """One run on this machine, until it has done its rounds."""
    with _started(task, None) as (run, _, workdir):
        run.wait_for_round(ROUNDS - 1)
        return of_lines(kept.read(workdir / "metrics.jsonl")[SKIPPED:ROUNDS])


def on_two_hosts(task: processes.Task) -> dict[str, Measured]:
    """One run on two hosts, whose link has each rate in turn."""
    found: dict[str, list[Mapping[str, Any]]] = {rate: [] for rate in RATES}
    sent = dict.fromkeys(RATES, 0.0)
    with _started(task, next(iter(RATES))) as (run, hosts, workdir):
        assert hosts is not None
        run.wait_for_round(SKIPPED)
        for _ in range(TURNS):
            for rate in RATES:
                hosts.limit(rate)
                run.wait_for_round(engine_gangs.num_rounds(workdir) + 1)  # one has both rates
                first, before = engine_gangs.num_rounds(workdir), hosts.bytes_sent()
                run.wait_for_round(first + ROUNDS // TURNS)
                last, after = engine_gangs.num_rounds(workdir), hosts.bytes_sent()
                found[rate] += kept.read(workdir / "metrics.jsonl")[first:last]
                most = max(b - a for a, b in zip(before, after, strict=True))
                sent[rate] += most / (last - first) / TURNS
    return {rate: of_lines(found[rate], sent[rate]) for rate in RATES}


def _note(name: str, run: Measured) -> None:
    """So that a run is not lost where the rows do not come."""
    print(f"load {os.getloadavg()[0]:.0f}, {name}: {told([run], 1e9)}", file=sys.stderr, flush=True)


def hosts_rows() -> list[Row]:
    """One host and two, at each rate, in turn."""
    if why := engine_hosts.missing():
        return [Row("two hosts", "told", f"not measured: {why}")]
    found: dict[tuple[str, str], list[Measured]] = {}
    for _ in range(_REPEATS.value):
        for name, task in processes.TASKS.items():
            for rate, measured in {"": by_hand(task), **on_two_hosts(task)}.items():
                found.setdefault((name, rate), []).append(measured)
                _note(f"{name}, {rate or 'one host'}", measured)
    rows = []
    for name, task in processes.TASKS.items():
        for rate in ("", *RATES):
            place = f"two hosts, {rate}/s" if rate else "one host"
            figure = f"{task.title}, 4 processes by hand, {place}: ms of a round; its longest "
            figure += "local phase; its exchange"
            figure += "; MB over the link, each way; ms that they take at its rate" if rate else ""
            rows.append(Row(figure, "told", told(found[name, rate], RATES.get(rate))))
    return rows


def told(runs: Sequence[Measured], rate: float | None) -> str:
    """Medians over runs; the bytes and their time, where a link has a rate in bits a second."""
    texts = [
        launched_runs.middle([1e3 * getattr(run, name) for run in runs], ".0f")
        for name in Measured._fields[:3]
    ]
    if rate:
        sent = [run.link_bytes for run in runs]
        texts.append(launched_runs.middle([1e-6 * each for each in sent]))
        texts.append(launched_runs.middle([8e3 * each / rate for each in sent], ".0f"))
    return "; ".join(texts)


# Engines: each is a context of a function from a workdir's command to that of the whole run


@contextlib.contextmanager
def _launcher() -> Iterator[tuple[list[str], dict[str, str]]]:
    options = ("--max_restarts=0",)
    yield launched_runs.launch_command(engine_gangs.NUM_WORKERS, (), *options), {}


@contextlib.contextmanager
def _open_mpi() -> Iterator[tuple[list[str], dict[str, str]]]:
    yield ["mpirun", "-n", str(engine_gangs.NUM_WORKERS)], engine_gangs.OPEN_MPI


@contextlib.contextmanager
def _slurm() -> Iterator[tuple[list[str], dict[str, str]]]:
    directory = pathlib.Path(tempfile.mkdtemp(dir=launched_runs.directory()))
    with engine_slurm.Slurm(directory / "slurm", num_nodes=1) as cluster:
        number = f"--ntasks={engine_gangs.NUM_WORKERS}"
        yield ["srun", number], {"SLURM_CONF": cluster.environment["SLURM_CONF"]}


ENGINES = {"the launcher": _launcher, "Open MPI": _open_mpi, "Slurm": _slurm}
NEEDS = {"Open MPI": ("mpirun",), "Slurm": engine_slurm.PROGRAMS}


def _by_engine(
    task: processes.Task, engine: Sequence[str], environment: Mapping[str, str]
) -> Measured:
    workdir = pathlib.Path(tempfile.mkdtemp(dir=launched_runs.directory())) / "run"
    full = [*engine, *command(task, workdir, ROUNDS)]
    done = subprocess.run(
        full,
        env={**launched_runs.environment(), **environment},
        capture_output=True,
        text=True,
        timeout=launched_runs.MOST_SECS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(full)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return of_lines(kept.read(workdir / "metrics.jsonl")[SKIPPED:])


def engines_rows() -> list[Row]:
    """The MLP on this machine, as each engine starts it, in turn."""
    task = processes.TASKS["mlp"]
    with contextlib.ExitStack() as stack:
        arms: dict[str, Callable[[], Measured]] = {"by hand": functools.partial(by_hand, task)}
        absent = []
        for name, engine in ENGINES.items():
            if lacking := [each for each in NEEDS.get(name, ()) if not shutil.which(each)]:
                absent.append(f"{name} was not measured: there is no {', '.join(lacking)}")
                continue
            arms[name] = functools.partial(_by_engine, task, *stack.enter_context(engine()))
        found: dict[str, list[Measured]] = {name: [] for name in arms}
        for turn in range(_REPEATS.value):
            for name in list(arms)[:: 1 if turn % 2 else -1]:  # neither is always the first
                found[name].append(arms[name]())
                _note(name, found[name][-1])
    base = [run.round_secs for run in found["the launcher"]]
    texts = []
    for name in arms:
        secs = [run.round_secs for run in found[name]]
        ratio = statistics.median(secs) / statistics.median(base)
        pairs = [one / other for one, other in zip(secs, base, strict=True)]
        exchange = launched_runs.middle([1e3 * run.exchange_secs for run in found[name]], ".0f")
        text = f"{name} {ratio:.2f} (pairs {min(pairs):.2f} to {max(pairs):.2f}): "
        text += f"{launched_runs.middle([1e3 * each for each in secs], '.0f')} ms, of them "
        texts.append(f"{text}exchange {exchange}")
    return [
        Row(
            f"{task.title}, 4 processes on one machine: a round over one under the launcher "
            f"(medians of {_REPEATS.value} runs in turn)",
            "≤ 1.05",
            "; ".join([*texts, *absent]),
        )
    ]


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "hosts": hosts_rows,
    "engines": engines_rows,
    "leftovers": host_leftovers.rows,
}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments are taken, but {argv[1:]} were given.")
    logging.set_verbosity(logging.WARNING)
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The machine is not idle (load {load:.1f}): figures may be void.", file=sys.stderr)
    print_tables(GROUPS, _ONLY.value)


if __name__ == "__main__":
    app.run(main)
