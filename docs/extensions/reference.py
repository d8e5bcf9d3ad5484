"""A page of each public name: signature, shapes, units, errors, source.

Docstrings say most of it. What the code declares in another form is added here: the fields of a
record, which stand beside comments with their shapes and units, and the options of a factory, which
stand in its annotations.
"""

import ast
import functools
import importlib
import inspect
import re
import textwrap

import hetjax
from docs.extensions import outside
from hetjax import parts, reported

GENERATED = outside.DOCS / "reference/generated"

# Public names of modules beside `hetjax` and the rooms that it lists.
BESIDE = {
    "hetjax.simulate": ("simulate", "Simulation"),
    "hetjax.cluster.emulate": ("EmulatedCluster", "Change", "simulate_policy"),
    "hetjax.losses.loss": ("masked",),
}

OURS = re.compile(
    r"\b(?!(?:np|jax|nnx|optax|pathlib)\.)[a-z_]+\.(?=[A-Z])"
)  # a module before a type


def rooms():
    """Modules, each with its public names."""
    names = {name: getattr(hetjax, name) for name in hetjax.__all__}
    modules = [name for name, found in names.items() if inspect.ismodule(found)]
    yield "hetjax", [name for name in names if name not in modules]
    for name in modules:
        yield f"hetjax.{name}", exported(names[name])
    yield from BESIDE.items()


def exported(room):
    """The names that a room has for its users, sorted.

    Those of `__all__`, or what it imports under their own names, defines, or holds as a constant.
    """
    if hasattr(room, "__all__"):
        return sorted(room.__all__)
    tree, names = ast.parse(inspect.getsource(room)), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {each.name for each in node.names if each.asname == each.name}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names.add(node.name)
    return sorted(names)


def module_of(name):
    """The module that has a public name."""
    return importlib.import_module(name.rpartition(".")[0])


def public_names():
    """Each public name in full, with what it stands for."""
    for module, names in rooms():
        for name in names:
            yield f"{module}.{name}", getattr(importlib.import_module(module), name)


def is_record(found):
    """Whether it is a class whose fields are declared in its body."""
    return inspect.isclass(found) and (
        hasattr(found, "_fields") or hasattr(found, "__dataclass_fields__")
    )


@functools.cache
def fields(record):
    """`{name: (annotation, default or "", what is said of it)}` of a record, from its source."""
    lines = textwrap.dedent(inspect.getsource(record)).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    found = {}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or node.target.id.startswith("_"):
            continue
        said = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said = inspect.cleandoc(after.value.value)
        default = ast.unparse(node.value) if node.value is not None else ""
        found[node.target.id] = (plain_hint(node.annotation), default, said)
    return found


def plain_hint(node):
    """An annotation as it is written, without the option that stands in it."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Annotated"):
        node = node.slice.elts[0]
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return OURS.sub("", node.value if is_text else ast.unparse(node))


@functools.cache
def hints_of(function):
    """`{parameter: annotation}` as a function's source has them; its result's as `return`."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    node = ast.parse(source).body[0]
    if not isinstance(node, ast.FunctionDef):
        return {}
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    hints = {each.arg: plain_hint(each.annotation) for each in every if each.annotation}
    return hints | ({"return": plain_hint(node.returns)} if node.returns else {})


def field_line(name, hint, default, said):
    """The line of a field."""
    by_default = f" By default `{default}`." if default else ""
    return f"    {name} ({hint}): {' '.join(said.split())}{by_default}"


