"""Kills, hangs, stops and cuts training runs, and looks whether each one is recovered exactly.

    python -m experiments.drills.faults [--only=kill,raise] [--trials=20] [--minutes=15]

`kill`: `kill -9` of any worker of a gang at a random round, again and again until the run is
finished; its ledger has to be whole, and its parameters equal to the bit to those of a run that
replays its trace undisturbed. `resume`: a run is cut after each round, for every ordering,
reducer and form of the local phase in one process. `hang`: a worker is stopped, sleeps in a
callback, or waits for a loader that is dead. `raise`: one process raises, in the loss, in a
callback, in a loader, in the script, or leaves by SystemExit; under the launcher and started by
hand. `hold`: one process of several that were started by hand holds the others up for 13 s.
`stop`: SIGTERM to one worker, or to the launcher.

Each drill adds its lines to a file of its own, and the table is about all of them.
"""

import importlib.metadata
import itertools
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tqdm
from absl import flags, logging

from experiments import command_line
from experiments.benchmarks import rows
from experiments.comparisons import kept
from experiments.drills import fault_cases, fault_gangs, fault_holds, fault_raises
from experiments.drills.fault_gangs import Record, Session

_COMBINATION = ("local", "ordering", "reducer")


# Cuts


def resume(session: Session, *, again: bool = False) -> None:
    """Cuts one combination after another; those that earlier runs have done are left out."""
    import hetjax

    hetjax.use_cpu_workers(4)
    done = set() if again else {tuple(r[k] for k in _COMBINATION) for r in session.earlier}
    left = [combination for combination in combinations() if combination not in done]
    directories = fault_gangs.new_directories(session)
    with fault_cases.keeping_programs(session.cache):
        for combination in tqdm.tqdm(left[: session.trials], desc="resume"):
            if session.is_late:
                break
            session.write(cut_every_round(next(directories), *combination))


def combinations() -> list[tuple[str, str, str]]:
    """Each local form in one process, ordering and reducer that work together."""
    from hetjax import ordering, topology
    from hetjax.config import kinds

    return [
        (local, name, reducer)
        for local in ("virtual", "stepped")
        for name, factory in ordering.ORDERINGS.items()
        for reducer, make in topology.REDUCERS.items()
        if not list(kinds.of_two(factory(), make()))
    ]


def cut_every_round(directory: pathlib.Path, local: str, ordering: str, reducer: str) -> Record:
    """Trains at one go, and cut after each round; compares all that is left of both."""
    import jax
    import optax

    import hetjax

    rng = np.random.default_rng(7)
    data = {"x": rng.normal(size=(51, 5)).astype(np.float32), "y": rng.integers(3, size=51)}
    weights = rng.normal(size=(5, 3)).astype(np.float32)

    def loss_fn(weights: Any, batch: Any, rng: Any) -> Any:
        noise = 0.1 * jax.random.normal(rng, weights.shape)  # so that wrong keys are seen
        logits = batch["x"] @ (weights + noise)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    def fit(workdir: pathlib.Path, *callbacks: Callable[[Any], bool]) -> Any:
        return hetjax.fit(
            loss_fn,
            weights,
            optax.sgd(0.3, momentum=0.9),
            data,
            eval_source=data,
            workdir=workdir,
            callbacks=callbacks,
            progress=False,
            raise_on_interrupt=False,
            epochs=3,
            microbatch_size=4,
            budget=8,
            local=local,
            ordering={"method": ordering},
            reducer={"name": reducer},
            quota={"policy": "static", "proportions": [4, 3, 2, 1]},
            cluster={
                "num_workers": 4,
                "secs_per_microbatch": [1.0, 1.5, 2.0, 4.0],
                "clock": "virtual",
            },
            checkpoint={"every_rounds": 1},
        )

    def interrupt(line: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    began = time.perf_counter()
    whole = fit(directory / "whole")
    cuts = 0
    while (cut := fit(directory / "cut", interrupt)).summary["interrupted"]:
        cuts += 1
    leaves = [jax.tree.leaves((r.params, r.best_params, r.state)) for r in (whole, cut)]
    is_equal = all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*leaves, strict=True)
    )
    jax.clear_caches()
    return {
        "drill": "resume",
        **dict(zip(_COMBINATION, (local, ordering, reducer), strict=True)),
        "cuts": cuts,
        "bit_equal": is_equal and whole.history == cut.history,
        "secs": round(time.perf_counter() - began, 1),
    }


# Results

DRILLS: dict[str, tuple[Callable[..., None], int]] = {
    "kill": (fault_gangs.kill, 100),
    "resume": (resume, 1000),
    "hang": (fault_gangs.hang, 6),
    "raise": (fault_raises.run_all, 32),
    "hold": (fault_holds.run_all, 8),
    "stop": (fault_gangs.stop, 6),
}
"""Each with the trials that it makes by default."""


def read(results: pathlib.Path, drill: str) -> list[Record]:
    """All lines of a drill, of all runs."""
    return list(kept.read(results / f"{drill}.jsonl"))


def table(results: pathlib.Path) -> str:
    """The figures as Markdown; drills that never ran are left out."""
    found = [_kill_rows(results), _resume_rows(results), _hang_rows(results)]
    found += [fault_raises.rows(read(results, "raise")), fault_holds.rows(read(results, "hold"))]
    return "\n".join(rows.table(itertools.chain(*found, _stop_rows(results))))


