"""Trains a configured model on unequal workers.

    python -m experiments.train --config=configs/digits.py --workdir=DIR [--config.FIELD=VALUE …]

DIR gets config.json, metrics.jsonl, summary.json and report.html. The same command goes on where a
run was stopped; `--resume=overwrite` begins anew, whatever run DIR holds.
"""

import math
import pathlib
import signal
import sys
from typing import Any, NoReturn

from absl import flags, logging

from experiments import command_line, config_flag, workers
from hetjax import paths, process_info
from hetjax.comm import join, runtime
from hetjax.liveness import exit_reports

config_flag.define()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of this run; made if it is missing.")
_RESUME = flags.DEFINE_enum(
    "resume", "true", ["true", "false", "force", "overwrite"], "As hetjax.fit has it."
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Of this process in a run of several, from 0; found where a launcher says."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Of the run.", 1)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")


def train_and_evaluate(
    config: Any,
    workdir: str | pathlib.Path | None,
    *,
    progress: bool = True,
    place: process_info.ProcessInfo | None = None,
    resume: bool | str = True,
    local_is_asked_for: bool = False,
) -> Any:
    """Runs a checked configuration; returns a `hetjax.FitResult`.

    With too few devices another local form is taken, and told, unless it `local_is_asked_for`.

    Raises:
        ValueError: what only the data, the devices or the other processes could tell.
    """
    import hetjax

    join.join(place)
    own = workers.own_workers(config.cluster.num_workers, config.local, place)
    hetjax.use_cpu_workers(own * math.prod(size or 1 for size in config.slices.axes.values()))

    from experiments import tasks
    from hetjax.inputs import arguments
    from hetjax.zoo import optimizers

    config = arguments.on_devices(config, is_asked_for=local_is_asked_for)
    trackers = hetjax.writers.by_names(config.writers)
    task = tasks.make(config)
    return hetjax.fit(
        task.loss_fn,
        task.params,
        optimizers.make_optimizer(config, num_examples=len(task.train)),
        task.train,
        eval_sources=task.evals or None,
        metrics_fn=task.metrics_fn,
        writers=trackers,
        workdir=workdir,
        config=config,
        progress=progress,
        resume=resume,
        raise_on_interrupt=False,
        **task.given,
    )


def _end(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        _end(f"Unexpected arguments: {' '.join(argv[1:])}. {config_flag.misplaced(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # not every data set that is opened
    config = config_flag.get()
    workdir = _WORKDIR.value
    if workdir is None:
        _end("--workdir is missing: the directory that gets this run's files.")
    place = None
    try:
        workdir = paths.on_disk(workdir)
        place = process_info.find(_PROCESS_ID.value, _NUM_PROCESSES.value, _COORDINATOR.value)
        resume = {"true": True, "false": False}.get(_RESUME.value, _RESUME.value)
        asked = config_flag.is_given("local")
        result = train_and_evaluate(
            config, workdir, place=place, resume=resume, local_is_asked_for=asked
        )
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        if place is not None and exit_reports.is_loss_of_others(error):
            raise
        from experiments import own

        runtime.current().detector.tell(f"refused its input: {error}", code=2)
        _end(own.told(error))
    if place is None or place.process_id == 0:
        from hetjax.records import results
        from hetjax.report import words

        print(words.aligned(results.summary_rows(result.summary)))
        print(f"Report: {workdir / 'report.html'}")
    if result.summary["interrupted"]:
        sys.exit(128 + getattr(signal, result.summary["stopped_by"] or "", signal.SIGINT))


if __name__ == "__main__":
    command_line.run(main, config_flag.parse_flags, takes_arguments=True)
