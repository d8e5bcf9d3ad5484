"""``python -m hetjax.report RUN …``: the report of a run again, while it goes on, or of several."""

import argparse
import contextlib
import pathlib
from collections.abc import Sequence

from hetjax import paths
from hetjax.report import bilevel, comparison, files, watching


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads runs from their directories, writes their page, and prints where it lies."""
    parser = argparse.ArgumentParser(
        prog="python -m hetjax.report",
        description="Writes the report of a run again from its files, or one page of several "
        "runs. The page loads nothing from elsewhere.",
    )
    parser.add_argument(
        "directories",
        metavar="RUN",
        type=pathlib.Path,
        nargs="+",
        help="the work directory of the run",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="the page; by default report.html in the run's directory, of several runs "
        "comparison.html here",
    )
    parser.add_argument(
        "--watch", action="store_true", help="write it anew while the run goes on, to its end"
    )
    parser.add_argument(
        "--every", type=int, default=5, metavar="SECS", help="between two pages of --watch"
    )
    given = parser.parse_args(arguments)
    try:
        directories = [paths.on_disk(directory) for directory in given.directories]
        if given.watch and len(directories) > 1:
            parser.error("--watch is of one run; give one directory")
        if given.every < 1:
            parser.error(f"--every: got {given.every}, must be at least 1 second")
        default = directories[0] / "report.html" if len(directories) == 1 else "comparison.html"
        out = pathlib.Path(given.out or default).expanduser()
        if given.watch:
            with contextlib.suppress(KeyboardInterrupt):
                watching.watch(directories[0], out, every_secs=given.every)
            return
        _write(directories, out)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(out)


def _write(directories: Sequence[pathlib.Path], out: pathlib.Path) -> None:
    run, *others = runs = [files.read(directory) for directory in directories]
    if others:
        text = comparison.render(runs)
    elif not run.is_bilevel:
        watching.write(run, out)
        return
    elif not run.has_ended:
        raise ValueError(f"{run.directory} is a bilevel run that is not at its end")
    else:
        rounds = files.rounds_of_levels(run.directory)
        text = bilevel.render(
            config=run.config, summary=run.summary, history=run.history, rounds=rounds
        )
    out.write_text(text, encoding="utf-8", errors="replace")


if __name__ == "__main__":
    main()