def _share(name: str, good: Sequence[Any], target: str = "all") -> rows.Row:
    """How many are true; where none of N failed, with the bound 3 / N."""
    n, bound = len(good), ""
    if all(good):
        bound = f" (95 %: at most {min(1, 3 / n):.1%} fail)"
    return rows.Row(name, target, rows.share(good) + bound, n)


def _kill_rows(results: pathlib.Path) -> rows.Found:
    records = read(results, "kill")
    kills = [r for r in records if r["drill"] == "kill"]
    gangs = [r for r in records if r["drill"] == "kill_gang"]
    if not kills or not gangs:
        return
    secs = [r["secs"] for r in kills if r["secs"] is not None]
    lost = [sum(g[key] or 0 for g in gangs) for key in ("missing", "duplicated")]
    again = sum(g["restarts"] - g["kills"] for g in gangs)
    yield _share("`kill -9`: recovered", [r["recovered"] for r in kills])
    yield rows.Row("… of process 0", "none", str(sum(r["worker"] == 0 for r in kills)), len(kills))
    yield _share("… the right worker named", [r["named"] for r in kills])
    yield rows.Row("… examples missing, duplicated", "0, 0", f"{lost[0]}, {lost[1]}", len(kills))
    yield _share("… gangs: every round once", [g["whole"] for g in gangs])
    yield _share("… gangs: bit-equal to the replay", [g["bit_equal"] for g in gangs])
    yield rows.Row("… restarts without a kill", "0", str(again), len(gangs))
    yield rows.Row("… to the next round", "none", rows.most(secs, ".1f", " s"), len(secs))


def _resume_rows(results: pathlib.Path) -> rows.Found:
    newest = {tuple(r[k] for k in _COMBINATION): r for r in read(results, "resume")}
    if newest:
        yield _share("cut at every round: bit-equal", [r["bit_equal"] for r in newest.values()])
        cuts = sum(r["cuts"] for r in newest.values())
        yield f"Cuts: {cuts}, of {len(combinations())} combinations of form, order and reducer."


def _hang_rows(results: pathlib.Path) -> rows.Found:
    records = read(results, "hang")
    for kind in sorted({r["kind"] for r in records}):
        own = [r for r in records if r["kind"] == kind]
        late = max(r["heartbeats"] or np.inf for r in own)
        good = [r["named"] and r["went_on"] and r["heartbeats"] for r in own]
        yield _share(f"hang, {kind}: right worker named, run went on", good)
        yield rows.Row("… noticed after", "≤ 2 heartbeats", f"at most {late:.2f}", len(own))


def _stop_rows(results: pathlib.Path) -> rows.Found:
    records = read(results, "stop")
    for to in sorted({r["to"] for r in records}):
        own = [r for r in records if r["to"] == to]
        ends = [r["same_round"] and r["exit_code"] == 143 for r in own]
        secs = max(r["secs"] for r in own)
        yield _share(f"SIGTERM to the {to}: one round, code 143", ends)
        yield rows.Row("… exit", "≤ 10 s", f"at most {secs:.1f} s", len(own))
        yield _share("… resumed, bit-equal to the replay", [r["bit_equal"] for r in own])


def run(drill: str, results: pathlib.Path, *, trials: int, **options: Any) -> None:
    """One drill; its lines are added to its file.

    Args:
        drill: a name in `DRILLS`.
        results: directory of the files.
        trials: how many.
        **options: `seed` of the random choices, None for a new one; `minutes` after which no new
            trial begins; `show` what is printed by each; `again`, see `resume`.
    """
    earlier = read(results, drill)
    version = importlib.metadata.version("jax")

    def write(record: Record) -> None:
        kept.append(results / f"{drill}.jsonl", {**record, "jax": version})

    seed, minutes = options.get("seed"), options.get("minutes", np.inf)
    with tempfile.TemporaryDirectory(prefix="hetjax-drill-") as name:
        directory = pathlib.Path(name)
        session = Session(
            trials=trials,
            ends=time.monotonic() + 60 * minutes,
            rng=random.Random(seed),
            directory=directory,
            cache=directory / "cache",
            earlier=earlier,
            write=write,
            show=options.get("show", False),
        )
        more = {"again": options["again"]} if drill == "resume" and "again" in options else {}
        DRILLS[drill][0](session, **more)


def main() -> None:
    logging.set_verbosity(logging.WARNING)  # not every backend that JAX looks for
    given = flags.FLAGS
    if unknown := set(given.only) - set(DRILLS):
        sys.exit(f"--only: there is no {', '.join(unknown)}; there are {', '.join(DRILLS)}")
    results = pathlib.Path(given.results)
    for drill in given.only or DRILLS:
        trials = DRILLS[drill][1] if given.trials is None else given.trials
        if trials:
            run(
                drill,
                results,
                trials=trials,
                seed=given.seed,
                minutes=given.minutes,
                show=given.show,
                again=given.again,
            )
    print(table(results))


if __name__ == "__main__":
    flags.DEFINE_list("only", [], f"Drills: {', '.join(DRILLS)}; all by default.")
    flags.DEFINE_integer("trials", None, "Of each drill; 0: only print the table.", 0)
    flags.DEFINE_float("minutes", np.inf, "After so many no trial of a drill begins.", 0)
    flags.DEFINE_string(
        "results", "experiments/results/faults", "Directory that lines are added to."
    )
    flags.DEFINE_integer("seed", None, "Of the random choices; None: a new one.")
    flags.DEFINE_bool("again", False, "Resume: combinations that are done, too.")
    flags.DEFINE_bool("show", False, "Print what each gang and each configuration printed.")
    command_line.run(main)
