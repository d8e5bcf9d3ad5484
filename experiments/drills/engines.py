"""Kills a run that another engine than hetjax's launcher has started; its command goes on.

    python -m experiments.drills.engines [--engines=open_mpi,slurm,ray] [--trials=20] [--minutes=60]

Each trial starts a script under static quotas, kills a process that the seed draws, process 0
too, by `kill -9` at a round that it draws, and gives the same command again. What is left has to be
equal to the bit to an undisturbed run of the same engine, on Ray (`engines_ray.py`) of the
launcher.

A trial adds its line to `runs.jsonl`; the page beside it is about all lines.
"""

import collections
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tqdm
from absl import flags

from experiments import command_line, markdown
from experiments.comparisons import kept
from experiments.drills import engine_gangs, engine_program, engine_slurm, fault_cases

Record = dict[str, Any]
Trial = Callable[[int], Record]

RESULTS = pathlib.Path(__file__).parents[1] / "results/engines"
PARTS = ("engine", "imports", "joining", "loading", "compiling", "rounds")
"""Of the seconds from a kill to the first new round: until the first process has started again; its
imports, until the last process has done them; joining; the data; compiling, or loading from the
cache; the checkpoint, the rounds that were lost, and the new one."""


def one(
    engine: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: pathlib.Path,
    seed: int,
) -> Record:
    """One trial of an engine: starts, kills, goes on, compares.

    Args:
        engine: its name.
        command: that starts four processes.
        environment: of the command.
        directory: of the engine's trials; the undisturbed run is made there by the first.
        seed: draws the process and the round.
    """
    rng = random.Random(seed)
    rank = rng.randrange(engine_gangs.NUM_WORKERS)
    at_round = rng.randrange(1, engine_program.NUM_ROUNDS - 10)
    told, log = directory / "told", directory / "log"
    directory.mkdir(exist_ok=True)
    variables = {**environment, engine_program.TOLD_VARIABLE: str(told)}

    def start(workdir: pathlib.Path) -> engine_gangs.EngineRun:
        shutil.rmtree(told, ignore_errors=True)
        told.mkdir()
        program = [sys.executable, "-m", engine_program.__name__, f"--workdir={workdir}"]
        return engine_gangs.EngineRun(
            [*command, *program], workdir, environment=variables, log=log, cwd=fault_cases.ROOT
        )

    whole, workdir = directory / "whole", directory / f"run-{seed}"
    if not (whole / "summary.json").exists():
        with start(whole) as run:
            _end(run, log)
    before = engine_gangs.files_in_memory()
    with start(workdir) as run:
        pids = run.wait_for_round(at_round)
        os.kill(pids[rank], signal.SIGKILL)
        killed = time.monotonic()
        code = run.end()
    over, done = time.monotonic() - killed, engine_gangs.num_rounds(workdir)
    with start(workdir) as run:
        engine_gangs.until(lambda: run.is_over or engine_program.read(told))
        engine_gangs.until(lambda: run.is_over or _new_rounds(workdir, done))
        new_round = time.monotonic() - killed
        _end(run, log)
    summary = json.loads((workdir / "summary.json").read_text())
    ends = [end - killed for end in engine_program.read(told) or ()]
    compiling = summary["start"]["compiling"]
    secs = [*np.diff([0.0, *ends]), compiling, new_round - ends[-1] - compiling]
    missing, doubled = engine_gangs.lost_and_doubled(workdir)
    record = {
        "engine": engine,
        "seed": seed,
        "rank": rank,
        "round": done,
        "exit_code": code,
        "whole": engine_gangs.is_whole(workdir, engine_program.NUM_ROUNDS),
        "bit_equal": fault_cases.are_bit_equal(workdir, whole),
        "missing": missing,
        "doubled": doubled,
        "left_in_memory": len(engine_gangs.files_in_memory() - before),
        "secs_to_end": round(over, 2),
        "secs_to_first_new_round": round(new_round, 2),
        "secs": {name: round(float(s), 2) for name, s in zip(PARTS, secs, strict=True)},
    }
    shutil.rmtree(workdir)
    return record


