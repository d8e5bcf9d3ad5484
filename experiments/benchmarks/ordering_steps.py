"""What does balancing cost a training step? Figures with JAX, on the default backend.

A step is a round of one worker with one microbatch of 32, as the training loop runs it: the
local phase, then the sync phase with momentum SGD.
Forms are timed in turn, so that what the
machine does beside hits all of them; ratios are medians of ratios within a turn.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

import hetjax
from experiments import problems
from experiments.benchmarks.rows import Found, Row
from hetjax import types
from hetjax.local import calls, packing, rules, stepped

_MICROBATCH, _SHAPE = 32, (32, 32, 3)
_MODELS: dict[str, dict[str, Any]] = {
    "lenet": {},
    "mlp": {"hidden": (1024, 1024, 1024)},
}


class Step:
    """One worker's round, called again and again on the same microbatches.

    Args:
        model: a name of `_MODELS`.
        quota: microbatches.
        microbatch_size: examples.
        ordering: fields of the configuration.
    """

    def __init__(
        self,
        model: str,
        *,
        quota: int = 1,
        microbatch_size: int = _MICROBATCH,
        **ordering: Any,
    ) -> None:
        loss_fn, params = problems.classifier(model, _SHAPE, input_max=255.0, **_MODELS[model])
        data = problems.images(microbatch_size * quota, _SHAPE)
        self.examples = {name: x[:microbatch_size] for name, x in data.items()}
        fields = {
            "microbatch_size": microbatch_size,
            "budget": quota,
            "cluster": {"num_workers": 1},
            "quota": {"policy": "equal"},
            "ordering": ordering,
        }
        optimizer = optax.sgd(1e-4, momentum=0.9)
        self.setup = hetjax.Run(loss_fn, params, optimizer, data, epochs=1, **fields).setup
        stream = self.setup.stream
        self._plan = stream.plan(stream.init(), np.array([quota]))
        self._state = state = self.setup.begun
        self._carried = self.setup.programs.main.begin(state.params, state.kept, ())
        self._keys = [self.setup.rng]
        self()

    def held_bytes(self) -> tuple[int, int, int]:
        """Bytes of the parameters; of the order's sums; of the local phase's temporaries."""
        params, kept = (
            sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
            for tree in (
                self._state.params,
                (self._state.memory, packing.unpack(self._carried).evidence),
            )
        )
        microbatch = self.setup.feed.load(0, self._plan.microbatches(0, 1)[0])
        steps = rules.with_observer(self.setup.programs.main.rule, self.setup.methods.observer)
        shared = types.Shared(self._state.params)
        (add, *_) = calls.jit_adds(steps, self.setup.where, marked=False)
        compiled = add.__wrapped__.lower(shared, self._carried, microbatch, self._keys[0]).compile()
        return params, kept, compiled.memory_analysis().temp_size_in_bytes

    def __call__(self) -> tuple[float, float]:
        """Runs one round; seconds of the local and of the sync phase."""
        began = time.perf_counter()
        contributed, _ = self.setup.programs.main.local.run(
            stepped.LocalPlan(None, self._plan, self._plan.quotas, self.setup.feed),
            types.Shared(self._state.params),
            self._carried,
            self._keys,
        )
        jax.block_until_ready(contributed)
        between = time.perf_counter()
        done = self.setup.programs.main.sync.call(
            self._state, contributed, self.setup.shares, (), (), ()
        )
        self._state, self._carried = done.state, done.carried
        jax.block_until_ready(done)
        return between - began, time.perf_counter() - between


@contextlib.contextmanager
def _steps(makers: Sequence[Callable[[], Step]]) -> Iterator[list[Step]]:
    steps = [make() for make in makers]
    try:
        yield steps
    finally:
        for step in steps:
            step.setup.close()


def in_turn(steps: Sequence[Step], repeats: int) -> np.ndarray:
    """f64[repeats, len(steps), 2]: seconds of the local and the sync phase."""
    return np.array([[step() for step in steps] for _ in range(repeats)])


def step_rows(repeats: int = 60) -> Found:
    """The step with balancing against the step without, by block size."""
    for model, target in (("lenet", "≤ 1.7x"), ("mlp", "≤ 1.4x")):
        blocks = (16, 8, 4, 2)
        makers: list[Callable[[], Step]] = [lambda model=model: Step(model)]
        makers += [
            lambda model=model, b=block: Step(model, method="d_grab", block_pairs=b)
            for block in blocks
        ]
        with _steps(makers) as steps:
            secs = in_turn(steps, repeats)
        whole = secs.sum(axis=2)
        ratios = np.median(whole / whole[:, :1], axis=0)
        phases = np.median(secs / secs[:, :1], axis=0)
        for i, block in enumerate(blocks, start=1):
            plain, balanced = np.median(whole[:, 0]) * 1e3, np.median(whole[:, i]) * 1e3
            name = f"{model}, blocks of {block} pairs"
            reached = f"{ratios[i]:.2f}x: {balanced:.1f} ms over {plain:.1f} ms"
            yield Row(name, target if block == max(blocks) else "none", reached, repeats)
            reached = f"{phases[i, 0]:.2f}x, {phases[i, 1]:.2f}x"
            yield Row(f"{name}: local, sync phase", "none", reached, repeats)
    yield f"A training step, microbatch {_MICROBATCH}, over one without an order."


def memory_rows() -> Found:
    """What the compiled local phase and the state hold more than without an order's signs.

    In copies of the parameters, from the compiler's own account: kept between calls, and
    temporary within one.
    """
    for model in ("lenet", "mlp"):
        for batch in (_MICROBATCH, 4 * _MICROBATCH):
            held = []
            for ordering in ({}, {"method": "d_grab", "block_pairs": batch // 2}):
                step = Step(model, microbatch_size=batch, **ordering)
                params, *state = step.held_bytes()
                held.append([each / params for each in state])
                step.setup.close()
            (kept, temporary), (kept_with, temporary_with) = held
            name = f"{model}, microbatch {batch}"
            yield Row(f"{name}: kept", "≤ 3 more", f"{kept_with - kept:.2f} more")
            reached = f"{temporary:.2f} → {temporary_with:.2f}"
            yield Row(f"{name}: temporary, without → with", "none", reached)
    yield "Memory of the matrix-free form, in copies of the parameters a worker."
