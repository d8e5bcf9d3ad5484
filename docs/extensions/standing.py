"""What a part of CI stands on, as one digest: `python -m docs.extensions.standing site`.

`site`, which is the site and the notebooks, stands on every file that git knows of `docs/` and
`notebooks/`, the pages of results and the own parts, which the site shows, each module of hetjax
that defines a public name, and what builds and runs all this. `engines` stands on what starts,
joins, watches and resumes the processes of a run, the pages whose commands its tests run, and the
tests.
"""

import fnmatch
import hashlib
import inspect
import pathlib
import subprocess
import sys

from docs.extensions import outside, reference

SHOWN = {  # `*` stands for folders, too
    "site": (
        "docs/*",
        "notebooks/*",
        "experiments/results/*.md",
        "experiments/results/*.svg",
        "experiments/results/*.png",
        "experiments/drills/notebooks.py",
        "tests/own_parts/*",
        "tests/strangers/gan.py",
        "pyproject.toml",
        ".ci/site",
    ),
    "engines": (
        "hetjax/checkpoints/*",
        "hetjax/training/driver.py",
        "hetjax/comm/*",
        "hetjax/liveness/*",
        "hetjax/ray*",
        "experiments/drills/engine*.py",
        "experiments/drills/ray*.py",
        "experiments/train.py",
        "docs/processes.md",
        "docs/ray.md",
        "docs/schedulers.md",
        "tests/engines/*",
        "pyproject.toml",
        ".ci/engines",
    ),
}


def public_modules():
    """The files that define public names."""
    for name, found in reference.public_names():
        defined = inspect.unwrap(found) if callable(found) else reference.module_of(name)
        path = pathlib.Path(inspect.getsourcefile(defined) or "")
        yield path.relative_to(outside.ROOT).as_posix()


def files(part):
    """The names of all files, in order."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(command, cwd=outside.ROOT, check=True, capture_output=True, text=True)
    shown = (
        name
        for name in known.stdout.splitlines()
        if any(fnmatch.fnmatch(name, pattern) for pattern in SHOWN[part])
    )
    return sorted({*shown, *(public_modules() if part == "site" else ())})


def digest(part):
    """SHA-256 of the names and the contents."""
    whole = hashlib.sha256()
    for name in files(part):
        path = outside.ROOT / name
        if path.is_file():
            whole.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


if __name__ == "__main__":
    print(digest(sys.argv[1]))
