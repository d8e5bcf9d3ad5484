"""A short message from each process of one machine to each of the others, once a round.

Every two processes have a Unix socket between them. So a message takes one step, and a process that
waits is woken once for each of the others. A collective over TCP takes a step for each process, and
each step may wait for one that has used up its share of the processor. The socket also ends with
the process at its other end, which is then known to be gone.
"""

import contextlib
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

from hetjax.comm import key_value_store as store_lib
from hetjax.liveness import blocking_waits

SHARED_MEMORY = "HETJAX_SHARED_MEMORY"  # "off": processes of one machine meet as others do
MOST_BYTES = 1 << 16  # of a message: a socket holds two, so no `send` waits for room
_DONE = b"."
_PATIENCE_SECS = 600.0
_SLICE_MILLISECONDS = 250  # after which a wait looks whether a process is still to come


class SocketAllGather:
    """The sockets of one process.

    Args:
        index: of this process.
        peers: the sockets to the others, by process.
    """

    def __init__(self, index: int, peers: Mapping[int, socket.socket]) -> None:
        self._index, self._peers = index, peers
        self.processes = sorted({index, *peers})
        """Those of this machine."""
        self._process_of = {peer.fileno(): process for process, peer in peers.items()}

    def __call__(self, message: bytes) -> list[bytes]:
        """Sends a message to all others; returns those of all processes, in order, its own too.

        Raises:
            LostProcessError: a process has ended before it sent its message.
        """
        self._to_all(lambda peer: peer.send(message))
        found = {self._index: message}
        waiting = select.poll()
        for peer in self._peers.values():
            waiting.register(peer, select.POLLIN)
        with blocking_waits.Wait("end the round", lambda: self._peers.keys() - {*found}) as wait:
            while len(found) <= len(self._peers):
                # All sockets are watched: an end is seen, whichever process is still missing.
                if not (ready := waiting.poll(_SLICE_MILLISECONDS)):
                    wait.check()
                for file, _ in ready:
                    process = self._process_of[file]
                    with _naming(process):
                        found[process] = self._peers[process].recv(MOST_BYTES)
                        if not found[process]:
                            raise ConnectionResetError
                    waiting.unregister(file)
        return [found[process] for process in sorted(found)]

    def follow(self, leader: int) -> None:
        """Returns when process `leader`, which waits for no process, has called it too.

        Raises:
            LostProcessError: the leader has ended, or one that follows has.
        """
        if leader == self._index:
            self._to_all(lambda peer: peer.send(_DONE))
            return
        with _naming(leader), blocking_waits.Wait("add up the sums", lambda: [leader]):
            if not self._peers[leader].recv(len(_DONE)):
                raise ConnectionResetError

    def hand_out(self, file: int | None) -> None:
        """Gives all others a file that is open here, or nothing; each calls `take`."""
        self._to_all(lambda peer: socket.send_fds(peer, [_DONE], [] if file is None else [file]))

    def take(self, giver: int) -> int | None:
        """The file that process `giver` hands out, open in this process too; or None.

        Raises:
            LostProcessError: the giver has ended.
        """
        with _naming(giver), blocking_waits.Wait("make the memory for the sums", lambda: [giver]):
            told, files, *_ = socket.recv_fds(self._peers[giver], len(_DONE), 1)
            if not told:
                raise ConnectionResetError
        return files[0] if files else None

    def _to_all(self, send: Callable[[socket.socket], object]) -> None:
        for process, peer in self._peers.items():
            with _naming(process):
                send(peer)

    def close(self) -> None:
        """Ends the connections."""
        for peer in self._peers.values():
            peer.close()


@contextlib.contextmanager
def _naming(process: int) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, FileNotFoundError, TimeoutError) as error:
        raise blocking_waits.LostProcessError(f"process {process} has ended") from error


def connect(
    index: int, processes: Sequence[int], board: store_lib.KeyValueStore
) -> SocketAllGather | None:
    """Connects the processes of one machine. All of them call it and get the same answer.

    Args:
        index: of this process.
        processes: of this machine, this one too.
        board: a store for this only, which says which are ready.

    Returns:
        The connections, or None if sockets are not possible here, or not wanted (`SHARED_MEMORY`).

    Raises:
        LostProcessError: a process has ended meanwhile.
    """
    with contextlib.ExitStack() as stack:
        own, told = secrets.token_hex(16), ""
        listening: socket.socket | None = None
        with contextlib.suppress(OSError, AttributeError):  # not Linux has none
            if os.environ.get(SHARED_MEMORY) != "off":
                listening = stack.enter_context(_socket())
                listening.bind(_address(own))
                listening.listen(len(processes))
                listening.settimeout(_PATIENCE_SECS)
                told = own
        names = board.gather(index, told, processes, what="come to the first communicator")
        if not all(names.values()):
            return None
        assert listening is not None
        peers = {}
        for process in (other for other in processes if other < index):
            peers[process] = _socket()
            with _naming(process):
                peers[process].connect(_address(names[process]))
                peers[process].send(index.to_bytes(4, "little"))
        with blocking_waits.Wait("connect", lambda: set(processes) - {index} - peers.keys()):
            while len(peers) < len(processes) - 1:
                try:
                    peer, _ = listening.accept()
                    if _user(peer) != os.geteuid():  # names can be read in /proc/net/unix
                        peer.close()
                        continue
                    sender = peer.recv(4)
                except (TimeoutError, ConnectionError):
                    sender = b""
                if not sender:
                    raise blocking_waits.LostProcessError("a process has ended")
                peers[int.from_bytes(sender, "little")] = peer
    return SocketAllGather(index, peers)


def _address(name: str) -> bytes:
    """Of a socket that is in no directory, so that nothing of it stays. Only Linux has such."""
    return b"\0hetjax-" + name.encode()


def _user(peer: socket.socket) -> int:
    """Whose process is at the other end."""
    size = struct.calcsize("3i")  # its process, user and group
    return struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST_BYTES)
    return made
