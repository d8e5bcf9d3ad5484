"""Do balanced example orders train faster? A comparison on MNIST and CIFAR-10, arm by arm.

    python -m experiments.compare_orders --data_dir=DIR [--only=TASK,…] [--minutes=90] [--jobs=2]

runs what is missing, measures the seconds of an epoch, and writes the report; DIR holds `mnist/`
and `cifar10/` with the original files. `--stage=` does one of these alone: `run`, `time` (on an
otherwise idle machine), `report` (from the results that are there, in seconds), and `plan`, which
prints what would be run and for how long. Each run leaves one small JSON file once it is done,
and is never done again; an interrupted run leaves nothing. What is compared is in `order_tasks`.

Each order's learning rate is tuned over the same grid with the first seed, by the lowest
training loss after an epoch; then come the other seeds at that rate, and in some tasks at a
rate that is the same for all.
Runs go on in parallel, each on one core, so they disturb each other's clocks: loss against time
is drawn with the median seconds of an epoch, measured alone, all arms in turn.
"""

import concurrent.futures
import functools
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from absl import app, flags, logging

from experiments import command_line
from experiments.comparisons import order_report, order_results, order_tasks
from experiments.comparisons.order_tasks import Run, Task

STAGES = ("all", "plan", "run", "time", "report")
_ONLY = flags.DEFINE_list("only", [], "Tasks, or groups of them; all if empty.")
_JOBS = flags.DEFINE_integer("jobs", len(os.sched_getaffinity(0)), "Runs at a time.", 1)
_MINUTES = flags.DEFINE_float("minutes", 90.0, "Start no run after this time.", 0.0)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of the data sets.")
_DIRECTORY = flags.DEFINE_string("directory", "experiments/results/orders", "Results and report.")
_STAGE = flags.DEFINE_enum("stage", "all", STAGES, "What to do.")

Arrays = tuple[dict[str, Any], dict[str, Any]]  # to train on; to evaluate, with 'is_test'


def path_of(directory: pathlib.Path, run: Run) -> pathlib.Path:
    """Where the result of a run lies."""
    return directory / "runs" / run.task.name / f"{run.name}.json"


def wanted(task: Task, records: order_results.Records) -> list[Run]:
    """The runs that the results so far ask for and that are not among them."""
    first, others = task.seeds[0], task.seeds[1:]
    runs = [Run(task, method, rate, first) for rate in task.learning_rates for method in task.arms]
    rates = {method: order_results.tuned_rate(task, records, method) for method in task.arms}
    same = dict.fromkeys(task.arms, task.same_rate or None)
    for rate_of in (rates, same):
        for seed in others:
            runs += [Run(task, m, rate, seed) for m, rate in rate_of.items() if rate is not None]
    return [run for run in dict.fromkeys(runs) if run.key not in records]


@functools.lru_cache(maxsize=2)
def load_arrays(dataset: str, num_train: int, num_test: int, data_dir: str | None) -> Arrays:
    """The images to train on; and those with the test images behind them, to evaluate."""
    import numpy as np

    from hetjax.data import datasets, sources

    opened = datasets.load(dataset, data_dir)
    train = sources.load_all(sources.first(opened.train, num_train)).arrays
    test = sources.load_all(sources.first(opened.test, num_test)).arrays
    both = {name: np.concatenate([train[name], test[name]]) for name in ("image", "label")}
    both["is_test"] = np.repeat(
        np.array([0, 1], np.float32), [len(train["label"]), len(test["label"])]
    )
    return train, both