def _new_rounds(workdir: pathlib.Path, done: int) -> bool:
    return engine_gangs.num_rounds(workdir) > done


def _end(run: engine_gangs.EngineRun, log: pathlib.Path) -> None:
    if code := run.end():
        raise RuntimeError(f"the run ended with code {code}:\n{log.read_text()[-3000:]}")


# Engines: each makes what it needs, in a directory, and yields a function of a seed


@contextlib.contextmanager
def open_mpi(directory: pathlib.Path, environment: dict[str, str]) -> Iterator[Trial]:
    """`mpirun`, which a machine has or not."""
    command = ["mpirun", "-n", str(engine_gangs.NUM_WORKERS)]
    both = environment | engine_gangs.OPEN_MPI
    yield functools.partial(one, "open_mpi", command, both, directory / "open_mpi")


@contextlib.contextmanager
def slurm(directory: pathlib.Path, environment: dict[str, str]) -> Iterator[Trial]:
    """`srun` on two nodes of a Slurm that is started here."""
    command = ["srun", f"--ntasks={engine_gangs.NUM_WORKERS}", "--nodes=2", "--kill-on-bad-exit=1"]
    with engine_slurm.Slurm(directory / "cluster") as cluster:
        both = {**environment, "SLURM_CONF": cluster.environment["SLURM_CONF"]}
        yield functools.partial(one, "slurm", command, both, directory / "slurm")


@contextlib.contextmanager
def ray(directory: pathlib.Path, environment: dict[str, str]) -> Iterator[Trial]:
    """Actors of a Ray that is started here, on one node."""
    from experiments.drills import engines_ray

    del environment
    with engines_ray.session():
        undisturbed = engines_ray.reference(directory / "reference")
        yield lambda seed: engines_ray.repetition(seed, directory / f"ray-{seed}", undisturbed)


ENGINES = {"open_mpi": open_mpi, "slurm": slurm, "ray": ray}
TITLES = {"open_mpi": "Open MPI", "slurm": "Slurm, two nodes", "ray": "Ray, two actors"}
NEEDS = {"open_mpi": ("mpirun",), "slurm": engine_slurm.PROGRAMS, "ray": ("ray",)}
"""The programs, or packages, without which an engine is left out."""


def missing(name: str) -> list[str]:
    """What an engine needs and this machine has not."""
    return [
        each for each in NEEDS[name] if not (shutil.which(each) or importlib.util.find_spec(each))
    ]


def run(results: pathlib.Path, names: Sequence[str], *, trials: int, ends: float) -> None:
    """As many trials of each engine as are missing to `trials`, in turn; adds their lines.

    Args:
        results: directory of the lines.
        names: of `ENGINES`.
        trials: of each engine, with those that are there.
        ends: monotonic seconds after which no trial begins.
    """
    path = results / "runs.jsonl"
    asked = ["git", "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.check_output(asked, cwd=fault_cases.ROOT, text=True).strip()
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hetjax-drill-"))
        )
        environment = os.environ | fault_cases.environment(directory / "cache")
        made = {name: stack.enter_context(ENGINES[name](directory, environment)) for name in names}
        done = {name: {r["seed"] for r in kept.read(path) if r["engine"] == name} for name in names}
        left = [(s, n) for s in range(trials) for n in names if s not in done[n]]
        for seed, name in tqdm.tqdm(left, desc="engines"):
            if time.monotonic() > ends:
                break
            kept.append(path, made[name](seed) | {"commit": commit})


# The page

