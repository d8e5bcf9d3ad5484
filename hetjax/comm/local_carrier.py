"""Reaches the referee of a run on one machine by a socket, and moves arrays by shared memory.

The launcher has the referee's host in a thread (`Server`). A member writes what it puts up into
files in memory that the others map, and that outlive it. It writes them anew when the round after
is decided: by then all who are members have read them, and what others read does not count.
"""

import asyncio
import contextlib
import mmap
import os
import pathlib
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from hetjax.comm import carrier as carrier_lib

SOCKET, PIECE = "referee", "piece"  # names of files in the directory of the run
THREAD = "hetjax-referee"
_HEAD = struct.Struct("<I")
_ANSWER_SECS = 30.0
SHARED = "HETJAX_SHARED_DIRECTORY"  # of the run, where not in /dev/shm
_BESIDE = 1 << 20  # bytes of small files


class Server:
    """Hosts the referee in a thread of this process, for members on this machine.

    Args:
        directory: of the run, which this user alone may read.
        host: of the referee, or another whose methods are coroutines.
    """

    def __init__(self, directory: pathlib.Path, host: Any) -> None:
        self._path, self._host = str(directory / SOCKET), host
        self._loop: asyncio.AbstractEventLoop
        self._is_open, self._is_over = threading.Event(), asyncio.Event()
        loop = threading.Thread(target=lambda: asyncio.run(self._run()), name=THREAD, daemon=True)
        loop.start()
        self._is_open.wait()

    def call(self, method: str, *args: Any) -> Any:
        """What a method of the host returns."""
        asked = getattr(self._host, method)(*args)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Has the thread do something."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_unix_server(self._serve, self._path)
        self._is_open.set()
        await self._is_over.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a thread of a member, one call at a time."""
        lost = asyncio.IncompleteReadError, ConnectionError
        with contextlib.suppress(*lost), contextlib.closing(writer):
            while True:
                (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                method, args = pickle.loads(await reader.readexactly(size))
                answer = pickle.dumps(await getattr(self._host, method)(*args))
                writer.write(_HEAD.pack(len(answer)) + answer)


class LocalCarrier(carrier_lib.Carrier):
    """As of `carrier`.

    Args:
        directory: of the run.
        incarnation: of this process.
        answer_secs: patience with an answer.
    """

    shares_gpus = outlives = True
    lost_secs = 600.0  # the launcher may be stopped for a while

    def __init__(
        self, directory: pathlib.Path, incarnation: int = -1, *, answer_secs: float = _ANSWER_SECS
    ) -> None:
        self._directory, self._incarnation = directory, incarnation
        self._answer_secs = answer_secs
        self._of_thread = threading.local()
        self._free: list[tuple[str, np.ndarray]] = []  # files of this process: name, and memory
        self._used: list[tuple[str, np.ndarray]] = []  # by what is put up now
        self._read: list[tuple[str, np.ndarray]] = []  # and for the round before
        self._mapped: dict[str, np.ndarray] = {}  # those of others
        self._num_files = 0
        self._room: tuple[str, np.ndarray] = "", np.zeros(0, np.uint8)  # not put up yet

    def call(self, method: str, *args: Any) -> Any:
        asked = pickle.dumps((method, args))
        try:
            if not hasattr(self._of_thread, "socket"):
                new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._of_thread.socket = new
                new.settimeout(self._answer_secs)
                new.connect(str(self._directory / SOCKET))
            self._of_thread.socket.sendall(_HEAD.pack(len(asked)) + asked)
            (size,) = _HEAD.unpack(self._received(_HEAD.size))
            return pickle.loads(self._received(size))
        except OSError as error:
            self.close()  # an answer that comes yet is none of the next call
            is_late = isinstance(error, TimeoutError)
            words = f"no answer for {self._answer_secs:.0f} s" if is_late else str(error)
            raise carrier_lib.LostRefereeError(words, is_final=not is_late) from error

    def close(self) -> None:
        """Of this thread; its next call connects anew."""
        if hasattr(self._of_thread, "socket"):
            self._of_thread.socket.close()
            del self._of_thread.socket

    def _received(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if not (part := self._of_thread.socket.recv(size - len(parts))):
                raise ConnectionResetError("the launcher has ended")
            parts += part
        return bytes(parts)

    def room(self, num_bytes: int) -> np.ndarray:
        name, memory = self._room
        if not name or memory.size != num_bytes:
            self._free += [self._room] if name else []
            place = next((k for k, (_, m) in enumerate(self._free) if m.size == num_bytes), None)
            self._room = self._new(num_bytes) if place is None else self._free.pop(place)
        return self._room[1]

    def put(self, piece: np.ndarray) -> Any:
        memory = self.room(piece.size)
        if piece.ctypes.data != memory.ctypes.data:
            np.copyto(memory, piece)
        put, self._room = self._room, ("", memory[:0])
        self._used.append(put)
        return put[0], piece.size

    def _new(self, num_bytes: int) -> tuple[str, np.ndarray]:
        name = f"{PIECE}.{self._incarnation}.{self._num_files}"
        self._num_files += 1
        with (self._directory / name).open("x+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(num_bytes, 1))  # else SIGBUS, later
            except OSError as error:
                told = f"{error.strerror} for {num_bytes >> 20} MB of shared memory"
                raise OSError(error.errno, told, file.name) from None
            return name, np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)[:num_bytes]

    def let_go(self) -> None:
        """What was put up before the last round may be overwritten: all have read it, or are no
        members any more."""
        self._free += self._read
        self._read, self._used = self._used, []

    def check_room(self, sums: int, state: int, members: int) -> None:
        needed = 4 * sums * members + state + _BESIDE  # contributions and totals of two rounds
        where = os.statvfs(self._directory)
        if needed > (free := where.f_bavail * where.f_frsize):
            whole = needed + (where.f_blocks - where.f_bavail) * where.f_frsize
            raise ValueError(
                f"--runtime=apart: up to {members} workers need {-(-needed >> 20)} MB of shared "
                f"memory, and {self._directory.parents[0]} has {free >> 20}. Start the container "
                f"with --shm-size={-(-whole >> 20)}m, or set {SHARED}=DIRECTORY"
            )

    def take(
        self, handles: Sequence[Any], over: tuple[int, int], moved: Callable[[int], None]
    ) -> list[np.ndarray] | None:
        taken = []
        for name, size in handles:
            if name not in self._mapped:
                try:
                    with (self._directory / name).open("rb") as file:
                        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                except OSError:
                    return None
                self._mapped[name] = np.frombuffer(memory, np.uint8)
            taken.append(self._mapped[name][:size])
        return taken
