"""Evaluation on one worker's device: weighted means of per-example metrics over a source."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import digests, executor, mesh, parts, slices, trees, types
from hetjax.data import choosing, passes, sources
from hetjax.inputs import fingerprint
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib
from hetjax.losses import stateful

MetricsFn = Callable[..., dict[str, Any]]
"""`(params, examples) -> {name: f32[B]}`, or of a model that keeps state `(params, state,
examples)`, and what it names of `mask`, `frozen`, `values`; a value may be `(f32[B, ...], weights
f32[B, ...])`, a `hetjax.OfMeans` of such, or a `hetjax.Collected` of arrays `[B, ...]`."""

_BATCH_SIZE = 256
_KEPT = 4  # functions whose programs are kept, with what these close over


def _once_a_function(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, which gives the same for the same function; the last few are kept."""
    kept = functools.lru_cache(_KEPT)(make)

    @functools.wraps(make)
    def made(function: Any, **options: Any) -> Any:
        try:
            hash(function)
        except TypeError:
            return make(function, **options)
        return kept(function, **options)

    return made


@jax.transfer_guard("allow")
def evaluate(
    params: types.PyTree,
    source: Any,
    metrics_fn: MetricsFn,
    *,
    model_state: types.PyTree | None = None,
    frozen: types.PyTree = (),
    values: types.PyTree = (),
    device: jax.Device | None = None,
) -> dict[str, float]:
    """Weighted means of metrics over all examples of a source, `sum(w * m) / sum(w)`.

    Another call with the same function, and examples and parameters of the same shapes, compiles
    nothing, unless a constant that the function reads from outside has changed. In a `jax.jit` of
    your own such a constant stays what it was, as in plain JAX.

    Args:
        params: a pytree of arrays without worker axis, such as `fit(...).params`.
        source: as for `fit`; kept in the memory of `device` meanwhile.
        metrics_fn: `(params, examples) -> {name: f32[B]}`, numbers or truths, one an example; or
            `(values, weights)` for a name, two arrays of one shape [B, ...], such as one a token;
            or a `hetjax.OfMeans` of such, for what follows from means, such as perplexity; or a
            `hetjax.Collected` of arrays [B, ...], for what needs all examples at once, such as AUC.
            `hetjax.nnx_metrics` and `hetjax.linen_metrics` make one from a Flax model.
        model_state: of a model that keeps one, such as `fit(...).model_state`: `metrics_fn` is
            called with `(params, state, examples)` then.
        frozen, values: arrays that `metrics_fn` names, as it does in `fit`. What
            `nnx_metrics(wrt=…)` and `linen_metrics(wrt=…)` make brings its own.
        device: where it is computed; by default JAX's first.

    Returns:
        `{name: mean}`, or the function of the means; NaN where the sum of the weights is 0.

    Raises:
        ValueError: `source` is none, or the metrics are no dict of one number an example each.

    Example:
        >>> data = {"x": np.arange(6.0), "y": np.array([1, 1, 1, 0, 0, 0])}
        >>> def metrics_fn(params, batch):
        ...     return {"accuracy": (batch["x"] > params) == (batch["y"] > 0)}
        >>> evaluate(np.float32(1.5), data, metrics_fn)["accuracy"]
        0.16666667...
    """
    device = jax.devices()[0] if device is None else device
    if model_state is not None:
        params, metrics_fn = types.Model(params, model_state), of_model(metrics_fn)
    params, named = jax.device_put((params, types.Named(frozen, values)), device)
    source = sources.as_source(source)
    return Evaluator(metrics_fn, source, params, device, named=named)(params)


@_once_a_function
def metrics_of_loss(loss_fn: losses_lib.LossFn, *, per_example_rng: bool = False) -> MetricsFn:
    """The training loss, and the metrics that it returns, with a fixed random key, or one a place.

    With `per_example_rng` the example at a place of the batch has that place's key.
    """

    def metrics(params: types.PyTree, examples: types.PyTree) -> dict[str, Any]:
        rng = jax.random.key(0)
        if per_example_rng:
            rng = jax.random.split(rng, jax.tree.leaves(examples)[0].shape[0])
        if isinstance(loss_fn, stateful.StatefulLoss):
            returned, _ = loss_fn.apply(params.params, params.state, examples, rng)  # a `Model`
        else:
            returned = loss_fn(params, examples, rng)
        found = losses_lib.split(returned)
        return {"loss": (found.losses, found.weights), **losses_lib.metrics_of(found)}

    return metrics


