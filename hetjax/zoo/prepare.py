"""Prepares data sets ahead of time: `python -m hetjax.zoo.prepare NAME … --data_dir=DIR`.

A training job does the same at its first use. This is for machines whose jobs have no network, and
for images of containers.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from hetjax import extras
from hetjax.zoo import datasets

USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    if args.list:
        for name, original in datasets.ORIGINAL_SETS.items():
            print(f"{name:14} {original.title}")
        return 0
    unknown = [name for name in args.names if name not in datasets.BUILTIN]
    if unknown or not args.names:
        for name in unknown:
            print(f"error: unknown data set {name!r}{datasets.nearest(name)}", file=sys.stderr)
        print(
            f"give one or more of: {', '.join(datasets.BUILTIN)} (--list says what they are)",
            file=sys.stderr,
        )
        return USER_ERROR
    data_dir = pathlib.Path(args.data_dir or datasets.default_data_dir()).expanduser()
    for name in args.names:
        try:
            where = _prepare(name, data_dir)
        except (ValueError, ModuleNotFoundError) as error:
            print(f"error: {error}", file=sys.stderr)
            return USER_ERROR
        print(where)
    return 0


def _prepare(name: str, data_dir: pathlib.Path) -> str:
    if name in datasets.ARRAY_SETS:  # nothing is written: it is made from its files when opened
        opened = datasets.load(name, data_dir)
        parts = {"train": opened.train, **opened.evals}
        counts = ", ".join(f"{split} {len(source):,}" for split, source in parts.items())
        return f"{name}: {counts} examples of the files in {data_dir}"
    extras.require(*datasets.TFDS)
    from hetjax.zoo.builders import prepared

    builder = prepared.prepare(datasets.IMAGE_SETS[name], data_dir)
    splits = builder.info.splits
    counts = ", ".join(f"{split} {splits[split].num_examples:,}" for split in ("train", "test"))
    return f"{name}: {counts} examples in {builder.data_dir}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hetjax.zoo.prepare",
        description="Prepares data sets from their original files, without TensorFlow.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets to prepare")
    parser.add_argument(
        "--data_dir",
        "--data-dir",
        metavar="DIR",
        help="where the original files are (DIR or DIR/NAME) and the prepared set goes; "
        f"default: ${datasets.DATA_DIR_VARIABLE}, or ~/.cache/hetjax",
    )
    parser.add_argument("--list", action="store_true", help="list the names and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
