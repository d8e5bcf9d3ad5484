"""Three fault drills, shortened, and the table that all of them fill."""

import json
import random
import time

import pytest

from experiments.drills import fault_cases, fault_gangs, fault_holds, fault_raises, faults


def write(results, drill, *records):
    text = "".join(json.dumps({"drill": drill, **record}) + "\n" for record in records)
    with (results / f"{drill}.jsonl").open("a") as file:
        file.write(text)


@pytest.mark.slow
def test_killed_workers_are_recovered_exactly(tmp_path, capfd):
    faults.run("kill", tmp_path, trials=1, seed=1)
    *kills, gang = faults.read(tmp_path, "kill")
    assert [record["recovered"] for record in kills] == [True], capfd.readouterr().err
    assert all(record["named"] for record in kills)
    assert gang["kills"] == gang["restarts"] == 1
    assert (gang["missing"], gang["duplicated"]) == (0, 0)
    assert gang["whole"]
    assert gang["bit_equal"]


def a_session(tmp_path):
    return fault_gangs.Session(
        trials=1,
        ends=time.monotonic() + 1000,
        rng=random.Random(3),
        directory=tmp_path,
        cache=tmp_path / "cache",
        earlier=[],
        write=print,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["callback", "no_hook"])
def test_who_raises_is_named_with_its_traceback_and_all_go_on(kind, tmp_path, capfd):
    record = fault_raises.launched(tmp_path, kind, session=a_session(tmp_path))
    said = capfd.readouterr().err
    assert record["secs"] is not None, said
    assert (record["traced"], record["went_on"]) == (True, True), said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["callback", "leave"])
def test_without_a_launcher_the_others_say_who_raised_what_and_end(kind, tmp_path, capfd):
    record = fault_raises.by_hand(tmp_path, kind, session=a_session(tmp_path))
    assert record["secs"] is not None, capfd.readouterr().err
    assert (record["said"], record["codes"]) == (True, True), capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "victim"), [("callback", 1), ("stopped", 0)])
def test_without_a_launcher_the_others_say_who_holds_them_up(kind, victim, tmp_path, capfd):
    record = fault_holds.hold_one(tmp_path, kind, 3, victim, session=a_session(tmp_path))
    assert record["named"] == 2, capfd.readouterr().err
    assert record["went_on"], capfd.readouterr().err


def test_the_table_adds_up_over_runs(tmp_path):
    killed = {"recovered": True, "named": True, "worker": 0, "secs": 2.0}
    gang = {"missing": 0, "duplicated": 0, "whole": True, "bit_equal": True}
    for _ in range(2):
        write(tmp_path, "kill", killed, {**killed, "worker": 1, "secs": None})
    gangs = [{**gang, "kills": 2, "restarts": 2}, {**gang, "kills": 2, "restarts": 3}]
    with (tmp_path / "kill.jsonl").open("a") as file:
        file.writelines(json.dumps({"drill": "kill_gang", **one}) + "\n" for one in gangs)
    hung = {"kind": "loader", "named": True, "went_on": True}
    write(tmp_path, "hang", {**hung, "heartbeats": 1.8}, {**hung, "heartbeats": None})
    held = {"kind": "sync", "workers": 3, "named": 2, "secs": 10.6, "went_on": True}
    write(tmp_path, "hold", held, {**held, "named": 1, "secs": None})
    text = faults.table(tmp_path)
    for row in (
        "| `kill -9`: recovered | all | 4 of 4 (95 %: at most 75.0% fail) | 4 |",
        "| … of process 0 | none | 2 | 4 |",
        "| … restarts without a kill | 0 | 1 | 2 |",
        "| hang, loader: right worker named, run went on | all | 1 of 2 | 2 |",
        "| … noticed after | ≤ 2 heartbeats | at most inf | 2 |",
        "by hand: all name it | all, ≤ 60 s | 1 of 2, at most inf s | 2 |",
        "| … by the waiting processes | all | 3 of 4 | 2 |",
    ):
        assert row in text


@pytest.mark.parametrize(
    ("lines", "is_whole"),
    [
        ([(0, 4, 4), (1, 4, 8)], True),
        ([(0, 4, 4), (0, 4, 4), (1, 4, 8)], False),  # a round twice
        ([(0, 4, 4), (1, 3, 7)], False),
    ],
)
def test_a_run_is_whole_when_every_round_was_done_once(lines, is_whole, tmp_path):
    keys = ("round", "examples", "examples_processed")
    text = "".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    config = {"epochs": 2, "data": {"num_train": 4, "sharing": "shared"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    summary = {"interrupted": False, "rounds": len(lines)}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert fault_cases.is_whole(tmp_path) is is_whole
