"""Draws small mistakes that could be made in the code, for `experiments.drills.mutants`.

    python -m experiments.drills.mutant_draws [--seed=33] [--rooms=quota,ordering]
        [--count=9] [--skip=0]

Prints a JSON line for each, of one kind after the other. Whoever writes them to the list reads
each one first. Left out, for the next one of its kind, is a mistake that changes nothing a test
could see (the operands of a sum swapped), that is a TypeError wherever it is reached, or that could
harm the machine (another process is killed). `--skip=9` goes on where nine were printed.
"""

import ast
import itertools
import json
import pathlib
import random
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import app, flags

from experiments.drills import mutant_list

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("quota", "ordering", "rounds", "data", "processes", "bilevel", "levels")

_FLIPPED = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_BOUNDS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
_OTHER = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmin": "argmax",
    "argmax": "argmin",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
}
_SAYS = ("logging", "warnings", "print", "log", "info", "warning", "debug")


class Change(NamedTuple):
    """Another text in one place of a file."""

    kind: str
    start: int
    end: int
    text: str


class _Source:
    """A file's text, with the place of each node in it."""

    def __init__(self, text: str):
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        return (
            self._place(node.lineno, node.col_offset),
            self._place(node.end_lineno, node.end_col_offset),
        )

    def _place(self, line: int, byte: int) -> int:
        before = self._lines[line - 1].encode()[:byte].decode()
        return self._starts[line - 1] + len(before)

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]


def changes(text: str) -> list[Change]:
    """All changes of a file's code that are known here, in its order.

    Messages, annotations and what is only logged are left as they are.
    """
    source = _Source(text)
    found = [change for node in _walk(ast.parse(text)) for change in _of_node(source, node)]
    return sorted(set(found), key=lambda change: (change[1:], change[0]))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = ast.unparse(node.value.func)
        if any(part in _SAYS for part in name.split(".")):
            return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _of_node(source: _Source, node: ast.AST) -> Iterator[Change]:
    start, end = source.span(node) if hasattr(node, "lineno") else (0, 0)
    if isinstance(node, ast.BinOp):
        yield from _of_operation(source, node)
    elif isinstance(node, ast.UnaryOp):
        kinds = {ast.USub: "sign", ast.Not: "condition", ast.Invert: "mask"}
        if type(node.op) in kinds and not isinstance(node.operand, ast.Constant):
            yield Change(kinds[type(node.op)], start, end, source.of(node.operand))
    elif isinstance(node, ast.BoolOp):
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in itertools.pairwise(node.values):
            yield from _between(source, left, right, *words, "condition")
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for kind, table in (("condition", _FLIPPED), ("off_by_one", _BOUNDS)):
            if words := table.get(type(node.ops[0])):
                yield from _between(source, node.left, node.comparators[0], *words, kind)
    elif isinstance(node, ast.Call):
        yield from _of_call(source, node)
    elif isinstance(node, ast.Subscript):
        yield from _of_index(source, node.slice)
    elif isinstance(node, ast.Dict) and len(node.keys) > 1:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield _left_out(source, source.span(key)[0], source.span(value)[1])
    elif isinstance(node, ast.List) and len(node.elts) > 1:
        for entry in node.elts:
            yield _left_out(source, *source.span(entry))
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield Change("step", start, end, "pass")


def _of_operation(source: _Source, node: ast.BinOp) -> Iterator[Change]:
    start, end = source.span(node)
    left, right = source.of(node.left), source.of(node.right)
    signs = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
    if words := signs.get(type(node.op)):
        if right == "1":
            yield Change("off_by_one", start, end, left)
        elif not isinstance(node.left, ast.Constant | ast.List | ast.JoinedStr):
            yield from _between(source, node.left, node.right, *words, "sign")
    elif isinstance(node.op, ast.BitAnd | ast.BitOr):
        words = ("&", "|") if isinstance(node.op, ast.BitAnd) else ("|", "&")
        yield from _between(source, node.left, node.right, *words, "mask")
    elif isinstance(node.op, ast.Mult) and not isinstance(node.left, ast.Constant):
        yield Change("mask", start, end, f"({left})")


def _of_call(source: _Source, node: ast.Call) -> Iterator[Change]:
    start, end = source.span(node)
    name = ast.unparse(node.func).rsplit(".", 1)[-1]
    if name in _OTHER:
        at = source.span(node.func)[1]
        yield Change("extreme", at - len(name), at, _OTHER[name])
    if name in ("where", "select") and len(node.args) == 3:
        for branch in node.args[1:]:
            yield Change("mask", start, end, source.of(branch))
    if name == "_replace" and len(node.keywords) > 1:
        for keyword in node.keywords:
            if keyword.arg:
                yield _left_out(source, *source.span(keyword))
    names = [argument for argument in node.args if isinstance(argument, ast.Name)]
    for first, second in itertools.pairwise(names):
        between = source.text[source.span(first)[1] : source.span(second)[0]]
        if between.strip() == ",":
            yield Change(
                "worker",
                source.span(first)[0],
                source.span(second)[1],
                second.id + between + first.id,
            )


