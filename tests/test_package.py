"""The package as a whole: who imports whom, and what starts without JAX."""

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import hetjax

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted((ROOT / "hetjax").rglob("*.py"))

# Imports point to a lower number, or stay within the part.
LAYERS = {
    "compiled": 0,
    "starting": 0,
    "types": 0,
    "values": 0,
    "interrupt": 0,
    "digests": 1,
    "mesh": 1,
    "parts": 1,
    "schedules": 1,
    "trees": 1,
    "weights": 1,
    "gates": 2,  # the four kinds of parts know none of each other
    "ordering": 2,
    "quota": 2,
    "topology": 2,
    "adapters": 2,
    "bilevel": 2,
    "models": 2,
    "checkpoints": 2,
    "processes": 2,
    "report": 2,
    "cluster": 3,  # plays policies on the virtual clock
    "data": 3,
    "kinds": 3,
    "launcher": 3,
    "config": 4,
    "launch": 4,
    "simulate": 4,
    "optimizers": 5,
    "rounds": 5,
    "records": 6,
    "task": 7,
    "driver": 8,
    "training": 9,
    "fitting": 10,
    "levels": 9,
}


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


ROOMS = sorted(path.parent for path in SOURCES if path.name == "__init__.py")


@pytest.mark.parametrize("room", ROOMS, ids=lambda p: p.name)
def test_every_room_says_what_lives_there(room):
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert said
    assert len(said.split("\n\n")) >= 2, "one sentence, and a paragraph"


def modules_after(code):
    output = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return set(output.stdout.split())


def test_quotas_configuration_and_data_start_without_jax():
    loaded = modules_after(
        "import hetjax, hetjax.quota, hetjax.gates, hetjax.ordering, hetjax.topology,"
        " hetjax.config, hetjax.cluster.emulate, hetjax.data.datasets"
    )
    assert "hetjax.quota.adaptive" in loaded
    assert not loaded & {"jax", "flax", "tensorflow", "torch", "matplotlib"}


def test_training_starts_without_tensorflow():
    loaded = modules_after("import hetjax\nhetjax.fit\nhetjax.nnx_loss")
    assert "jax" in loaded
    assert not loaded & {"tensorflow", "torch", "tensorflow_datasets", "matplotlib"}


def test_every_public_name_resolves():
    for name in hetjax.__all__:
        found = getattr(hetjax, name)
        assert callable(found) or inspect.ismodule(found) or found is hetjax.STOP
    assert set(hetjax.__all__) <= set(dir(hetjax))
    with pytest.raises(AttributeError, match="fitt"):
        hetjax.fitt  # noqa: B018
