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


LAUNCHED, ALONE, HELD = fault_raises.launched, fault_raises.by_hand, fault_holds.hold_one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drill", "kind", "found"),
    [
        (LAUNCHED, ["callback"], {"traced": True, "went_on": True}),
        (LAUNCHED, ["no_hook"], {"traced": True, "went_on": True}),
        (ALONE, ["callback"], {"said": True, "codes": True}),
        (ALONE, ["leave"], {"said": True, "codes": True}),
        (HELD, ["callback", 3, 1], {"named": 2, "went_on": True}),
        (HELD, ["stopped", 3, 0], {"named": 2, "went_on": True}),
    ],
)
def test_who_raises_or_holds_up_is_named_with_a_launcher_and_without(
    drill, kind, found, tmp_path, capfd
):
    session = fault_gangs.Session(
        *(1, time.monotonic() + 1000, random.Random(3), tmp_path, tmp_path / "cache"),
        *([], print),
    )
    record = drill(tmp_path, *kind, session=session)
    said = capfd.readouterr().err
    assert record["secs"] is not None, said
    assert {name: record[name] for name in found} == found, said


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
