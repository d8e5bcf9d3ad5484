"""Nothing in the package runs what it reads."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "hetjax").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")])
MODULES = {"yaml", "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Between the launcher and the processes that it has started; of a drill's own functions, for Ray.
OWN = {"local_carrier.py": "pickle", "ray_nodes.py": "cloudpickle"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}


def name_of(node):
    """A dotted name as it is called, or an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(tree):
    """What in a module could run what somebody else wrote."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from (name for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = name_of(node.func)
        if called in CALLS:
            yield called
        for keyword in node.keywords:
            value = getattr(keyword.value, "value", None)
            if keyword.arg in ("shell", "allow_pickle") and value is not False:
                yield f"{called}({keyword.arg}=…)"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_that_is_read_is_run(path):
    found = set(unsafe(ast.parse(path.read_text())))
    assert found - {OWN.get(path.name)} == set()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "eval('1')",
        "subprocess.run('ls', shell=True)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_ban_finds_what_is_banned(code):
    assert list(unsafe(ast.parse(code)))
