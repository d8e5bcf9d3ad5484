"""Temporary memory over the number of lower steps, as XLA plans it; and the benchmark's groups."""

import pytest

from experiments.benchmarks import bilevel_blocks, bilevel_figures, bilevel_plain


@pytest.mark.parametrize(
    ("name", "growth"),
    [
        ("reverse", 4.0),
        ("checkpointed", 2.0),
        ("reverse, 32 back", 1.0),
        ("forward", 1.0),
        ("implicit", 1.0),
        ("value gap", 1.0),
    ],
)
def test_memory_grows_with_the_steps_as_it_is_said(name, growth):
    """From 64 to 256 and to 1024 steps; beside what does not grow, such as y itself."""
    made, _ = bilevel_figures.BY_STEPS[name]
    small, middle, large = (bilevel_figures.temp_bytes(made(T)) for T in (64, 256, 1024))
    if growth == 1.0:
        assert small == middle == large
    else:
        assert (large - middle) / (middle - small) == pytest.approx(growth, rel=0.02)


@pytest.mark.slow
def test_plain_programs_find_the_same():
    shape = bilevel_plain.Shape(60, 40, 8, 5)
    for name in bilevel_plain.METHODS:
        ratio, own, plain, distance = bilevel_plain.compared(shape, name, 3)
        assert ratio > 0
        assert own > 0
        assert plain > 0
        assert distance < 1e-4, name  # float32


@pytest.mark.slow
def test_counts_and_memory_have_rows():
    assert [row.reached for row in bilevel_figures.count_rows()][:3] == [
        "101 gradients, 100 hessian products, 100 cross products",
        "101 gradients, 20 hessian products, 20 cross products",
        "201 gradients, 100 hessian products, 100 cross products",
    ]
    assert len(bilevel_figures.memory_rows()) == len(bilevel_figures.BY_STEPS)


@pytest.mark.slow
def test_blocks_have_rows():
    """A value gap of few steps, and 500 steps back that hold more."""
    found = bilevel_blocks.block_rows(2, bilevel_plain.Shape(200, 100, 8, 10))
    assert [row.figure.split(",")[0] for row in found] == [
        *["temporary memory"] * 3,
        "value gap",
        "a hypergradient by RHG",
    ]
    assert float(found[4].reached.split()[0]) > 1
    unrolled = float(found[1].reached.rpartition("1/")[2])
    checkpointed = float(found[2].reached.rpartition("1/")[2])
    assert unrolled > 5 * checkpointed > 5