def fit(
    run: Run, data_dir: str | None, *, evaluate: bool = True, epochs: int = 0, **options: Any
) -> Any:
    """`hetjax.fit` as the run says; evaluates training loss and test accuracy in one pass."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import hetjax
    from experiments import problems
    from hetjax import models

    task = run.task
    train, both = load_arrays(task.dataset, task.num_train, task.num_test, data_dir)
    model = models.make(
        task.model,
        train["image"].shape[1:],
        int(np.max(train["label"])) + 1,
        rngs=nnx.Rngs(run.seed),
        input_max=task.input_max,
    )

    def metrics(model: nnx.Module, batch: Any) -> Any:
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        correct = jnp.asarray(logits.argmax(-1) == batch["label"], jnp.float32)
        return {
            "train_loss": (losses, 1 - batch["is_test"]),
            "accuracy": (correct, batch["is_test"]),
        }

    loss_fn, params = hetjax.nnx_loss(model, problems.cross_entropy)
    return hetjax.fit(
        loss_fn,
        params,
        optax.chain(
            optax.add_decayed_weights(task.weight_decay),
            optax.sgd(run.learning_rate, momentum=task.momentum),
        ),
        train,
        eval_source=both if evaluate else None,
        metrics_fn=hetjax.nnx_metrics(model, metrics) if evaluate else None,
        local="virtual",
        seed=run.seed,
        epochs=epochs or task.epochs,
        microbatch_size=task.microbatch_size,
        budget=task.budget,
        ordering={"method": run.method},
        progress=False,
        **task.fields,
        **options,
    )


def train(run: Run, directory: pathlib.Path, data_dir: str | None) -> dict[str, Any]:
    """Does a run and writes its result.

    Raises:
        KeyboardInterrupt: it was interrupted; nothing is written.
    """
    import jax

    import hetjax

    started, diverged = time.perf_counter(), False
    try:
        result = fit(run, data_dir)
    except hetjax.NonFiniteError as error:
        result, diverged = error.result, True
    if result.summary["interrupted"] and not diverged:
        raise KeyboardInterrupt
    evals = [line["eval"] for line in result.history if line.get("eval")]
    losses = [value["test_train_loss"] for value in evals]
    quotas = [(line["round"], line["quotas"]) for line in result.history if line["full"]]
    changes = [
        new for old, new in zip([(0, None), *quotas], quotas, strict=False) if old[1] != new[1]
    ]
    record = {
        "task": run.task.name,
        "method": run.method,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "settings": run.task.settings(),
        "diverged": diverged or any(loss is None or not math.isfinite(loss) for loss in losses),
        "train_losses": [_rounded(loss) for loss in losses],  # after each epoch
        "test_accuracies": [_rounded(value["test_accuracy"]) for value in evals],
        "quotas": changes[:30],  # (first round, quotas)
        "examples_missing": result.summary["examples_missing"],
        "examples_duplicated": result.summary["examples_duplicated"],
        "secs": round(time.perf_counter() - started, 1),
        "jax": jax.__version__,
    }
    if multiprocessing.parent_process() is not None:  # programs of its own, kept on disk
        jax.clear_caches()
    _write(path_of(directory, run), record)
    return record


def run_all(
    tasks: Iterable[Task],
    directory: pathlib.Path,
    *,
    data_dir: str | None,
    jobs: int,
    minutes: float = math.inf,
) -> int:
    """Does the runs that are missing, and returns how many; `jobs=0`: in this process."""
    tasks, started, count = list(tasks), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as cache, _executor(jobs, cache) as executor:
        pending: dict[concurrent.futures.Future, Run] = {}
        while True:
            missing = [
                run
                for task in tasks
                for run in wanted(task, order_results.read_records(directory, task))
                if run not in pending.values()
            ]
            late = time.monotonic() - started > 60 * minutes
            for run in [] if late else missing[: max(jobs, 1) - len(pending)]:
                pending[executor.submit(train, run, directory, data_dir)] = run
            if not pending:
                if late and missing:
                    print(f"The time is over; {len(missing)} runs or more are left.")
                return count
            done, _ = concurrent.futures.wait(
                pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                run, record = pending.pop(future), future.result()
                count += 1
                left = sum(secs for _, secs in plan(tasks, directory).values()) / max(jobs, 1)
                print(
                    f"{(time.monotonic() - started) / 60:5.1f} min  {run.task.name} {run.name}: "
                    f"{order_results.best(record):.4f} in {record['secs']:.0f} s; at most "
                    f"{left / 60:.0f} min left",
                    flush=True,
                )


def plan(tasks: Iterable[Task], directory: pathlib.Path) -> dict[str, tuple[int, float]]:
    """By task: the runs that are left at most, and their seconds on one core.

    A run takes as long as those of its arm that are done, on average; before, a guess.
    """
    left = {}
    for task in tasks:
        records = list(order_results.read_records(directory, task).values())
        count, secs = 0, 0.0
        for method in task.arms:
            done = [record["secs"] for record in records if record["method"] == method]
            missing = max(task.most_runs(method) - len(done), 0)
            count += missing
            secs += missing * (statistics.mean(done) if done else task.run_secs(method))
        if not wanted(task, order_results.read_records(directory, task)):
            count, secs = 0, 0.0
        left[task.name] = count, secs
    return left


def epoch_secs(task: Task, data_dir: str | None, *, repeats: int = 5) -> dict[str, list[float]]:
    """Seconds of `repeats` epochs of each arm, without evaluation, one arm at a time in turn.

    Every arm trains in a thread of its own, and only the one whose turn it is runs.
    """
    turns = {method: threading.Semaphore(0) for method in task.arms}
    handed_over = threading.Semaphore(0)
    secs: dict[str, list[float]] = {method: [] for method in task.arms}
    ended = threading.Event()

    def callback(method: str) -> Callable[[Any], bool]:
        began, epoch = 0.0, -1

        def round_done(line: Any) -> bool:
            nonlocal began, epoch
            if line.epoch == epoch:
                return False
            if epoch >= 1:  # the first epoch warms up
                secs[method].append(time.perf_counter() - began)
            epoch = line.epoch
            handed_over.release()
            turns[method].acquire()
            began = time.perf_counter()
            return ended.is_set()

        return round_done

    def work(method: str) -> None:
        turns[method].acquire()
        run = Run(task, method, task.learning_rates[0], task.seeds[0])
        try:
            fit(run, data_dir, evaluate=False, epochs=repeats + 3, callbacks=[callback(method)])
        except BaseException:
            ended.set()
            raise
        finally:
            handed_over.release()

    with concurrent.futures.ThreadPoolExecutor(len(task.arms)) as threads:
        futures = [threads.submit(work, method) for method in task.arms]
        for method in task.arms * (repeats + 2):
            turns[method].release()
            handed_over.acquire()
            if ended.is_set():  # an arm failed
                break
        ended.set()
        for method in task.arms:
            turns[method].release(2)
        for future in futures:
            future.result()
    return secs


def time_all(
    tasks: Iterable[Task], directory: pathlib.Path, *, data_dir: str | None, again: bool
) -> None:
    """Measures and keeps the seconds of an epoch, for tasks with a picture against time."""
    path = directory / "runs" / order_results.EPOCH_SECS
    kept = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as cache, _executor(1, cache) as executor:
        for task in tasks:
            known = kept.get(task.name, {}).get("settings") == task.settings()
            if task.group or (known and not again):
                continue
            print(f"Measuring epochs of {task.name}", flush=True)
            secs = executor.submit(epoch_secs, task, data_dir).result()
            kept[task.name] = {"settings": task.settings(), "secs": secs}
            _write(path, kept)


def _write(path: pathlib.Path, value: Any) -> None:
    """All or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(value, allow_nan=False) + "\n")
    draft.replace(path)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _executor(jobs: int, cache: str) -> concurrent.futures.Executor:
    if not jobs:
        return _InProcess()
    context = multiprocessing.get_context("spawn")
    cores: Any = context.SimpleQueue()
    allowed = sorted(os.sched_getaffinity(0))
    for job in range(jobs):
        cores.put(allowed[job % len(allowed)])
    return concurrent.futures.ProcessPoolExecutor(
        jobs, context, initializer=_begin_process, initargs=(cores, cache)
    )


