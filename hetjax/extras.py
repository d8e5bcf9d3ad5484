"""Packages that the core does not need, asked for by one sentence where they are missing."""

import importlib.util


def require(*packages: str, extra: str = "experiments") -> None:
    """Sees that packages of an extra are installed.

    Raises:
      ModuleNotFoundError: some are not; says which, and how to get them.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ModuleNotFoundError(
            f"this needs {', '.join(missing)}: pip install 'hetjax[{extra}]'", name=missing[0]
        )
