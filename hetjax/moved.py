"""Import paths of the release before: they lead to the modules' new places, and say so.

`import hetjax` imports this file, so what only an old path needs is imported when one is asked for.
"""

from typing import Any

_MOVED = {
    "hetjax.data.builders": "hetjax.zoo.builders",
    "hetjax.data.datasets": "hetjax.zoo.datasets",
    "hetjax.data.prepare": "hetjax.zoo.prepare",
    "hetjax.data.series": "hetjax.zoo.series",
    "hetjax.data.text": "hetjax.zoo.text",
    "hetjax.models": "hetjax.zoo.models",
    "hetjax.optimizers": "hetjax.zoo.optimizers",
}
_NAMES = {
    "hetjax.config": (
        "hetjax.zoo.config",
        ("ExperimentConfig", "base", "completed", "from_json", "load", "to_dict", "validate"),
    ),
}


class Finder:
    """Finds moved modules by their old names, and loads the modules of the new ones."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The specification of a module that has moved; None of any other."""
        if not fullname.startswith("hetjax.") or not (new := _new_name(fullname)):
            return None
        import importlib.util

        if importlib.util.find_spec(new) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=False)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        """The module of the new name: one module, whatever it is called."""
        import importlib
        import warnings

        # Frames of importlib do not count, so the warning is the importer's.
        warnings.warn(_said(spec.name, _new_name(spec.name)), DeprecationWarning, stacklevel=2)
        module = importlib.import_module(str(_new_name(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Gives the module its own specification back: importlib has put the old name's there."""
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> Any:
        """The program of `python -m` with the old name."""
        import importlib.util
        import sys

        print(f"hetjax: {_said(fullname, _new_name(fullname))}", file=sys.stderr)
        spec: Any = importlib.util.find_spec(str(_new_name(fullname)))
        return spec.loader.get_code(spec.name)


def _new_name(name: str) -> str | None:
    for old, new in _MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def attribute(module: str, name: str) -> Any:
    """What a module had by this name, from its new place.

    Raises:
      AttributeError: the module never had it.
    """
    import importlib
    import warnings

    new, names = _NAMES[module]
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # Behind the module's own __getattr__ there is who asks.
    warnings.warn(_said(f"{module}.{name}", f"{new}.{name}"), DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(new), name)


def _said(old: str, new: str | None) -> str:
    return f"{old} is {new} now; the old name goes with the next release"
