"""How long are the pages, and their sentences?

    python -m docs.extensions.prose

prints a line a page, and one for all. Code, formulas, tables, headings and figures are no
sentences; words of tables and headings count as words of the page.
"""

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "BUILD.md", "CONTRIBUTING.md", "notebooks/README.md")
]
PAGES += sorted(
    path
    for path in (ROOT / "docs").rglob("*.md")
    if "generated" not in path.relative_to(ROOT).parts
)

_TOLD = re.compile(
    r"^(`{3,})\{(?:glossary|note|tip|warning)\}(.*?)^\1\s*$", re.DOTALL | re.MULTILINE
)
_FENCED = re.compile(
    r"^ *(`{3,}|\$\$).*?^ *\1\s*$|<!--.*?-->|^ *:.*?$|^ *:{3,}.*?$", re.DOTALL | re.MULTILINE
)
_BLOCKS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[|#])")
_ENDS = re.compile(r"(?<=[.!?:;])[)\"*]*\s+(?=[A-Z\"'(\[*`])")


class Prose(NamedTuple):
    words: int
    sentences: list[int]  # words of each

    def __str__(self) -> str:
        over = sum(length > 30 for length in self.sentences)
        mean = sum(self.sentences) / max(len(self.sentences), 1)
        return (
            f"{self.words} words, {len(self.sentences)} sentences of {mean:.1f} words in the mean, "
            f"{over / max(len(self.sentences), 1):.1%} over 30"
        )


def of_text(text: str) -> Prose:
    text = _FENCED.sub("\n\n", _TOLD.sub(r"\2", text))
    lengths = []
    for block in _BLOCKS.split(text):
        if block.lstrip().startswith(("|", "#", "!")):
            continue
        block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
        block = re.sub(r"`[^`]*`|\$[^$]*\$", "Code", block)
        counts = [len(re.findall(r"[\w'.-]*\w", part)) for part in _ENDS.split(block)]
        lengths += [count for count in counts if count]
    return Prose(len(re.findall(r"\S*\w\S*", text)), lengths)


def of_pages(paths: list[pathlib.Path]) -> Prose:
    found = [of_text(path.read_text()) for path in paths]
    return Prose(sum(each.words for each in found), [n for each in found for n in each.sentences])


def main() -> None:
    for path in PAGES:
        print(f"{path.relative_to(ROOT)}: {of_pages([path])}")
    print(f"all {len(PAGES)} pages: {of_pages(PAGES)}")


if __name__ == "__main__":
    main()
