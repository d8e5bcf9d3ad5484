"""Programs that a test runs, each in a process of its own that has the imports behind it.

Imports are much of what a short program takes. So a server imports JAX, Flax and hetjax once for
each worker of pytest-xdist, and a program is a fork of it: no device of JAX has been started there.
"""

import atexit
import functools
import gc
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import types
import warnings

ROOT = pathlib.Path(__file__).parents[1]


def run(arguments, directory, **environment) -> subprocess.CompletedProcess:
    """What `python ARGUMENTS` did in a directory: its status, and what it wrote.

    Args:
      arguments: `-c` and a text, `-m` and a module, or a file; and what the program is given.
      directory: becomes its own; hetjax is found from there as from a checkout.
      **environment: variables beside this process's own. JAX has read those of its own before.
    """
    arguments = [str(each) for each in arguments]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}"}
    environ |= environment
    with tempfile.TemporaryDirectory() as kept:
        paths = [pathlib.Path(kept, name) for name in ("stdout", "stderr")]
        server = _server()
        asked = [arguments, str(directory), environ, [str(path) for path in paths]]
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status, f"the server of programs ended ({server.wait()})"
        said = [path.read_text() for path in paths]
        return subprocess.CompletedProcess(arguments, int(status), *said)


@functools.cache
def _server():
    command = [sys.executable, "-m", "tests.programs"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, text=True, cwd=ROOT, **pipes)
    atexit.register(server.communicate)  # it ends when nobody can ask any more
    return server


def _serve():
    """Forks for each line; returns in the fork alone, with what it is to run."""
    for line in sys.stdin:
        asked = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks by what has threads
            process = os.fork()
        if not process:
            return asked
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def _become(arguments, directory, environ, paths):
    """Runs a program as Python would have started it."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    kind, *rest = arguments
    sys.path[0] = directory
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def _import():
    import flax.linen
    import flax.nnx
    import optax

    import hetjax

    del flax, optax
    for name in hetjax.__all__:
        getattr(hetjax, name)
    gc.collect()
    gc.freeze()  # or each fork copies and frees all of it as it ends


if __name__ == "__main__":
    _import()
    _become(*_serve())
