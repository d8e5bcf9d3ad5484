"""Sources that wait, change what they give, or cannot be read by several threads."""

import os
import signal
import threading
import time

import numpy as np


class Waiting:
    """Each read takes so long, as a disk does; notes what was read, and by which thread."""

    def __init__(self, count=64, secs=0.002):
        self.count, self.secs = count, secs
        self.reads, self.threads = [], set()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.reads.append(index)
        self.threads.add(threading.get_ident())
        time.sleep(self.secs)
        return {"x": np.full(3, index, np.float32), "y": np.int32(index)}


class Augmented(Waiting):
    """One field is another one each time."""

    def __init__(self, count=64, secs=0.0, seed=0):
        super().__init__(count, secs)
        self.rng = np.random.default_rng(seed)

    def __getitem__(self, index):
        noise = self.rng.normal(size=3).astype(np.float32)
        return {**super().__getitem__(index), "noise": noise}


class OfOneThread(Waiting):
    """As a connection of sqlite3."""

    def __init__(self, *args):
        super().__init__(*args)
        self.owner = threading.get_ident()

    def __getitem__(self, index):
        if threading.get_ident() != self.owner:
            raise RuntimeError("made in another thread")
        return super().__getitem__(index)


class At5(Waiting):
    """Does something before example 5 is read."""

    def __init__(self, does):
        super().__init__(10, 0.0)
        self.does = does

    def __getitem__(self, index):
        if index == 5:
            self.does()
        return super().__getitem__(index)


class Busy(Waiting):
    """Each read holds the interpreter's lock for so long, and ends the process where it is told."""

    def __init__(self, count=64, secs=0.0, *, ends_at=-1, opens=True):
        super().__init__(count, secs)
        self.ends_at, self.opens = ends_at, opens

    def __setstate__(self, state):
        if not state["opens"]:
            raise OSError("no such file here")
        self.__dict__.update(state)

    def __getitem__(self, index):
        if index == self.ends_at:
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.thread_time() + self.secs
        while time.thread_time() < end:
            pass
        self.reads.append(index)
        return {"x": np.full(3, index, np.float32), "by": np.int32(os.getpid())}
