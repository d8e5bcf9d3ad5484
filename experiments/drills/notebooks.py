"""The notebooks: made from their Python files, and executed from top to bottom.

    python -m experiments.drills.notebooks --write            # NAME.ipynb anew from NAME.py
    python -m experiments.drills.notebooks [NAME ...] [--html=DIR] [--most_secs=60]

`notebooks/NAME.py`, in Jupytext's percent format, is what is reviewed. Its badge and its first code
cell are the same in all notebooks but for the name; `--write` puts them there, from `SETUP` and the
address of the repository in pyproject.toml. The second command executes each notebook in a fresh
kernel and an empty directory, prints its seconds, and exits with 1 if a cell raises, a warning
is shown or one takes too long. `--html` keeps what a reader sees; it needs nbconvert.
"""

import argparse
import os
import pathlib
import re
import sys
import tempfile
import time
import tomllib
from typing import Any

import jupytext
import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
_FORMAT = "py:percent"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_BADGE = re.compile(r"^# \[!\[Open in Colab\].*$", re.MULTILINE)

SETUP = '''\
# Installs hetjax where it is missing, and says which devices there are.
import importlib.util
import shutil

if importlib.util.find_spec("hetjax") is None:
    from IPython import get_ipython

    wanted = "hetjax@git+{repository}"
    wanted += " jax[cuda12]" if shutil.which("nvidia-smi") else ""
    get_ipython().run_line_magic("pip", f"install -q {{wanted}}")

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import hetjax

devices = jax.devices()


def local_form(num_workers):
    """A device for each worker where there are as many; else one plays all of them."""
    return "stepped" if 1 < num_workers <= len(devices) else "virtual"


look = {{"figure.figsize": (10, 3.6), "figure.dpi": 100, "figure.constrained_layout.use": True}}
look |= {{"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}}
plt.rcParams.update(look)
print(f"hetjax {{hetjax.__version__}}, JAX {{jax.__version__}}")
print(f"{{len(devices)}} device(s), {{devices[0].device_kind}}; four workers: {{local_form(4)}}")
'''


def repository() -> str:
    """The address in pyproject.toml, `https://github.com/OWNER/NAME`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def badge(name: str) -> str:
    """The line of Markdown that opens a notebook on Colab."""
    place = repository().removeprefix("https://github.com/")
    site = "https://colab.research.google.com"
    address = f"{site}/github/{place}/blob/main/notebooks/{name}.ipynb"
    return f"[![Open in Colab]({site}/assets/colab-badge.svg)]({address})"


def names() -> list[str]:
    """Of all notebooks."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.py"))


def python_text(name: str) -> str:
    """The Python file of a notebook, with the badge and the first code cell that it is to have."""
    text = (NOTEBOOKS / f"{name}.py").read_text()
    title, setup, *others = re.split(r"^(?=# %%)", text, flags=re.MULTILINE)[1:]
    if not title.startswith("# %% [markdown]\n# # ") or not _BADGE.search(title):
        raise ValueError(
            f"notebooks/{name}.py must begin with a cell '# %% [markdown]', whose first line is "
            "'# # TITLE' and which has a line '# [![Open in Colab]'"
        )
    if not setup.startswith("# %%\n"):
        raise ValueError(f"notebooks/{name}.py: its second cell must be code, '# %%'")
    title = _BADGE.sub(f"# {badge(name)}", title)
    setup = f"# %%\n{SETUP.format(repository=repository())}\n"
    return "".join([title, setup, *others])


def notebook(name: str) -> Any:
    """What the Python file of a notebook makes: without outputs, its cells numbered."""
    made = jupytext.reads((NOTEBOOKS / f"{name}.py").read_text(), fmt=_FORMAT)
    made.metadata = nbformat.from_dict({"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(made.cells):
        cell.id, cell.metadata = f"{name}-{number}", nbformat.from_dict({})
    nbformat.validate(made)
    return made


def notebook_text(name: str) -> str:
    """The file `NAME.ipynb`."""
    return nbformat.writes(notebook(name)).rstrip("\n") + "\n"


def write(name: str) -> None:
    """Writes `NAME.py` with its badge and first code cell, and `NAME.ipynb`."""
    (NOTEBOOKS / f"{name}.py").write_text(python_text(name))
    (NOTEBOOKS / f"{name}.ipynb").write_text(notebook_text(name))


def execute(name: str, directory: str | os.PathLike) -> Any:
    """Runs all cells in a kernel of its own, in a directory, with this checkout's hetjax.

    Returns:
        The notebook with its outputs. If a cell raised, those up to there.
    """
    made = notebook(name)
    where = {"metadata": {"path": os.fspath(directory)}}
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    client = nbclient.NotebookClient(made, timeout=600, allow_errors=True, resources=where)
    client.execute(env=environment)
    return made


def complaints(executed: Any) -> list[str]:
    """The errors and warnings among the outputs of a notebook."""
    found = []
    for number, cell in enumerate(executed.cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                found.append(f"cell {number}: {output.ename}: {output.evalue}")
            elif output.output_type == "stream" and "Warning" in output.text:
                found.append(f"cell {number}: {output.text.strip()}")
    return found


def _html(executed: Any) -> str:
    try:
        import nbconvert
    except ModuleNotFoundError:
        sys.exit("--html needs nbconvert: pip install nbconvert")
    return nbconvert.HTMLExporter().from_notebook_node(executed)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--write", action="store_true", help="write NAME.py's head and NAME.ipynb")
    parser.add_argument("--html", type=pathlib.Path, help="gets NAME.html, as executed")
    parser.add_argument("--most_secs", type=float, default=60.0, help="that a notebook may take")
    given = parser.parse_args()
    chosen = [pathlib.Path(name).stem for name in given.names] or names()
    if unknown := [name for name in chosen if name not in names()]:
        sys.exit(f"there is no notebook {unknown[0]!r}; there are {', '.join(names())}")
    if given.write:
        for name in chosen:
            write(name)
        return
    wrong = 0
    for name in chosen:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            executed = execute(name, directory)
        secs = time.perf_counter() - began
        found = complaints(executed)
        if secs > given.most_secs:
            found.append(f"took {secs:.0f} s; at most {given.most_secs:.0f} s are allowed")
        wrong += len(found)
        print(f"{name:<18} {secs:5.1f} s  {'; '.join(found) or 'ok'}", flush=True)
        if given.html:
            given.html.mkdir(parents=True, exist_ok=True)
            (given.html / f"{name}.html").write_text(_html(executed))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
