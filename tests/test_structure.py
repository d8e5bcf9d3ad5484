"""What holds for every file: no private names of others, nothing too long, no circles of imports.

What does not hold yet is listed below. The lists may only shrink: an entry that is not needed
any more fails, too.
"""

import ast
import collections
import functools
import pathlib
import re

import pytest

from experiments.benchmarks import code_size

ROOT = pathlib.Path(__file__).parent.parent
MOST_FUNCTION_LINES, MOST_FILE_LINES = 80, 400
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("hetjax", "experiments")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TEST_FILES = {
    path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "tests").rglob("*.py"))
}

# Public, although their names begin with an underscore.
PUBLIC = {"_replace", "_asdict", "_make", "_fields", "_field_defaults", "_exit"}
# What other libraries give no public name.
NOT_OURS = {
    "hetjax/comm/runtime.py": {"_jax", "_src"},  # of jax
    "hetjax/compiled.py": {"_src"},  # of jax
    "hetjax/process_info.py": {"_inheriting"},  # of multiprocessing
    "hetjax/ray/joining.py": {"_raylet"},  # of ray
    "hetjax/zoo/builders/prepared.py": {"_active"},  # of tensorflow_datasets
}

PRIVATE_NOW: dict[str, set[str]] = {}
LONG_FUNCTIONS_NOW: set[str] = set()
LONG_FILES_NOW: set[str] = set()
# By which imports a circle is closed: when modules are imported, when functions are called, and
# for the types alone.
CIRCLES_NOW = {
    ("import",): set(),
    ("import", "call"): set(),
    ("import", "call", "typing"): set(),
}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


# Private names

BY_TEXT = ("getattr", "setattr", "hasattr", "delattr", "_replace")


def is_of_self(node):
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names(tree):
    """What a file defines: functions, classes, variables, fields, attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif is_of_self(node) and isinstance(node.ctx, ast.Store):
            yield node.attr


def foreign_names(tree):
    """The private names of other files that a file uses."""
    own = set(own_names(tree)) | PUBLIC
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Attribute):
            found = [] if is_of_self(node) else [node.attr]
        elif isinstance(node, ast.ImportFrom):
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_TEXT:
            found = [name.value for name in node.args[1:2] if isinstance(name, ast.Constant)]
        is_import = isinstance(node, ast.ImportFrom | ast.Import)
        for name in found:
            if isinstance(name, str) and is_private(name) and (is_import or name not in own):
                yield name


@pytest.mark.parametrize("name", FILES)
def test_no_file_uses_a_private_name_of_another(name):
    found = set(foreign_names(parsed(FILES[name])))
    assert found - NOT_OURS.get(name, set()) == PRIVATE_NOW.get(name, set())
    assert found >= NOT_OURS.get(name, set())  # the list has no more than is needed


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(x): return x._replace(a=1)", set()),
        ("class A:\n    def f(self, other): self._a = 1; return other._a", set()),
        ("def f(run): run._round(0)", {"_round"}),
        ("def f(run): getattr(run, '_state')", {"_state"}),
        ("from jax._src import core", {"_src"}),
        ("import m\ndef _read(): return m.__doc__, m._read", set()),
        ("import m\nm._read()", {"_read"}),
    ],
)
def test_private_names_of_others_are_found(text, names):
    assert set(foreign_names(ast.parse(text))) == names


# Lengths


def lines_without_docstring(function):
    count = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        text = function.body[0]
        count -= text.end_lineno - text.lineno + 1
    return count


def functions_of(name, path):
    """Each function of a file, as `file:Class.name`."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{child.name}."
                if not isinstance(child, ast.ClassDef):
                    yield f"{name}:{inner[:-1]}", child
            yield from walk(child, inner)

    yield from walk(parsed(path), "")


def test_functions_are_short():
    lengths = {
        function: lines_without_docstring(node)
        for name, path in FILES.items()
        for function, node in functions_of(name, path)
    }
    assert len(lengths) > 500
    too_long = {name: n for name, n in lengths.items() if n > MOST_FUNCTION_LINES}
    assert too_long.keys() == LONG_FUNCTIONS_NOW, too_long


def test_files_are_short():
    lengths = {n: len(p.read_text().splitlines()) for n, p in (FILES | TEST_FILES).items()}
    too_long = {name: n for name, n in lengths.items() if n > MOST_FILE_LINES}
    assert too_long.keys() == LONG_FILES_NOW, too_long


# What a module keeps

WITHOUT_STATE = re.compile(r"hetjax/(comm|liveness|launcher|ray)/|hetjax/launch.py")
MAKE_CONSTANTS = ("MappingProxyType", "frozenset", "logging.getLogger", "slice", "struct.Struct")
# Of a process there is one.
KEPT = {
    "hetjax/comm/runtime.py": ["@functools.cache current"],
    "hetjax/liveness/blocking_waits.py": ["@functools.cache of_process"],
}


