"""What does the device that JAX finds here reach? One command says it.

    python -m experiments.benchmarks.accelerator [--most_minutes=10] [--only=GROUP,…] [--tiny]
        [--peak_tflops=BF16,F32]

Groups: loop, forms, depth, host, orders, kernels, processes, beside, and a model in a type, such as
resnet18_bfloat16. Each is a process of its own with its share of the minutes, so that one that
fails or takes too long leaves the others theirs: its row says why. `--tiny` takes sizes that a CPU
does in seconds, all in one process. experiments/results/accelerator/README.md keeps the tables.
"""

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import flags, logging

from experiments import command_line
from experiments.benchmarks import accelerator_models, accelerator_processes, accelerator_rounds
from experiments.benchmarks import rows as rows_lib
from experiments.benchmarks.accelerator_models import Sizes
from experiments.benchmarks.rows import Found, Row

# Other programs have flags of these names too, and tests import several of them.
_ONLY = flags.DEFINE_list("only", [], "Groups to run; all if empty.", allow_override=True)
_MINUTES = flags.DEFINE_float("most_minutes", 10.0, "That all groups together may take.", 0.1)
_TINY = flags.DEFINE_bool("tiny", False, "Sizes that a CPU does in seconds.")
_PEAK = flags.DEFINE_list(
    "peak_tflops", [], "Of the device in bfloat16 and float32; for one whose peak is not known."
)
_GROUP = flags.DEFINE_string("group", None, "What this process measures; set by the program.")
_SECS = flags.DEFINE_float("secs", 60.0, "That it may take; set by the program.")

_FAILED = "not measured: {}"
_LEAST_SECS = 3.0  # in which a process starts
_TINY_SECS = 2.0  # of a group


class Group(NamedTuple):
    """Rows that are measured together."""

    title: str  # of the row that says why there is none
    share: float  # of the minutes
    rows: Callable[[Sizes], Found]


def _groups() -> dict[str, Group]:
    of = accelerator_rounds
    found = {
        "loop": Group("a round over the bare loop", 1, of.loop_rows),
        "forms": Group("local forms", 1, of.form_rows),
        "depth": Group("microbatches in flight", 0.7, of.depth_rows),
        "host": Group("the host's part of a round", 0.4, of.host_rows),
        "orders": Group("a step with d_grab over one without", 0.8, of.order_rows),
        "kernels": Group("share of the memory's bandwidth", 0.5, of.kernel_rows),
    }
    for name, dtype in itertools.product(accelerator_models.MODELS, accelerator_models.DTYPES):
        rows = functools.partial(accelerator_models.model_rows, name, dtype)
        share = 0.7 if name == "lenet" else 2  # the others compile for longer
        found[f"{name}_{dtype}"] = Group(f"{name}, {dtype}", share, rows)
    rows = accelerator_processes.process_rows
    found["processes"] = Group("several processes on one device", 2, rows)
    found["beside"] = Group("the CPU as one more worker", 1, of.beside_rows)
    return found


GROUPS = _groups()
_MODELS = [name for name in GROUPS if name.partition("_")[0] in accelerator_models.MODELS]


def guarded(group: Group, sizes: Sizes) -> Found:
    """The rows of a group; the last one says what went wrong, if anything did."""
    try:
        yield from group.rows(sizes)
    except Exception as error:
        yield _failed(group, f"{type(error).__name__}: {error}")


def _failed(group: Group, why: str) -> Row:
    line = " ".join(why.split()).replace("|", "/")
    return Row(group.title, "none", _FAILED.format(line[:300]))


def in_process(name: str, secs: float, cache: str) -> Found:
    """The rows of a group, by a process of its own that is ended after so many seconds.

    Groups share compiled programs in the directory `cache`; models do not: their start is measured.
    """
    group = GROUPS[name]
    if secs < _LEAST_SECS:
        yield _failed(group, "the minutes were over")
        return
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as told:
        command = [sys.executable, "-m", "experiments.benchmarks.accelerator", f"--group={name}"]
        command += [f"--secs={secs}", f"--peak_tflops={','.join(_PEAK.value)}"]
        process = subprocess.Popen(
            command + (["--tiny"] if _TINY.value else []),
            stdout=out,
            stderr=told,
            start_new_session=True,
            env={
                **os.environ,
                "JAX_ENABLE_COMPILATION_CACHE": str(int(name not in _MODELS)),
                "JAX_COMPILATION_CACHE_DIR": cache,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
        )
        try:
            code, why = process.wait(secs), ""
        except subprocess.TimeoutExpired:
            code, why = None, f"it took more than its {secs:.0f} s"
        finally:
            _end(process)
        out.seek(0)
        for line in out.read().splitlines():
            with contextlib.suppress(ValueError):  # a library's own words, or half a line
                found = json.loads(line)["row"]
                yield found if isinstance(found, str) else Row(*found)
        if code != 0:
            told.seek(0)
            lines = told.read().strip().splitlines() or ["no word"]
            yield _failed(group, why or f"exit code {code}: {lines[-1]}")


def _end(process: subprocess.Popen) -> None:
    """It and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def _ends(only: list[str]) -> dict[str, float]:
    """When each group has to be over, by `time.monotonic`: what one leaves the next ones have."""
    chosen = [name for name in GROUPS if not only or name in only]
    shares = np.array([GROUPS[name].share for name in chosen])
    parts = np.cumsum(shares) / shares.sum()
    return dict(zip(chosen, time.monotonic() + 60 * _MINUTES.value * parts, strict=True))


def _sizes(secs: float) -> Sizes:
    try:
        peaks = tuple(map(float, _PEAK.value))
    except ValueError:
        peaks = (0.0,)
    if len(peaks) not in (0, 2) or not all(peak > 0 for peak in peaks):
        given = ",".join(_PEAK.value)
        sys.exit(f"--peak_tflops={given}: must be two numbers above 0, such as 312,156")
    return Sizes(_TINY.value, secs, peaks)


def _machine() -> str:
    """Of a process of its own: one that has used a device keeps most of its memory."""
    code = "from experiments.benchmarks import rows; print(rows.machine())"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        sys.exit(f"JAX does not start here:\n{ended.stderr}")
    return ended.stdout.splitlines()[-1]


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    if _GROUP.value:
        for row in guarded(GROUPS[_GROUP.value], _sizes(_SECS.value)):
            print(json.dumps({"row": row}), flush=True)
        return
    tiny, ends = _sizes(_TINY_SECS), _ends(_ONLY.value)
    with tempfile.TemporaryDirectory(prefix="hetjax-benchmark-") as cache:

        def measured(name: str) -> Found:
            if tiny.tiny:
                return guarded(GROUPS[name], tiny)
            return in_process(name, ends[name] - time.monotonic(), cache)

        tables = {name: functools.partial(measured, name) for name in GROUPS}
        rows_lib.print_tables(tables, _ONLY.value, _machine)


if __name__ == "__main__":
    command_line.run(main)
