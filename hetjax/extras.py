"""Packages that the core does not need, asked for by one sentence where they are missing."""

import importlib.util


def require(*packages: str) -> None:
    """Sees that packages of the extra `experiments` are installed.

    Raises:
      ModuleNotFoundError: some are not; says which, and how to get them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"this needs {', '.join(missing)}, which hetjax alone does not bring: "
            "pip install 'hetjax[experiments]' (in a checkout: pip install -e '.[experiments]')",
            name=missing[0],
        )
