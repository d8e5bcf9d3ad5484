"""Does another version of hetjax train to the bit as an earlier one?

    python -m experiments.drills.checkouts --before=DIR [--after=DIR] [--only=PATTERN,…]
        [--every=7] [--float64] [--directory=DIR]

DIR are two checkouts. An arm is a run of several passes that a callback ends in the middle, and its
resumption, in one process of four workers or in two launched processes of two workers each. Each
ordering is trained with each reducer in each form of the local phase, and there are arms of each of
these kinds (`--only='KIND/*'`):

    bilevel    `fit_bilevel`, by estimators of each family
    loop       rounds of `Run` one by one: updates, products, products of a held batch
    blocks     orders that sign several blocks of a microbatch
    sets       several evaluation sets, and the best by a metric
    weights    weights that depend on the parameters, or are negative
    nonfinite  examples that are not finite, skipped
    replay     another run's trace: to its end, past its end, cut and resumed
    workdir    a run that the earlier checkout has cut: the later one goes on with it, loads and
               reports it, or refuses its format; the arm says which

Quotas are static, or adaptive on the virtual clock, so that nothing depends on how fast the machine
is. Both checkouts run all arms with the same interpreter, each in processes of its own.

Quotas, microbatches done, orders, what is left of each pass, and the ledger have to be identical
after every round or outer step: one flipped sign is a failure. Parameters, optimiser state and
losses have to be equal to the bit. An arm whose numbers are not is run again in float64, and named.
Exit code 1 where an arm has failed.

All arms take an hour or two. `--directory` keeps what they leave: the same command goes on after
the arms that are there.
"""

import concurrent.futures
import fnmatch
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags, logging

from experiments import command_line, markdown
from experiments.drills import checkout_arms, checkout_outcomes, fault_cases
from experiments.drills.checkout_arms import Arm

ROOT = pathlib.Path(__file__).parents[2]
_WORKER = "experiments.drills.checkout_worker"
_ARMS_AT_ONCE = 12  # of a process: a few seconds of start, and a cut loses no more
_MOST_SECS = 1200.0  # for that many arms


def run_checkout(
    checkout: pathlib.Path,
    chosen: Sequence[Arm],
    directory: pathlib.Path,
    *,
    cache: pathlib.Path,
    float64: bool = False,
) -> str:
    """Runs the arms with one checkout's hetjax; what it printed. An arm may lack an outcome.

    Args:
        checkout: directory that holds `hetjax/`.
        chosen: the arms.
        directory: gets a directory for each arm.
        cache: directory of compiled programs; those of equal programs are shared.
        float64: 64-bit numbers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "path"  # this checkout's drills, and no hetjax but the one to run
    (path / "experiments").mkdir(parents=True, exist_ok=True)
    for name, at in (("hetjax", checkout), ("experiments/drills", ROOT)):
        if not (path / name).exists():
            (path / name).symlink_to(at.resolve() / name)
    environment = {
        **{n: v for n, v in os.environ.items() if not n.startswith("HETJAX_")},
        **fault_cases.environment(cache),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "JAX_ENABLE_X64": str(int(float64)),
        "PYTHONPATH": str(path.resolve()),
    }
    printed = ""
    for gang in sorted(set(map(_gang_of, chosen))):
        processes, listed = gang[0], directory / "arms.json"
        listed.write_text(json.dumps([arm for arm in chosen if _gang_of(arm) == gang]))
        given = [str(checkout.resolve()), str(listed), str(directory)]
        command = [sys.executable, "-P", "-m", _WORKER, *given]
        if processes > 1:
            launch = ["hetjax.launch", f"--workers={processes}", "--max_restarts=0"]
            command = [sys.executable, "-P", "-m", *launch, "--start_secs=inf", "--", *command]
        done = subprocess.run(
            command,
            env=environment,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_MOST_SECS,
            check=False,
        )
        printed += done.stdout
    return printed


def _gang_of(arm: Arm) -> tuple[int, str]:
    """Which arms the same processes run; after a refusal some of them would wait for others."""
    may_be_refused = arm["task"] == "go on" and arm["processes"] > 1
    return arm["processes"], arm["name"] if may_be_refused else ""


class Result(NamedTuple):
    """What became of one arm."""

    arm: Arm
    identical: bool
    bit_equal: bool
    told: str = ""
    """Where the checkouts differ, or why there is nothing to compare."""
    is_refused: bool = False
    """The later version refuses the earlier one's checkpoints by their format, as `told` says."""


