"""Iterables with and without a state of their own, as loaders of PyTorch, Grain and others have."""

import numpy as np

from tests.rounds import problems

COUNT = 500
DATA = problems.classification(COUNT, np.float32)


def example(at):
    return {"x": DATA["x"][at % COUNT], "y": DATA["y"][at % COUNT], "at": np.int32(at)}


def generator(count=10**9, given=None):
    for at in range(count):
        if given is not None:
            given.append(at)
        yield example(at)


class Again:
    """Can be gone through again, as a loader: `count` examples, in each pass others."""

    def __init__(self, count, given=None):
        self.count, self.given, self.epoch = count, [] if given is None else given, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        start = self.epoch * self.count
        for at in range(start, start + self.count):
            self.given.append(at)
            yield example(at)


class Loader:
    """As PyTorch's: batches, lists in place of dicts, and of a `StatefulDataLoader` its state."""

    def __init__(self, count, batch_size):
        self.dataset, self.batch_size, self.count = range(count), batch_size, count

    def __iter__(self):
        for start in range(0, self.count, self.batch_size):
            rows = [example(at) for at in range(start, min(start + self.batch_size, self.count))]
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class WithState:
    """As a Hugging Face data set: the iterable has the state of its newest iterator."""

    def __init__(self, given=None):
        self.given, self.at = [] if given is None else given, 0

    def state_dict(self):
        return {"at": self.at, "more": (b"bytes", None, np.arange(3))}

    def load_state_dict(self, state):
        assert isinstance(state["more"], tuple)
        self.at = state["at"]

    def __iter__(self):
        while True:
            self.at += 1
            self.given.append(self.at - 1)
            yield example(self.at - 1)


class _Iterator:
    def __init__(self, given):
        self.given, self.at = given, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        self.given.append(self.at - 1)
        return example(self.at - 1)

    def get_state(self):
        return str(self.at).encode()

    def set_state(self, state):
        self.at = int(state)


class WithStates:
    """As a loader of Grain: each iterator has its own state, in bytes."""

    def __init__(self, given=None):
        self.given = [] if given is None else given

    def __iter__(self):
        return _Iterator(self.given)
