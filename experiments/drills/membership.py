"""Do the others go on at once when a worker is killed, and is nothing lost? Kills, and judges.

    python -m experiments.drills.membership [--only=hits,rounds,replaced] [--secs=180] [--every=3]
        [--cpus=1,0.5,0.25,0.25] [--kind=kill|stop] [--model=lenet|mlp] [--microbatch_size=32]
        [--save_secs=60] [--wire=float32] [--steps]

`rounds` compares a round of `--runtime=apart` with one of `joined` of the same quotas, those of the
shares, where no worker is lost. `hits`: four workers of one run are killed at random, or stopped
for 5 s, one every so many seconds. The launcher starts them anew. The table says how long the
others waited, and what the ledger has. `replaced`: a slow worker is replaced by a fast one, and
another is added, by the commands that a user has. The rounds from the 20th on are compared with the
best for those workers. With `--steps` workers take local steps.
Commits are seen by the drill, which looks every few milliseconds at the run's record; that all
states were equal the run sees by itself, from digests, in every round.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optax
from absl import flags

import hetjax
from experiments import command_line, problems
from experiments.benchmarks import launched_runs, rows
from hetjax import quota

_SECS = flags.DEFINE_float("secs", 180.0, "Of the run.", 1.0)
_EVERY = flags.DEFINE_float("every", 3.0, "Seconds between two kills.", 0.1)
_KIND = flags.DEFINE_enum("kind", "kill", ["kill", "stop"], "What is done to a worker.")
_CPUS = flags.DEFINE_string("cpus", "1,0.5,0.25,0.25", "Shares of a core.")
_MODEL = flags.DEFINE_enum("model", "lenet", ["lenet", "mlp"], "What is trained.")
_ONLY = flags.DEFINE_list("only", [], "Groups; all if empty.", allow_override=True)
_SIZE = flags.DEFINE_integer("microbatch_size", 0, "Examples; 0: as many as the model has.", 0)
_SAVE_SECS = flags.DEFINE_float("save_secs", 60.0, "Seconds between two checkpoints.", 0.1)
_IS_STATIC = flags.DEFINE_bool("static", False, "Quotas in proportion to the shares.")
_WIRE = flags.DEFINE_string("wire", "float32", "Of what a worker hands in.")
_STEPS = flags.DEFINE_bool("steps", False, "Local steps.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Of a worker; set by the drill.")

_STOP_SECS = 5.0
_TURNS, _TURN_SECS, _SKIPPED = 5, 20.0, 10  # of `rounds`
_SHARES, _REPLACEMENT, _ADDED = "0.6,0.4,0.3,0.1", 0.4, 0.2  # of `replaced`
_SETTLED, _COMPARED = 20, 60  # rounds after a change
_MOST_SECS = 600.0  # for them
_MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"microbatch_size": 32, "budget": 64},
    "mlp": {"microbatch_size": 512, "budget": 8, "options": {"hidden": (1024, 1024, 1024)}},
}


def train() -> None:
    """What each worker does, until so many seconds are over since the first round."""
    hetjax.join_processes()
    model = dict(_MODELS[_MODEL.value])
    model["microbatch_size"] = _SIZE.value or model["microbatch_size"]
    shape, options = (32, 32, 3), model.pop("options", {})
    loss_fn, params = problems.classifier(_MODEL.value, shape, input_max=255.0, **options)
    data = problems.images(model["microbatch_size"] * model["budget"] * 20, shape)
    begun = pathlib.Path(_WORKDIR.value, "began")
    if _IS_STATIC.value:
        proportions = tuple(map(float, _CPUS.value.split(",")))
        model["quota"] = {"policy": "static", "proportions": proportions}

    optimizer = optax.sgd(0.01, momentum=0.9)
    if _STEPS.value:
        inner = {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9}
        model["rule"], optimizer = hetjax.local_steps(inner), optax.sgd(0.7, 0.9, nesterov=True)

    def is_over(report: hetjax.RoundReport) -> bool:
        with contextlib.suppress(FileExistsError), open(begun, "x") as file:
            file.write(str(time.time()))  # of the first round, by the first to come
        began = begun.read_text()
        return bool(began) and time.time() > float(began) + _SECS.value

    hetjax.fit(
        loss_fn,
        params,
        optimizer,
        data,
        epochs=1_000_000,
        reducer=hetjax.topology.all_reduce(wire=_WIRE.value),
        workdir=_WORKDIR.value,
        checkpoint={"every_secs": _SAVE_SECS.value},
        callbacks=[is_over],
        progress=False,
        **model,
    )


def _told(workdir: pathlib.Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return list(map(json.loads, lines)), json.loads((workdir / "summary.json").read_text())


def _command(
    workdir: pathlib.Path, runtime: str, model: str, secs: float, *more: str, cpus: str = ""
) -> list[str]:
    cpus = cpus or _CPUS.value
    command = [sys.executable, "-m", "hetjax.launch", f"--runtime={runtime}", "--max_restarts=9999"]
    command += [f"--workers={len(cpus.split(','))}", f"--cpus={cpus}", *more, "--"]
    own = [sys.executable, "-m", "experiments.drills.membership", f"--workdir={workdir}"]
    own += [f"--secs={secs}", f"--model={model}", f"--save_secs={_SAVE_SECS.value}"]
    own += [f"--steps={_STEPS.value}", f"--wire={_WIRE.value if runtime == 'apart' else 'float32'}"]
    return [*command, *own, f"--cpus={cpus}", f"--microbatch_size={_SIZE.value}"]


def compare() -> rows.Found:
    """A round apart over one of processes that are joined, in turn; no worker is lost."""
    for model in _MODELS:
        secs: dict[str, list[float]] = {"joined": [], "apart": []}
        for turn in range(2 * _TURNS):
            runtime = ("joined", "apart")[turn % 2]
            with tempfile.TemporaryDirectory() as directory:
                command = _command(pathlib.Path(directory), runtime, model, _TURN_SECS)
                subprocess.run([*command, "--static"], check=True, stderr=subprocess.DEVNULL)
                lines, _ = _told(pathlib.Path(directory))
            secs[runtime].append(float(np.median([x["round_secs"] for x in lines[_SKIPPED:]])))
        each = [a / b for a, b in zip(secs["apart"], secs["joined"], strict=True)]
        yield rows.Row(f"{model}: apart over joined", "≤ 1.05", rows.middle(each), _TURNS)
        for runtime, own in secs.items():
            millis = rows.middle([1e3 * x for x in own], ".0f", " ms")
            yield rows.Row(f"{model}, {runtime}: a round", "none", millis, _TURNS)
    yield f"Shares {_CPUS.value}, the same quotas, in turn; medians of runs."


def replace() -> rows.Found:
    """Two runs at each of whose changes the workers have other speeds."""
    over: dict[str, list[float]] = {"replaced": [], "added": [], "not changed yet": []}
    for _ in range(2):
        with tempfile.TemporaryDirectory() as directory:
            workdir = pathlib.Path(directory)
            command = _command(workdir, "apart", _MODEL.value, 1e6, "--max_workers=5", cpus=_SHARES)
            with _launched(command) as (launcher, said):
                for name, number in _changes(workdir, said).items():
                    here = _lines(workdir)[number + _SETTLED :][:_COMPARED]
                    full = [line for line in here if line["full"]]
                    over[name].append(_over_optimum(full))
                launcher.send_signal(signal.SIGINT)
    for name, found in over.items():
        each = ", ".join(f"{x:.3f}" for x in found)
        yield rows.Row(f"{name}: over the optimum", "≤ 1.05", each, len(found))
    yield f"{_MODEL.value}, shares {_SHARES}: a round from the {_SETTLED}th on after a change."
    yield "Over the exact optimum for the workers there."


@contextlib.contextmanager
def _launched(command: list[str]) -> Iterator[tuple[subprocess.Popen, list[str]]]:
    """A launcher, and what it has said; it ends within this context."""
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said: list[str] = []

    def read() -> None:
        assert launcher.stderr is not None
        said.extend(line.rstrip() for line in launcher.stderr)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield launcher, said
    except BaseException:
        launcher.terminate()
        raise
    finally:
        launcher.wait()
        reader.join()


def _changes(workdir: pathlib.Path, said: list[str]) -> dict[str, int]:
    """Changes the workers, as a user does, and waits; from which round they were so."""
    _wait_for_lines(workdir, 2 * _SETTLED + _COMPARED)
    (run,) = [m[1] for line in said if (m := re.search(r"--add=(\S+)", line))]
    found = {"not changed yet": _SETTLED}
    asks = {"replaced": [f"--add={run}", f"--cpus={_REPLACEMENT}"], "added": [f"--add={run}"]}
    asks["added"].append(f"--cpus={_ADDED}")
    for name, ask in asks.items():
        before, launch = len(said), [sys.executable, "-m", "hetjax.launch"]
        subprocess.run([*launch, *ask], check=True, stdout=subprocess.DEVNULL)
        joins = _wait_for(r"round (\d+): worker \d+ joins", said, before)
        if name == "replaced":
            subprocess.run([*launch, f"--remove={run}:3"], check=True, stdout=subprocess.DEVNULL)
            joins = 1 + _wait_for(r"round (\d+): worker 3 left", said, before)
        found[name] = joins
        _wait_for_lines(workdir, joins + _SETTLED + _COMPARED)
    return found


def _wait_for(pattern: str, said: list[str], begin: int) -> int:
    def found() -> list[int]:
        return [int(m[1]) for line in said[begin:] if (m := re.search(pattern, line))]

    _eventually(found, pattern)
    return found()[0]


def _eventually(condition: Callable[[], Any], what: str) -> None:
    ends = time.monotonic() + _MOST_SECS
    while not condition():
        if time.monotonic() > ends:
            sys.exit(f"not within {_MOST_SECS:g} s: {what}")
        time.sleep(0.2)


def _lines(workdir: pathlib.Path) -> list[dict[str, Any]]:
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _wait_for_lines(workdir: pathlib.Path, count: int) -> None:
    _eventually(lambda: len(_lines(workdir)) >= count, f"{count} rounds")


def _over_optimum(lines: list[dict[str, Any]]) -> float:
    """Rounds of the same workers, over what they would take with the best quotas for what these
    need in the mean."""
    there = np.array(lines[0]["present"])
    compute, host, done = (
        np.array([line[key] for line in lines], float)[:, there]
        for key in ("compute_secs", "host_secs", "microbatches_done")
    )
    costs = quota.WorkerCosts(np.median(host, axis=0), compute.sum(0) / done.sum(0))
    took = np.array([line["round_secs"] for line in lines])
    common = float(np.median(took - (compute + host).max(1)))
    best = quota.optimal_round_secs(costs, int(done[0].sum())) + common
    return float(took.mean()) / best


def drill() -> rows.Found:
    with tempfile.TemporaryDirectory() as directory:
        workdir = pathlib.Path(directory)
        commits = launched_runs.Commits(workdir)
        commits.start()
        with _launched(_command(workdir, "apart", _MODEL.value, _SECS.value)) as (launcher, said):
            hits = _hit(launcher, commits)
        commits.over.set()
        if launcher.returncode:
            sys.exit("\n".join([f"the run ended with {launcher.returncode}:", *said[-40:]]))
        yield from _judge(hits, commits.at, *_told(workdir), said)


def _hit(launcher: subprocess.Popen, commits: launched_runs.Commits) -> list[float]:
    """Kills or stops a worker now and then; returns when."""
    rng, hits = random.Random(0), []
    while len(commits.at) < 20 and launcher.poll() is None:
        time.sleep(0.1)
    ends = time.monotonic() + _SECS.value
    while launcher.poll() is None:
        time.sleep(_EVERY.value)
        workers = launched_runs.workers_of(launcher.pid, "drills.membership")
        if not workers or time.monotonic() > ends:
            continue
        pid = rng.choice(workers)
        hits.append(time.time())
        os.kill(pid, signal.SIGKILL if _KIND.value == "kill" else signal.SIGSTOP)
        if _KIND.value == "stop":
            threading.Timer(_STOP_SECS, os.kill, (pid, signal.SIGCONT)).start()
    return hits


def _judge(
    hits: list[float],
    commits: dict[int, float],
    lines: list[dict[str, Any]],
    summary: dict[str, Any],
    said: list[str],
) -> rows.Found:
    times = np.sort(list(commits.values()))
    gaps = np.diff(times)
    usual = float(np.median(gaps))
    hits = [hit for hit in hits if hit < times[-1]]
    waits = np.array([times[times > hit][0] - hit for hit in hits])
    lost = float(np.maximum(waits - usual, 0).sum() / (times[-1] - times[0]))
    joins = [int(m[1]) for line in said if (m := re.search(r"round (\d+): worker \d+ joins", line))]
    at_joins = np.array([commits[n] - commits[n - 1] for n in joins if {n, n - 1} <= {*commits}])
    is_once = [line["round"] for line in lines] == list(range(len(lines)))
    lost_all = sum("from the last checkpoint" in line for line in said)
    amounts = f"{summary['examples_missing']}, {summary['examples_duplicated']}"
    yield rows.Row("examples missing, doubled", "0, 0", amounts, len(hits))
    yield rows.Row("each round has one line", "True", str(is_once), len(lines))
    yield rows.Row("times all with the state died", "none", str(lost_all), len(hits))
    yield rows.Row("a usual round", "none", f"{usual * 1e3:.0f} ms", len(lines))
    yield rows.Row("seconds lost over the run's", "≤ 1 %", f"{lost:.2%}", len(hits))
    for what, unit, target, values in (
        ("to the next commit", " rounds", "≤ 2 in 95 %", waits / usual),
        ("to the next commit", " ms", "≤ 3,000 ms", waits * 1e3),
        ("a join's round", " rounds", "≤ 2", at_joins / usual),
    ):
        points = [*np.percentile(values, [50, 95]), values.max()] if len(values) else []
        reached = ", ".join(f"{x:.3g}" for x in points) + unit
        yield rows.Row(f"{what}: median, 95 %, most", target, reached, len(values))
    yield f"{_MODEL.value}, shares {_CPUS.value}, a {_KIND.value} every {_EVERY.value:g} s."
    yield "Lost: to the next commit, beyond a usual round. A join sends the state."


def main() -> None:
    if _WORKDIR.value:
        train()
        return
    rows.print_tables({"rounds": compare, "replaced": replace, "hits": drill}, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
