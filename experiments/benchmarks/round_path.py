"""How much of hetjax does a steady round go through?

    python -m experiments.benchmarks.round_path [--before=DIR]

Of this checkout, and of another one beside it: the functions and files of hetjax that are called in
one round (the README's network on four workers) and in one outer step of a bilevel run; which
functions of hetjax lie between `fit` and the optimiser's update; the records that a round makes;
the widest record of `hetjax.rounds`. A round of `fit`, and an outer step, are what is between two
callbacks; one of `Run` is its call of `round`.

Only public names are asked for, so that other checkouts answer, too: the program that updates is
the one in which the optimiser was traced, and that of a worker the one in which the loss was. A
worker has threads of its own but in `virtual`, so that is where the way to its program is counted.

experiments/results/structure/README.md keeps the table.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from experiments import command_line

ROOT = pathlib.Path(__file__).parents[2]
_STEADY_ROUND, _STEADY_STEP = 20, 3  # that are looked at; nothing is compiled in them
_BEFORE = flags.DEFINE_string("before", "", "Directory of another checkout, to compare with.")
_OUT = flags.DEFINE_string("out", "", "What one checkout goes through, as JSON: for its process.")

ROWS = {
    "round of `Run`, without `quota` and `data`": "round without",
    "… of `quota`": "quota",
    "… of `data`": "data",
    "round of `Run`": "round",
    "round of `Run`, `virtual`": "virtual round",
    "from `fit` to the optimiser's update, `virtual`": "way",
    "round of `fit`, its driver with it": "fit",
    "outer step of `fit_bilevel`": "step",
    "hops from `fit` to a worker's program": "to the worker",
    "hops from `fit_bilevel` to a worker's program": "to the level's worker",
    "fields of the widest record of `rounds`": "widest",
    "records that a round of `fit` makes": "records",
    "… with microbatches done, quotas or seconds": "of work",
    "… of these outside `quota`": "outside",
    "… outside, with microbatches done": "done",
    "… outside, with quotas": "quotas",
    "… outside, with seconds": "secs",
}
_HELD: dict[str, Callable[[str], bool]] = {
    "done": lambda field: "microbatches_done" in field,
    "quotas": lambda field: "quota" in field,
    "secs": lambda field: field.endswith("secs"),
}


class Watch:
    """What is called, and which records are made, while it looks.

    Args:
        package: the directory whose functions count.
    """

    def __init__(self, package: pathlib.Path) -> None:
        self._package = str(package) + os.sep
        self._thread = threading.local()
        self.looks = False
        self.called: set[tuple[str, str, int]] = set()  # file, function, line
        self.records: set[type] = set()  # made, or traced
        self.ways: dict[str, list[str]] = {}  # to a program, by whose function was traced in it
        self.traced: dict[str, list[str]] = {}  # the way from its program to a function

    @contextlib.contextmanager
    def profiling(self) -> Iterator[None]:
        """Hears of every call, and of every program that is made of a function by `jax.jit`."""
        import jax

        plain = jax.jit
        jax.jit = functools.partial(self._jit, plain)
        threading.setprofile(self._hear)  # of the threads that start from here on
        sys.setprofile(self._hear)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            jax.jit = plain

    def named(self, name: str, function: Any) -> Any:
        """A function of the user; it names the programs in which it is traced."""

        def same(*args: Any, **fields: Any) -> Any:
            program = self._traced_program()
            if program is not None:
                program.names.add(name)
                self.traced[name] = self._way()[len(program.way) :]
            return function(*args, **fields)

        return same

    def _traced_program(self) -> "_Program | None":
        return getattr(self._thread, "program", None)

    def _hear(self, frame: Any, event: str, argument: Any) -> None:
        del argument
        if event != "call" or not (self.looks or self._traced_program()):
            return
        code = frame.f_code
        if code.co_filename.startswith(self._package):
            if self.looks and (not code.co_name.startswith("<") or code.co_name == "<lambda>"):
                file = code.co_filename.removeprefix(self._package)
                self.called.add((file, code.co_qualname, code.co_firstlineno))
        elif code.co_varnames and code.co_varnames[0] in ("_cls", "cls", "self"):
            first = frame.f_locals.get(code.co_varnames[0])
            made = first if isinstance(first, type) else type(first)
            if made.__module__.split(".")[0] == "hetjax" and _fields_of(made):
                self.records.add(made)

    def _jit(self, plain: Any, function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(self._jit, plain, **options)
        program = _Program(self)

        @functools.wraps(function)
        def traced(*args: Any, **fields: Any) -> Any:
            outer = self._traced_program()
            self._thread.program, program.way = program, self._way()
            try:
                return function(*args, **fields)
            finally:
                self._thread.program = outer

        program.jitted = plain(traced, **options)
        return program

    def begun(self, program: "_Program") -> None:
        """A program is called."""
        for name in program.names if self.looks else ():
            self.ways[name] = max(self.ways.get(name, []), self._way(), key=len)

    def _way(self) -> list[str]:
        """The functions of the package that this thread is in, the outermost first."""
        frame: Any = inspect.currentframe()
        way: list[str] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self._package):
                way.append(f"{code.co_filename.removeprefix(self._package)}:{code.co_qualname}")
            frame = frame.f_back
        return way[::-1]


class _Program:
    """A jitted function that tells its watch when it is called."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.jitted: Any = None
        self.names: set[str] = set()  # of the user's functions that were traced in it
        self.way: list[str] = []  # to where it was traced

    def __call__(self, *args: Any, **fields: Any) -> Any:
        self._watch.begun(self)
        return self.jitted(*args, **fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def _fields_of(made: type) -> list[str]:
    """Of a record; empty for other classes."""
    if dataclasses.is_dataclass(made):
        return [field.name for field in dataclasses.fields(made)]
    return list(getattr(made, "_fields", ()))


def look() -> dict[str, list[int]]:
    """What a round and an outer step of the hetjax that is imported go through."""
    import hetjax

    assert hetjax.__file__ is not None
    package = pathlib.Path(hetjax.__file__).resolve().parent
    if not package.is_relative_to(pathlib.Path(os.environ["PYTHONPATH"]).resolve()):
        sys.exit(f"hetjax was imported from {package}, and not from {os.environ['PYTHONPATH']}")
    hetjax.use_cpu_workers(4)

    def watched(run: Callable[[Watch, str], None], local: str = "stepped") -> Watch:
        watch = Watch(package)
        with watch.profiling():
            run(watch, local)
        return watch

    of_run, of_fit, of_step = watched(_rounds), watched(_fit), watched(_fit_bilevel)
    played = watched(_fit, "virtual")
    way = played.ways["update"] + played.traced["update"]
    rooms = {
        room: {found for found in of_run.called if found[0].startswith(room + os.sep)}
        for room in ("quota", "data")
    }
    held = {
        name: {made for made in of_fit.records if any(map(holds, _fields_of(made)))}
        for name, holds in _HELD.items()
    }
    of_work = set().union(*held.values())
    outside = {made for made in of_work if not made.__module__.startswith("hetjax.quota")}
    return {
        "round without": _sizes(of_run.called - rooms["quota"] - rooms["data"]),
        "quota": _sizes(rooms["quota"]),
        "data": _sizes(rooms["data"]),
        "round": _sizes(of_run.called),
        "fit": _sizes(of_fit.called),
        "step": _sizes(of_step.called),
        "virtual round": _sizes(watched(_rounds, "virtual").called),
        "way": [len(way), len({step.split(":")[0] for step in way})],
        "widest": [max(len(_fields_of(made)) for made in _records_of("hetjax.rounds"))],
        "to the worker": [len(played.ways["loss"])],
        "to the level's worker": [len(watched(_fit_bilevel, "virtual").ways["loss"])],
        "records": [len(of_fit.records)],
        "of work": [len(of_work)],
        "outside": [len(outside)],
        **{name: [len(found & outside)] for name, found in held.items()},
    }


def _records_of(package: str) -> list[type]:
    """The classes of records that its modules define, but for lines and states that are kept."""
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    return [
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type)
        and found.__module__ == module.__name__
        and not hasattr(found, "to_plain")
    ]


