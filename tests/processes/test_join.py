"""Who a process is in a run of several."""

import collections

import pytest
from jax._src import distributed

import hetjax
from hetjax.processes import board as board_lib
from hetjax.processes import endings, files, join, waits
from tests.launcher import launches


def test_a_process_that_is_alone_has_no_board():
    with pytest.raises(RuntimeError, match="this process is alone"):
        board_lib.Board("a test")


def test_a_board_more_of_one_name_shifts_none_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed.global_state, "client", files.Files(tmp_path))
    monkeypatch.setattr(board_lib, "_boards", collections.Counter())
    numbers = [5e-324, 1.7e308, *(1 / (k + 3) for k in range(5000))]
    board_lib.Board("gate").post("k", numbers)
    board_lib.Board("sums").post("k", 2)
    monkeypatch.setattr(board_lib, "_boards", collections.Counter())  # another process
    for _ in range(3):
        board_lib.Board("solutions")
    assert board_lib.Board("sums").wait("k", 1.0) == 2
    assert board_lib.Board("gate").wait("k", 1.0) == numbers


def test_a_process_of_several_that_did_not_join_does_not_train_alone(monkeypatch):
    monkeypatch.setenv("HETJAX_NUM_PROCESSES", "4")
    with pytest.raises(ValueError, match=r"one of 4.*call hetjax.join_processes"):
        join.check_joined()
    monkeypatch.setenv("HETJAX_NUM_PROCESSES", "1")
    join.check_joined()


def test_a_process_that_sees_an_engine_and_has_not_joined_says_so(monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(join, "_is_alone", False)
    join.check_joined()
    said = capsys.readouterr().err
    assert "this process trains alone, and by its environment it is one of several (Open MP" in said
    join.check_joined()  # once
    monkeypatch.setattr(join, "_is_alone", False)
    hetjax.join_processes(0, 1)  # it is meant so
    join.check_joined()
    assert capsys.readouterr().err == ""


def test_where_jax_was_initialized_its_place_counts():
    address = f"127.0.0.1:{join.find_port('127.0.0.1')}"
    program = f"import jax; jax.distributed.initialize({address!r}, 1, 0)\n"
    program += "import hetjax; print(hetjax.join_processes())"
    said = launches.python(program, JOB_COMPLETION_INDEX="1", JAX_PLATFORMS="cpu")
    assert f"Member(process_id=0, num_processes=1, coordinator={address!r}" in said.stdout, said


def test_who_cannot_find_the_coordinator_names_its_address():
    program = "import hetjax; hetjax.join_processes(1, 3, 'no-such-host.invalid:7000')"
    ended = launches.python(program, HETJAX_START_SECS="3")
    words = "process 1 of 3 cannot join its run at no-such-host.invalid:7000: not all were there"
    assert words in ended.stderr
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (RuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (RuntimeError("UNAVAILABLE: Stream removed"), True),
        (waits.LostProcessError("process 1 has ended"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (ValueError("cannot join its run: UNAVAILABLE: failed to connect"), False),
    ],
)
def test_the_loss_of_others_is_told_from_mistakes(error, is_loss):
    assert endings.is_loss_of_others(error) == is_loss