def _begin_process(cores: Any, cache: str) -> None:
    """Keeps this process to one core; it and its siblings compile each program once."""
    os.sched_setaffinity(0, {cores.get()})
    single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {single}".strip()

    import jax

    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _InProcess(concurrent.futures.Executor):
    """Does at once, here, what it is given."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments are taken, but {argv[1:]} were given.")
    only, directory = set(_ONLY.value), pathlib.Path(_DIRECTORY.value).expanduser()
    tasks = [t for t in order_tasks.TASKS.values() if not only or only & {t.name, t.group}]
    known = {name for t in order_tasks.TASKS.values() for name in (t.name, t.group) if name}
    if only - known:
        raise app.UsageError(f"--only: {sorted(only - known)} are none of {sorted(known)}.")
    stage, data_dir = _STAGE.value, _DATA_DIR.value
    print("| task | images | epochs | rounds | runs left, at most | minutes of one core |")
    print("|---|---|---|---|---|---|")
    rows = plan(tasks, directory)
    for task in tasks:
        count, secs = rows[task.name]
        size = f"{task.num_train} | {task.epochs} | {task.num_rounds}"
        print(f"| {task.name} | {size} | {count} | {secs / 60:.0f} |")
    total = sum(secs for _, secs in rows.values()) / 60
    print(f"At most {total / _JOBS.value:.0f} minutes with {_JOBS.value} at a time.", flush=True)
    if stage in ("all", "run"):
        run_all(tasks, directory, data_dir=data_dir, jobs=_JOBS.value, minutes=_MINUTES.value)
    if stage in ("all", "time"):
        time_all(tasks, directory, data_dir=data_dir, again=stage == "time")
    if stage in ("all", "report"):
        path = order_report.write(directory, list(order_tasks.TASKS.values()))
        print(f"Report: {path}")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse_flags)
