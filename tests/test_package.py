"""The package as a whole: who imports whom, and what starts without JAX."""

import ast
import importlib.metadata
import importlib.util
import inspect
import pathlib
import re
import sys
import tomllib

import jax
import pytest

import hetjax
from hetjax.inputs import arguments
from tests.launcher import launches

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted((ROOT / "hetjax").rglob("*.py"))

# Imports point to a lower number, or stay within the part.
ORDER = (
    "executor extras memory messages paths process_info starting types parts whole wires",
    "checkpoints compiled cpu_workers digests mesh reported schedules trees writers",
    "extra_arguments report",  # whose cards graphs, schedules and results show in a notebook
    "gates ordering quota topology",  # the four kinds of parts know none of each other
    "cluster liveness losses placement",  # of which the first plays policies on the virtual clock
    "comm",
    "config launcher",
    "launch simulate adapters data slices",
    *("local", "inputs", "rounds", "records", "training", "bilevel ray"),
    "zoo",  # no part of the core
)
LAYERS = {name: layer for layer, names in enumerate(ORDER) for name in names.split()}


def imports_of(path):
    """(module, its first part below hetjax, the second) of each hetjax import in a file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            yield name.split(".")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downward(path):
    parts = path.relative_to(ROOT / "hetjax").with_suffix("").parts
    if parts == ("__init__",):
        return
    for name in imports_of(path):
        if name[0] != "hetjax":
            assert name[:2] != ["absl", "flags"] or parts == ("launch",), name
            assert name[0] not in ("tensorflow", "torch", "clu"), name
            continue
        other = name[1]
        assert other in LAYERS, f"{other} has no layer"
        is_below = LAYERS[other] < LAYERS[parts[0]] or other == parts[0]
        assert is_below, f"{'.'.join(parts)} imports {'.'.join(name)}"


def test_a_checkout_that_is_not_installed_knows_its_version(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert arguments.versions() == {"hetjax": project["version"], "jax": jax.__version__}


def modules_after(code):
    loaded = "print(*(name for name, module in sys.modules.items() if module))"
    done = launches.python(f"{code}\nimport sys\n{loaded}")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_core_needs_eight_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}
    extra = {
        re.match(r"[\w-]+", each)[0]
        for name in ("experiments", "tensorboard", "wandb", "mlflow", "ray")
        for each in project["optional-dependencies"][name]
    }
    assert core == {
        *("flax", "jax", "matplotlib", "numpy", "optax", "orbax-checkpoint", "scipy", "tqdm")
    }
    imported = {name[0] for path in SOURCES for name in imports_of(path)}
    known = {each.replace("-", "_") for each in core | extra} | {"hetjax", "orbax", "mlflow"}
    assert imported <= known | sys.stdlib_module_names | {"torch", "IPython"}


NEEDED = """
import sys
for name in ("ml_collections", "tensorflow_datasets", "array_record"):
    sys.modules[name] = None  # as if it were not installed
"""


@pytest.mark.slow
def test_the_core_trains_without_the_extra(tmp_path):
    modules_after(
        NEEDED
        + f"""
import hetjax, numpy as np, optax
from hetjax.zoo.builders import digits
assert len(digits.arrays()[0]["label"]) == 1438
hetjax.use_cpu_workers(2)
x = np.arange(16, dtype=np.float32)
result = hetjax.fit(
    lambda params, examples, rng: (examples["x"] * params - 1) ** 2, np.float32(0.0),
    optax.sgd(0.001), {{"x": x}}, budget=2, microbatch_size=2, max_rounds=2,
    workdir={str(tmp_path)!r},
)
assert result.params > 0, result
"""
    )


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("from hetjax.zoo import config; config.base()", "ml_collections"),
        ("from hetjax.zoo import datasets; datasets.load('digits')", "tensorflow_datasets"),
    ],
)
def test_a_missing_extra_is_asked_for(call, missing):
    done = launches.python(f"{NEEDED}\n{call}")
    assert done.returncode == 1
    assert re.search(rf"this needs {missing}.*pip install 'hetjax\[experiments\]'", done.stderr)


ROOMS = sorted(path.parent for path in SOURCES if path.name == "__init__.py")


@pytest.mark.parametrize("room", ROOMS, ids=lambda p: p.name)
def test_every_room_says_what_lives_there(room):
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert said
    assert len(said.split("\n\n")) >= 2, "one sentence, and a paragraph"


def test_quotas_configuration_and_data_start_without_jax():
    loaded = modules_after(
        "import hetjax, hetjax.quota, hetjax.gates, hetjax.ordering, hetjax.topology,"
        " hetjax.config, hetjax.cluster.emulate, hetjax.zoo.datasets"
    )
    assert "hetjax.quota.adaptive" in loaded
    assert not loaded & {"jax", "flax", "tensorflow", "torch", "matplotlib"}


def test_every_public_name_resolves():
    for name in hetjax.__all__:
        found = getattr(hetjax, name)
        assert callable(found) or inspect.ismodule(found) or found is hetjax.STOP
    assert set(hetjax.__all__) <= set(dir(hetjax))
    with pytest.raises(AttributeError, match="fitt"):
        hetjax.fitt  # noqa: B018
