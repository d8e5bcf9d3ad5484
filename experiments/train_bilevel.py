"""Cleans polluted labels: finds a weight for each training example by a bilevel problem.

    python -m experiments.train_bilevel --config=configs/digits_cleaning.py --workdir=DIR
        [--config.estimator.name=implicit_cg --config.FIELD=VALUE …]

DIR gets config.json, metrics.jsonl, summary.json and report.html.
"""

import json
import pathlib
import sys
import time
from typing import Any, NoReturn

from absl import app, flags, logging

from experiments import config_flag
from experiments.bilevel import settings
from hetjax.config import recorded
from hetjax.records import lock, record

config_flag.define(settings.SCHEMA)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of this run; made if it is missing.")


def clean_and_evaluate(
    config: settings.CleaningConfig, workdir: str | pathlib.Path | None, *, progress: bool = True
) -> dict[str, Any]:
    """Runs a checked configuration; returns its summary.

    Raises:
        ValueError: what only the data could tell, a loss that is not finite, or a workdir that is
            another run's.
    """
    if workdir is None:
        return _run(config, None, progress=progress)
    workdir = record.made_directory(pathlib.Path(workdir).expanduser())
    with lock.held(workdir):
        recorded.check(workdir, _plain(config))
        return _run(config, workdir, progress=progress)


def _plain(config: settings.CleaningConfig) -> dict[str, Any]:
    """As `config.json` holds it."""
    return json.loads(json.dumps(settings.to_dict(config)))


def _run(
    config: settings.CleaningConfig, workdir: pathlib.Path | None, *, progress: bool
) -> dict[str, Any]:
    import jax

    from experiments.bilevel import baselines, cleaning, page
    from experiments.bilevel import data as data_lib

    began = time.perf_counter()
    data = data_lib.make(config.data, config.seed)
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

    found = cleaning.clean(config, data, on_record=on_record)
    summary = found.summary | {
        "baselines": baselines.run(config, data, found.summary["kept_fraction"]),
        "num_test": len(data.test.labels),
        "wall_secs": time.perf_counter() - began,
        "jax_version": jax.__version__,
    }
    if workdir is not None:
        plain = _plain(config)
        (workdir / "config.json").write_text(json.dumps(plain, indent=2) + "\n")
        lines = (json.dumps(line) + "\n" for line in found.history)
        (workdir / "metrics.jsonl").write_text("".join(lines))
        (workdir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        page.write(workdir / "report.html", config=plain, summary=summary, history=found.history)
    return summary


def table(summary: dict[str, Any]) -> str:
    """What a run ended with, beside the baselines, for a terminal."""
    from experiments.bilevel import page

    rows = page.rows(summary)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    each = summary["cost_of_a_hypergradient"]
    return "\n".join(
        [
            *lines,
            "",
            f"{summary['hypergradients']} hypergradients of {each['gradients']} gradients and "
            f"{each['hessian_products'] + each['cross_products']} products in "
            f"{summary['train_secs']:.2f} s, and {summary['compile_secs']:.2f} s to compile; "
            f"{summary['wall_secs']:.1f} s with the baselines.",
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
    workdir = pathlib.Path(_WORKDIR.value).expanduser()
    try:
        summary = clean_and_evaluate(config, workdir)
    except ValueError as error:
        _end(str(error))
    print(table(summary))
    print(f"Report: {workdir / 'report.html'}")


if __name__ == "__main__":
    app.run(main, flags_parser=config_flag.parse_flags)
