"""What does a run depend on beside its configuration? Digests, by which it knows itself again.

The loss, the optimiser and a local rule of one's own are told by their programs, with all numbers
in them: a learning rate, an array that is closed over. So one that was only written otherwise is
the same, and one that does something else is not. The loss is told by its gradient, too, where
alone a `custom_vjp` or a `custom_jvp` shows its rules.

A run compares them with those of its checkpoint, and the processes of a run with each other.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from hetjax import digests, executor, extra_arguments, types
from hetjax.config import experiment as config_lib
from hetjax.config import kinds
from hetjax.data import feeding, iterables, owned, sources, trial
from hetjax.inputs import rule_identity
from hetjax.local import gradients, rules
from hetjax.losses import batch_loss, stateful
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib

_WHOLE_BYTES = 1 << 28  # of arrays, up to which all of the data are looked at
_SAMPLE = 1024  # examples of larger arrays, evenly spaced
_WAY = 2  # of making digests; hetjax had another one before
PROGRAMS = ("loss", "optimizer", "rule", "goes on", "upper loss", "upper rule", "estimator")
"""Written otherwise by another JAX; and on another platform, where a function looks at that."""
_MEANING = {
    "examples": "the data have {here} examples, and had {there}",
    "values": "the data hold other values",
    "params": "the initial parameters have other values",
    "frozen": "the frozen arrays have other values",
    "goes on": "values= begins or goes on otherwise, or with other constants",
    "loss": "the loss computes something else, or with other constants",
    "optimizer": extra_arguments.OTHERWISE,
    "rule": "the local rule computes something else, or with other constants",
    "estimator": "the estimator does something else, or with other settings",
}
_MEANING |= {
    f"upper {name}": _MEANING[name].replace("the ", "the upper ", 1)
    for name in ("examples", "values", "loss", "rule", "frozen")
}


def make(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation | None,
    source: Any,
    config: config_lib.ExperimentConfig,
    rule: rules.LocalRule,
    per_example_rng: bool,
    by_name: named_lib.Beside,
) -> dict[str, Any]:
    """Digests of what rounds depend on, as JSON values.

    Args:
        loss_fn, params, optimizer: as given to `Run`.
        source: checked. Examples in memory are looked at all, up to 256 MB, others in part.
        config, rule, per_example_rng, by_name: of the run.
    """
    first, _ = feeding.first_examples(config, source, per_example_rng=per_example_rng)
    own: dict[str, Any] = {}
    point: types.PyTree = params
    own_state: types.PyTree = ()
    if isinstance(loss_fn, stateful.StatefulLoss):
        point, own_state = types.Model(params, loss_fn.model_state), loss_fn.model_state
    given, named = by_name.values, by_name.named
    if jax.tree.leaves(by_name.frozen):
        own["frozen"] = digests.of_arrays(by_name.frozen)
    sums, is_own = rule, config.rule.name != kinds.DEFAULT_RULE
    if is_own or isinstance(loss_fn, batch_loss.BatchLoss):
        sums = gradients.gradient_sums(loss_fn, per_example_rng=per_example_rng, weights_vary=True)
    if config.form != executor.EAGER:  # it would be traced
        own["loss"] = rule_identity.digest(sums, params, first, own_state, named)
        if given.update is not None:
            begun = () if given.of_progress else digests.of_arrays(given.begun)
            own["goes on"] = f"{begun} {named_lib.digest(given, params, rule.reads.metrics)}"
    # A rule that asks for values of its round has none here; what is wrong is said when it runs.
    if is_own:
        with contextlib.suppress(Exception):
            own["rule"] = rule_identity.digest(rule, params, first, own_state, named)
    if optimizer is not None:
        own["optimizer"] = extra_arguments.digest(optimizer, params)
    return {
        "examples": len(source),
        "values": of_data(source),
        "params": digests.of_arrays(point),
        **own,
        "jax": f"{jax.__version__}, {_WAY}",
    }


def of_parts(digests: dict[str, Any], own: owned.Owned) -> dict[str, Any]:
    """The digests of a run; where processes have parts of their own they call it together."""
    if own.part is None:
        return digests
    sizes = f"{len(own.sizes)} processes' {' + '.join(map(str, own.sizes))}"
    return digests | {"examples": sizes, "values": own.tell(digests["values"])}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """What differs, in words, by name; empty where a run may go on.

    Programs are compared where JAX is the same.
    """
    return {
        name: meaning.format(here=here[name], there=there[name])
        for name, meaning in _MEANING.items()
        if name in there and name in here and there[name] != here[name]
        if name not in PROGRAMS or there["jax"] == here["jax"]
    }


def check(found: Mapping[str, str], held: str, *, way: str, force: str, is_forced: bool) -> str:
    """Refuses something else than what a run began with; examples of another number always.

    Args:
        found: differences.
        held: what holds the run, to stand before "began with something else".
        way: what to do instead.
        force: what goes on all the same, such as "resume='force'"; "": nothing does.
        is_forced: whether that was given.

    Returns:
        what to tell where that was given; "" where nothing differs.

    Raises:
        ValueError: something differs.
    """
    if not found:
        return ""
    text = "; ".join(found.values())
    if force and not any(name.endswith("examples") for name in found):
        if is_forced:
            kept = "; its state is the checkpoint's" if "optimizer" in found else ""
            return f"going on all the same, as {force} says: {text}{kept}"
        way = f"{way}, and {force} goes on all the same"
    raise ValueError(f"{held} began with something else: {text}. {way}")


def of_data(source: Any) -> str:
    """A digest of the examples' values; only of their shapes where reading one twice gives two."""
    if isinstance(source, sources.ArraySource):
        if sum(leaf.nbytes for leaf in jax.tree.leaves(source.arrays)) <= _WHOLE_BYTES:
            return digests.of_arrays(source.arrays)
        sample = np.linspace(0, len(source) - 1, min(_SAMPLE, len(source))).astype(np.int64)
        return digests.of_arrays(sources.fetch(source, np.unique(sample)))
    if isinstance(source, iterables.Streamed):
        return digests.of_arrays(jax.tree.map(np.zeros_like, sources.read(source, 0)))
    found, changes = (looked := trial.look(source)).examples, looked.difference is not None
    return digests.of_arrays(jax.tree.map(np.zeros_like, found) if changes else found)
