"""What the site and the notebooks stand on, as one digest: `python -m docs.extensions.standing`.

That is every file that git knows of `docs/` and `notebooks/`, the pages of results and the own
parts, which the site shows, each module of hetjax that defines a public name, and what builds and
runs all this.
"""

import fnmatch
import hashlib
import inspect
import pathlib
import subprocess

from docs.extensions import outside, reference

SHOWN = (
    "docs/*",
    "notebooks/*",
    "experiments/results/*.md",  # `*` stands for folders, too
    "experiments/results/*.svg",
    "experiments/results/*.png",
    "experiments/drills/notebooks.py",
    "tests/own_parts/*",
    "pyproject.toml",
    ".ci/site",
)


def public_modules():
    """The files that define public names."""
    for name, found in reference.public_names():
        defined = inspect.unwrap(found) if callable(found) else reference.module_of(name)
        path = pathlib.Path(inspect.getsourcefile(defined) or "")
        yield path.relative_to(outside.ROOT).as_posix()


def files():
    """The names of all files, in order."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(command, cwd=outside.ROOT, check=True, capture_output=True, text=True)
    shown = (
        name
        for name in known.stdout.splitlines()
        if any(fnmatch.fnmatch(name, pattern) for pattern in SHOWN)
    )
    return sorted({*shown, *public_modules()})


def digest():
    """SHA-256 of the names and the contents."""
    whole = hashlib.sha256()
    for name in files():
        path = outside.ROOT / name
        if path.is_file():
            whole.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


if __name__ == "__main__":
    print(digest())
