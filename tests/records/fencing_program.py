"""A run is stopped before one of the changes that it makes in its workdir. It goes on when the same
call has come to its end elsewhere.

    python -m tests.records.fencing_program DIRECTORY EVERY FIRST

Prints a line of JSON for each kind of change: what it is, how the process ended that was stopped,
what it said, and the files that it changed after it woke. Each run is a fork: JAX is imported once.
"""

import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import traceback

import numpy as np

import hetjax
from tests.rounds import problems

EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "open"}


def train(workdir):
    data = problems.classification(32, np.float32)
    fields = {"workers": 1, "local": "virtual", "microbatch_size": 4, "budget": 2, "epochs": 2}
    fields |= {"checkpoint": {"every_rounds": 2}, "writers": [hetjax.writers.csv()]}
    fields |= {"eval_source": data, "progress": False, "workdir": workdir}
    hetjax.fit(
        problems.softmax_loss, problems.initial_weights(np.float32), problems.SGD, data, **fields
    )


def changes(workdir, on_change):
    """Calls `on_change(kind)` before each change in a workdir, from when it is to lead."""
    begun = []

    def hook(event, given):
        if event not in EVENTS or not isinstance(given[0], str | os.PathLike):
            return
        if event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        places = [os.fspath(each) for each in given if isinstance(each, str | os.PathLike)]
        places = [os.path.relpath(each, workdir) for each in places if os.path.isabs(each)]
        if not places or places[0].startswith(".."):
            return
        if begun or "generations" in places[0]:
            begun.append(event)
            kind = " ".join([event, *(re.sub(r"[0-9a-f]{8,}", "*", each) for each in places)])
            on_change(re.sub(r"arrays/.*", "arrays/*", kind))

    sys.addaudithook(hook)


def forked(program, *given):
    """The number of a process that runs a function; what it says goes into a file."""
    sys.stdout.flush()
    if number := os.fork():
        return number
    try:
        program(*given)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)


def contents(workdir):
    """Of all files that are read; those that begin with a dot are half made."""
    files = {path.relative_to(workdir): path for path in workdir.rglob("*") if path.is_file()}
    is_hidden = lambda name: any(part.startswith(".") for part in name.parts)  # noqa: E731
    return {str(name): path.read_bytes() for name, path in files.items() if not is_hidden(name)}


def stopped(workdir, kind, number, said):
    """A run on a machine without locks that stops before the change of a kind and a number."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.lockf = no_locks
    seen = []

    def on_change(found):
        if found == kind:
            seen.append(found)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGSTOP)

    changes(workdir, on_change)
    train(workdir)


def main(directory, every, first):
    counts = directory / "counts"

    def count():
        found = {}

        def on_change(kind):
            found[kind] = found.get(kind, 0) + 1

        changes(directory / "counted", on_change)
        train(directory / "counted")
        counts.write_text(json.dumps(found))

    assert os.waitpid(forked(count), 0)[1] == 0
    for index, (kind, times) in enumerate(json.loads(counts.read_text()).items()):
        if (index - first) % every:
            continue
        workdir, said = directory / f"run-{index}", directory / f"said-{index}"
        sleeper = forked(stopped, workdir, kind, (times + 1) // 2, said)
        _, status = os.waitpid(sleeper, os.WUNTRACED)
        assert os.WIFSTOPPED(status), (kind, said.read_text())
        assert os.waitpid(forked(train, workdir), 0)[1] == 0, kind
        before = contents(workdir)
        os.kill(sleeper, signal.SIGCONT)
        _, status = os.waitpid(sleeper, 0)
        after = contents(workdir)
        names = {name for name in before | after if before.get(name) != after.get(name)}
        told = {"kind": kind, "code": os.waitstatus_to_exitcode(status), "changed": sorted(names)}
        print(json.dumps(told | {"said": said.read_text()[-300:]}), flush=True)
        shutil.rmtree(workdir)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve(), *map(int, sys.argv[2:]))