def compare(chosen: Sequence[Arm], before: pathlib.Path, after: pathlib.Path) -> list[Result]:
    """The arms' outcomes in two directories that `run_checkout` filled."""
    results = []
    for arm in chosen:
        outcomes = []
        try:
            for side in (before, after):
                outcomes.append(checkout_outcomes.read(side / arm["name"]))
        except ValueError as error:
            side_name = ("before", "after")[len(outcomes)]
            results.append(Result(arm, False, False, f"{side_name}: {error}"))
            continue
        if refusal := outcomes[1].counts.get("refused"):
            results.append(Result(arm, False, False, refusal, is_refused=True))
            continue
        found = checkout_outcomes.differences(*outcomes)
        wrong = [text for text in found if text.startswith(checkout_outcomes.IDENTICAL)]
        results.append(Result(arm, not wrong, not found, "; ".join(found)))
    return results


def run_both(
    chosen: Sequence[Arm],
    before: pathlib.Path,
    after: pathlib.Path,
    directory: pathlib.Path,
    *,
    float64: bool = False,
) -> list[Result]:
    """Runs the arms in both checkouts at the same time, and compares them."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    cache = pathlib.Path(given) if given else directory / "cache"
    results = []
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for some in _batches(chosen):
            handed = [arm for arm in some if arm["task"] == "go on"]
            own = [arm for arm in some if arm["task"] != "go on"]
            runs = [
                threads.submit(_run_rest, before, some, directory / "before", cache, float64),
                threads.submit(_run_rest, after, own, directory / "after", cache, float64),
            ]
            printed = [run.result() for run in runs]
            printed.append(_run_rest(after, handed, directory / "after", cache, float64))
            results += compare(some, directory / "before", directory / "after")
            if any("ended before" in result.told for result in results[-len(some) :]):
                print("\n".join(text[-4000:] for text in printed), file=sys.stderr)
            equal = sum(result.bit_equal for result in results)
            print(f"{len(results)} of {len(chosen)}, equal: {equal}", file=sys.stderr, flush=True)
    return results


def _batches(chosen: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that one process, or the same number of them, runs one after the other."""
    found: list[list[Arm]] = []
    for arm in chosen:
        is_full = not found or len(found[-1]) == _ARMS_AT_ONCE
        if is_full or found[-1][0]["processes"] != arm["processes"]:
            found.append([])
        found[-1].append(arm)
    return found


def _run_rest(
    checkout: pathlib.Path,
    some: Sequence[Arm],
    directory: pathlib.Path,
    cache: pathlib.Path,
    float64: bool,
) -> str:
    """Runs the arms that have no outcome yet."""
    left = [arm for arm in some if not (directory / arm["name"] / "result.npz").exists()]
    for arm in left:
        own, begun = directory / arm["name"], directory.parent / "before" / arm["name"] / "cut"
        shutil.rmtree(own, ignore_errors=True)  # half of a run
        if arm["task"] == "go on" and directory.name == "after" and begun.exists():
            for name in ("cut", "run"):  # the worker goes on with what it finds
                shutil.copytree(begun, own / name)
    return run_checkout(checkout, left, directory, cache=cache, float64=float64) if left else ""


def exceptions(
    results: Sequence[Result], before: pathlib.Path, after: pathlib.Path, directory: pathlib.Path
) -> dict[str, float]:
    """The largest relative gap in float64 of each arm that is identical and not bit-equal.

    Infinite where even its quotas, orders or ledger differ then.
    """
    again = [result.arm for result in results if result.identical and not result.bit_equal]
    if not again:
        return {}
    repeated = run_both(again, before, after, directory, float64=True)
    return {
        arm["name"]: checkout_outcomes.largest_gap(
            *(
                checkout_outcomes.read(directory / side / arm["name"])
                for side in ("before", "after")
            )
        )
        if result.identical
        else float("inf")
        for arm, result in zip(again, repeated, strict=True)
    }


