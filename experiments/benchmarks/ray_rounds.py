"""How long is a round of an elastic run over Ray, beside one of joined processes?

    python -m experiments.benchmarks.ray_rounds [--only=lenet,mlp,limited] [--turns=3]
        [--rounds=60] [--wire=float32]

Four workers with the same static quotas, no worker is lost. Over Ray each is on a node of its own,
a raylet on this machine; joined they are processes of the launcher's, which add up in memory that
they share. In turn; a round is the median of the rounds behind the first ten. CPU seconds are those
of the workers and of Ray's nodes over Ray, less those of joined processes, in the same rounds.

`limited` has the larger model where each worker is in a network namespace, whose link carries
1 Gb/s each way; there joined processes add up over the network, too. It needs root.
"""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optax
from absl import flags

import hetjax
from experiments import command_line, problems
from experiments.benchmarks import launched_runs, rows
from experiments.drills import ray_nodes
from hetjax.comm import join

_ONLY = flags.DEFINE_list("only", [], "Models; all if empty.", allow_override=True)
_TURNS = flags.DEFINE_integer("turns", 3, "Runs of each kind.", 1, allow_override=True)
_ROUNDS = flags.DEFINE_integer("rounds", 60, "Of a run.", 20, allow_override=True)
_WIRE = flags.DEFINE_string("wire", "float32", "Of what is handed in.", allow_override=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Of a worker; set by the benchmark.", allow_override=True
)
_PLACE = flags.DEFINE_list(
    "place", [], "Number and coordinator of a worker; as workdir.", allow_override=True
)
_MODEL = flags.DEFINE_string(
    "model", None, "Of a worker; set by the benchmark.", allow_override=True
)
_WARM = "warm"  # a file: the rounds that are skipped are done

_PROPORTIONS, _SKIPPED = [4.0, 2.0, 1.0, 1.0], 10
_TARGETS = {"lenet": "≤ 40 ms more", "mlp": "≤ 1.6", "limited": "≤ 1.15"}
_LOOK_SECS = 0.05


def train(workdir: pathlib.Path, model: str, rounds: int, wire: str = "float32") -> Any:
    """What each worker does."""
    cpu = CpuSecs(workdir.parent, lambda: sum(os.times()[:2]))
    task, shape = launched_runs.TASKS[model], (32, 32, 3)
    fields = dict(task.model)
    loss_fn, params = problems.classifier(fields.pop("name"), shape, input_max=255.0, **fields)

    def is_over(report: hetjax.RoundReport) -> bool:
        if report.round == _SKIPPED:
            (workdir.parent / _WARM).touch()
        return report.round + 1 >= rounds

    result = hetjax.fit(
        loss_fn,
        params,
        optax.sgd(0.01, momentum=0.9),
        problems.images(task.batch * 20, shape),
        microbatch_size=task.microbatch_size,
        budget=task.budget,
        epochs=1_000_000,
        quota=hetjax.quota.static(proportions=_PROPORTIONS),
        reducer=hetjax.topology.all_reduce(wire=wire),
        checkpoint={"every_rounds": 0},
        workdir=workdir,
        callbacks=[is_over],
        progress=False,
    )
    (workdir.parent / f"cpu-{socket.gethostname()}-{os.getpid()}").write_text(str(cpu.end()))
    return result


class CpuSecs:
    """CPU seconds since the rounds were skipped that are not counted; there is a file then.

    Args:
        directory: of the file.
        now: gives the CPU seconds.
    """

    def __init__(self, directory: pathlib.Path, now: Callable[[], float]) -> None:
        self._began, self._now, self._file = now(), now, directory / _WARM
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._file.exists():
            time.sleep(_LOOK_SECS)
        self._began = self._now()

    def end(self) -> float:
        return self._now() - self._began


def cpu_secs(pids: Sequence[int]) -> float:
    """That processes have used."""
    found = 0.0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def joined(workdir: pathlib.Path, model: str, rounds: int, nodes: ray_nodes.Nodes) -> None:
    launcher = [sys.executable, "-m", "hetjax.launch", f"--workers={len(_PROPORTIONS)}", "--"]
    own = [sys.executable, "-m", "experiments.benchmarks.ray_rounds", f"--workdir={workdir}"]
    own += [f"--model={model}", f"--rounds={rounds}"]
    if not isinstance(nodes, ray_nodes.NetworkNodes):
        subprocess.run([*launcher, *own], check=True, stderr=subprocess.DEVNULL)
        return
    port = join.find_port("127.0.0.1")
    processes = []
    for number in range(len(_PROPORTIONS)):
        place = f"--place={number},{ray_nodes.address(0)}:{port}"
        processes.append(subprocess.Popen([*nodes.inside(number), *own, place]))
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit("a joined process has failed")