@_once_a_function
def of_model(metrics_fn: MetricsFn) -> MetricsFn:
    """`(params, state, examples) -> metrics` as a function of a `Model` and examples.

    Raises:
        ValueError: it takes other arguments.
    """
    metrics_fn = named_lib.giving(metrics_fn, 3)
    _check_function(metrics_fn, "params", "state", "examples")

    @functools.wraps(metrics_fn)
    def metrics(model: types.Model, examples: types.PyTree) -> dict[str, Any]:
        return metrics_fn(model.params, model.state, examples)

    del metrics.__wrapped__  # whose arguments are others
    return metrics


class Evaluator:
    """Means of `metrics_fn` over all of `source`, in batches of one fixed shape.

    Args:
        metrics_fn: per-example metrics.
        source: a data source; kept in the memory of `device`.
        params: without worker axis; only for shapes.
        place: where parameters given to `__call__` lie.
        layout: of the arrays there, where it is a slice.
        named: what the metrics may ask for.
        on_batch: called before each batch.
        num_readers: threads or processes that read the source, as `data.readers`.
        progress: show a bar where the source takes long to read.
        batch_size: of which the last one is filled up with the first examples, which do not count.

    Raises:
        ValueError: the metrics are no dict of one number an example each.
    """

    def __init__(
        self,
        metrics_fn: MetricsFn,
        source: Any,
        params: types.PyTree,
        place: mesh.Place,
        *,
        layout: mesh.Layout | None = None,
        named: types.Named = types.UNNAMED,
        on_batch: Callable[[], None] = lambda: None,
        num_readers: int | str = 1,
        progress: bool = False,
        batch_size: int = _BATCH_SIZE,
    ) -> None:
        self._on_batch, self._num_done, self._source = on_batch, 0, source
        self._feed = choosing.evaluation_feed(
            source, place, num_readers=num_readers, progress=progress
        )
        ids = np.arange(len(source), dtype=np.int32)
        unit = 64 if layout else 1  # over the devices of slices of any shape, by one program
        batch_size = min(batch_size, -(-len(ids) // unit) * unit)
        # Others, not copies of one: metrics may compare.
        padding = passes.filling(np.resize(ids, -len(ids) % batch_size))
        self._rows = np.concatenate([ids, padding]).reshape(-1, batch_size)
        first = self._feed.load(0, self._rows[0])
        frozen = named_lib.frozen_of(metrics_fn, named.frozen)
        self._named = named = named._replace(frozen=mesh.put(frozen, place, layout))
        with slices.seen(layout, alike=True):
            self._functions = _check_metrics(metrics_fn, params, first, named)

        def sums(params: types.PyTree, microbatch: types.Microbatch, named: types.Named) -> Any:
            made = _sums(metrics_fn, params, microbatch, named)
            self._zeros = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), made[0])
            self.names = sorted({**made[0], **made[1]})
            return made

        self._program = ""
        if executor.is_eager():
            executor.shapes(sums, params, first, named)
        else:  # by what is computed now: what the function reads from outside may have changed
            with slices.seen(layout, alike=True):
                self._program = digests.of_programs((sums, (params, first, named)))
        self._add = _adder(metrics_fn, program=self._program, layout=layout)
        if self._program:  # else there is nothing to compile
            placed = mesh.put(params, place, layout)
            jax.block_until_ready(self._add(placed, first, self._zeros, named))

    def digests(self, name: str) -> dict[str, str]:
        """Of the source, which is called `name`, and of what is computed of it, by words."""
        found = {f"the set {name!r}": f"{len(self._source)} {fingerprint.of_data(self._source)}"}
        if self._program:  # none where it is eager; another JAX writes it otherwise
            named = [f"{name} {parts.path_of(of)}" for name, of in sorted(self._functions.items())]
            found[f"metrics of {name!r}, by JAX {jax.__version__}"] = f"{self._program} {named}"
        return found

    def __call__(self, params: types.PyTree, values: types.PyTree = ()) -> dict[str, float]:
        """Returns `{name: mean, or function of means or of what was collected}`.

        `params` have no worker axis; `values` are those that the metrics may ask for.
        """
        named = self._named._replace(values=values) if jax.tree.leaves(values) else self._named
        self._feed.compare(self._num_done)
        self._num_done += 1
        totals, collected = self._zeros, []
        for index, row in enumerate(self._rows):
            self._on_batch()
            if self._feed.reads_ahead:
                ahead = self._rows[index : index + 2]
                self._feed.read_ahead(ahead, np.zeros(len(ahead), int))
            totals, arrays = self._add(params, self._feed.load(0, row), totals, named)
            collected.append(jax.tree.map(lambda a, row=row: np.asarray(a)[row >= 0], arrays))
        found: dict[str, Any] = jax.tree.map(lambda *of: np.concatenate(of), *collected)
        for name, pairs in jax.device_get(totals).items():
            found[name] = [float(total / count) if count else np.nan for total, count in pairs]
        return {name: self._told(name, *found[name]) for name in self.names}

    def _told(self, name: str, *given: Any) -> float:
        if (function := self._functions.get(name)) is None:
            return given[0]
        made = parts.array_of(function(*given))
        if made.shape == () and made.dtype.kind in "fiub":
            return float(made)
        raise ValueError(
            f"metrics_fn: the function of {name!r}, {parts.path_of(function)}, returned "
            f"{parts.shown(made)} for {', '.join(map(parts.shown, given))}; it must return one "
            "number"
        )


