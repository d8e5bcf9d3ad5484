"""Solves a bilevel problem: cleaning, few-shot learning, architecture search or a GAN.

    python -m experiments.train_bilevel --config=configs/digits_cleaning.py --workdir=DIR
        [--config.estimator.name=implicit_cg --config.FIELD=VALUE …]

DIR gets config.json, metrics.jsonl, summary.json and report.html.

configs/digits_cleaning.py cleans polluted labels on unequal workers: each sum that the estimator
asks for is a round. DIR/run gets what any run of `hetjax.fit_bilevel` writes. The same command goes
on where a run was stopped; `--resume=overwrite` begins anew, whatever run DIR holds.
configs/sinusoids_few_shot.py, configs/digits_search.py and
configs/gaussians_gan.py run on one device, and begin anew if they were stopped.
"""

import contextlib
import json
import pathlib
import signal
import sys
import time
from typing import Any, NoReturn

from absl import flags, logging

from experiments import command_line, config_flag, workers
from experiments.bilevel import files, settings
from hetjax import process_info
from hetjax.comm import join, runtime
from hetjax.config import recorded
from hetjax.liveness import exit_reports
from hetjax.records import checkpoint_manager, lock
from hetjax.records import workdir as workdir_lib

config_flag.define(settings.SCHEMA)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of this run; made if it is missing.")
_RESUME = flags.DEFINE_enum(
    "resume", "true", ["true", "false", "force", "overwrite"], "As hetjax.fit_bilevel has it."
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Of this process in a run of several, from 0; found where a launcher says."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Of the run.", 1)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")


