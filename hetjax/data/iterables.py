"""Examples that come one after another, without an index: generators, loaders, endless streams.

`Inputs` takes them from the iterable, counts them, and keeps the iterable's own states, by which a
run goes on. `iterable_feed` shuffles them in a buffer and brings them to the devices. In several
processes each takes all of them from its own copy of the iterable, and uses those of its workers;
or each has an iterable of its own, which its workers share.
"""

import collections
import contextlib
import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hetjax import digests, messages, parts
from hetjax.data import iterable_states, leaves, source_checks, sources

logger = logging.getLogger(__name__)

_DUE = 16  # examples after a state, by which a run that goes on sees whether it left any out
_INTERFACES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class StreamEnd(Exception):
    """The iterable has no more examples."""


class _Snapshot(NamedTuple):
    """The iterable's own state, and where it stood."""

    taken: int  # examples that it had given in this run
    iteration: int  # how often it was begun before
    state: Any
    due: list[Any]  # the examples that came next, a few


class Inputs:
    """The examples of an iterable, counted from where a run begins.

    Args:
        iterable: gives examples, or batches of them.
        per_epoch: where it may end, and is begun again.
        batched: whether it gives batches, `[k, ...]`, that are split.
    """

    def __init__(self, iterable: Any, *, per_epoch: int, batched: bool) -> None:
        self.name = type(iterable).__name__
        self._iterable, self._per_epoch, self._batched = iterable, per_epoch, batched
        self._iterator: Iterator[Any] | None = None
        self._waiting: collections.deque[Any] = collections.deque()  # taken, not handed on
        self._lock = threading.Lock()
        self._failed: ValueError | None = None
        self._head: _Snapshot | None = None  # before any example
        self.begin()

    def begin(self) -> None:
        """A run begins: at the head, or, of what can be gone through once, where the last ended."""
        self._was_read = getattr(self, "_handed_on", 0) > 0
        if self._iterator is not self._iterable:
            self._iterator = None
            self._waiting.clear()
        self.first: list[Any] = []  # examples that were looked at before the run
        self._handed_on, self._iteration, self._gave = 0, 0, False
        self._snapshots: list[_Snapshot] = []

    @property
    def _taken(self) -> int:
        return self._handed_on + len(self._waiting)

    def look(self, index: int) -> Any:
        """One of the first examples, which are handed on all the same; before a run, and after.

        Where fewer come, they are gone through again.
        """
        if len(self.first) <= index and not self._handed_on:
            with contextlib.suppress(StreamEnd):
                while len(self._waiting) <= index:
                    self._take()
            self.first = list(self._waiting)
            if not self.first:
                raise ValueError(f"hetjax.stream: the {self.name} gave no example")
        return self.first[index % len(self.first)]

    def next(self) -> Any:
        """The next example, as it is.

        Raises:
            StreamEnd: there is none.
            ValueError: the iterable raised something.
        """
        while not self._waiting:
            self._take()
        with self._lock:
            example = self._waiting.popleft()
            for each in self._snapshots:
                if each.taken <= self._handed_on and len(each.due) < _DUE:
                    each.due.append(example)
            self._handed_on += 1
            return example

    def _take(self) -> None:
        """Takes an item, an example or a batch of them."""
        if self._failed is not None:  # a generator would seem to have ended
            raise self._failed
        try:
            iterator = self._begun()
            item = next(iterator)
        except StopIteration:
            again = self._gave and iterator is not self._iterable
            if not again or self._taken % self._per_epoch:
                raise StreamEnd from None
            self._iterator, self._iteration = None, self._iteration + 1
            self._begun()
            return
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self._failed = ValueError(
                f"hetjax.stream: the {self.name} failed after {self._taken:,} examples: {said}"
            )
            raise self._failed from error
        self._gave = True
        self._waiting.extend(self._split(item) if self._batched else [item])

    def _begun(self) -> Iterator[Any]:
        if self._iterator is None:
            if hasattr(self._iterable, "set_epoch"):  # so that it shuffles otherwise
                self._iterable.set_epoch(self._iteration)
            self._iterator, self._gave = iter(self._iterable), False
            if self._head is None and (own := self._own_state()) is not None:
                self._head = _Snapshot(0, 0, copy.deepcopy(own[0]()), [])
        return self._iterator

    def _split(self, batch: Any) -> list[Any]:
        said = f"hetjax.stream: the {self.name} gave no batch after {self._taken:,} examples: "
        with messages.as_mistake(said, after="; batched=False takes single examples"):
            examples = sources.ArraySource(source_checks.opened(batch))
            return [examples[at] for at in range(len(examples))]

    # --- How a run goes on ---

    def _own_state(self) -> tuple[Callable[[], Any], Callable[[Any], None], bool] | None:
        """How to get and set it, and whether it is the iterator's; None where there is none."""
        for owner in (self._begun(), self._iterable):
            for get, put in _INTERFACES:
                if callable(getattr(owner, get, None)) and callable(getattr(owner, put, None)):
                    return getattr(owner, get), getattr(owner, put), owner is self._iterator
        return None

    def remember(self, needed: int) -> None:
        """Keeps the iterable's state as it is now, where it has one.

        Args:
            needed: no example before it is asked for again, so that older states can go.
        """
        if (own := self._own_state()) is None:
            return
        found = _Snapshot(self._taken, self._iteration, copy.deepcopy(own[0]()), [])
        with self._lock:
            old = [i for i, s in enumerate(self._snapshots) if s.taken <= needed and s.due]
            self._snapshots = [*self._snapshots[max(old, default=0) :], found]

    def saved(self, needed: int) -> dict[str, Any] | None:
        """The newest state from which the example `needed` is still to come, as JSON values."""
        with self._lock:
            found = [each for each in self._snapshots if each.taken <= needed]
        if not found:
            return None
        last = next((each for each in reversed(found) if each.due), found[-1])
        due = len(last.due), _digests(last.due)
        try:
            return {**last._asdict(), "state": iterable_states.encode(last.state), "due": due}
        except TypeError as error:
            logger.warning(f"the state of the {self.name} cannot be kept ({error})")
            return None

    def go_to(self, position: int, saved: dict[str, Any] | None, *, tells: bool) -> None:
        """Has an example be the next one, by the state that was saved, or by skipping.

        A state may leave out examples that were read and not yet given, as of a shuffle buffer. So
        the next ones are compared with those that were due; where they are others, it skips.

        Args:
            position: of that example.
            saved: from `saved`.
            tells: whether this process tells the user.

        Raises:
            ValueError: it cannot be reached.
        """
        began, why = time.perf_counter(), ""
        if skips := saved is None or self._own_state() is None:
            if self._was_read and self._iterator is self._iterable:
                raise ValueError(
                    f"hetjax.stream: this {self.name} was read by an earlier run; make it anew"
                )
            if self._handed_on:
                self.begin()
        elif skips := not self._goes_on(saved, tells=tells):
            why = ", whose state leaves out some, as that of a shuffle buffer"
        try:
            self._skip(position)
        except StreamEnd:
            raise ValueError(
                f"hetjax.stream: the run has done {position:,} examples, and the {self.name} gives "
                f"{self._handed_on:,} now"
            ) from None
        if skips and position and tells:
            secs = time.perf_counter() - began
            logger.info(
                f"skipped the first {position:,} examples of the {self.name}{why}, in {secs:.1f} s"
            )

    def _skip(self, position: int) -> None:
        while self._handed_on < position:
            self.next()

    def _goes_on(self, saved: dict[str, Any], *, tells: bool) -> bool:
        """Whether its state brings what was due; if not, it has skipped what was before that."""
        count, due = saved.get("due", (0, {}))
        kept = _Snapshot(**{**saved, "state": iterable_states.decode(saved["state"]), "due": []})
        first = self._come(kept, kept.taken, count)
        if first == due:
            return True
        second = self._come(kept, kept.taken, count)
        same = {n: d for n, d in due.items() if first.get(n) == second.get(n)}  # not drawn anew
        if same and same.items() <= first.items():
            return True
        assert self._head is not None
        if same and same.items() <= self._come(self._head, kept.taken, count).items():
            return False
        self._restore(kept)
        if tells:
            logger.warning(
                f"the {self.name} goes on by its state with other examples than were due: some may "
                "never be done, others twice. Give it a seed, or a state with its buffer"
            )
        return True

    def _come(self, start: _Snapshot, position: int, count: int) -> dict[str, str]:
        """Digests of the examples from `position` on, by field; these are the next ones now."""
        self._restore(start)
        with contextlib.suppress(StreamEnd):
            self._skip(position)
            while len(self._waiting) < count:
                self._take()
        return _digests(itertools.islice(self._waiting, count))

    def _restore(self, kept: _Snapshot) -> None:
        self._iteration = kept.iteration
        own = self._own_state()
        assert own is not None
        if not own[2]:  # the iterable's, which the next iterator takes
            self._iterator = None
            if hasattr(self._iterable, "set_epoch"):
                self._iterable.set_epoch(self._iteration)
        try:
            own[1](copy.deepcopy(kept.state))
        except Exception as error:
            raise ValueError(
                f"hetjax.stream: the {self.name} does not take the state that it had: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self._iterator is None:
            self._iterator = iter(self._iterable)
        self._waiting.clear()
        self._handed_on, self._gave = kept.taken, True


def _digests(examples: Iterable[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, leaf in itertools.chain.from_iterable(map(leaves.walk, examples)):
        found[path] = found.get(path, "") + digests.of_arrays(np.asarray(leaf))
    return found


class Streamed:
    """Examples of an iterable, so many an epoch; `stream` makes it.

    `source[i]` is one of the first examples, by which a loss is tried; it is not lost by that.

    Args:
        inputs: the examples.
        examples_per_epoch: N.
        buffer_size: examples that are shuffled among themselves.
        seed: of the run.
    """

    def __init__(
        self, inputs: Inputs, examples_per_epoch: int, buffer_size: int, *, seed: int = 0
    ) -> None:
        self.inputs, self._len, self.seed = inputs, examples_per_epoch, seed
        self.buffer_size = max(1, buffer_size)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < self._len:
            raise IndexError(f"example {index} of an epoch of {self._len}")
        return self.inputs.look(index)

    def of_run(self, seed: int) -> "Streamed":
        """The same examples, shuffled as in a run of another seed, which begins now."""
        self.inputs.begin()
        return Streamed(self.inputs, self._len, self.buffer_size, seed=seed)

    def ended(self, epoch: int, came: int) -> str:
        """What to tell of an iterable that ended in an epoch after so many examples."""
        return (
            f"the {self.inputs.name} ended in epoch {epoch}: {came:,} examples of it came, and "
            f"examples_per_epoch={self._len:,} were promised"
        )


def stream(
    iterable: Any, *, examples_per_epoch: int, buffer_size: int = 0, batched: bool | None = None
) -> Streamed:
    """Examples that come one after another, as a source of `fit` and `Run`.

    An epoch is the next `examples_per_epoch` of them. An iterable that ends with an epoch, and can
    be gone through again, is begun again, after `set_epoch(number)` where it has that. One that
    ends within an epoch ends the run, which keeps what it has trained. Data are shared, and the
    order is that in which examples come, shuffled in the buffer.

    A run goes on by the iterable's own state (`state_dict` and `load_state_dict`, or `get_state`
    and `set_state`, of it or of its iterator), else by skipping what is done, and so where the
    state does not bring what was due, as without its shuffle buffer. In several processes
    each reads all, so that the iterable must give the same in each; or each has its own, with
    `data={"sharing": "process_local", "weighting": "example"}`.

    Args:
        iterable: a generator, a loader of PyTorch or Grain, a streamed data set of Hugging Face.
        examples_per_epoch: examples, or what they are in a batch, that make an epoch.
        buffer_size: so many examples that come one after another are shuffled among themselves; 0:
            none. As many are held in memory, twice.
        batched: whether it gives batches, which are split into examples along their first axis.
            None: a loader of PyTorch does, anything else gives examples.

    Raises:
        ValueError: what is given is no iterable, or a number is none.

    Example:
        >>> def endless():
        ...     rng = np.random.default_rng(0)
        ...     while True:
        ...         yield {"x": rng.normal(size=2).astype(np.float32)}
        >>> len(stream(endless(), examples_per_epoch=1000, buffer_size=100))
        1000
    """
    if not hasattr(iterable, "__iter__") or isinstance(iterable, str | bytes | dict):
        raise ValueError(
            f"hetjax.stream: got a {type(iterable).__name__}; give what `for example in …` takes"
        )
    parts.integer(at_least=1).check("hetjax.stream: examples_per_epoch", examples_per_epoch)
    parts.integer(at_least=0).check("hetjax.stream: buffer_size", buffer_size)
    if batched is None:
        batched = hasattr(iterable, "dataset") and getattr(iterable, "batch_size", None) is not None
    inputs = Inputs(iterable, per_epoch=examples_per_epoch, batched=batched)
    return Streamed(inputs, examples_per_epoch, buffer_size)
