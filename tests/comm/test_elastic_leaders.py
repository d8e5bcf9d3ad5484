"""Who leads a run apart is killed, or interrupted with those who come: what stays of it?"""

import contextlib
import csv
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed

import hetjax
from hetjax import gates
from hetjax import mesh as mesh_lib
from hetjax.comm import communicator as communicator_lib
from hetjax.comm import elastic, local_carrier, membership, referee
from hetjax.comm import key_value_store as store_lib
from tests.comm import elastic_program, elastic_threads, stores, test_elastic, test_join
from tests.comm.test_elastic import apart  # noqa: F401
from tests.launcher import launches
from tests.launcher.conftest import launch  # noqa: F401
from tests.own_parts import gate as own_gate


@pytest.mark.slow
def test_a_new_leader_knows_what_was_judged_and_written(apart):  # noqa: F811
    """Worker 0 is killed, and may come back in time; worker 1, which leads then, is asked to go."""
    fields = {"epochs": 40, "evaluates": True}
    launched, workdir = apart(writes=True, **fields)
    launches.eventually(lambda: sum("eval" in line for line in test_elastic.lines(workdir)) > 1)
    os.kill(test_elastic.pid_of(launched, 0), signal.SIGKILL)
    launched.wait_for("worker 1 leads from round")
    test_elastic.ask(launched, "remove", ":1")
    launched.wait_for("worker 2 leads from round")
    told = test_elastic.results(launched)
    assert told.keys() - {0} == {2}
    lines = test_elastic.lines(workdir)
    evals = {line["round"]: line["eval"] for line in lines if line.get("eval")}
    assert len(evals) == fields["epochs"]
    first = min(evals)
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["best_test_loss"] == max(each["test_loss"] for each in evals.values())
    assert summary["test_loss"] == evals[len(lines) - 1]["test_loss"]
    assert "resumed" not in summary
    with (workdir / "scalars.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(len(lines)))
    again = {"cluster": {"num_workers": 3}, "replay": str(workdir / "metrics.jsonl")}
    with jax.enable_x64(True):
        best = elastic_program.fit(local="virtual", max_rounds=first + 1, **fields, **again).params
    for each in told.values():
        assert each["judged"] == {k: v for k, v in each["judged"].items() if k in summary}
        assert each["judged"]["best_test_loss"] == pytest.approx(summary["best_test_loss"])
        found = [float.fromhex(x) for x in each["best"]]
        np.testing.assert_allclose(found, best, rtol=1e-12)
        assert each["resumed"] is None
    test_elastic.check_exact(workdir, told, **fields)


@pytest.mark.slow
def test_an_interrupt_saves_the_run_while_another_worker_starts(apart):  # noqa: F811
    launched, workdir = apart(f"--max_workers={test_elastic.WORKERS + 1}", epochs=1000)
    test_elastic.after(5, workdir)
    test_elastic.ask(launched, "add")
    launches.eventually((launched.heartbeats / f"process-{test_elastic.WORKERS}.beacon").exists)
    launched.send(signal.SIGINT)
    assert launched.end() == 130
    assert "the same call goes on from there" in launched.text()
    assert any((workdir / "checkpoints").iterdir())


def test_who_leads_is_known_before_it_has_joined(monkeypatch):
    for seat, start, leads in (("0", "0", True), ("1", "1", False), ("0", "3", False)):
        monkeypatch.setenv("HETJAX_PROCESS_ID", seat)
        monkeypatch.setenv("HETJAX_START", start)
        assert hetjax.leads() == leads


@pytest.mark.parametrize("gate", [gates.first(), gates.quorum(3), own_gate.after(3)])
def test_who_has_seen_no_rounds_before_closes_one_with_the_others(gate, monkeypatch):
    client = stores.client()
    monkeypatch.setattr(distributed.global_state, "client", client)
    communicator, lives, quotas = communicator_lib.Communicator(2), [], np.array([3, 3])
    for _ in range(2):
        test_join.becomes_another_process(monkeypatch)
        lives.append(
            gates.begin(gate, store_lib.RoundStore("gate", lambda: communicator.round_number))
        )
    for number in (-1, 5, 6, 7):  # one has warmed up and closed two rounds when the other comes
        communicator.round_number = number
        for live in lives[: 1 + (number == 7)]:
            live.begin(quotas)
            assert live.is_open()
        for done in (1, 2, 3):
            lives[0].finished(0, done)
        assert not lives[0].is_open()
    assert not lives[1].is_open()
    kept = {key.split("/")[-2] for key, _ in client.key_value_dir_get("hetjax/")}
    assert kept <= {"6", "7"}


@pytest.mark.slow
def test_a_gate_goes_on_closing_rounds_when_a_worker_has_come_back(apart):  # noqa: F811
    fields = {"gate": {"trigger": "quorum", "quorum": 3}, "quota": "equal"}
    launched, workdir = apart(epochs=40, **fields)
    test_elastic.after(5, workdir)
    os.kill(test_elastic.pid_of(launched, 1), signal.SIGKILL)
    (match,), _ = launched.wait_for(r"round (\d+): worker 1 joins")
    told = test_elastic.results(launched)
    whole = [line for line in test_elastic.lines(workdir) if line["round"] > int(match[1])]
    assert any(sum(line["microbatches_done"]) < sum(line["quotas"]) for line in whole)
    test_elastic.check_exact(workdir, told, epochs=40, **fields)


ROOM = "os.statvfs = lambda path: os.statvfs_result([4096, 4096, 250, 9, 9, 1, 1, 1, 0, 255])\n"
FULL = """
def full(*given):
    raise OSError(28, "No space left on device")
os.posix_fallocate = full
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacks", "code", "said"),
    [
        (ROOM, 2, r"up to 4 workers need 2 MB of .* has 0\. .*--shm-size=2m.*nothing is restarted"),
        (FULL, 1, r"raised OSError: .*No space left on device for 0 MB of shared memory: '/.*"),
    ],
)
def test_a_run_that_lacks_memory_ends_by_name(lacks, code, said, apart, monkeypatch):  # noqa: F811
    """Before it begins, or when others have taken what was there."""
    monkeypatch.setattr(test_elastic, "PROGRAM", f"import os\n{lacks}{test_elastic.PROGRAM}")
    launched, _ = apart("--max_restarts=0", "--max_workers=4", epochs=4)
    assert launched.end() == code
    launched.wait_for(said)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # as it beats
@pytest.mark.parametrize("is_enough", [True, False])
def test_the_memory_of_all_seats_and_of_a_state_is_looked_for(is_enough, tmp_path, monkeypatch):
    """A million numbers of a worker, five seats; a state of as many, and a MB of small files."""
    run, own = elastic_threads.Run(1, {}), referee.Member(0, 0)
    run.ask("found", run.founders)
    carrier = elastic_threads.Carrier(run, own)
    carrier.check_room = local_carrier.LocalCarrier(tmp_path).check_room
    roster = membership.MembershipClient(carrier, own, seats=5)
    member = elastic.Elastic(roster, mesh_lib.make_worker_mesh(1))
    member.sums({"a": jnp.zeros((1 << 20) - 8), "b": jnp.zeros(8)})
    state = elastic_threads.Begun(0, np.zeros(1 << 20, np.float32))
    needs = 4 * (4 * 5 + 1) + 1
    room = os.statvfs_result([1 << 20, 1 << 20, 300, 300, needs - 1 + is_enough, 1, 1, 1, 0, 255])
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    words = f"need {needs} MB of shared memory"
    lacks = contextlib.nullcontext() if is_enough else pytest.raises(ValueError, match=words)
    with contextlib.closing(run), lacks:
        member.start_barrier(state)
    assert (roster.last is not None) == is_enough
