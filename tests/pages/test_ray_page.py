"""What a user of Ray adds to a script, as the page says it."""

import ast
import re

import pytest

from tests.pages import test_commands
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


def commands():
    """What the page gives to `ray`, as words."""
    for _, text in blocks(PAGE, "sh"):
        for words in test_commands.lines_of(re.sub(r"\$\(.*?\)", "X", text)):
            if "ray" in words[:2]:
                yield words[words.index("ray") + 1 :]


def refused(command, options):
    """What of a command's options Ray does not know."""
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return {word.partition("=")[0] for word in options if word.startswith("-")} - known


def test_ray_has_the_commands_and_options_of_the_page():
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is missing")
    jobs = pytest.importorskip("ray.dashboard.modules.job.cli").job_cli_group.commands
    seen = set()
    for name, *options in commands():
        own = options[: options.index("--")] if "--" in options else options
        group = scripts.cli.commands
        if name == "job":
            group, (name, *own) = jobs, own
        assert not refused(group[name], own), (name, own)
        seen.add(name)
    assert seen == {"start", "submit", "symmetric-run"}
    assert refused(group[name], ["--no-such=1"]) == {"--no-such"}
