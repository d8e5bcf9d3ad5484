"""The README: short, its programs run, its figures are those that were measured."""

import ast
import re

import pytest

from experiments.benchmarks.rows import Row, read
from hetjax.cluster import emulate
from tests.own_parts import policy
from tests.pages.blocks import README, ROOT, blocks, run

MOST_LINES, MOST_COLUMNS = 110, 115


def side(sign):
    """The script of the README before ('-') and after ('+') its change."""
    ((_, diff),) = blocks(README, "diff")
    return "".join(
        line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in (sign, " ", "\n")
    )


def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    outside = re.sub(r"^```.*?^```", "", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in outside.splitlines() if len(line) > MOST_COLUMNS]
    assert long == []


def test_the_loop_of_ones_own_runs_as_it_stands(tmp_path):
    (program,) = (block for of, block in blocks(ROOT / "docs/scripts.md") if of == "Your own loop")
    printed = run(program, tmp_path)
    assert len(re.findall(r"\d+", printed.split("]")[0])) == 4, printed


def test_the_policy_to_copy_finds_the_best_quotas_where_a_worker_is_absent():
    leaves = emulate.Change(0, 0, present=False)
    for speeds in ((1.0, 2.0, 3.0, 6.0), (0.004, 0.004, 0.006, 0.012)):
        cluster = emulate.EmulatedCluster(speeds, changes=(leaves,))
        quotas = emulate.simulate_policy(policy.one_at_a_time(least=2), cluster, 24, 40)[0]
        assert quotas[-2:].tolist() == [[0, 12, 8, 4], [0, 12, 8, 4]]


@pytest.mark.slow
def test_the_script_of_the_readme_runs_before_and_after_its_change(tmp_path):
    before = float(run(side("-"), tmp_path))
    assert "hetjax" not in side("-")
    after = run(side("+") + '\nprint(result.summary["train_loss"])', tmp_path)
    assert float(after.split()[-1]) == pytest.approx(before, rel=0.25)


def test_the_script_to_copy_is_that_of_the_readme():
    copy = next(block for _, block in blocks(ROOT / "docs/scripts.md"))
    assert ast.dump(ast.parse(copy)) == ast.dump(ast.parse(side("+")))


@pytest.mark.slow
def test_the_recipes_go_on_where_the_script_ends(tmp_path):
    (recipes,) = (block for of, block in blocks(ROOT / "docs/scripts.md") if of == "Four recipes")
    printed = run(side("+") + recipes, tmp_path)
    assert re.search(r"^0 [\d.]+ \[4, 4, 4, 4\]$", printed, re.MULTILINE)  # the fourth
    assert (tmp_path / "runs/mine/report.html").exists()  # the third


def measured():
    """Examples a second of hetjax and of the other, and how many times as many, of each row."""
    page = (ROOT / "experiments/results/processes/README.md").read_text()
    for title in ("The MLP in four processes", "LeNet in four processes"):
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        rows = {row.name: row.figure.split()[0] for row in read(section) if isinstance(row, Row)}
        speeds = [rows[name] for name in rows if name.endswith("DDP: examples a second")]
        ddp = max(speeds, key=lambda text: int(text.replace(",", "")))
        yield rows["adaptive: examples a second"], ddp, rows["adaptive over DDP"]
    rows = {row.name: row.figure for row in read(page) if isinstance(row, Row)}
    for kills in ("undisturbed", "a kill each 30 s"):
        ratio, own, other = re.findall(r"[\d,.]*\d", rows[f"hetjax over torchft, {kills}"])
        yield own, other, ratio


@pytest.mark.parametrize("page", [README, ROOT / "docs/index.md"], ids=["readme", "index"])
def test_figures_of_the_first_page_are_those_of_the_measurements(page):
    row = r"^\| (?:MLP|LeNet).* \| ([\d,]+) \| ([\d,]+) \| \**([\d.]+)\** \|$"
    assert re.findall(row, page.read_text(), re.M) == list(measured())
