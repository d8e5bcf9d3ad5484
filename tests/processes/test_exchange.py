"""Messages between processes of one machine; `rounds/test_processes.py` has real ones."""

import concurrent.futures
import errno
import os
import socket
import threading
import time

import pytest

from hetjax.processes import exchange, waits

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "SOCK_SEQPACKET") or os.uname().sysname != "Linux", reason="needs Linux"
)


class Board:
    """As `processes.Board`, among threads."""

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
def members(tmp_path):
    board = Board()
    made = in_each(4, lambda index: exchange.connect(tmp_path, index, 4, board))
    yield made
    for member in made:
        member.close()


def test_each_gets_the_messages_of_all_in_order(members, tmp_path):
    def rounds(index):
        return [members[index](f"{index} in round {r}".encode()) for r in range(200)]

    found = in_each(4, rounds)
    expected = [[f"{i} in round {r}".encode() for i in range(4)] for r in range(200)]
    assert found == [expected] * 4
    assert not list(tmp_path.iterdir())


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


def test_who_leads_waits_for_nobody_and_who_follows_one_that_ended_is_told(members):
    members[0].follow(0)
    members[1].follow(0)
    members[2].close()
    with pytest.raises(waits.LostProcessError, match="process 2 has ended"):
        members[1].follow(2)
    with pytest.raises(waits.LostProcessError, match="process 2 has ended"):
        members[1].follow(1)


def test_who_is_ahead_does_not_wait_for_room(members):
    """The largest messages of two rounds lie between two processes, and nobody reads."""
    for peer in members[0]._peers.values():
        peer.setblocking(False)
        for _ in range(2):
            assert peer.send(bytes(exchange.MOST_BYTES)) == exchange.MOST_BYTES


def test_a_process_that_ends_is_named_at_once(members):
    members[2].close()
    for index in (0, 1, 3):
        with pytest.raises(waits.LostProcessError, match="process 2 has ended"):
            members[index](b"still there")


def test_a_process_that_ends_is_named_while_others_wait(members):
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(members[index], b"waiting") for index in (0, 1, 3)]
        time.sleep(0.2)
        for peer in members[2]._peers.values():  # as the end of a process does it, with unread data
            peer.shutdown(socket.SHUT_RDWR)
        for future in waiting:
            with pytest.raises(waits.LostProcessError, match="process 2 has ended"):
                future.result(120)


def test_whoever_has_all_messages_may_leave(members):
    def last(index):
        found = members[index](b"last")
        members[index].close()
        return found

    assert in_each(4, last) == [[b"last"] * 4] * 4


def test_where_one_has_no_sockets_nobody_uses_them(tmp_path, monkeypatch):
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
    answers = in_each(3, lambda index: exchange.connect(tmp_path, index, 3, board))
    assert answers == [None] * 3
    assert len(made) == 3
    assert not list(tmp_path.iterdir())
