"""Random views of examples: new in each epoch, and the same in each run of one seed."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import parts
from hetjax.data import sources
from hetjax.losses import named


class Augmented:
    """A source whose examples a function changes; `augmented` makes it. It is streamed.

    Args:
        source: the examples.
        f: `(example, rng) -> example`.
        seed: of the run.
        epoch: whose views it gives, from 0.
        values_at: from the epochs done to what `f` is given as `values`; None: there is nothing.

    Attributes:
        asks: what `f` names.
    """

    def __init__(
        self,
        source: sources.Source,
        f: Callable[..., Any],
        *,
        seed: int = 0,
        epoch: int = 0,
        values_at: Callable[[Any], Any] | None = None,
    ) -> None:
        self._source, self._seed, self._epoch, self._values_at = source, seed, epoch, values_at
        self._f, own = f, parts.asked_for(f, ("values",), 2)
        self.asks = (*own, *getattr(source, "asks", ()))
        if own and values_at is not None:
            values = jax.device_get(values_at(jnp.asarray(epoch, jnp.result_type(float))))
            self._f = functools.partial(f, values=values)
        self._given = f
        self.thread_safe = getattr(source, "thread_safe", None)
        self.notes = tuple(getattr(source, "notes", ()))
        if hasattr(source, "__getitems__") and not isinstance(source, sources.ArraySource):
            self.__getitems__ = self._together

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> Any:
        return self._view(self._source[index], index)

    def _together(self, ids: list[int]) -> list[Any]:
        items = self._source.__getitems__(ids)  # type: ignore[attr-defined]
        return [self._view(item, index) for item, index in zip(items, ids, strict=True)]

    def _view(self, item: Any, index: int) -> Any:
        rng = np.random.default_rng((self._seed, self._epoch, index))
        return self._f(copy.deepcopy(item), rng)  # or one that writes into it would write there

    def of_epoch(self, epoch: int) -> "Augmented":
        """The same examples, as they are in another epoch."""
        source = sources.of_epoch(self._source, epoch)
        values_at = self._values_at
        return Augmented(source, self._given, seed=self._seed, epoch=epoch, values_at=values_at)

    def of_run(self, seed: int) -> "Augmented":
        """The same examples, as they are in a run of another seed."""
        source = sources.of_run(self._source, seed)
        values_at = named.current_values_at()
        return Augmented(source, self._given, seed=seed, epoch=self._epoch, values_at=values_at)


def augmented(source: Any, f: Callable[..., Any]) -> Augmented:
    """Examples that a function augments: other views in each epoch, the same ones in each run.

    The generator of a view is made of the run's `seed`, the epoch and the example's index. So
    neither quotas nor readers nor processes change a view, and a run that goes on after a kill
    sees what it would have seen. Views are made when they are needed and are never kept.

    Args:
        source: as `hetjax.fit` takes it.
        f: `(example, rng) -> example`: a copy of an example as the source gives it, and a NumPy
            generator. What it returns has one structure, shape and dtype for all examples. If it
            names `values`, as `(example, rng, *, values)`, it is given those of `fit(values=…)` at
            the epoch's beginning, where these are a function of the progress.

    Returns:
        A source. `source[i]` is the view of the first epoch of a run with seed 0.

    Raises:
        ValueError: no source can be made of `source`.

    Example:
        >>> def noisy(example, rng):
        ...     return {"x": example["x"] + rng.normal(size=2).astype(np.float32)}
        >>> source = augmented({"x": np.zeros((5, 2), np.float32)}, noisy)
        >>> bool((source[3]["x"] == source[3]["x"]).all())
        True
        >>> bool((source[3]["x"] == source.of_epoch(1)[3]["x"]).any())
        False
    """
    return Augmented(sources.as_source(source), f)
