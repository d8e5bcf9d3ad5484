"""How many lines of code has hetjax, without comments and docstrings? How long are its messages?

    python -m experiments.benchmarks.code_size [DIR …]

DIR are checkouts, by default this one. A line counts if it holds code: it is not blank, no comment
alone, and no part of a string that is a statement (a docstring, of an attribute too).
"""

import ast
import collections
import pathlib
import subprocess

from absl import app

from experiments import command_line, markdown

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


def message_words(checkout: pathlib.Path) -> float:
    """Words in the mean of what is raised in hetjax/ with a text, without what is put into it."""
    found = []
    for path in (checkout / "hetjax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and path.parts[-2] != "zoo":
                texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                words = len(" ".join(text for text in texts if isinstance(text, str)).split())
                found += [words] if words > 1 else []
    return sum(found) / max(len(found), 1)


def commit(checkout: pathlib.Path) -> str:
    """Short, with a + where files were changed since; 'unknown' of a directory without history."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(argv: list[str]) -> None:
    found = {}
    for checkout in map(pathlib.Path, argv[1:] or [str(ROOT)]):
        if not (checkout / "hetjax").is_dir():
            raise app.UsageError(f"{checkout} is no checkout: it has no hetjax/")
        parts = dict(sorted(counts(checkout).items(), key=lambda item: -item[1]))
        others = {
            f"{name}/": sum(
                code_lines(path.read_text()) for path in (checkout / name).rglob("*.py")
            )
            for name in ("experiments", "tests")
        }
        sums = {"hetjax/ without zoo/": sum(parts.values()) - parts.get("zoo", 0), **others}
        told = {name: f"{number:,}" for name, number in (sums | parts).items()}
        words = {"words a message": f"{message_words(checkout):.1f}"}
        found[f"{checkout.resolve().name}, {commit(checkout)}"] = words | told
    names = dict.fromkeys(name for told in found.values() for name in told)
    rows = ([name, *(told.get(name, "") for told in found.values())] for name in names)
    print(markdown.table(["lines of code", *found], rows))


if __name__ == "__main__":
    command_line.run(main, takes_arguments=True)