def _measured(
    metrics_fn: MetricsFn, params: types.PyTree, microbatch: types.Microbatch, named: types.Named
) -> dict[str, Any]:
    with named_lib.scope(named, mask=microbatch.example_mask):
        return named_lib.giving(metrics_fn, 2)(params, microbatch.examples)


def _sums(
    metrics_fn: MetricsFn, *of_microbatch: Any
) -> tuple[dict[str, list[tuple[jax.Array, jax.Array]]], dict[str, tuple[jax.Array, ...]]]:
    """Of a microbatch `(sum of weight * value, sum of weights)` of each part of a metric, and the
    arrays that are collected."""
    mask = of_microbatch[1].example_mask

    def pair(value: Any) -> tuple[jax.Array, jax.Array]:
        values, weights = value if isinstance(value, tuple) else (value, None)
        wide = trees.wider(values.dtype, jnp.result_type(float))
        totals = losses_lib.weigh(values.astype(wide), weights, mask)
        return jnp.sum(totals[0]), jnp.sum(totals[1])

    found = _measured(metrics_fn, *of_microbatch)
    collected = {n: value.parts for n, value in found.items() if isinstance(value, types.Collected)}
    means = {name: found[name] for name in found if name not in collected}
    return {name: [pair(part) for part in _parts(v)] for name, v in means.items()}, collected


def _parts(value: Any) -> tuple[Any, ...]:
    """What the means are taken of, or what is collected."""
    return value.parts if isinstance(value, types.OfParts) else (value,)


@_once_a_function
def _adder(metrics_fn: MetricsFn, program: str, layout: mesh.Layout | None) -> Callable[..., Any]:
    """`(params, microbatch, totals) -> (totals, collected)`, jitted; the same for the same
    function, while it computes the same, of which `program` is a digest."""

    def add(params: Any, microbatch: types.Microbatch, totals: Any, named: types.Named) -> Any:
        with slices.seen(layout):
            microbatch = slices.spread(microbatch)
            found, collected = _sums(metrics_fn, params, microbatch, named)
        return jax.tree.map(jnp.add, totals, found), collected

    return jax.jit(add)


def _check_metrics(
    metrics_fn: MetricsFn, params: types.PyTree, first: types.Microbatch, named: types.Named
) -> dict[str, Callable[..., float]]:
    """Refuses what no mean can be taken of; the functions of those metrics that are of parts."""
    _check_function(metrics_fn, "params", "examples")
    batch_size = jax.tree.leaves(first.examples)[0].shape[0]

    measured = functools.partial(_measured, metrics_fn)
    try:
        program, values = executor.program(measured, params, first, named)
    except TypeError as error:
        if "not callable" not in str(error):
            raise
        raise ValueError(
            f"metrics_fn {parts.path_of(metrics_fn)} called what is no function ({error}); it is "
            f"given parameters, and no model: {_MADE_BY}"
        ) from error
    named_lib.tell_of_constants("metrics_fn", program, "def metrics_fn(params, batch, *, frozen)")
    if not isinstance(values, dict):
        raise ValueError(f"metrics_fn returned {type(values).__name__}; must be a dict of f32[B]")
    for name, value in values.items():
        for part in _parts(value):
            if not isinstance(value, types.Collected):
                losses_lib.check_metric("metrics_fn", name, part, (batch_size,))
            elif getattr(part, "shape", ())[:1] != (batch_size,):
                raise ValueError(
                    f"metrics_fn returned a Collected {name!r} of {parts.shown(part)}; allowed are "
                    f"arrays [{batch_size}, …], a row an example"
                )
    return {name: v.function for name, v in values.items() if isinstance(v, types.OfParts)}


_MADE_BY = "hetjax.nnx_metrics(model, …) and hetjax.linen_metrics(…) make one of a Flax model"


def _check_function(metrics_fn: Any, *arguments: str) -> None:
    """Refuses what cannot be called with these arguments."""
    takes = functools.partial(parts.takes, named_lib.giving(metrics_fn, len(arguments)))
    if not callable(metrics_fn) or not takes(len(arguments)):
        raise ValueError(
            f"metrics_fn is {parts.shown(metrics_fn)}; it must be a function "
            f"({', '.join(arguments)}) -> {{name: f32[B]}}: {_MADE_BY}"
        )
