"""How did a run go? One self-contained HTML file with its pictures and numbers.

`write_report` and `render` take the configuration, the summary and the lines of ``metrics.jsonl``
of a run; ``python -m hetjax.report DIR`` makes the page again from the files in DIR. The page needs
no script and loads nothing, follows the reader's light or dark mode, and stays below 2 MB for
runs of any length. What is missing or not a number is left out.

Nothing here needs JAX, and matplotlib is imported when the first picture is drawn.
"""

from hetjax.report.page import render, write_report

__all__ = ["render", "write_report"]
