"""How many lines of code has hetjax, without comments and docstrings?

    python -m experiments.benchmarks.code_size [DIR …]

DIR are checkouts, by default this one. A line counts if it holds code: it is not blank, no comment
alone, and no part of a string that is a statement (a docstring, of an attribute too).
"""

import ast
import collections
import pathlib
import subprocess

from absl import app

ROOT = pathlib.Path(__file__).parents[2]


def code_lines(text: str) -> int:
    """Lines of code of a Python program.

    Example:
        >>> code_lines('''"Of a module."
        ...
        ... # A comment.
        ... x = 1  # one
        ... "Of x."
        ... ''')
        1
    """
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        number not in strings and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in lines
    )


def counts(checkout: pathlib.Path) -> dict[str, int]:
    """Lines of code of each part of hetjax: its packages, and the modules beside them."""
    found: collections.Counter[str] = collections.Counter()
    package = checkout / "hetjax"
    for path in sorted(package.rglob("*.py")):
        found[path.relative_to(package).parts[0].removesuffix(".py")] += code_lines(
            path.read_text()
        )
    return dict(found)


def commit(checkout: pathlib.Path) -> str:
    """Short, with a + where files were changed since; 'unknown' of a directory without history."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(argv: list[str]) -> None:
    print("| checkout | commit | lines of code of hetjax/ | of its parts |\n|---|---|---|---|")
    for checkout in map(pathlib.Path, argv[1:] or [str(ROOT)]):
        if not (checkout / "hetjax").is_dir():
            raise app.UsageError(f"{checkout} is no checkout: it has no hetjax/")
        found = counts(checkout)
        largest = sorted(found.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {number:,}" for name, number in largest)
        name, total = checkout.resolve().name, sum(found.values())
        print(f"| {name} | {commit(checkout)} | {total:,} | {parts} |")


if __name__ == "__main__":
    app.run(main)
