"""Names of the release before: they lead to what has moved to a new place, and say so.

`hetjax/__init__.py` has the table of modules, and imports this file when one is asked for.
"""

import importlib.util
import sys
import warnings
from typing import Any

_NAMES = {
    "hetjax.config": (
        "hetjax.zoo.config",
        ("ExperimentConfig", "base", "completed", "from_json", "load", "to_dict", "validate"),
    ),
}


class _Loader:
    """Loads the module of the new name: one module, whatever it is called."""

    def __init__(self, new: str):
        self._new = new

    def create_module(self, spec: Any) -> Any:
        # Frames of importlib do not count, so the warning is the importer's.
        warnings.warn(_said(spec.name, self._new), DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self._new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Gives the module its own specification back: importlib has put the old name's there."""
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> Any:
        """The program of `python -m` with the old name."""
        print(f"hetjax: {_said(fullname, self._new)}", file=sys.stderr)
        spec: Any = importlib.util.find_spec(self._new)
        return spec.loader.get_code(spec.name)


def spec(old: str, new: str) -> Any:
    """The specification of a module that has moved; None where there is none of the new name."""
    if importlib.util.find_spec(new) is None:
        return None
    return importlib.util.spec_from_loader(old, _Loader(new), is_package=False)  # type: ignore[arg-type]


def attribute(module: str, name: str) -> Any:
    """What a module had by this name, from its new place.

    Raises:
      AttributeError: the module never had it.
    """
    new, names = _NAMES[module]
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # Behind the module's own __getattr__ there is who asks.
    warnings.warn(_said(f"{module}.{name}", f"{new}.{name}"), DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(new), name)


def _said(old: str, new: str) -> str:
    return f"{old} is {new} now; the old name goes with the next release"
