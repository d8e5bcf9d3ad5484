"""The notebooks: their two files agree, they begin alike, and they run without an error."""

import ast
import re
import sys
import tomllib

import nbformat
import pytest

from experiments.drills import notebooks

NAMES = notebooks.names()
SHORTEST = "simulator"
SHARED = {"hetjax", "jax", "matplotlib", "numpy", "optax", "flax", "scipy", "IPython"}


def cells(name):
    return nbformat.read(notebooks.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells


def code(name):
    return "\n".join(cell.source for cell in cells(name) if cell.cell_type == "code")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_made_from_its_python_file(name):
    path = notebooks.NOTEBOOKS / f"{name}.ipynb"
    again = "python -m experiments.drills.notebooks --write"
    assert path.read_text() == notebooks.notebook_text(name), f"made by {again}"
    assert not any(cell.get("outputs") for cell in cells(name))
    kept = (notebooks.NOTEBOOKS / f"{name}.py").read_text()
    assert kept == notebooks.python_text(name), f"its first two cells are made by {again}"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_begins_with_its_badge_and_the_cell_of_all(name):
    project = tomllib.loads((notebooks.ROOT / "pyproject.toml").read_text())["project"]
    address = project["urls"]["Repository"].removeprefix("https://github.com/")
    title, setup, *_, last = cells(name)
    opens = f"https://colab.research.google.com/github/{address}/blob/main/notebooks/{name}.ipynb"
    assert title.source.startswith("# ")
    assert f"]({opens})" in title.source
    assert f"hetjax@git+{project['urls']['Repository']}" in setup.source
    assert setup.source == cells(NAMES[0])[1].source
    assert last.source.startswith("## Try this\n")
    assert len(re.findall(r"^\d\. ", last.source, re.MULTILINE)) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_needs_the_installed_package_alone(name):
    for node in ast.walk(ast.parse(code(name))):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module]
        for module in found:
            first, *_ = module.split(".")
            assert first in SHARED or first in sys.stdlib_module_names, module
            in_extra = module.startswith("hetjax.zoo") and module != "hetjax.zoo.builders"
            assert not in_extra, module
        if isinstance(node, ast.Attribute):
            assert not re.match(r"_[a-z]", node.attr), f"{node.attr} is private"


def test_errors_and_warnings_of_a_notebook_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)
    sources = "print('fine')", "1 / 0", "import warnings; warnings.warn('careful')", "print(2)"
    (tmp_path / "small.py").write_text("\n\n".join(f"# %%\n{source}" for source in sources))
    raised, warned = notebooks.complaints(notebooks.execute("small", tmp_path))
    assert raised == "cell 1: ZeroDivisionError: division by zero"
    assert warned.startswith("cell 2: ")
    assert "UserWarning: careful" in warned


def test_the_shortest_notebook_runs(tmp_path):
    executed = notebooks.execute(SHORTEST, tmp_path)
    assert notebooks.complaints(executed) == []
    outputs = [output for cell in executed.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