def _of_index(source: _Source, index: ast.expr) -> Iterator[Change]:
    start, end = source.span(index)
    if isinstance(index, ast.Name) and re.fullmatch(
        r"(i|j|k|n|w|\w*(index|worker|rank|place|number|process|position)\w*)", index.id
    ):
        yield Change("worker", start, end, f"{index.id} - 1")
    elif source.of(index) in ("0", "-1"):
        yield Change("worker", start, end, "-1" if source.of(index) == "0" else "0")
    elif isinstance(index, ast.Slice):
        for bound, word in ((index.lower, "+"), (index.upper, "-")):
            if isinstance(bound, ast.Name | ast.Attribute):
                a, b = source.span(bound)
                yield Change("off_by_one", a, b, f"{source.of(bound)} {word} 1")


def _between(
    source: _Source, left: ast.AST, right: ast.AST, old: str, new: str, kind: str
) -> Iterator[Change]:
    """Another operator between two operands."""
    start, end = source.span(left)[1], source.span(right)[0]
    match = re.search(rf"\b{old}\b" if old.isalpha() else re.escape(old), source.text[start:end])
    if match:
        yield Change(kind, start + match.start(), start + match.end(), new)


def _left_out(source: _Source, start: int, end: int) -> Change:
    """Without an entry, and the comma behind it."""
    after = re.match(r"\s*,[ ]*", source.text[end:])
    return Change("field", start, end + (after.end() if after else 0), "")


def is_other_code(text: str, change: Change) -> bool:
    """Whether the changed text parses, and is another program than before."""
    try:
        new = ast.parse(text[: change.start] + change.text + text[change.end :])
    except SyntaxError:
        return False
    return ast.dump(new) != ast.dump(ast.parse(text))


def snippet(text: str, change: Change) -> tuple[str, str]:
    """The whole lines that a change is in, before and after it; more where they are not unique."""
    lines = text.splitlines()
    first = text.count("\n", 0, change.start)
    last = text.count("\n", 0, change.end)
    while True:
        old = "\n".join(lines[first : last + 1])
        if len(mutant_list.places(text, old)) == 1:
            break
        if first and lines[first - 1].strip():
            first -= 1
        else:
            last += 1
    begins = len("".join(line + "\n" for line in lines[:first]))
    new = old[: change.start - begins] + change.text + old[change.end - begins :]
    return old, "\n".join(line for line in new.splitlines() if line.strip())


def draw(
    root: pathlib.Path, room: str, *, seed: int, left_out: Sequence[str] = ()
) -> Iterator[dict[str, str]]:
    """Draws all mistakes of a room, of one kind after the other.

    Args:
        root: a checkout.
        room: a folder of `hetjax/`.
        seed: of the draws; a room's do not depend on the other rooms.
        left_out: stems of files that none is drawn from.
    """
    rng = random.Random(f"{seed} {room}")
    by_kind: dict[str, list[tuple[pathlib.Path, Change]]] = {}
    for path in sorted((root / "hetjax" / room).glob("*.py")):
        for change in [] if path.stem in left_out else changes(path.read_text()):
            by_kind.setdefault(change.kind, []).append((path, change))
    kinds = sorted(by_kind)
    rng.shuffle(kinds)
    for kind in kinds:
        rng.shuffle(by_kind[kind])
    while any(by_kind.values()):
        for kind in kinds:
            while by_kind[kind]:
                path, change = by_kind[kind].pop()
                text = path.read_text()
                if is_other_code(text, change):
                    old, new = snippet(text, change)
                    file = path.relative_to(root).as_posix()
                    yield {"room": room, "file": file, "kind": kind, "old": old, "new": new}
                    break


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    given = flags.FLAGS
    for room in given.rooms:
        drawn = draw(ROOT, room, seed=given.seed, left_out=given.left_out)
        for record in itertools.islice(drawn, given.skip, given.skip + given.count):
            print(json.dumps(record))


if __name__ == "__main__":
    flags.DEFINE_list("rooms", list(ROOMS), "Folders of hetjax/.")
    flags.DEFINE_integer("seed", 33, "Of the draws.")
    flags.DEFINE_integer("count", 9, "Of each room.", 1)
    flags.DEFINE_integer("skip", 0, "So many are not printed.", 0)
    flags.DEFINE_list(
        "left_out",
        ["datasets", "prepare", "series", "text"],
        "Files that none is drawn from; those of the prepared data sets by default.",
    )
    app.run(main)
