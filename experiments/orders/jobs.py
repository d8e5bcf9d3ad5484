"""Several runs at a time, each in a process that keeps to one core."""

import concurrent.futures
import importlib
import json
import multiprocessing
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from absl import logging

from experiments.comparisons import kept

_MOST_DEVICES = 4  # of a task that is not played on one device


def write(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(value, allow_nan=False) + "\n")
    draft.replace(path)


@contextmanager
def executor(jobs: int) -> Iterator[concurrent.futures.Executor]:
    """Processes for so many jobs at a time; `jobs=0`: jobs are done at once, in this process."""
    if not jobs:
        yield _InProcess()
        return
    context = multiprocessing.get_context("spawn")
    cores: Any = context.SimpleQueue()
    allowed = sorted(os.sched_getaffinity(0))
    for job in range(jobs):
        cores.put(allowed[job % len(allowed)])
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ProcessPoolExecutor(
            jobs, context, initializer=_begin_process, initargs=(cores, cache)
        ) as processes,
    ):
        yield processes


def do(work: str, *args: Any, path: pathlib.Path | None = None) -> Any:
    """Does one job and adds what it returns to `path`; nothing is added where it raises.

    Args:
        work: `module:function`, imported where the job is done.
        *args: of the function.
        path: of a file of JSON lines; None: what the function returns is returned alone.
    """
    module, _, function = work.partition(":")
    record = getattr(importlib.import_module(module), function)(*args)
    if multiprocessing.parent_process() is not None:  # programs of its own, kept on disk
        import jax

        jax.clear_caches()
    if path is not None:
        kept.append(path, record)
    return record


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, who would never ask it for more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _begin_process(cores: Any, cache: str) -> None:
    """Keeps this process to one core; it and its siblings compile each program once."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.sched_setaffinity(0, {cores.get()})
    single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {single}".strip()

    import jax

    import hetjax

    logging.set_verbosity(logging.WARNING)
    hetjax.use_cpu_workers(_MOST_DEVICES)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _InProcess(concurrent.futures.Executor):
    """Does at once, here, what it is given."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # told by `future.result()`, as of a process
            future.set_exception(error)
        return future
