"""The README and the pages: short, linked, their programs run, their tables agree with the code."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from hetjax import gates, ordering, quota, topology

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "BUILD.md", *DOCS, *sorted((ROOT / "experiments/results").rglob("*.md"))]
MOST_LINES, MOST_COLUMNS = 150, 115

CHECKED = ("Your own loop", "Bring your own part")  # here the printed quotas are looked at, too

# What the reader of a page has where its blocks are no programs, but parts of one.
SURROUNDINGS = """
import hetjax

hetjax.use_cpu_workers(4)

import jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn, nnx

x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
data = test = {"x": x, "y": (x[:, 0] > 0).astype(np.int32)}
model = nnx.Sequential(
    nnx.LoRA(8, 2, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 2, rngs=nnx.Rngs(0))
)


class Adapted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="dense")(x) + nn.Dense(2, name="lora")(x)


module = Adapted()
variables = module.init(jax.random.key(0), x[:1])


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


loss_fn, params = hetjax.nnx_loss(model, loss)
metrics = hetjax.nnx_metrics(model, lambda model, batch: {"loss": loss(model, batch)})
"""


def blocks(path, language="python"):
    """Those of a page, each with the title of its section."""
    for section in re.split(r"^(?=##+ )", path.read_text(), flags=re.MULTILINE):
        title = section.splitlines()[0].lstrip("# ") if section else ""
        for block in re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
            yield title, block


def is_program(block):
    return block.startswith(("import ", "from "))


def run(program, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def side(sign):
    """The script of the README before ('-') and after ('+') its change."""
    ((_, diff),) = blocks(README, "diff")
    return "".join(
        line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in (sign, " ", "\n")
    )


PROGRAMS = [
    (path, title, block)
    for path in DOCS
    for title, block in blocks(path)
    if is_program(block) and title not in CHECKED
]
OF_PARTS = [
    path for path in DOCS if any(not is_program(block) for _, block in blocks(path))
]  # of programs


def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    outside = re.sub(r"^```.*?^```", "", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in outside.splitlines() if len(line) > MOST_COLUMNS]
    assert long == []


@pytest.mark.parametrize("title", CHECKED)
def test_the_example_runs_as_it_stands(title, tmp_path):
    (program,) = (block for of, block in blocks(ROOT / "docs/scripts.md") if of == title)
    printed = run(program, tmp_path)
    quotas = [int(number) for number in re.findall(r"\d+", printed.split("]")[0])]
    assert len(quotas) == 4, printed
    if title == "Bring your own part":
        assert sum(quotas) == 12
        assert quotas[0] > quotas[3] >= 2


def test_the_policy_to_copy_finds_the_best_quotas_where_a_worker_is_absent(tmp_path):
    (program,) = (b for of, b in blocks(ROOT / "docs/scripts.md") if of == "Bring your own part")
    absent = """
from hetjax.cluster import emulate
leaves = emulate.Change(0, 0, present=False)
for speeds in ((1.0, 2.0, 3.0, 6.0), (0.004, 0.004, 0.006, 0.012)):
    cluster = emulate.EmulatedCluster(speeds, changes=(leaves,))
    print(emulate.simulate_policy(one_at_a_time(least=2), cluster, 24, 40)[0][-2:].tolist())
