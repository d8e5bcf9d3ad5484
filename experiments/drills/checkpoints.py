"""Damages checkpoints and kills their writer, and looks whether the newest good one is found.

    python -m experiments.drills.checkpoints [--trials=200]

`damage`: the newer of two checkpoints loses a bit, a part or a file, or gets what is not its own;
it has to be set aside and the older one taken. `kill`, a quarter as many trials: a process that
saves one checkpoint after another is killed at a random moment of a stage of the writing; the
newest one that was committed has to be found, bit by bit. Each run adds a line a drill to the
results file, and the table is about all of its lines.
"""

import collections
import contextlib
import io
import os
import pathlib
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm
from absl import flags, logging

from experiments import command_line
from experiments.benchmarks import rows
from experiments.comparisons import kept
from hetjax.checkpoints import checkpoint

_MOST_SECS = {"begin": 0.001, "arrays": 0.04, "manifest": 0.01, "commit": 0.001, "prune": 0.002}


def arrays_of(step: int) -> dict[str, np.ndarray]:
    """What the checkpoint of a step holds: 1.6 MB in 9 arrays."""
    rng = np.random.default_rng(step)
    params = {f"params/{i}": rng.normal(size=(160, 160)) for i in range(8)}
    return params | {"order": rng.permutation(1000).astype(np.int32)}


def _is_right(saved: checkpoint.Saved) -> bool:
    expected = arrays_of(saved.step)
    return saved.arrays.keys() == expected.keys() and all(
        array.dtype == expected[name].dtype and array.tobytes() == expected[name].tobytes()
        for name, array in saved.arrays.items()
    )


def _save(directory: pathlib.Path, steps: list[int]) -> None:
    store = checkpoint.Checkpoints(directory)
    for step in steps:
        store.save(step, arrays_of(step), {"round": step})
    store.close()


# Damage


