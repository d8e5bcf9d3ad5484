"""The pages, and the blocks that stand on them.

A block that no test can run says so by a comment on the line before it:

    <!-- not run: needs a Slurm cluster -->
"""

import pathlib
import re
from typing import NamedTuple

from tests import programs

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if "generated" not in path.parts
]  # those that are generated are made of what else is tested
PAGES = [README, *(ROOT / f"{name}.md" for name in ("BUILD", "CONTRIBUTING", "SECURITY")), *DOCS]

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<why>[^>]+?) -->\n+)?"
    r"^(?P<indent>[ ]*)```(?!`)(?P<info>[^`\n]*)\n(?P<text>.*?)^[ ]*```[ ]*$",
    re.DOTALL | re.MULTILINE,
)
_INFO = re.compile(r"(?:\{code-block\}[ ]*)?(\w*)")  # of a directive that shows no code: no match
_OPTIONS = re.compile(r"(?:[ ]*:[\w-]+:.*\n)*")


class Block(NamedTuple):
    """A block of code of a page."""

    path: pathlib.Path
    title: str  # of its section
    language: str
    text: str
    why_not: str  # why no test runs it; '': one does
    line: int  # of the page, of its first line


def blocks_of(path):
    """All blocks of a page. Directives such as `{figure}` are none."""
    text = path.read_text()
    for found in _BLOCK.finditer(text):
        language = _INFO.fullmatch(found["info"].strip())
        if language is None:
            continue
        titles = re.findall(r"^##+ (.*)$", text[: found.start()], re.MULTILINE)
        start = _OPTIONS.match(found["text"]).end() if "{" in found["info"] else 0
        lines = found["text"][start:].splitlines(keepends=True)
        code = "".join(line.removeprefix(found["indent"]) for line in lines)
        why, line = found["why"] or "", text[: found.start("text")].count("\n") + 1
        yield Block(path, titles[-1] if titles else "", language[1], code, why, line)


def blocks(path, language="python"):
    """(title of its section, text) of each block of a language."""
    return [(each.title, each.text) for each in blocks_of(path) if each.language == language]


def name_of(path):
    """A page for the name of a test."""
    return str(path.relative_to(ROOT).with_suffix(""))


def is_program(text):
    return text.startswith(("import ", "from ")) or "\nimport hetjax\n" in text


def without_code(path):
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def run(program, directory, *, files=()):
    """What a program printed, run in a directory as a reader of a checkout would.

    Args:
      program: its text.
      directory: becomes its own.
      files: of the checkout, that the reader has copied there.
    """
    for path in [ROOT / "configs", ROOT / "experiments", *files]:
        if not (directory / path.name).exists():
            (directory / path.name).symlink_to(path)
    ran = programs.run(["-c", program], directory)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
