"""Links that lead out of `docs/`, and the pages of the results, which lie outside it.

The rule: a link to a page of `experiments/results/` leads to its page here, one to a picture to the
picture, and one to any other file to that file in the repository.
"""

import os
import pathlib
import re

DOCS = pathlib.Path(__file__).parent.parent
ROOT = DOCS.parent
RESULTS = ROOT / "experiments/results"
GENERATED = DOCS / "results/generated"
PICTURES = {".png", ".svg", ".gif", ".jpg"}

# What is code has no links: a fenced block, and text in backticks.
CODE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$|(`+)[^`\n]+?\2", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^()\s]+)(\))")


def result_pages():
    """Each page of the results, by the name of its page here."""
    for path in sorted(RESULTS.rglob("*.md")):
        names = list(path.relative_to(RESULTS).with_suffix("").parts)
        yield "-".join(names[:-1] if names[-1] == "README" else names), path


def target_of(target, origin, page, repository):
    """Where a link leads in the site.

    Args:
      target: as the file says it.
      origin: the file whose link it is.
      page: the page of the site that shows it.
      repository: its address.
    """
    name, hash_sign, anchor = target.partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return target
    path = pathlib.Path(os.path.normpath(origin.parent / name))
    here = {file: GENERATED / f"{title}.md" for title, file in result_pages()}
    is_page = path.suffix == ".md" and path.is_relative_to(DOCS)
    if path in here or is_page or path.suffix in PICTURES:
        found = here.get(path, path)
        return os.path.relpath(found, page.parent) + hash_sign + anchor
    kind = "tree" if path.is_dir() else "blob"
    return f"{repository}/{kind}/main/{path.relative_to(ROOT)}{hash_sign}{anchor}"


def with_links(text, origin, page, repository):
    """The text of a file as a page shows it: its links follow the rule."""

    def link(match):
        return match[1] + target_of(match[2], origin, page, repository) + match[3]

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(link, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(link, text[end:])])


def write_if_new(path, text):
    """Leaves a file alone that has the text, so that Sphinx does not read it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_results(app):
    repository = app.config.repository
    pages = {GENERATED / f"{title}.md": path for title, path in result_pages()}
    for page, path in pages.items():
        write_if_new(page, with_links(path.read_text(), path, page, repository))
    for old in set(GENERATED.glob("*.md")) - pages.keys():
        old.unlink()


def without_empty_globs(text, folder):
    """The text without the lines of a toctree whose pattern no page has that is not listed yet."""
    listed, kept = set(), []
    for line in text.splitlines(keepends=True):
        entry = line.strip()
        if re.fullmatch(r"[\w/.*-]+", entry):
            endings = (".md", ".rst") if "*" not in entry else (".*",)
            paths = [path for ending in endings for path in folder.glob(f"{entry}{ending}")]
            found = {path.with_suffix("") for path in paths} - listed
            if "*" in entry and not found - {folder / "index"}:
                continue
            listed |= found
        kept.append(line)
    return "".join(kept)


def rewrite(app, docname, source):
    page = DOCS / f"{docname}.md"
    if page.exists() and page.parent.name != "generated":
        text = with_links(source[0], page, page, app.config.repository)
        source[0] = without_empty_globs(text, page.parent) if page.stem == "index" else text


def setup(app):
    app.add_config_value("repository", "", "env")
    app.connect("builder-inited", write_results)
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}