def _files(step: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def _flip(path: pathlib.Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _flip_by_size(step: pathlib.Path, rng: random.Random) -> None:
    files = _files(step)
    _flip(rng.choices(files, [path.stat().st_size for path in files])[0], rng)


def _flip_by_file(step: pathlib.Path, rng: random.Random) -> None:
    _flip(rng.choice(_files(step)), rng)


def _truncate(step: pathlib.Path, rng: random.Random) -> None:
    path = rng.choice(_files(step))
    os.truncate(path, rng.choice([0, rng.randrange(path.stat().st_size)]))


def _delete(step: pathlib.Path, rng: random.Random) -> None:
    files = _files(step)
    for path in rng.sample(files, rng.choice([1, 1, 1, len(files)])):
        path.unlink()


def _garbage(step: pathlib.Path, rng: random.Random) -> None:
    arrays = step / "arrays"
    names = ["_METADATA", "manifest.ocdbt"]
    path = rng.choice([step / "manifest.json", step / "about.json", *(arrays / n for n in names)])
    texts = [b"", b"{}", b"[]", b"null", b"{", b"[" * 5000, b"\xff\xfe\0", b"9" * 5000]
    path.write_bytes(rng.choice([*texts, rng.randbytes(path.stat().st_size)]))


def _add(step: pathlib.Path, rng: random.Random) -> None:
    parent = rng.choice([path.parent for path in _files(step)])
    (parent / "more").write_bytes(rng.randbytes(rng.choice([0, 100])))


def _swap(step: pathlib.Path, rng: random.Random) -> None:
    """Some or all of the older checkpoint's files, in place of its own."""
    older = step.with_name("00000001")
    names = ["manifest.json", "about.json", "arrays/manifest.ocdbt"]
    for name in rng.sample(names, rng.choice([1, 2])):
        shutil.copy(older / name, step / name)
    if rng.random() < 0.2:
        shutil.rmtree(step)
        shutil.copytree(older, step)


DAMAGES: dict[str, Callable[[pathlib.Path, random.Random], None]] = {
    "bit flipped, by size": _flip_by_size,
    "bit flipped, by file": _flip_by_file,
    "truncated": _truncate,
    "deleted": _delete,
    "garbage metadata": _garbage,
    "file added": _add,
    "files of another": _swap,
}


def damage(num_trials: int, seed: int) -> dict[str, Any]:
    """Counts of the trials, and of what was found, silent and fallen back from, by kind."""
    rng, counts = random.Random(seed), collections.Counter[str]()
    kinds: dict[str, collections.Counter[str]] = {k: collections.Counter() for k in DAMAGES}
    with tempfile.TemporaryDirectory() as temporary:
        good = pathlib.Path(temporary, "good")
        _save(good, [1, 2])
        for trial in tqdm.trange(num_trials, desc="damage"):
            kind = list(DAMAGES)[trial % len(DAMAGES)]
            directory = shutil.copytree(good, pathlib.Path(temporary, "trial"))
            DAMAGES[kind](directory / "00000002", rng)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                saved = checkpoint.newest(directory)
            counts["trials"] += 1
            is_found = (directory / "00000002.damaged").exists() and "is damaged" in said.getvalue()
            counts["found"] += is_found
            counts["silent"] += saved is not None and not _is_right(saved)
            counts["fell_back"] += saved is not None and saved.step == 1 and _is_right(saved)
            kinds[kind].update(trials=1, found=is_found)
            shutil.rmtree(directory)
    return {**counts, "kinds": kinds}


# Kills


def save_for_ever(directory: str, pause: str, count: int) -> None:
    """What is killed: saves checkpoints without end, and tells each stage on stdout.

    At the stage `pause` of the `count`-th checkpoint it stops for good.
    """
    saved = checkpoint.newest(directory)
    step = 0 if saved is None else saved.step
    last = step + count

    def on_stage(stage: str) -> None:
        print(stage, step, flush=True)
        while stage == pause and step == last:
            time.sleep(60)

    store = checkpoint.Checkpoints(directory, on_stage=on_stage)
    while True:
        store.wait()
        step += 1
        store.save(step, arrays_of(step), {"round": step})


def _kill_once(directory: pathlib.Path, stage: str, rng: random.Random) -> tuple[str, int]:
    """Kills a writer, at a pause before a stage or at a random time in it: the last it told."""
    count, is_paused = rng.choice([1, 2, 3]), stage == "end" or rng.random() < 0.5
    call = f"save_for_ever({str(directory)!r}, {stage if is_paused else ''!r}, {count})"
    program = f"from experiments.drills import checkpoints; checkpoints.{call}"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert child.stdout is not None
    lines, seen = [], 0
    try:
        while seen < count and (line := child.stdout.readline()):
            lines.append(line)
            seen += line.startswith(f"{stage} ")
        time.sleep(0 if is_paused else rng.uniform(0, _MOST_SECS[stage]))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    told = [*lines, *child.stdout.read().splitlines()]
    child.stdout.close()
    if child.returncode != -signal.SIGKILL or not told:
        raise RuntimeError(f"the writer ended by itself, with {child.returncode}: {told[-1:]}")
    name, step = told[-1].split()
    return name, int(step)


def kill(num_trials: int, seed: int) -> dict[str, Any]:
    """Counts of the trials, of those that found the right checkpoint, and of kills by stage."""
    rng, counts = random.Random(seed), collections.Counter[str]()
    stages: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary, "run")
        _save(directory, [1])  # all trials go on in the same directory, as restarts do
        for trial in tqdm.trange(num_trials, desc="kill"):
            stage, step = _kill_once(
                directory, checkpoint.STAGES[trial % len(checkpoint.STAGES)], rng
            )
            allowed = {
                "begin": {step - 1},
                "arrays": {step - 1},
                "manifest": {step - 1},
                "commit": {step - 1, step},
                "prune": {step},
                "end": {step},
            }[stage]
            with contextlib.redirect_stderr(io.StringIO()) as said:
                saved = checkpoint.newest(directory)
            is_found = saved is not None and saved.step in allowed
            counts.update(
                trials=1,
                found=is_found and not said.getvalue(),
                wrong_values=saved is not None and not _is_right(saved),
            )
            stages[stage] += 1
    return {**counts, "stages": stages}


# Results


def add_up(path: pathlib.Path, drill: str) -> collections.Counter[str]:
    """The counts of one drill over all lines of a results file."""
    total = collections.Counter[str]()
    for record in kept.read(path):
        if record["drill"] == drill:
            numbers = {k: value for k, value in record.items() if isinstance(value, int)}
            total.update(numbers | record.get("stages", {}))
            total["runs"] += 1
    return total


def table(path: pathlib.Path) -> str:
    """The figures as Markdown."""
    damaged, killed = add_up(path, "damage"), add_up(path, "kill")
    n, k = damaged["trials"], killed["trials"]

    def found() -> rows.Found:
        for name, target, count, of in (
            ("damaged checkpoints found and set aside", "all", damaged["found"], n),
            ("silent: other values restored", "0", damaged["silent"], n),
            ("fell back to the one before", "all", damaged["fell_back"], n),
            ("killed while writing, newest good one found", "all", killed["found"], k),
            ("killed while writing, other values restored", "0", killed["wrong_values"], k),
        ):
            yield rows.Row(name, target, f"{count} of {of}", of)
        by_stage = ", ".join(f"{stage} {killed[stage]}" for stage in checkpoint.STAGES)
        yield f"Kills by stage: {by_stage}; runs: {killed['runs']}."

    return "\n".join(rows.table(found()))


def run(num_trials: int, path: pathlib.Path, seed: int | None = None) -> str:
    """Both drills; their lines are added to the results file, of which the table is returned."""
    seed = len(kept.read(path)) if seed is None else seed
    drills = {"damage": (damage, num_trials), "kill": (kill, num_trials // 4)}
    for name, (drill, trials) in drills.items():
        began = time.perf_counter()
        record = {"drill": name, **drill(trials, seed), "seconds": 0.0, "seed": str(seed)}
        record["seconds"] = round(time.perf_counter() - began, 1)
        record["versions"] = f"Python {platform.python_version()}, JAX {jax.__version__}"
        kept.append(path, record)
    return table(path)


def main() -> None:
    logging.set_verbosity(logging.WARNING)  # not every backend that JAX looks for
    print(run(flags.FLAGS.trials, pathlib.Path(flags.FLAGS.results), flags.FLAGS.seed))


if __name__ == "__main__":
    flags.DEFINE_integer("trials", 200, "Damaged checkpoints; a quarter as many kills.", 1)
    flags.DEFINE_string(
        "results",
        "experiments/results/faults/checkpoint_drill.jsonl",
        "File that results are added to.",
    )
    flags.DEFINE_integer("seed", None, "Of the random moments and kinds; None: a new one.")
    command_line.run(main)
