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
    "types": 0,
    "mesh": 0,
    "trees": 0,
    "values": 0,
    "parts": 0,
    "kinds": 1.4,
    "config": 1.5,
    "config_fields": 1.5,
    "config_files": 1.5,
    "config_groups": 1.5,
    "config_rules": 1.5,
    "quota": 1,
    "gates": 1,
    "ordering": 1,
    "topology": 1,
    "models": 1,
    "cluster": 2,  # plays policies on the virtual clock
    "report": 1,
    "data": 2,
    "training": 3,
    "simulate": 4,
    "launch": 3,
}
TOP_OF_TRAINING = {
    "driver",
    "fit",
    "planning",
    "reporting",
    "resume",
    "run",
    "run_records",
    "setup",
    "summary",
    "telemetry",
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
        assert (
            LAYERS[other] < LAYERS[parts[0]]
            or other == parts[0]
            or (LAYERS[other] == LAYERS[parts[0]] and LAYERS[other] in (0, 1.5))
        ), f"{'.'.join(parts)} imports {'.'.join(name)}"
        if parts[0] == other == "training" and parts[-1] not in TOP_OF_TRAINING | {"__init__"}:
            assert name[2] not in TOP_OF_TRAINING, f"{'.'.join(parts)} imports {'.'.join(name)}"


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
        assert callable(found) or inspect.ismodule(found)
    assert set(hetjax.__all__) <= set(dir(hetjax))
    with pytest.raises(AttributeError, match="fitt"):
        hetjax.fitt  # noqa: B018
