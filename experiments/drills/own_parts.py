"""Trains with parts that return what they must not, and looks what is said, and that none hangs.

    python -m experiments.drills.own_parts [--only='policy/*'] [--limit_secs=120]

Each case of `own_part_cases` is one part, one of its functions and one mutation of what that
returns: a wrong shape or type, NaN, a negative number, a state that grows, an order that is no
permutation. It is run in `virtual`, and each sixth in the other local forms too. A case is right
where a ValueError names the part, the function, what it returned and what is allowed (of a
callback, whose answer changes nothing, a line on stderr).

One process runs many cases, since each start takes seconds. A case that is not over in time is a
hang: the process is killed, and another one goes on with the next case.
"""

import contextlib
import fnmatch
import io
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

FORMS = ("virtual", "stepped", "fused")
_OTHER_FORMS_EVERY = 6
_CASES = "HETJAX_OWN_PARTS"  # numbers of the cases that a process is to run, with their forms


def planned(only: str) -> list[tuple[int, str]]:
    """(number of a case, local form), of the cases whose names fit a pattern."""
    from experiments.drills import own_part_cases

    return [
        (index, form)
        for index, case in enumerate(own_part_cases.CASES)
        for form in FORMS
        if fnmatch.fnmatch(case.name, only)
        and (form == "virtual" or (index % _OTHER_FORMS_EVERY == 0 and form in case.forms))
    ]


def tried(index: int, form: str) -> tuple[str, str]:
    """What came of one case: `(outcome, sentence)`; the outcome is 'refused' where it is right."""
    from experiments.drills import own_part_cases

    case, said = own_part_cases.CASES[index], io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            case.train(form)
    except ValueError as error:
        sentence = str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "raw", f"{type(error).__name__}: {error} ({where.name})"
    else:
        if not case.is_told:
            return "trained", ""
        sentence = said.getvalue()
    missing = [part for part in case.says if part not in sentence]
    return ("refused", sentence) if not missing else (f"without {missing}", sentence)


def work() -> None:
    """The process that runs cases: a line of JSON before and after each."""
    import hetjax

    hetjax.use_cpu_workers(4)
    for index, form in json.loads(os.environ[_CASES]):
        for line in (["begins"], tried(index, form)):
            print("OWN_PARTS " + json.dumps([index, form, *line]), flush=True)


def command() -> list[str]:
    """That runs the cases of the environment."""
    return [sys.executable, "-m", "experiments.drills.own_parts", "--work"]


def outcomes(cases: Sequence[tuple[int, str]], limit_secs: float) -> Iterator[list[Any]]:
    """[index, form, outcome, sentence] of each case, by as many processes as hang, and one."""
    left = list(cases)
    while left:
        with subprocess.Popen(
            command(),
            env=os.environ | {_CASES: json.dumps(left), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            yield from _of_process(process, left, limit_secs)


def _of_process(
    process: subprocess.Popen, left: list[tuple[int, str]], limit_secs: float
) -> Iterator[list[Any]]:
    """What one process tells, until it ends or a case hangs; takes the cases off the list."""
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    while left:
        try:
            line = lines.get(timeout=limit_secs)
        except queue.Empty:
            line = ""
        if not line:
            outcome = "hung" if process.poll() is None else "died"
            yield [*left.pop(0), outcome, ""]
            break
        if line.startswith("OWN_PARTS ") and len(found := json.loads(line[10:])) == 4:
            left.pop(0)
            yield found
    process.kill()
    reader.join()


def _read(process: subprocess.Popen, lines: queue.Queue) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def main(argv: Sequence[str]) -> None:
    del argv
    if flags.FLAGS.work:
        work()
        return
    from experiments.drills import own_part_cases

    cases, wrong = planned(flags.FLAGS.only), 0
    print("| part | function | mutation | form | outcome | sentence |\n|---|---|---|---|---|---|")
    for index, form, outcome, sentence in outcomes(cases, flags.FLAGS.limit_secs):
        wrong += outcome != "refused"
        name = " | ".join(own_part_cases.CASES[index].name.split("/"))
        cell = sentence.strip().replace("\n", " ").replace("|", "\\|")
        print(f"| {name} | {form} | {outcome} | {cell} |", flush=True)
    print(f"\n{len(cases) - wrong} of {len(cases)} refused by a sentence that says all of it.")


if __name__ == "__main__":
    flags.DEFINE_string("only", "*", "cases by name, PART/FUNCTION/MUTATION, with * and ?")
    flags.DEFINE_float("limit_secs", 120.0, "a case that takes longer hangs")
    flags.DEFINE_boolean("work", False, "run the cases of the environment (used by itself)")
    app.run(main)