class Interrupted(Exception):
    """A signal ended the run, which has said so; the same command goes on from there."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def solve(
    config: settings.TrainConfig,
    workdir: str | pathlib.Path | None,
    *,
    progress: bool = True,
    place: process_info.ProcessInfo | None = None,
    local_is_asked_for: bool = False,
    resume: bool | str = True,
) -> dict[str, Any]:
    """Runs a checked configuration; returns its summary, in process 0.

    With too few devices another local form is taken, and told, unless it `local_is_asked_for`.

    Raises:
        ValueError: what only the data could tell, a loss that is not finite, a workdir that is
            another run's, or several processes for a problem of one device.
        Interrupted: a signal ended the run.
    """
    if config.problem != "cleaning" and place is not None and place.num_processes > 1:
        raise ValueError(
            f"problem={config.problem!r} runs on one device, but this is process "
            f"{place.process_id} of {place.num_processes}. Start one process"
        )
    join.join(place)
    if workdir is None or (place is not None and place.process_id):
        path = None if workdir is None else pathlib.Path(workdir).expanduser()
        return _run(
            config, path, progress=False, place=place, asked=local_is_asked_for, resume=resume
        )
    workdir = workdir_lib.made_directory(pathlib.Path(workdir).expanduser())
    with contextlib.ExitStack() as stack:
        lock.Holder(stack, workdir).hold()
        if resume != checkpoint_manager.OVERWRITE:
            recorded.check(workdir, settings.to_dict(config), may_differ=settings.MAY_DIFFER)
        return _run(
            config, workdir, progress=progress, place=place, asked=local_is_asked_for, resume=resume
        )


def _run(
    config: settings.TrainConfig,
    workdir: pathlib.Path | None,
    *,
    progress: bool,
    place: process_info.ProcessInfo | None,
    asked: bool,
    resume: bool | str,
) -> dict[str, Any]:
    if config.problem != "cleaning":
        from experiments.bilevel import problems

        if workdir is not None:
            text = json.dumps(settings.to_dict(config), indent=2) + "\n"
            files.write_whole(workdir / "config.json", text)
        return problems.run(config, workdir, progress=progress)
    import hetjax

    hetjax.use_cpu_workers(workers.own_workers(config.cluster.num_workers, config.local, place))

    import jax

    from experiments.bilevel import baselines, page, rounds
    from experiments.bilevel import data as data_lib
    from hetjax.inputs import arguments

    began = time.perf_counter()
    data = data_lib.make(config.data, config.seed)
    is_first = place is None or place.process_id == 0
    plain = settings.to_dict(config)
    written = workdir / "config.json" if workdir is not None and is_first else None
    before = written.read_text() if written is not None and written.exists() else None
    of_run = None if workdir is None else workdir / rounds.RUN / "config.json"
    began_before = _stamp(of_run)
    if written is not None:
        files.write_whole(written, json.dumps(plain, indent=2) + "\n")
    # After it is written: the same command is to go on.
    config = arguments.on_devices(config, is_asked_for=asked)
    shown = time.monotonic()

    def on_record(line: dict[str, Any]) -> None:
        nonlocal shown
        if progress and time.monotonic() - shown > 2:
            shown = time.monotonic()
            print(
                f"{line['step']:6d} hypergradients  validation loss "
                f"{line['validation_loss']:.4f}  test accuracy {line['test_accuracy']:.1%}  "
                f"F1 {line['f1_true_labels']:.1%}",
                flush=True,
            )

    try:
        found, result = rounds.clean(config, data, workdir, resume=resume, on_record=on_record)
    except ValueError:
        if written is not None and _stamp(of_run) == began_before:  # nothing was begun with it
            if before is None:
                written.unlink()
            else:
                files.write_whole(written, before)
        raise
    if result.summary["interrupted"]:
        raise Interrupted(128 + getattr(signal, result.summary["stopped_by"] or "", signal.SIGINT))
    if not is_first or found is None:
        return {}
    summary = found.summary | {
        "baselines": baselines.run(config, data, found.summary["kept_fraction"]),
        "num_test": len(data.test.labels),
        "wall_secs": time.perf_counter() - began,
        "jax_version": jax.__version__,
    }
    if workdir is not None:
        files.write_whole(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
        text = page.render(
            config=plain, summary=summary, history=found.history, rounds=rounds.lines_of(workdir)
        )
        files.write_whole(workdir / "report.html", text)
    return summary


def _stamp(path: pathlib.Path | None) -> int | None:
    """When a file was written; None: there is none."""
    return path.stat().st_mtime_ns if path is not None and path.exists() else None


def table(summary: dict[str, Any]) -> str:
    """What a run ended with, for a terminal; of cleaning beside the baselines."""
    if "problem" in summary:
        from experiments.bilevel import problems

        return problems.table(summary)
    from experiments.bilevel import page

    rows = page.rows(summary)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    each, levels = summary["cost_of_a_hypergradient"], summary["levels"].values()
    missing, twice, again = (
        sum(level[f"examples_{what}"] for level in levels)
        for what in ("missing", "duplicated", "revisited")
    )
    return "\n".join(
        [
            *lines,
            "",
            f"{summary['hypergradients']} hypergradients of {each['gradients']} gradients and "
            f"{each['hessian_products'] + each['cross_products']} products: {summary['rounds']:,} "
            f"rounds of {summary['num_workers']} workers in {summary['train_secs']:.1f} s, "
            f"{summary['waiting_fraction']:.0%} of their time waiting; {summary['wall_secs']:.1f} "
            "s with all.",
            f"Examples: {missing} missing, {twice} duplicated, {again:,} revisits in held batches.",
        ]
    )


def _end(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        _end(f"Unexpected arguments: {' '.join(argv[1:])}. {config_flag.misplaced(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    config = config_flag.get()
    if _WORKDIR.value is None:
        _end("--workdir is missing: the directory that gets this run's files.")
    place = None
    try:
        workdir = pathlib.Path(_WORKDIR.value).expanduser()
        place = process_info.find(_PROCESS_ID.value, _NUM_PROCESSES.value, _COORDINATOR.value)
        asked = config_flag.is_given("local")
        resume = {"true": True, "false": False}.get(_RESUME.value, _RESUME.value)
        summary = solve(config, workdir, place=place, local_is_asked_for=asked, resume=resume)
    except Interrupted as error:
        sys.exit(error.code)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        if place is not None and exit_reports.is_loss_of_others(error):
            raise
        from experiments import own

        runtime.current().detector.tell(f"refused its input: {error}", code=2)
        _end(own.told(error))
    if summary:
        print(table(summary))
        print(f"Report: {workdir / 'report.html'}")


if __name__ == "__main__":
    command_line.run(main, config_flag.parse_flags, takes_arguments=True)