"""
    printed = run(program[: program.index("x = np.random")] + absent, tmp_path)
    assert printed.splitlines() == ["[[0, 12, 8, 4], [0, 12, 8, 4]]"] * 2


@pytest.mark.slow
def test_the_script_of_the_readme_runs_before_and_after_its_change(tmp_path):
    before = float(run(side("-"), tmp_path))
    assert "hetjax" not in side("-")
    after = run(side("+") + '\nprint(result.summary["train_loss"])', tmp_path)
    assert float(after.split()[-1]) == pytest.approx(before, rel=0.25)


def test_the_script_to_copy_is_that_of_the_readme():
    (copy,) = (block for of, block in blocks(ROOT / "docs/scripts.md") if of == "Flax NNX")
    assert ast.dump(ast.parse(copy)) == ast.dump(ast.parse(side("+")))


@pytest.mark.slow
def test_the_recipes_go_on_where_the_script_ends(tmp_path):
    ((title, recipes),) = blocks(README)
    assert title == "Five recipes"
    printed = run(side("+") + recipes, tmp_path)
    assert re.search(r"^0 [\d.]+ \[4, 4, 4, 4\]$", printed, re.MULTILINE)  # the fourth
    assert (tmp_path / "runs/mine/report.html").exists()  # the third


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "block"),
    [(path, block) for path, _, block in PROGRAMS],
    ids=[f"{path.stem}-{title}" for path, title, _ in PROGRAMS],
)
def test_a_program_of_a_page_runs_as_it_stands(path, block, tmp_path):
    run(block, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", OF_PARTS, ids=lambda path: path.stem)
def test_the_parts_of_programs_of_a_page_run_in_turn(path, tmp_path):
    parts = [block for _, block in blocks(path) if not is_program(block)]
    run("\n".join([SURROUNDINGS, *parts]), tmp_path)


@pytest.mark.slow
def test_quotas_follow_the_changes_of_speed_as_the_page_says(tmp_path):
    page = ROOT / "docs/configuration.md"
    (block,) = (block for title, block in blocks(page) if title == "Changes of speed")
    (tmp_path / "changes.py").write_text(block)
    program = (
        "import json\n"
        "from experiments import train\n"
        "from hetjax.zoo import config\n"
        "loaded = config.load('changes.py')\n"
        "loaded.cluster.clock = 'virtual'\n"
        "result = train.train_and_evaluate(config.validate(loaded), None, progress=False)\n"
        "print(json.dumps([line['quotas'] for line in result.history if line['full']]))\n"
        "print(json.dumps([line['round'] for line in result.history if line['full']]))\n"
    )
    lines = run(program, tmp_path).splitlines()[-2:]
    quotas, rounds = map(ast.literal_eval, lines)
    by_round = dict(zip(rounds, quotas, strict=True))
    text = page.read_text()
    told = re.findall(r"(\d) (\d) (\d) (\d)\s+\(round\s+(\d+)\)", text)
    assert len(told) == 4
    for *expected, when in told:
        assert by_round[int(when)] == [int(quota) for quota in expected]
    tried = "some rounds after each change \\((\\d+), (\\d+) and (\\d+) here\\)"
    equal = [
        when
        for when, quotas in by_round.items()
        if when and max(quotas) - min(quota for quota in quotas if quota) <= 1
    ]
    assert [str(when) for when in equal] == list(
        re.search(tried, " ".join(text.split()), re.IGNORECASE).groups()
    )


def slugs(path):
    """The anchors of a page, as GitHub makes them from its titles."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    wrong = []
    for target in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in slugs(file)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_programs_that_are_named_are_there(path):
    text = path.read_text()
    files = re.findall(r"`((?:configs|docs|experiments|hetjax|tests)/[\w./]*\w)/?`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []
    modules = re.findall(r"python -m ((?:experiments|hetjax)[\w.]*\w)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_each_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\((docs/\w+\.md)", README.read_text()))
    assert linked >= {f"docs/{path.name}" for path in DOCS if path.stem != "index"}


def test_the_table_of_fields_is_that_of_the_code():
    program = [sys.executable, "-m", "hetjax.zoo.config"]
    written = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert (ROOT / "docs/fields.md").read_text() == written


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("quotas", quota.POLICIES),
        ("rounds", topology.REDUCERS),
        ("rounds", gates.GATES),
        ("orders", ordering.ORDERINGS),
    ],
)
def test_the_tables_of_parts_have_them_all(page, names):
    table = re.findall(r"^\| (`.*?) \|", (ROOT / f"docs/{page}.md").read_text(), re.MULTILINE)
    told = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert told >= set(names)


def test_the_contracts_show_the_parts_as_they_are():
    """Each block of the page follows the name of its file, and has its lines but for blank ones."""

    def code(text):
        return [line.rstrip() for line in text.splitlines() if line.strip()]

    page = (ROOT / "docs/contracts.md").read_text()
    shown = re.findall(
        r"\]\(\.\./(tests/own_parts/\w+\.py)\)[^`]*```py\n(.*?)^```", page, re.S | re.M
    )
    assert len(shown) == page.count("```py\n") >= 5
    for path, extract in shown:
        of_file = [line.removeprefix("    ") for line in code((ROOT / path).read_text())]
        assert "\n".join(code(extract)) in "\n".join(of_file), path


def test_the_contracts_quote_the_refusals_of_the_code():
    page = (ROOT / "docs/contracts.md").read_text()
    rows = re.search(r"^\| returned by .*?\n\n", page, re.S | re.M).group(0).splitlines()[2:]
    quoted = [words for row in rows for words in re.findall(r'"([^"]+)"', row)]
    said = {
        node.value
        for path in (ROOT / "hetjax").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [words for words in quoted if not any(words in text for text in said)] == []
    assert len(quoted) >= len(rows)


def test_the_figures_of_the_readme_are_those_of_the_measurements():
    results = (ROOT / "experiments/results/quotas/README.md").read_text()
    columns = ("equal", "proportional each epoch", "dead_band", "adaptive")
    measured = [
        [f"{float(re.search(rf'{name} ([0-9.]+)', row).group(1)):.2f}" for name in columns]
        for row in re.findall(r"^\| mean round over the optimum, 200 rounds.*$", results, re.M)
    ]
    rows = re.findall(
        r"^\| .* \| (\d\.\d\d) \| (\d\.\d\d) \| (\d\.\d\d) \| \*\*(\d\.\d\d)\*\* \|$",
        README.read_text(),
        re.M,
    )
    assert [list(row) for row in rows] == measured
    assert len(rows) == 4