def elastic(workdir: pathlib.Path, model: str, rounds: int, nodes: ray_nodes.Nodes) -> None:
    import hetjax.ray

    hetjax.ray.launch(
        functools.partial(train, workdir, model, rounds, _WIRE.value),
        resources=[{"CPU": 1, f"node{k}": 1} for k in range(len(_PROPORTIONS))],
        elastic=True,
    )


def compare(what: str) -> rows.Found:
    """The rows of a group."""
    return ray_nodes.isolated(_compared, what) if what == "limited" else _compared(what)


def _compared(what: str) -> list[rows.Row | str]:
    model = {"limited": "mlp"}.get(what, what)
    nodes = ray_nodes.NetworkNodes(rate="1gbit") if what == "limited" else ray_nodes.Nodes()
    cpu: dict[str, list[float]] = {"joined": [], "elastic": []}
    secs: dict[str, list[float]] = {"joined": [], "elastic": []}
    try:
        for turn in range(2 * _TURNS.value):
            run = (joined, elastic)[turn % 2]
            with tempfile.TemporaryDirectory() as directory:
                of_nodes = CpuSecs(pathlib.Path(directory), lambda: cpu_secs(nodes.own()))
                run(pathlib.Path(directory, "run"), model, _ROUNDS.value, nodes)
                paths = list(pathlib.Path(directory).glob("cpu-*"))
                assert len(paths) == len(_PROPORTIONS), paths
                used = sum(float(path.read_text()) for path in paths)
                cpu[run.__name__].append(used + of_nodes.end() * (run is elastic))
                told = pathlib.Path(directory, "run", "metrics.jsonl").read_text().splitlines()
            found = [json.loads(line)["round_secs"] for line in told[_SKIPPED:]]
            secs[run.__name__].append(float(np.median(found)))
    finally:
        nodes.close()
    return list(_rows(what, model, secs, cpu))


def _rows(
    what: str, model: str, secs: dict[str, list[float]], cpu: dict[str, list[float]]
) -> rows.Found:
    pairs = list(zip(secs["elastic"], secs["joined"], strict=True))
    more, over = [1e3 * (a - b) for a, b in pairs], [a / b for a, b in pairs]
    targets = (_TARGETS[what], "none") if what == "lenet" else ("none", _TARGETS[what])
    # Each takes all others' sums whole, or of a large model a slice, and then the others' slices.
    others = len(_PROPORTIONS) - 1
    exchanged = others * {"lenet": len(_PROPORTIONS) * 62_006, "mlp": 2 * 5_300_000}[model] * 4e-9
    count = _ROUNDS.value - _SKIPPED
    each = [(a - b) / count / exchanged for a, b in zip(cpu["elastic"], cpu["joined"], strict=True)]
    yield rows.Row(f"{what}: CPU s a GB exchanged", "none", rows.middle(each), len(each))
    yield rows.Row(
        f"{what}: longer than joined", targets[0], rows.middle(more, ".0f", " ms"), len(more)
    )
    yield rows.Row(f"{what}: over joined", targets[1], rows.middle(over), len(over))
    for kind, own in secs.items():
        millis = rows.middle([1e3 * x for x in own], ".0f", " ms")
        yield rows.Row(f"{what}, {kind}: a round", "none", millis, len(own))


def main() -> None:
    if _WORKDIR.value is not None:
        if _PLACE.value:
            number, coordinator = _PLACE.value
            hetjax.join_processes(int(number), len(_PROPORTIONS), coordinator)
        else:
            hetjax.join_processes()
        train(pathlib.Path(_WORKDIR.value), _MODEL.value, _ROUNDS.value)
        return
    os.environ.update(ray_nodes.VARIABLES)
    rows.print_tables({m: functools.partial(compare, m) for m in _TARGETS}, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
