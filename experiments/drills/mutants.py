"""Which small mistakes in the code do the tests find?

    python -m experiments.drills.mutants [--commit=HEAD] [--only='quota/*,rounds/3'] [--every=7]
        [--workers=1] [--minutes=30] [--include_slow]

`mutants.jsonl` lists mistakes that were drawn by a seed from the rooms of hetjax
that compute: a sign, an off-by-one, a mask dropped, workers swapped, an entry left out. Each is
made in a copy of the commit of its own, and the tests of its room run on it until one fails: those
of `tests/ROOM`, nearest to the changed module first, and the doctests of `hetjax/ROOM`. A test that
fails is run again without the mistake, and kills the mutant only if it passes then. The test that
killed it at another commit runs before the others.

A mutant is found by its text. Where its lines have moved to another file the drill goes there and
says so; where they are gone, or stand in several places, it says that, and the list has to be
mended. Each mutant adds a line to `--results`, and the same command goes on after those that are
there. `--minutes` has to be more than the room's tests take: a mutant that takes longer counts as
one that hangs.
"""

import concurrent.futures
import fnmatch
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import tqdm
from absl import flags

from experiments import command_line, markdown
from experiments.comparisons import kept
from experiments.drills import mutant_list
from experiments.drills.mutant_list import Mutant, NotFoundError

ROOT = pathlib.Path(__file__).parents[2]
OUTCOMES = ("killed", "timed out", "survived", "unsure", "gone")
"""`unsure`: a test failed that fails without the mutant too, or no test ran."""

_NO_TESTS_RAN = (3, 4, 5)  # pytest's exit codes: of its own errors, its arguments, no tests

Record = dict[str, Any]


# One mutant


def tests_of(root: pathlib.Path, room: str, file: str) -> list[str]:
    """What may kill a mutant of a file: its doctests, the room's tests, the room's doctests.

    Tests that name the file's module most often come first. A file of tests that has the module's
    name is the room's, wherever it lies.
    """
    stem = pathlib.Path(file).stem

    def farness(path: pathlib.Path) -> tuple[bool, int, str]:
        mentions = len(re.findall(rf"\b{stem}\b", path.read_text()))
        return path.stem != f"test_{stem}", -mentions, path.as_posix()

    imports = f"hetjax.{room.replace('/', '.')} import"
    in_room = set((root / "tests" / room).rglob("test_*.py"))
    elsewhere = {
        path for path in (root / "tests").rglob(f"test_{stem}.py") if imports in path.read_text()
    }
    tests = sorted(in_room | elsewhere, key=farness)
    if not in_room:
        raise NotFoundError(f"there are no tests/{room}; name the mutant by the room it is in now")
    doctests = sorted((root / "hetjax" / room).rglob("*.py"))
    found = [path.relative_to(root).as_posix() for path in tests + doctests]
    return [file, *(other for other in found if other != file)]


def run_in(
    root: pathlib.Path,
    mutant: Mutant,
    *,
    secs: float,
    first: Sequence[str] = (),
    include_slow: bool = False,
    running: set[subprocess.Popen] | None = None,
) -> Record:
    """Makes a mistake in a copy of a commit, which is spent, and runs its room's tests.

    Args:
        root: the copy.
        mutant: the mistake.
        secs: tests that take longer are ended.
        first: tests that run before the others, where the commit has them.
        include_slow: tests marked `slow` run too.
        running: has the processes of tests while they run, for who ends them before.

    Returns:
        `outcome`, `secs`, `file` where the lines are, and `by`: the test that failed, or why
        there is no such test.
    """
    began = time.monotonic()

    def record(outcome: str, by: str, file: str = mutant.file) -> Record:
        took = round(time.monotonic() - began, 1)
        return {"outcome": outcome, "by": by, "secs": took, "file": file}

    try:
        file = mutant_list.locate(root, mutant)
        tests = tests_of(root, mutant.room, file)
    except NotFoundError as error:
        return record("gone", str(error))
    text = (root / file).read_text()
    (root / file).write_text(mutant_list.mutated(text, mutant))
    running = set() if running is None else running
    chosen = [] if include_slow else ["-m", "not slow"]
    known = [test for test in first if _is_there(root, test)]
    for some in (known, tests) if known else (tests,):
        code, printed = _run_tests(root, [*some, *chosen], secs, running)
        if code not in (0, 5):  # 5: it is slow
            break
    (root / file).write_text(text)
    if code is None:
        return record("timed out", f"after {secs:.0f} s", file)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    if failed is None:
        is_whole = "[100%]" in printed
        if code == 0 and is_whole:
            return record("survived", "", file)
        told = f"pytest ended with {code}" + ", before the last test" * (not is_whole)
        return record("unsure" if code in _NO_TESTS_RAN else "killed", told, file)
    test = failed.group(1)
    again, _ = _run_tests(root, [test], secs, running)
    if again != 0:
        return record("unsure", f"{test}, which fails without the mutant too", file)
    return record("killed", test, file)


def _is_there(root: pathlib.Path, test: str) -> bool:
    file, _, name = test.partition("::")
    return (root / file).is_file() and f"def {name}(" in (root / file).read_text()


def _run_tests(
    root: pathlib.Path, arguments: Sequence[str], secs: float, running: set[subprocess.Popen]
) -> tuple[int | None, str]:
    """The exit code of pytest, None where it was ended, and what it printed."""
    environment = {
        **{n: v for n, v in os.environ.items() if n != "JAX_COMPILATION_CACHE_DIR"},
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file that changes twice within a second
    }
    own = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", f"--basetemp={root.parent / 'tests'}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *own, *arguments],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.add(process)
        try:
            code = process.wait(secs)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            running.discard(process)
        output.seek(0)
        return code, output.read()


