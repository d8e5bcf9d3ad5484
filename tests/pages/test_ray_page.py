"""What a user of Ray adds to a script, as the page says it."""

import ast

import pytest

from tests.pages.blocks import ROOT, blocks

PAGE = ROOT / "docs/ray.md"
MOST_ADDED = 3


def lines(number):
    return [text for _, text in blocks(PAGE, "diff")][number].splitlines()


def after(number, without="-"):
    """The script of a block after its change; without "+": before it."""
    return "\n".join(line[1:] for line in lines(number) if not line.startswith(without))


@pytest.mark.parametrize("number", [0, 1], ids=["launch", "loop"])
def test_at_most_three_lines_are_added_to_a_script(number):
    added = [line for line in lines(number) if line.startswith("+")]
    assert 1 <= len(added) <= MOST_ADDED
    assert any("hetjax.ray." in line for line in added)
    ast.parse(after(number, without="+"))
    ast.parse(after(number))
