"""Links of a built site that lead nowhere: `python -m docs.extensions.links build/site`.

Looks at links among its files and their anchors alone; no network.
"""

import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """The links and the anchors of one file."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


def broken(site):
    """(page, link) of each that leads to no file or to no anchor."""
    site = site.resolve()
    paths = [path for path in site.rglob("*.html") if site / "_static" not in path.parents]
    pages = {path: Page(path.read_text()) for path in paths}
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            name = urllib.parse.unquote(parts.path)
            target = (path.parent / name).resolve() if name else path
            if target.is_dir():
                target /= "index.html"
            anchor = urllib.parse.unquote(parts.fragment)
            is_there = anchor in pages[target].anchors if target in pages else target.exists()
            if not is_there:
                yield path.relative_to(site).as_posix(), link


def main():
    site = pathlib.Path(sys.argv[1])
    found = list(broken(site))
    for page, link in found:
        print(f"{page}: {link} leads nowhere", file=sys.stderr)
    print(f"{len(list(site.rglob('*.html')))} pages, {len(found)} broken links")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
