"""How did a run go? One self-contained HTML file with its pictures and numbers.

`render` takes the configuration, the summary and the lines of ``metrics.jsonl`` of a run.
``python -m hetjax.report DIR`` makes the page again from the files in DIR, with ``--watch`` while
the run goes on; of several directories it makes one page. A page needs no script and loads nothing,
follows the reader's light or dark mode, and stays below 2 MB for runs of any length. What is
missing or not a number is left out.

- `page` is the whole page; `bilevel` that of a bilevel run, `comparison` that of several runs.
- `files` reads a workdir; `watching` writes its page while the run goes on.
- `cards` are what a notebook shows, with `graph_pictures`.
- `sections` are its headings, captions and pictures; `tiles` its key numbers.
- `timeline`, `over_rounds`, `gates`, `losses` and `gossip` draw one thing each.
- `canvas` has what all pictures share; `line_panels` is one kind of picture.
- `series` reads numbers from the records; `words` writes numbers as text.

Nothing here needs JAX. matplotlib is imported when the first picture is drawn.
"""

from hetjax.report.page import render as render