def additions(found):
    """Sections for the docstring of a public name, of what its code declares."""
    if is_record(found):
        text = inspect.getdoc(found) or ""
        told = re.findall(r"^ +(\w+)(?: \(.*?\))?:", text, re.MULTILINE)  # in its docstring
        left = {name: field for name, field in fields(found).items() if name not in told}
        if left:
            yield "Fields:"
        for name, field in left.items():
            yield field_line(name, *field)
            if issubclass(found, reported.Grouped) and is_record(found.__annotations__[name]):
                group = fields(found.__annotations__[name])
                yield from (field_line(f"{name}.{each}", *group[each]) for each in group)
    if parts.is_factory(found) and "Args:" not in (found.__doc__ or ""):
        options = parts.options_of(found)
        if options:
            yield "Args:"
        for name, option in options.items():
            unit = f"{option.unit} " if option.unit else ""
            yield f"    {name}: {unit}{option.says}; {option.rule.allowed}."
    if parts.is_factory(found) and "Raises:" not in (found.__doc__ or ""):
        yield ""
        yield "Raises:"
        yield "    ValueError: an argument is out of range, unknown or missing."


def complete(app, what, name, found, options, lines):
    if what not in ("class", "function"):
        return
    added = list(additions(found))
    if added:
        lines += ["", *added]


def skip(app, what, name, found, skips, options):
    """What no user calls."""
    return True if name.startswith("_") else None


def signature(app, what, name, found, options, written, returns):
    """The signature as the source has it; of a record its fields, whose types are told below."""
    if is_record(found):
        each = [f"{n}={default}" if default else n for n, (_, default, _) in fields(found).items()]
        return f"({', '.join(each)})", None
    function = found.__init__ if inspect.isclass(found) else found
    if not inspect.isfunction(inspect.unwrap(function)):
        return None
    hints = hints_of(function)
    parameters = [
        each.replace(annotation=hints.get(each.name, inspect.Parameter.empty))
        for each in inspect.signature(function).parameters.values()
        if each.name not in ("self", "cls")
    ]
    from sphinx.util.inspect import stringify_signature  # tests go without it

    text = stringify_signature(inspect.Signature(parameters))
    return text, hints.get("return") if what != "class" else None


def entries(registry):
    """The table of a registry: its names, and what each stands for."""
    rows = ["   * - name", "     - what it is"]
    for name, entry in registry.items():
        if callable(entry):
            said = f"`{entry.__name__}`: {inspect.getdoc(entry).splitlines()[0]}"
        else:
            said = f"{entry.name}. {entry.paper}. Assumes: {entry.assumes}."
        rows += [f"   * - ``{name}``", f"     - {said}"]
    return "\n".join(
        ["   .. list-table::", "      :header-rows: 1", "", *(f"   {r}" for r in rows)]
    )


def page(name, found):
    directive, options = "autodata", "   :no-value:\n"
    if isinstance(found, dict):
        title = name.removeprefix("hetjax.")
        value = f".. py:data:: {name}\n\n   By name, as a configuration has them:\n\n"
        return f"{title}\n{'=' * len(title)}\n\n{value}{entries(found)}\n"
    if inspect.isclass(found):
        directive, options = "autoclass", "   :members:\n"
        if issubclass(found, reported.Grouped):
            options += "   :inherited-members:\n"
        if is_record(found):  # their fields are told once, by `complete`
            options += f"   :exclude-members: {', '.join(fields(found))}\n"
    elif inspect.isroutine(found):
        directive, options = "autofunction", ""
    title = name.removeprefix("hetjax.") if name.count(".") > 1 else name
    return f"{title}\n{'=' * len(title)}\n\n.. {directive}:: {name}\n{options}"


def room_page(module, names):
    said = inspect.cleandoc(importlib.import_module(module).__doc__).split("\n\n")[0]
    entries = "\n".join(f"   {module}.{name}" for name in names)
    toctree = f".. toctree::\n   :maxdepth: 1\n\n{entries}\n"
    return f"{module}\n{'=' * len(module)}\n\n{said}\n\n{toctree}"


def write_pages(app):
    pages = {GENERATED / f"{name}.rst": page(name, found) for name, found in public_names()}
    for module, names in rooms():
        pages[GENERATED / f"room.{module}.rst"] = room_page(module, names)
    for path, text in pages.items():
        outside.write_if_new(path, text)
    for old in set(GENERATED.glob("*.rst")) - pages.keys():
        old.unlink()


def setup(app):
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", complete, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
