"""Every Python block of every page: a program runs as it stands, and parts of one in turn."""

import re

import pytest

from tests.pages.blocks import DOCS, README, ROOT, blocks_of, is_program, name_of, run

# These are run with more checks by `tests/test_readme.py`.
CHECKED = {
    (ROOT / "docs/scripts.md", "Your own loop"),
    (ROOT / "docs/scripts.md", "Four recipes"),
}

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

RUN = [
    block
    for path in (README, *DOCS)
    for block in blocks_of(path)
    if block.language == "python" and not block.why_not and (path, block.title) not in CHECKED
]
PROGRAMS = [block for block in RUN if is_program(block.text)]
PARTS = {}
for block in RUN:
    if not is_program(block.text):
        PARTS.setdefault(block.path, []).append(block.text)


def shown(path):
    """The files that a page shows whole, which a reader copies."""
    names = re.findall(r"^```\{literalinclude\} (\S+\.py)$", path.read_text(), re.MULTILINE)
    return [(path.parent / name).resolve() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", PROGRAMS, ids=[f"{name_of(each.path)}:{each.line}" for each in PROGRAMS]
)
def test_a_program_of_a_page_runs_as_it_stands(block, tmp_path):
    run(block.text, tmp_path, files=shown(block.path))


@pytest.mark.slow
@pytest.mark.parametrize("path", PARTS, ids=name_of)
def test_the_parts_of_programs_of_a_page_run_in_turn(path, tmp_path):
    run("\n".join([SURROUNDINGS, *PARTS[path]]), tmp_path, files=shown(path))


LANGUAGES = {
    *("python", "py", "sh", "console"),  # run by a test each, or compared with a file
    *("", "text", "json", "toml", "yaml", "ini", "html", "bibtex", "diff", "dockerfile"),
}


@pytest.mark.parametrize("path", [README, *DOCS], ids=name_of)
def test_each_block_is_of_a_language_that_is_run_or_is_no_program(path):
    found = list(blocks_of(path))
    assert {block.language for block in found} <= LANGUAGES
    assert path.read_text().count("<!-- not run:") == sum(bool(block.why_not) for block in found)
    for block in found:
        if block.language in ("", "text"):
            compiled = block.text.startswith(("import ", "python -m", "pip ", "$ "))
            assert not compiled, f"{path}:{block.line} has code, but no language"


PAGE = """# Page

```{figure} picture.svg
```

## Tabs

::::{tab-set}
<!-- not run: needs a cluster -->
```python
1
```
  ```{code-block} python
  :caption: a.py
  import a
  ```
::::
```
text
```
"""


def test_blocks_are_found_among_directives(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    found = [each[1:] for each in blocks_of(tmp_path / "page.md")]
    assert found == [
        ("Tabs", "python", "1\n", "needs a cluster", 11),
        ("Tabs", "python", "import a\n", "", 14),
        ("Tabs", "", "text\n", "", 19),
    ]
