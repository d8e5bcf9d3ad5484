"""Who a process is in a run of several."""

import functools
import re

import pytest
from jax._src import distributed

import hetjax
from hetjax.comm import join, runtime
from hetjax.comm import key_value_store as store_lib
from hetjax.liveness import blocking_waits, exit_reports
from tests import programs
from tests.comm import stores
from tests.comm import test_process_info as engines
from tests.launcher import launches


def becomes_another_process(monkeypatch):
    monkeypatch.setattr(runtime, "current", functools.cache(runtime.Runtime))


def test_a_process_that_is_alone_has_no_board():
    with pytest.raises(RuntimeError, match="this process is alone"):
        store_lib.KeyValueStore("a test")


def test_a_board_more_of_one_name_shifts_none_of_another(monkeypatch):
    monkeypatch.setattr(distributed.global_state, "client", stores.client())
    becomes_another_process(monkeypatch)
    numbers = [5e-324, 1.7e308, *(1 / (k + 3) for k in range(5000))]
    store_lib.KeyValueStore("gate").post("k", numbers)
    store_lib.KeyValueStore("sums").post("k", 2)
    becomes_another_process(monkeypatch)
    for _ in range(3):
        store_lib.KeyValueStore("solutions")
    assert store_lib.KeyValueStore("sums").wait("k", 1.0) == 2
    assert store_lib.KeyValueStore("gate").wait("k", 1.0) == numbers


def test_what_nobody_has_put_up_is_not_there(monkeypatch):
    monkeypatch.setattr(distributed.global_state, "client", stores.client())
    becomes_another_process(monkeypatch)
    board = store_lib.KeyValueStore("a test")
    assert board.read("k") is None
    with pytest.raises(TimeoutError, match=r"no process posted 'k' within 0\.1 s"):
        board.wait("k", 0.1)
    assert [board.settled("k", value) for value in (1, 2)] == [1, 1]
    board.remove("k")
    assert board.read_all() == {}


def test_a_process_of_several_that_did_not_join_does_not_train_alone(monkeypatch):
    monkeypatch.setenv("HETJAX_NUM_PROCESSES", "4")
    with pytest.raises(ValueError, match=r"one of 4.*call hetjax.join_processes"):
        join.check_joined()
    monkeypatch.setenv("HETJAX_NUM_PROCESSES", "1")
    join.check_joined()


def test_a_process_that_sees_an_engine_and_has_not_joined_says_so(monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    becomes_another_process(monkeypatch)
    join.check_joined()
    said = capsys.readouterr().err
    assert "this process trains alone, and by its environment it is one of several (Open MP" in said
    join.check_joined()  # once
    becomes_another_process(monkeypatch)
    hetjax.join_processes(0, 1)  # it is meant so
    join.check_joined()
    assert capsys.readouterr().err == ""


def test_where_jax_was_initialized_its_place_counts():
    address = f"127.0.0.1:{join.find_port('127.0.0.1')}"
    program = f"import jax; jax.distributed.initialize({address!r}, 1, 0)\n"
    program += "import hetjax; print(hetjax.join_processes())"
    said = launches.python(program, JOB_COMPLETION_INDEX="1", JAX_PLATFORMS="cpu")
    assert f"ProcessInfo(process_id=0, num_processes=1, coordinator={address!r}" in said.stdout, (
        said
    )


UNKNOWN = "no-such-host.invalid"
AT_UNKNOWN = {"JAX_COORDINATOR_ADDRESS": f"{UNKNOWN}:7000"}
BY_HAND = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "3"}
INDEXED_JOB = {**engines.INDEXED_JOB, "JAX_NUM_PROCESSES": "4", "MASTER_PORT": "7000"}
OF_MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": f"1079443456.0;tcp://{UNKNOWN}:57849",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
WAYS = {
    "arguments": {},
    "launcher": {**engines.LAUNCHER, "HETJAX_COORDINATOR": f"{UNKNOWN}:7000"},
    "JAX's variables": {**BY_HAND, **AT_UNKNOWN},
    "torchrun": {**engines.TORCHRUN, "MASTER_ADDR": UNKNOWN},
    "variables of torch": {**engines.TORCH, "MASTER_ADDR": UNKNOWN},
    "Kubernetes": {**INDEXED_JOB, "MASTER_ADDR": UNKNOWN},
    "Open MPI 4": {**engines.open_mpi(1, 4), **OF_MPIRUN},
    "Open MPI 5": {**engines.open_mpi(1, 4, version=5), **AT_UNKNOWN},
    "MPICH": {**engines.pmi(1, 2), **AT_UNKNOWN},
    "Slurm": {**engines.slurm(1, 4), "SLURM_STEP_NODELIST": UNKNOWN},
}


@pytest.mark.parametrize("way", WAYS)
def test_who_cannot_find_the_coordinator_names_its_address(tmp_path, way):
    given = "" if WAYS[way] else f"1, 3, '{UNKNOWN}:7000'"
    program = (
        "import hetjax\nfrom hetjax.liveness import stall_reporter\n"
        f"stall_reporter.PERIOD_SECS = 0.4; hetjax.join_processes({given})"
    )
    ended = programs.run(["-c", program], tmp_path, **WAYS[way], HETJAX_START_SECS="1")
    waits_for = rf"hetjax: process \d of \d has waited \d s for process 0 at {UNKNOWN}:\d+, or the"
    assert re.search(waits_for, ended.stderr), ended.stderr
    refused = rf"cannot join its run at {UNKNOWN}:\d+: not all were there after 1 s"
    assert re.search(refused, ended.stderr), ended.stderr
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (RuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (RuntimeError("UNAVAILABLE: Stream removed"), True),
        (blocking_waits.LostProcessError("process 1 has ended"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (ValueError("cannot join its run: UNAVAILABLE: failed to connect"), False),
    ],
)
def test_the_loss_of_others_is_told_from_mistakes(error, is_loss):
    assert exit_reports.is_loss_of_others(error) == is_loss
