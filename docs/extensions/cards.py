"""The cards of the first page, each of which is a part of the sidebar.

`index.md` has them as a list, which reads well on a code host: a title, a sentence, and the pages.
"""

import re

CARD = re.compile(r"^- \*\*(?P<title>.+?)\.\*\* (?P<text>.*\n(?:  .*\n)*)", re.MULTILINE)


def with_cards(text):
    """The text with a grid of cards in the place of the list, and the sidebar's tables."""
    found = list(CARD.finditer(text))
    grid, tables = ["::::{grid} 1 1 2 2\n:gutter: 3\n"], []
    for card in found:
        grid.append(f":::{{grid-item-card}} {card['title']}\n{card['text']}:::\n")
        pages = re.findall(r"\]\(([\w/]+)\.md\)", card["text"])
        if not pages:  # of other folders alone
            continue
        options = [f":caption: {card['title']}", ":maxdepth: 1", ":hidden:", "", *pages]
        tables.append("\n".join(["```{toctree}", *options, "```\n"]))
    start, end = found[0].start(), found[-1].end()
    return "\n".join([text[:start], *grid, "::::\n", *tables, text[end:]])


def rewrite(app, docname, source):
    if docname == app.config.root_doc:
        source[0] = with_cards(source[0])


def setup(app):
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}
