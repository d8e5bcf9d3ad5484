"""What each process of a run computes for itself: taken from one of them, or found to differ."""

import json

import numpy as np
import pytest
from jax._src import distributed

from hetjax.comm import allgather_work, broadcast_once
from hetjax.data import stream
from hetjax.inputs import agreement
from hetjax.local import stepped
from hetjax.rounds import run_state
from tests.comm import stores, test_join
from tests.rounds import gangs


def run_two(directory, other, *, shared_memory=False, **fields):
    """Two processes, of which process 1 computes `other` otherwise: [(exit code, message)]."""
    directory.mkdir()
    case = json.dumps({"other": other, "fields": fields})
    variables = {} if shared_memory else {"HETJAX_SHARED_MEMORY": "off"}
    module = "tests.rounds.gathering_cases"
    return gangs.run(module, 2, directory, case, str(directory), **variables)


@pytest.mark.slow
def test_all_processes_take_the_schedule_of_one_to_the_bit(tmp_path):
    reducer = {"name": "matcha", "graph": "0-1,1-2,2-3,0-2", "budget": 0.4}
    told = run_two(tmp_path / "out", "last bits", epochs=1, reducer=reducer)
    assert [code for code, _ in told] == [0, 0], told
    first, second = (np.load(tmp_path / "out" / f"{index}.npz") for index in range(2))
    np.testing.assert_array_equal(first["weights"], second["weights"])
    np.testing.assert_array_equal(first["active"], second["active"])
    np.testing.assert_array_equal(first["params"], second["params"])
    assert 0 < first["active"].mean() < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "parts", "fields", "shared_memory"),
    [
        ("flags", "exchanges", {"reducer": {"name": "matcha", "graph": "ring"}}, False),
        *(("quotas", "examples|quotas", {"budget": 7, "quota": "equal"}, s) for s in (False, True)),
    ],
)
def test_who_plans_another_round_is_named_before_anybody_waits(
    other, parts, fields, shared_memory, tmp_path
):
    told = run_two(tmp_path / "out", other, shared_memory=shared_memory, epochs=2, **fields)
    for code, message in told:
        assert code != 0, told
        assert "DisagreementError: process 1 planned another round than process 0" in message
        assert any(f"other {part}" in message for part in parts.split("|")), message


OTHERS = {
    "parameters": "other initial parameters than process 0; all need one program",
    "rule": "config.rule = ",
    "closed rule": "another rule than process 0",
    "rate": "another optimizer than process 0; all need one program, learning rate",
    "loss": "another loss than process 0",
    "shards": "other data than process 0; give each process all of the data",
    "sizes": "examples = 40 and process 0 has 203; give each process all of the data",
    "form": "examples = \"{'x': ShapeDtypeStruct(shape=(10,), dtype=float32), 'y'",
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_parts_are_refused(other, tmp_path):
    (first_code, _), (code, message) = run_two(tmp_path / "out", other, epochs=1)
    assert 0 not in (first_code, code)
    assert f"DisagreementError: process 1 has {OTHERS[other]}" in message


@pytest.mark.slow
def test_what_the_first_process_uses_alone_is_given_to_it_alone(tmp_path):
    told = run_two(tmp_path / "out", "of the leader", epochs=1)
    assert [code for code, _ in told] == [0, 0], told


def test_programs_are_compared_with_those_of_one_platform(monkeypatch):
    """A function may look at the platform; data and parameters are alike on all."""

    monkeypatch.setattr(distributed.global_state, "client", stores.client())

    def process(number, platform, **digests):
        test_join.becomes_another_process(monkeypatch)
        monkeypatch.setattr(distributed.global_state, "process_id", number)
        monkeypatch.setattr("jax.default_backend", lambda: platform)
        digests = {"params": "p", "values": "v", "loss": "l"} | digests
        agreement.check_same_parts(digests, holds_all=True)

    process(0, "cpu")
    process(1, "gpu", loss="g")
    process(2, "gpu", loss="g")
    process(3, "cpu")
    with pytest.raises(
        allgather_work.DisagreementError, match="4 has another loss than process 1;"
    ):
        process(4, "gpu", loss="l")
    with pytest.raises(ValueError, match="process 5 has other initial parameters than process 0"):
        process(5, "gpu", loss="g", params="q")


class Board:
    """One for all, in memory."""

    def __init__(self):
        self.values = {}

    def post(self, key, value):
        self.values[key] = json.dumps(value)

    def wait(self, key, timeout_secs, **who):
        return json.loads(self.values[key])


@pytest.fixture
def solving():
    """What two processes ask: who solves, and who hears of it."""
    board = Board()
    return [broadcast_once.BroadcastOnce(board, leads=leads) for leads in (True, False)]


def test_one_process_solves_and_the_others_hear_of_it(solving):
    (first, second), numbers = solving, [0.1, 1 / 3, 5e-324, 0.1 + 0.2]
    assert first("p", lambda: numbers) == numbers
    assert second("p", pytest.fail) == numbers
    assert first("p", pytest.fail) == numbers  # asked again, as in another run of the process
    assert first.save() == {"p": numbers}


def test_where_one_cannot_solve_nobody_waits_for_it(solving):
    first, second = solving

    def solve():
        raise ValueError("budget is 7")

    with pytest.raises(ValueError, match="budget is 7"):
        first("p", solve)
    with pytest.raises(ValueError, match="process 0 could not solve 'p': ValueError: budget is 7"):
        second("p", solve)


def test_each_part_of_a_plan_has_a_digest_of_its_own():
    plan = stream.Assignment(np.arange(8).reshape(2, 4), np.arange(3), np.zeros(2, int))
    local, active = stepped.LocalPlan(5, plan, np.array([1, 1]), None), np.array([True, False])
    own = run_state.digests_of(local, active)
    assert own == run_state.digests_of(local, active)
    later = plan._replace(passes=plan.passes + 1)
    others = {
        "examples": run_state.digests_of(local._replace(assigned=later), active),
        "quotas": run_state.digests_of(local._replace(limits=np.array([1, 0])), active),
        "exchanges": run_state.digests_of(local, np.array([True, True])),
    }
    for index, (name, digests) in enumerate(others.items()):
        assert [a != b for a, b in zip(own, digests, strict=True)] == [
            other == index for other in range(3)
        ], name
    assert run_state.digests_of(local._replace(may_close=False), active) != own
    next_round = run_state.digests_of(local._replace(round_index=6), active)
    assert all(a != b for a, b in zip(own, next_round, strict=True))