def table(results: Sequence[Result], gaps: dict[str, float]) -> tuple[str, bool]:
    """The figures as Markdown, those that failed named below; whether all is well."""
    counts, is_good = [], True
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(checkout_arms.kind_of(result.arm), []).append(result)
    for title, own in [*groups.items(), ("all", list(results))]:
        identical, equal = (sum(column) for column in zip(*(r[1:3] for r in own), strict=True))
        counts.append([title, len(own), identical, equal])
    lines = [markdown.table(("arms", "number", "identical", "equal to the bit"), counts)]
    for result in results:
        if result.bit_equal:
            continue
        if result.is_refused:
            lines.append(f"\nrefused: {result.arm['name']}: {result.told}")
            continue
        gap = gaps.get(result.arm["name"])
        rounding = gap is not None and gap <= checkout_outcomes.TOLERANCE
        is_good &= rounding
        said = "" if gap is None else f" (float64: largest relative gap {gap:.1e})"
        word = "rounding" if rounding else "FAILED"
        lines.append(f"\n{word}: {result.arm['name']}{said}: {result.told}")
    return "\n".join(lines), is_good


def main() -> None:
    logging.set_verbosity(logging.WARNING)  # not every backend that JAX looks for
    given = flags.FLAGS
    before, after = (pathlib.Path(given[name].value).resolve() for name in ("before", "after"))
    for checkout in (before, after):
        if not (checkout / "hetjax" / "__init__.py").exists():
            sys.exit(f"{checkout} is no checkout: it has no hetjax/__init__.py")
    chosen = [a for a in checkout_arms.arms() if not given.only or _is_asked(a["name"], given.only)]
    chosen = chosen[:: given.every]
    if not chosen:
        names = "\n".join(arm["name"] for arm in checkout_arms.arms())
        sys.exit(f"--only: no arm is like {', '.join(given.only)}; there are\n{names}")
    if given.directory:
        _hold(pathlib.Path(given.directory), [str(before), str(after)])
    with tempfile.TemporaryDirectory(prefix="hetjax-checkouts-") as temporary:
        directory = pathlib.Path(given.directory or temporary)
        name = "float64" if given.float64 else "float32"
        results = run_both(chosen, before, after, directory / name, float64=given.float64)
        gaps = {}
        if not given.float64:
            gaps = exceptions(results, before, after, directory / "again")
    text, is_good = table(results, gaps)
    print(text)
    sys.exit(0 if is_good else 1)


def _hold(directory: pathlib.Path, compared: list[str]) -> None:
    """Says whose outcomes the directory keeps; ends where they are another pair's."""
    note = directory / "compared.json"
    if any(directory.glob("*")):
        found = json.loads(note.read_text()) if note.exists() else "something else"
        if found != compared:
            sys.exit(f"--directory: {directory} holds {found}; give another for {compared}")
    directory.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(compared))


def _is_asked(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    flags.DEFINE_string("before", None, "Checkout of the earlier version.", required=True)
    flags.DEFINE_string("after", str(ROOT), "Checkout of the later version; this one by default.")
    flags.DEFINE_list(
        "only",
        [],
        "Patterns of arms, named PROCESSES/LOCAL/ORDERING/REDUCER/SHARING/QUOTAS, with a kind "
        "before it but for plain runs, such as '1/*/d_grab*/ring/*,bilevel/*'; all by default.",
    )
    flags.DEFINE_integer("every", 1, "Of the arms, each one in so many: 7 for a quick look.", 1)
    flags.DEFINE_bool("float64", False, "Compare in float64, to the bit too.")
    flags.DEFINE_string(
        "directory",
        None,
        "Keeps what the runs leave, and goes on with it; none is kept by default.",
    )
    command_line.run(main)
