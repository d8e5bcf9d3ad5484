"""Tasks of `checkouts` that read what another run has left: a trace, or a whole workdir."""

import contextlib
import hashlib
import importlib
import json
import pathlib
from typing import Any

import jax

import hetjax
from experiments.drills import checkout_tasks as tasks
from hetjax import report

_render = report.render  # of a run of `fit`; kept where the worker leaves out pictures


def replayed(arm: tasks.Arm, own: pathlib.Path) -> tasks.Found:
    """A run, and another one that takes the first one's quotas; it may be cut and resumed."""
    trace = own / "trace"
    tasks.trained({**arm, "fields": arm["traced"]}, trace)
    replay = str(trace if "estimator" in arm else trace / "metrics.jsonl")
    again = {**arm, "fields": {**arm["fields"], "replay": replay}}
    if "cut_round" in arm:
        return tasks.cut_and_resumed(again, own)
    return tasks.Found(tasks.returned(tasks.trained(again, own / "run")), {})


def gone_on(arm: tasks.Arm, own: pathlib.Path) -> tasks.Found:
    """Loads, reports and ends a run that was cut.

    `cut` and `run` in the directory are the cut run of the other checkout, or not there: then this
    one makes them. A format or options that this version refuses are told as `refused`.
    """
    if not (own / "run").exists():
        tasks.trained(arm, own / "cut", tasks.interrupter(arm))
        tasks.trained(arm, own / "run", tasks.interrupter(arm))
    try:
        loaded = hetjax.load(own / "cut")
        result = tasks.trained(arm, own / "run")
    except ValueError as error:
        if not any(word in str(error) for word in ("format", "another configuration")):
            raise
        return tasks.Found({}, {"counts": {"refused": str(error)}})
    read = {"summary": loaded.summary, "history": loaded.history, "config": loaded.config}
    pages = _pages(own / "cut", read) if jax.process_index() == 0 else {}
    arrays = tasks.returned(result) | tasks.named(
        loaded=loaded.params, loaded_best=loaded.best_params
    )
    counts = {f"loaded {name}": _digest(json.dumps(it)) for name, it in read.items()}
    return tasks.Found(arrays, {"counts": counts | pages})


def _pages(cut: pathlib.Path, read: dict[str, Any]) -> dict[str, str]:
    """Digests of the reports of a run."""
    if "outer_steps" not in read["summary"]:
        command = importlib.import_module("hetjax.report.__main__")
        with contextlib.redirect_stdout(None):
            command.main([str(cut)])  # `python -m hetjax.report`
        written = (cut / "report.html").read_text()
        return {"page": _digest(_render(**read)), "written page": _digest(written)}
    lines = [
        json.loads(line)
        for level in ("upper", "lower")
        for line in (cut / f"{level}_rounds.jsonl").read_text().splitlines()
    ]
    bilevel = importlib.import_module("hetjax.report.bilevel")
    return {"page": _digest(bilevel.render(**read, rounds=lines))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
