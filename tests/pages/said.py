"""What the page of a public name does not say and should: shapes or types, units, errors."""

import ast
import inspect
import re
import textwrap

from docs.extensions import reference
from hetjax import parts

# A value of these is said in words, with its shape or its keys; of others the name is enough.
OPAQUE = re.compile(r"Array|ndarray|\bAny\b|PyTree|\btuple\b|\bdict\b|Callable|Mapping|ArrayLike")
SHAPE = re.compile(r"\b(?:f|i|u|c|b|bool|key)(?:8|16|32|64)?\[")


def source_of(function):
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


def called(function):
    """The functions of hetjax that a function names and calls."""
    names = inspect.unwrap(function).__globals__
    for node in ast.walk(source_of(function)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            found = names.get(node.func.id)
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            found = getattr(names.get(node.func.value.id), node.func.attr, None)
        else:
            continue
        if inspect.isfunction(found) and found.__module__.startswith("hetjax"):
            yield found


def raises(function, depth=1):
    """Whether a function refuses what a user gives, itself or in a function that it calls."""
    refuses = any(
        isinstance(node, ast.Raise) and node.exc is not None and "ValueError" in ast.unparse(node)
        for node in ast.walk(source_of(function))
    )
    return refuses or (depth > 0 and any(raises(each, depth - 1) for each in called(function)))


def full_docstring(found):
    """With what its page adds."""
    return "\n".join([inspect.getdoc(found) or "", "", *reference.additions(found)])


def section(text, title):
    """The text of a section of a docstring; None where there is none."""
    found = re.search(rf"^{title}:\n(.*?)(?=^\w+:\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return found and found[1]


def arguments_of(text):
    """The names that a section `Args` explains; `a, b: …` explains two."""
    for names in re.findall(r"^ +([\w*, ]+)(?: \([^)]*\))?:", section(text, "Args") or "", re.M):
        yield from (name.strip(" *") for name in names.split(","))


def lacks_of_function(function, *, is_method=False):
    """What the docstring of a function does not say."""
    text, signature = full_docstring(function), inspect.signature(function)
    hints = reference.hints_of(function)
    if not inspect.getdoc(function):
        yield "a docstring"
        return
    told = set(arguments_of(text))
    for name in signature.parameters:
        if name in ("self", "cls") or name in told:
            continue
        in_words = is_method and (f"`{name}" in text or not OPAQUE.search(hints.get(name, "Any")))
        if not in_words:
            yield f"the argument {name}"
    result = hints.get("return", "")
    first = text.split("\n\n")[0]
    if OPAQUE.search(result) and not parts.is_factory(function):
        is_said = section(text, "Returns") or section(text, "Yields") or SHAPE.search(first)
        if not (is_said or first.startswith(("Returns ", "`"))):
            yield f"what it returns, {result}"
    if raises(function) and not section(text, "Raises"):
        yield "its errors"


def lacks_of_record(record):
    """Which fields of a record have a type that says too little, and no words."""
    text = inspect.getdoc(record) or ""
    for name, (hint, _, said) in reference.fields(record).items():
        if OPAQUE.search(hint) and not said and not re.search(rf"`{name}\b|^ *{name}:", text, re.M):
            yield f"the field {name}"


def lacks(found):
    """What the page of a public name does not say, in words."""
    if inspect.isclass(found):
        if not found.__doc__:
            yield "a docstring"
        if reference.is_record(found):
            yield from lacks_of_record(found)
        known = reference.fields(found) if reference.is_record(found) else {}
        for name, method in vars(found).items():
            if name in known:
                continue
            function = method.__func__ if isinstance(method, classmethod) else method
            if not name.startswith("_") and inspect.isfunction(function):
                for each in lacks_of_function(function, is_method=True):
                    yield f"{name}: {each}"
    elif inspect.isroutine(found):
        yield from lacks_of_function(found)