def may_change(value):
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) not in MAKE_CONSTANTS
    if isinstance(value, ast.Subscript | ast.Lambda):  # a type, a function
        return False
    displays = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    return isinstance(value, displays) or any(map(may_change, ast.iter_child_nodes(value)))


def kept(tree):
    """What is no constant of a module or of its classes: values, caches, names that are set anew,
    here or from another module."""
    imported_here = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hetjax")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield ast.unparse(node)
        for made_by in getattr(node, "decorator_list", []):
            if re.search(r"\b(lru_)?cache\b", text := ast.unparse(made_by)):
                yield f"@{text} {node.name}"
        if isinstance(node, ast.Module | ast.ClassDef):
            for each in node.body:
                is_set = isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None
                if is_set and may_change(each.value):
                    yield ast.unparse(each)
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and ast.unparse(node.value) in imported_here:
            yield ast.unparse(node)


@pytest.mark.parametrize("name", [*filter(WITHOUT_STATE.match, FILES)])
def test_rooms_of_processes_keep_no_state_in_modules(name):
    assert list(kept(parsed(FILES[name]))) == KEPT.get(name, [])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A: tuple = (1, 'b', -2 ** 3)\nB = f'{A}'\nC = frozenset({1})\nD = list[int]", []),
        ("_hosts: dict[int, str] = {}", ["_hosts: dict[int, str] = {}"]),
        ("_known = (1, [])", ["_known = (1, [])"]),
        ("_asked = queue.SimpleQueue[int]()", ["_asked = queue.SimpleQueue[int]()"]),
        ("class A:\n    seen = set()", ["seen = set()"]),
        ("_own = None\ndef f():\n    global _own\n    _own = 1", ["global _own"]),
        ("@functools.cache\ndef f(): return []", ["@functools.cache f"]),
        ("from hetjax.comm import join\ndef f(): join.own = 1", ["join.own"]),
    ],
)
def test_what_a_module_keeps_is_found(text, found):
    assert list(kept(ast.parse(text))) == found


# Circles of imports


def module_name(name):
    parts = name.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(name): path for name, path in FILES.items()}


def imported(node, package):
    """The modules of this repository that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
        names = [
            f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
            for alias in node.names
        ]
    return [name for name in names if name in MODULES]


def edges(kinds):
    """Who imports whom by these kinds of imports: `import`, `call`, `typing`."""
    graph = collections.defaultdict(set)
    for module, path in MODULES.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]

        def walk(node, kind, module=module, package=package):
            if isinstance(node, ast.Import | ast.ImportFrom) and kind in kinds:
                graph[module].update(set(imported(node, package)) - {module})
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                for child in node.body:
                    walk(child, "typing")
                for child in node.orelse:
                    walk(child, kind)
                return
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                kind = "call"
            for child in ast.iter_child_nodes(node):
                walk(child, kind)

        walk(parsed(path), "import")
    return graph


def circles(graph):
    """The sets of modules that reach each other."""

    def reached(start):
        seen, left = set(), [start]
        while left:
            for other in graph.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    reach = {module: reached(module) for module in graph}
    return {
        frozenset(m for m in reach[module] if module in reach.get(m, ()))
        for module in graph
        if module in reach[module]
    }


@pytest.mark.parametrize("kinds", CIRCLES_NOW, ids="+".join)
def test_imports_make_no_circles(kinds):
    assert circles(edges(kinds)) == CIRCLES_NOW[kinds]


def test_every_kind_of_import_is_seen():
    kinds = ("import", "call", "typing")
    when_imported, when_called, for_types = (edges((kind,)) for kind in kinds)
    assert "hetjax.training.driver" in when_imported["hetjax.training.fitting"]
    assert "hetjax.quota" in when_imported["hetjax.rounds.planning"]
    assert "hetjax.ordering" in when_called["experiments.drills.faults"]
    assert for_types["hetjax.ordering"] == {"hetjax.ordering.balance"}


def test_lines_of_code_are_without_comments_and_docstrings():
    text = 'x = """a\n\nb"""  # c\n# d\nclass A:\n    """E\n    f."""\n\n    y: int\n    """G."""'
    assert code_size.code_lines(text) == 4  # two of x, class and y
    assert code_size.counts(ROOT)["rounds"] > 2000


def test_measurements_say_of_which_commit_they_are():
    pages = (ROOT / "experiments/results").rglob("*.md")
    texts = {str(path): text for path in pages if "# Measurements" in (text := path.read_text())}
    assert len(texts) >= 4
    for name, text in texts.items():
        assert re.search(r"of the code at commit [0-9a-f]{7}\b", text), name


def test_each_line_of_the_core_begins_with_the_name_of_tests():
    lines = (ROOT / "tests/core.txt").read_text().splitlines()
    for line in (line for line in lines if line and not line.startswith("#")):
        path, _, name = line.partition("::")
        assert (ROOT / path).exists(), line
        assert f"def {name}" in (ROOT / path).read_text() if name else True, line