_PAGE = """\
# Measurements: engines

Does a run that another engine has started survive `kill -9`, and what does a restart cost?

`python -m experiments.drills.engines` starts a script under each engine on one machine: a model of
two layers on four workers, static quotas 4, 3, 2, 1, {rounds} rounds, a checkpoint every ten. A
seed draws a process and a round. The drill kills that process at that round, and gives the same
command again. The run has to be equal to the bit to an undisturbed one of the same engine.

On Ray two actors of unequal resources do 75 rounds, and `hetjax.ray.launch` starts them anew. The
undisturbed run is one of hetjax's launcher. Each trial has its line in [runs.jsonl](runs.jsonl).
[Schedulers](../../../docs/schedulers.md) says how an engine is used.

{table}

Seconds are medians, with the most in brackets, of two cores that other programs shared. They are
counted from the kill, and the parts follow each other:

- engine: it notices, ends the others, and starts the same command again
- imports, joining, loading of the data, compiling from the cache
- rounds: the checkpoint, the rounds that were lost, and the first new one

hetjax's own is joining and rounds.
Figures are of the code at commit {commits}.
"""


def table(results: pathlib.Path) -> str:
    """What all lines say, as Markdown."""
    of_engine = collections.defaultdict(list)
    for record in kept.read(results / "runs.jsonl"):
        of_engine[record["engine"]].append(record)
    names = [name for name in TITLES if name in of_engine]
    rows: list[tuple[str, str, Callable[[list[Record]], str]]] = [
        ("joined, killed, gone on", "20 of 20", lambda rs: _share(rs, "whole")),
        ("… of them process 0", "", lambda rs: str(sum(r["rank"] == 0 for r in rs))),
        ("… equal to the bit", "20 of 20", lambda rs: _share(rs, "bit_equal")),
        ("examples missing", "0", lambda rs: _sum(rs, "missing")),
        ("… doubled", "0", lambda rs: _sum(rs, "doubled")),
        ("files left in shared memory", "0", lambda rs: _sum(rs, "left_in_memory")),
        ("kill to the first new round, s", "told", lambda rs: _secs(_all_secs(rs))),
    ]
    for part in PARTS:
        rows.append((f"… {part}", "", lambda rs, part=part: _secs(r["secs"][part] for r in rs)))
    own = ("… hetjax's own, s", "≤ 10", lambda rs: _secs(_own(r) for r in rs))
    lines = (
        [title, target, *(figure(of_engine[name]) for name in names)]
        for title, target, figure in [*rows, own]
    )
    return markdown.table(["name", "target", *(TITLES[name] for name in names)], lines)


def _all_secs(records: list[Record]) -> Iterator[float]:
    return (r["secs_to_first_new_round"] for r in records)


def _own(record: Record) -> float:
    return record["secs"]["joining"] + record["secs"]["rounds"]


def _share(records: list[Record], name: str) -> str:
    return f"{sum(bool(r[name]) for r in records)} of {len(records)}"


def _sum(records: list[Record], name: str) -> str:
    return str(sum(r[name] for r in records))


def _secs(found: Iterator[float]) -> str:
    values = list(found)
    return f"{np.median(values):.1f} ({max(values):.1f})"


def page(results: pathlib.Path) -> str:
    """The page about all lines."""
    found = {record["commit"]: None for record in kept.read(results / "runs.jsonl")}
    return _PAGE.format(
        rounds=engine_program.NUM_ROUNDS, table=table(results), commits=", ".join(found)
    )


def main() -> None:
    given = flags.FLAGS
    if unknown := set(given.engines) - set(ENGINES):
        sys.exit(f"--engines: there is no {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    results = pathlib.Path(given.results)
    for name in given.engines:
        if needed := missing(name):
            print(f"{name} is left out: there is no {', '.join(needed)}", file=sys.stderr)
    names = [name for name in given.engines if not missing(name)]
    if names:
        run(results, names, trials=given.trials, ends=time.monotonic() + 60 * given.minutes)
    if kept.read(results / "runs.jsonl"):
        (results / "README.md").write_text(page(results))
        print(table(results))


if __name__ == "__main__":
    flags.DEFINE_list("engines", list(ENGINES), "Which, of those that the machine has.")
    flags.DEFINE_integer("trials", 20, "Of each engine, with those that are kept already.", 0)
    flags.DEFINE_float("minutes", np.inf, "After so many no trial begins.", 0)
    flags.DEFINE_string("results", str(RESULTS), "Directory that lines are added to.")
    command_line.run(main)
