"""Who a process is in a run of several."""

import collections

import pytest
from jax._src import distributed

from hetjax.processes import board as board_lib
from hetjax.processes import endings, join, waits

LAUNCHER = {
    "HETJAX_PROCESS_ID": "1",
    "HETJAX_NUM_PROCESSES": "4",
    "HETJAX_COORDINATOR": "127.0.0.1:7000",
}
SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    ("arguments", "environment", "place"),
    [
        ((), {}, None),
        ((), LAUNCHER, (1, 4, "127.0.0.1:7000")),
        ((0, 2, "host:80"), LAUNCHER, (0, 2, "host:80")),
        ((), SLURM, (2, 8, None)),
        ((), {**SLURM, **LAUNCHER}, (1, 4, "127.0.0.1:7000")),
        ((), {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0"}, None),  # a shell in an allocation
        ((), {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ((None, None, "host:80"), {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
         (3, 4, "host:80")),
        ((None, None, "[::1]:80"), {"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, "[::1]:80")),
        ((0, 1, "host:80"), {}, None),
    ],
)  # fmt: skip
def test_arguments_come_before_the_launcher_and_the_launcher_before_a_scheduler(
    arguments, environment, place
):
    assert join.find_place(*arguments, environment=environment) == place


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, None), "--process_id is 1 and --num_processes None; give both"),
        ((0, 2), r"--coordinator is missing: HOST:PORT"),
        ((2, 2, "host:80"), "--process_id is 2; it must be from 0 to 1"),
        ((-1, 2, "host:80"), "--process_id is -1"),
        ((0, 2, "host"), "--coordinator is 'host'; it must be HOST:PORT"),
        ((0, 2, "host:0"), "must be HOST:PORT"),
        ((0, 2, ":80"), "must be HOST:PORT"),
        ((0, 2, "host:70000"), "must be HOST:PORT"),
    ],
)
def test_a_wrong_place_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        join.find_place(*arguments, environment={})


def test_a_process_that_is_alone_has_no_board():
    with pytest.raises(RuntimeError, match="this process is alone"):
        board_lib.Board("a test")


class Client:
    """Of a coordination service that has one process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, text, *, allow_overwrite):
        assert len(text) <= 4096
        self.values[key] = text

    def key_value_try_get(self, key):
        return self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        return self.values[key]


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1 / (k + 3) for k in range(5000)] + [5e-324, 1.7e308, 0.1 + 0.2],
        {"error": '"' * 5000 + "\\" * 5000 + "ü" * 5000},
    ],
)
def test_a_long_value_is_read_as_it_was_put_up(value, monkeypatch):
    monkeypatch.setattr(distributed.global_state, "client", Client())
    board = board_lib.Board("a test")
    board.post_long("p", value)
    assert board.wait_long("p", 1.0) == value


def test_a_board_more_of_one_name_shifts_none_of_another(monkeypatch):
    client = Client()
    monkeypatch.setattr(distributed.global_state, "client", client)
    monkeypatch.setattr(board_lib, "_boards", collections.Counter())
    board_lib.Board("gate").post("k", 1)
    board_lib.Board("sums").post("k", 2)
    monkeypatch.setattr(board_lib, "_boards", collections.Counter())  # another process
    for _ in range(3):
        board_lib.Board("solutions")
    assert board_lib.Board("sums").wait("k", 1.0) == 2
    assert board_lib.Board("gate").wait("k", 1.0) == 1


def test_joining_alone_does_nothing():
    join.join(None)


def test_a_process_of_several_that_did_not_join_does_not_train_alone(monkeypatch):
    monkeypatch.setenv("HETJAX_NUM_PROCESSES", "4")
    with pytest.raises(ValueError, match=r"one of 4.*call hetjax.join_processes"):
        join.check_joined()
    monkeypatch.setenv("HETJAX_NUM_PROCESSES", "1")
    join.check_joined()


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (RuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (RuntimeError("UNAVAILABLE: Stream removed"), True),
        (waits.LostProcessError("process 1 has ended"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (ValueError("cannot join its run: UNAVAILABLE: failed to connect"), False),
    ],
)
def test_the_loss_of_others_is_told_from_mistakes(error, is_loss):
    assert endings.is_loss_of_others(error) == is_loss