def _sizes(called: set[tuple[str, str, int]]) -> list[int]:
    return [len(called), len({file for file, _, _ in called})]


def _problem(watch: Watch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of the README: a network in NNX, and what is as good for `fit` as for `Run`."""
    import numpy as np
    import optax
    from flax import nnx

    import hetjax

    x = np.random.default_rng(0).normal(size=(2048, 10)).astype(np.float32)
    data = {"x": x, "y": np.sin(x[:, :1] + x[:, 1:2])}
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(10, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 1, rngs=rngs))

    def loss(model: Any, batch: Any) -> Any:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)

    adam = optax.adam(3e-3)
    optimizer = optax.GradientTransformation(adam.init, watch.named("update", adam.update))
    loss_fn, params = hetjax.nnx_loss(model, loss)
    speeds = {"num_workers": 4, "secs_per_microbatch": (0.004, 0.006, 0.006, 0.012)}
    settings = {"epochs": 3, "microbatch_size": 8, "budget": 16, "cluster": speeds}
    return (watch.named("loss", loss_fn), params, optimizer, data), settings


def _rounds(watch: Watch, local: str) -> None:
    import hetjax

    given, settings = _problem(watch)
    with hetjax.Run(*given, local=local, **settings) as run:
        state = run.init()
        while not run.done(state):
            watch.looks = state.rounds_done == _STEADY_ROUND
            state, _ = run.round(state)
            watch.looks = False


def _fit(watch: Watch, local: str) -> None:
    import hetjax

    given, settings = _problem(watch)

    def note(line: Any) -> None:
        watch.looks = line.round == _STEADY_ROUND

    hetjax.fit(*given, local=local, callbacks=[note], progress=False, **settings)


def _fit_bilevel(watch: Watch, local: str) -> None:
    """The example of `fit_bilevel`: the weight of a ridge."""
    import numpy as np
    import optax
    from jax import numpy as jnp

    import hetjax
    from hetjax import bilevel

    inputs = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)
    train, validation = (
        {"inputs": part, "targets": part @ np.ones(3, np.float32)}
        for part in (inputs[:32], inputs[32:])
    )

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return (batch["inputs"] @ y - batch["targets"]) ** 2

    def lower(x: Any, y: Any, batch: Any) -> Any:
        return upper(x, y, batch) + jnp.exp(x) * jnp.sum(y**2)

    def note(line: Any) -> None:
        watch.looks = line.step == _STEADY_STEP

    hetjax.fit_bilevel(
        bilevel.Bilevel(upper, watch.named("loss", lower)),
        np.float32(1.0),
        np.zeros(3, np.float32),
        bilevel.implicit(bilevel.descent(optax.sgd(0.1)), 5),
        optax.sgd(0.5),
        upper_source=validation,
        lower_source=train,
        outer_steps=6,
        microbatch_size=4,
        local=local,
        cluster={"num_workers": 4},
        progress=False,
        callbacks=[note],
    )


def figures(checkout: pathlib.Path) -> dict[str, list[int]]:
    """What a checkout goes through, found in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory, "found.json")
        subprocess.run(
            [sys.executable, "-P", __file__, f"--out={out}"],
            env=os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"},
            check=True,
        )
        return json.loads(out.read_text())


def main() -> None:
    if _OUT.value:
        pathlib.Path(_OUT.value).write_text(json.dumps(look()))
        return
    from experiments import markdown
    from experiments.benchmarks import code_size

    before = [pathlib.Path(_BEFORE.value).resolve()] if _BEFORE.value else []
    checkouts = [*before, ROOT]
    of_each = [figures(checkout) for checkout in checkouts]
    names = [code_size.commit(checkout) for checkout in checkouts]
    told = (
        [label, *(" in ".join(map(str, found[key])) for found in of_each)]
        for label, key in ROWS.items()
    )
    print(markdown.table(["name", *names], told))
    print("\nFunctions in files, and classes of records.")


if __name__ == "__main__":
    command_line.run(main)
