"""The six problems of notebooks/bilevel_gallery.py: their lengths, and their numbers over seeds."""

import ast
import functools

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest

from experiments.drills import notebooks

SOLVED = {
    "ridge": lambda number: number <= 1.01,
    "tasks": lambda number: number <= 0.05,
    "gridworld": lambda number: 0.98 <= number <= 1 + 1e-6,
    "few_shot": lambda number: number <= 0.5,
    "search": lambda number: number == 2,
    "gan": lambda number: number == 8,
}
"""What was asked for before anything was tuned; the notebook says the same."""
SEEDS = (0, 1, 2, 3, 4)  # sizes and rates were chosen on seeds 100 and 101
SLOW = ("few_shot", "search", "gan")


@functools.cache
def functions():
    """What the notebook defines, without running its cells; and the functions' lengths."""
    text = (notebooks.NOTEBOOKS / "bilevel_gallery.py").read_text()
    _, own = text.split("# One loop serves all", 1)  # without the setup
    tree = ast.parse("#" + own)
    kept = [
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).isupper())
    ]
    names = {"jax": jax, "np": np, "optax": optax, "plt": plt}
    exec(compile(ast.Module(kept, []), "bilevel_gallery", "exec"), names)
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in kept
        if isinstance(node, ast.FunctionDef)
    }
    return names, lengths


@pytest.fixture(autouse=True)
def _promoting():
    """The notebook's reader has JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_each_problem_has_at_most_40_lines():
    _, lengths = functions()
    assert lengths.keys() >= SOLVED.keys()
    assert max(lengths.values()) <= 40, lengths


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SOLVED]
)
def test_each_problem_is_solved_in_most_seeds(name):
    """In four of five; in two of three where a seed takes half a minute."""
    problem = functions()[0][name]
    seeds, needed = (SEEDS[:3], 2) if name in SLOW else (SEEDS, 4)
    numbers, solved = [], 0
    for seed in seeds:
        numbers.append(problem(seed)["number"])
        solved += bool(SOLVED[name](numbers[-1]))
        if solved == needed:  # the others decide nothing
            break
    assert solved == needed, numbers
