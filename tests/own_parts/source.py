"""A data set of one's own: windows of a long series in a file, which is never read as a whole.

hetjax.fit(loss_fn, params, optimizer, Windows("series.npy", past=24, future=6), …)
"""

import numpy as np


class Windows:
    """Example i has the `past` values from place i + shift on as x, the next `future` as y."""

    thread_safe = True  # a memory map may be read by several threads

    def __init__(self, path, *, past, future, shift=0):
        self._path, self._past, self._future, self._shift = path, past, future, shift
        self._series = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self._series) - self._past - self._future + 1

    def __getitem__(self, i):
        return self.__getitems__([i])[0]

    def __getitems__(self, ids):
        """Optional: many examples at once, which is faster where each call has a cost."""
        starts = (np.asarray(ids) + self._shift) % len(self)
        rows = self._series[starts[:, None] + np.arange(self._past + self._future)]
        return [{"x": row[: self._past], "y": row[self._past :]} for row in rows]

    def of_epoch(self, epoch):
        """Optional: the set as it is in an epoch; here its windows begin a place later."""
        return Windows(self._path, past=self._past, future=self._future, shift=epoch)