def _end(process: subprocess.Popen) -> None:
    """Ends pytest, and what a test started and left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


# All of them


def export(commit: str, directory: pathlib.Path) -> None:
    """Writes the files of a commit, without the results."""
    path = directory.with_suffix(".tar")
    _git("archive", "-o", str(path), commit, ".", ":(exclude)experiments/results")
    shutil.unpack_archive(path, directory, filter="data")
    path.unlink()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def run_all(
    mutants: Sequence[Mutant],
    commit: str,
    results: pathlib.Path,
    *,
    workers: int,
    secs: float,
    include_slow: bool = False,
) -> None:
    """Runs the mutants that have no line of this commit yet; each adds one.

    Args:
        mutants: which.
        commit: what is copied.
        results: file of lines.
        workers: at once.
        secs: as `run_in` has it.
        include_slow: as `run_in` has it.
    """
    name = _git("log", "-1", "--format=%h", "--abbrev=7", commit, "--", "hetjax", "tests")
    asked = {"commit": name, "include_slow": include_slow}

    def key(record: Record) -> tuple[Any, ...]:
        return tuple(record[k] for k in ("name", "digest", *asked))

    done = {key(record) for record in lines(results)}
    killers: dict[str, list[str]] = {}
    for record in lines(results):
        if record["outcome"] == "killed" and "::" in record["by"]:
            test = record["by"].partition("[")[0]
            killers.setdefault(record["name"], []).append(test)
    left = [
        (mutant, started)
        for mutant in mutants
        if key(started := {"name": mutant.name, "digest": mutant.digest, **asked}) not in done
    ]

    running: set[subprocess.Popen] = set()

    def one(mutant: Mutant) -> Record:
        with tempfile.TemporaryDirectory(prefix="hetjax-mutant-") as directory:
            root = pathlib.Path(directory, "copy")
            export(commit, root)
            known = {"first": killers.get(mutant.name, ()), "running": running}
            return run_in(root, mutant, secs=secs, include_slow=include_slow, **known)

    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        runs = {threads.submit(one, mutant): started for mutant, started in left}
        finished = concurrent.futures.as_completed(runs)
        try:
            for run in tqdm.tqdm(finished, desc=f"mutants of {name}", total=len(runs)):
                kept.append(results, {**runs[run], **run.result()})
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                _end(process)
            raise


def lines(results: pathlib.Path) -> list[Record]:
    """All lines of a file of results; none where there is no such file."""
    return list(kept.read(results))


# Tables


def table(mutants: Sequence[Mutant], records: Sequence[Record]) -> str:
    """The figures of each commit as Markdown, and what became of each mutant."""
    by_commit: dict[str, dict[str, Record]] = {}
    listed = {(m.name, digest): m for m in mutants for digest in (m.digest, *m.earlier)}
    for record in records:
        if (record["name"], record["digest"]) in listed:
            of = record["commit"] + ", slow tests too" * record["include_slow"]
            by_commit.setdefault(of, {})[record["name"]] = record
    commits, told = [], []
    for commit, own in by_commit.items():
        counts = [sum(r["outcome"] == outcome for r in own.values()) for outcome in OUTCOMES]
        minutes = sum(record["secs"] for record in own.values()) / 60
        commits.append([commit, len(own), *counts, f"{minutes:.1f}"])
    for mutant in mutants:
        mine = {commit: own[mutant.name] for commit, own in by_commit.items() if mutant.name in own}
        newest = _cell(mutant, list(mine.values())[-1]) if mine else ""
        alive = [commit for commit, record in mine.items() if record["outcome"] == "survived"]
        told.append([mutant.name, mutant.kind, f"`{mutant.file}`", newest, ", ".join(alive)])
    header = ("mutant", "kind", "file", "at its newest commit", "survived")
    first = markdown.table(("commit", "mutants", *OUTCOMES, "minutes"), commits)
    return f"{first}\n\n{markdown.table(header, told)}"


def _cell(mutant: Mutant, record: Record) -> str:
    told = record["outcome"]
    if record["by"]:
        told += f": `{record['by']}`" if "::" in record["by"] else f": {record['by']}"
    return told + (f" (in {record['file']})" if record["file"] != mutant.file else "")


def main() -> None:
    given, mutants = flags.FLAGS, mutant_list.read()
    chosen = [m for m in mutants if not given.only or _is_asked(m.name, given.only)]
    if not chosen:
        names = ", ".join(mutant.name for mutant in mutants)
        sys.exit(f"--only: no mutant is like {', '.join(given.only)}; there are {names}")
    results = pathlib.Path(given.results)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the tests, too
    if given.workers:
        run_all(
            chosen[:: given.every],
            given.commit,
            results,
            workers=given.workers,
            secs=60 * given.minutes,
            include_slow=given.include_slow,
        )
    print(table(mutants, lines(results)))


def _is_asked(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    flags.DEFINE_string("commit", "HEAD", "Of this repository; what is not committed is not run.")
    flags.DEFINE_list("only", [], "Patterns of mutants, such as 'quota/*'; all by default.")
    flags.DEFINE_integer("every", 1, "Of these, each one in so many.", 1)
    flags.DEFINE_integer("workers", 1, "Mutants at once; 0: only print the tables.", 0)
    flags.DEFINE_float("minutes", 30.0, "A mutant's tests are ended then.", 0.1)
    flags.DEFINE_bool("include_slow", False, "Tests marked slow, too.")
    flags.DEFINE_string(
        "results", "experiments/results/mutants/runs.jsonl", "File that lines are added to."
    )
    command_line.run(main)
