"""Messages between processes of one machine; `rounds/test_processes.py` has real ones."""

import concurrent.futures
import errno
import os
import socket
import threading
import time

import pytest

from hetjax.comm import key_value_store as store_lib
from hetjax.comm import socket_allgather
from hetjax.liveness import blocking_waits

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "SOCK_SEQPACKET") or os.uname().sysname != "Linux", reason="needs Linux"
)


class Board(store_lib.KeyValueStore):
    """Among threads."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def post(self, key, value):
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, key, timeout_secs, **who):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 120)
            return self._values[key]


def in_each(num_processes, call):
    """What `call(index)` returns in a thread for each."""
    with concurrent.futures.ThreadPoolExecutor(num_processes) as threads:
        return list(threads.map(call, range(num_processes)))


@pytest.fixture
def members():
    board = Board()
    made = in_each(4, lambda index: socket_allgather.connect(index, range(4), board))
    yield made
    for member in made:
        member.close()


def test_each_gets_the_messages_of_all_in_order(members):
    def rounds(index):
        return [members[index](f"{index} in round {r}".encode()) for r in range(200)]

    found = in_each(4, rounds)
    expected = [[f"{i} in round {r}".encode() for i in range(4)] for r in range(200)]
    assert found == [expected] * 4


def test_those_who_follow_return_after_the_leader_has_come(members):
    done = []

    def rounds(index):
        found = []
        for r in range(100):
            leader = r % 3
            members[index](b"all are here")
            if index == leader:
                done.append(r)
            members[index].follow(leader)
            found.append(done[-1] == r)
        return found

    assert in_each(4, rounds) == [[True] * 100] * 4


def test_who_is_ahead_does_not_wait_for_room(members):
    """The largest messages of two rounds lie between two processes, and nobody reads."""
    for peer in members[0]._peers.values():
        peer.setblocking(False)
        for _ in range(2):
            assert peer.send(bytes(socket_allgather.MOST_BYTES)) == socket_allgather.MOST_BYTES


def test_a_process_that_ends_is_named_while_others_wait(members):
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(members[index], b"waiting") for index in (0, 1, 3)]
        time.sleep(0.2)
        for peer in members[2]._peers.values():  # as the end of a process does it, with unread data
            peer.shutdown(socket.SHUT_RDWR)
        for future in waiting:
            with pytest.raises(blocking_waits.LostProcessError, match="process 2 has ended"):
                future.result(120)


def test_a_file_that_one_hands_out_is_the_same_for_all(members, tmp_path):
    with (tmp_path / "shared").open("w+b") as file:

        def take(index):
            members[index].hand_out(file.fileno()) if index == 1 else None
            got = file.fileno() if index == 1 else members[index].take(1)
            os.pwrite(got, b"%d" % index, index)
            return got

        others = [got for got in in_each(4, take) if got != file.fileno()]
        assert os.pread(file.fileno(), 9, 0) == b"0123"
        for got in others:
            os.close(got)
    none = in_each(4, lambda i: members[i].hand_out(None) if i == 1 else members[i].take(1))
    assert none == [None] * 4


def test_another_user_does_not_get_in(monkeypatch):
    user, seen = os.geteuid(), []

    def other_first(peer):
        seen.append(1)
        return user + 1 if len(seen) == 1 else user

    monkeypatch.setattr(socket_allgather, "_user", other_first)
    board = Board()
    with (
        concurrent.futures.ThreadPoolExecutor(1) as threads,
        socket_allgather._socket() as stranger,
    ):
        first = threads.submit(socket_allgather.connect, 0, range(2), board)
        stranger.connect(socket_allgather._address(board.wait("0", 120)))
        stranger.send((1).to_bytes(4, "little"))
        second = socket_allgather.connect(1, range(2), board)
        first.result(120).close()
        with pytest.raises(ConnectionResetError):  # shut out, what it sent unread
            stranger.recv(1)
        assert second._peers[0].recv(1) == b""  # it was connected to the first, which has closed
        second.close()


def test_where_one_has_no_sockets_nobody_uses_them(monkeypatch):
    made, lock = [], threading.Lock()

    class Socket(socket.socket):
        def bind(self, address):
            with lock:
                made.append(address)
                if len(made) == 2:
                    raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Socket)
    board = Board()
    assert in_each(3, lambda index: socket_allgather.connect(index, range(3), board)) == [None] * 3
    assert len(made) == 3
