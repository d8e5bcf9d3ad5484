"""Are gradients right where a balanced order shares its passes, and what does the proof cost?

The losses are those of `ordering_losses`; exact is the sum of the gradients of each example's loss
beside the others, in float64. The check is made where programs are traced; so its cost is in the
seconds of a start, and in a step only if it changed the program that runs.
"""

import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import ordering_losses, ordering_steps
from experiments.benchmarks.rows import Row
from hetjax import ordering, types
from hetjax import parts as parts_lib
from hetjax.ordering import by_rows
from hetjax.rounds import gradients, rules
from hetjax.rounds import losses as losses_lib

_SIZE = ordering_losses.MICROBATCH
_ORDERS = ("pair_balance", "d_grab", "frozen")


def _wide(tree: Any) -> Any:
    """With float64 for float32."""
    return jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, tree)


def _exact_sum(loss_fn: Callable, params: Any, examples: Any, key: jax.Array) -> jax.Array:
    def of_one(position: jax.Array) -> jax.Array:
        return jax.grad(lambda p: loss_fn(p, examples, key)[position])(params)["weights"]

    return jax.lax.map(of_one, jnp.arange(_SIZE)).sum(axis=0)


def gradient_errors(loss_fn: Callable) -> tuple[dict[str, float], str]:
    """The relative error of the update under each order; why it was the dearer form, or ''.

    The larger error of two microbatches: the first has no flags, the second one has.
    """
    params, rng = ordering_losses.initial_params(), jax.random.key(0)
    noise = np.random.default_rng(5)
    running_sum = jax.tree.map(lambda x: noise.standard_normal(x.shape).astype(x.dtype), params)
    data = ordering_losses.problem(4 * _SIZE, 2 * _SIZE)
    mask, microbatches = np.ones(_SIZE, np.float32), []
    for start in (0, 3 * _SIZE):
        ids = np.arange(start, start + _SIZE, dtype=np.int32)
        microbatches.append(types.Microbatch(ids, mask, {k: x[ids] for k, x in data.items()}))
    exact = jax.jit(functools.partial(_exact_sum, loss_fn))
    with jax.enable_x64(True):
        keys = [jax.random.fold_in(rng, m.example_ids[0]) for m in microbatches]
        rights = [
            np.asarray(exact(*_wide((params, m.examples)), key))
            for m, key in zip(microbatches, keys, strict=True)
        ]
    errors, reasons = {}, set()
    for method in _ORDERS:
        factory = ordering.ORDERINGS[method]
        whole = (
            {"block_pairs": _SIZE // 2} if "block_pairs" in parts_lib.options_of(factory) else {}
        )
        observer = factory(**whole).observer(ordering.Sizes(2, _SIZE, 1))
        assert observer is not None
        steps = rules.with_observer(gradients.gradient_sums(loss_fn), observer)
        add, shared = jax.jit(steps.add), types.Shared(params)
        empty, errors[method] = steps.begin(shared, (), running_sum), 0.0
        for microbatch, right in zip(microbatches, rights, strict=True):
            after, _ = add(shared, empty, microbatch, rng)
            error = np.linalg.norm(after.sums.grad_sum["weights"] - right) / np.linalg.norm(right)
            errors[method] = max(errors[method], float(error))

        def reason(params: Any, refusal: Callable = observer.refusal) -> None:
            losses = losses_lib.masked(loss_fn, microbatches[0], rng, per_example_rng=False)
            reasons.add(refusal(losses, params, _SIZE))

        jax.eval_shape(reason, params)
    (reason_of_all,) = reasons  # they share their local phase
    return errors, reason_of_all


def gradient_rows() -> list[Row]:
    """Each hard and each easy loss under each order that may share its passes."""
    rows, worst = [], dict.fromkeys(_ORDERS, 0.0)
    for kind, terms in (("hard", ordering_losses.HARD), ("easy", ordering_losses.EASY)):
        for name, term in terms.items():
            errors, reason = gradient_errors(ordering_losses.with_term(term))
            worst = {method: max(worst[method], errors[method]) for method in _ORDERS}
            form = f"a backward pass more: {reason.split(': /')[0]}" if reason else "shared"
            rows.append(
                Row(
                    f"gradient against exact, relative, {kind} loss `{name}`: {', '.join(_ORDERS)}",
                    "≤ 1e-6, or refused",
                    f"{', '.join(f'{error:.0e}' for error in errors.values())} ({form})",
                )
            )
    rows.append(
        Row(
            f"gradient against exact, relative, worst of {len(rows)} losses: {', '.join(_ORDERS)}",
            "≤ 1e-6, or refused",
            ", ".join(f"{error:.1e}" for error in worst.values()),
        )
    )
    return rows


def _lowered(step: ordering_steps.Step) -> tuple[str, float]:
    """The local phase's program, and the seconds that tracing it takes."""
    parts, seconds = step.parts, []
    for _ in range(5):
        observer = parts.observer
        assert observer is not None
        steps = rules.with_observer(gradients.gradient_sums(parts.loss_fn), observer)
        shared = types.Shared(jax.tree.map(lambda x: x[0], parts.state.params))
        ids = np.arange(parts.config.microbatch_size, dtype=np.int32)
        microbatch = types.Microbatch(ids, np.ones(len(ids), np.float32), step.examples)
        arguments = (
            shared,
            steps.begin(shared, (), observer.init(shared.params)),
            microbatch,
            parts.rng,
        )
        began = time.perf_counter()
        lowered = jax.jit(steps.add).lower(*arguments)
        seconds.append(time.perf_counter() - began)
    return lowered.as_text(), float(np.median(seconds))


def cost_rows(repeats: int = 40) -> list[Row]:
    """With and without the check; and a step whose loss it refuses."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise by_rows.NotByRowsError("refused, to be measured")

    rows = []
    for model in ("lenet", "mlp"):
        plain, checked = ordering_steps.Step(model), ordering_steps.Step(model, method="d_grab")
        with mock.patch.object(by_rows, "prove", return_value=None):
            unchecked = ordering_steps.Step(model, method="d_grab")
            text, secs = _lowered(unchecked)
        own_text, own_secs = _lowered(checked)
        with mock.patch.object(by_rows, "prove", refuse):
            refused = ordering_steps.Step(model, method="d_grab")
        steps = [plain, checked, unchecked, refused]
        try:
            times = ordering_steps.in_turn(steps, repeats).sum(axis=2)
        finally:
            for step in steps:
                step.parts.close()
        whole = np.median(times / times[:, :1], axis=0)
        rows += [
            Row(
                f"check that gradients may share their passes, {model}: a step with it over one "
                "without; the local phase's tracing and lowering, with and without",
                "≤ 1.02",
                f"{'1, the same program' if text == own_text else 'other programs'} "
                f"(timed {np.median(times[:, 1] / times[:, 2]):.3f}); "
                f"{own_secs:.2f} s, {secs:.2f} s",
            ),
            Row(
                f"training step, {model}, microbatch 32, against without an order: shared passes; "
                "a loss that is refused",
                "-",
                f"{whole[1]:.2f}x; {whole[3]:.2f}x",
            ),
        ]
    return rows
