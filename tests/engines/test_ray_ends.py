"""Elastic runs over Ray that lose workers, all of them, their driver or their referee."""

import json
import os
import re
import signal

import pytest

from experiments.drills import ray_ends, ray_nodes

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # a node's processes
]
ray = pytest.importorskip("ray", reason="Ray is missing: pip install 'hetjax[ray]'")
SPEEDS = (1.0, 0.5)
EXACT = {"examples_missing": 0, "examples_duplicated": 0}


@pytest.fixture(scope="module", autouse=True)
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", **ray_nodes.VARIABLES}.items():
            patch.setenv(name, value)
        found = ray_nodes.Nodes(len(SPEEDS), connects=False)
        yield found
        found.close()


def code(**fields):
    said = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    return (
        "import pathlib, sys; from experiments.drills import ray_elastic;"
        f"ray_elastic.launched(pathlib.Path(sys.argv[1]), {SPEEDS}, {said})"
    )


@pytest.mark.parametrize("what", ["driver", "referee"])
def test_workers_end_by_name_and_the_same_call_goes_on(what, nodes, tmp_path):
    found = ray_ends.ended(what, tmp_path, code(), nodes, lambda: nodes)
    assert len(found.said) == found.workers == len(SPEEDS)
    assert found.summary.items() >= EXACT.items()
    assert found.summary["resumed"]


def test_without_a_head_all_end_by_name_and_the_same_call_goes_on(tmp_path):
    """By themselves: Ray would end a driver that asks for the head after a minute, without one."""
    there = []

    def own_nodes():
        there.append(ray_nodes.Nodes(len(SPEEDS), connects=False))
        return there[-1]

    try:
        found = ray_ends.ended("head", tmp_path, code(), own_nodes(), own_nodes)
    finally:
        for each in there:
            each.close()
    assert len(found.said) == found.workers == len(SPEEDS)
    assert found.summary.items() >= EXACT.items()
    assert "launch: the run has lost the head of the cluster" in (tmp_path / "driver").read_text()


@pytest.fixture
def run(nodes, tmp_path):
    """Begins a run that has done some rounds, given fields of `launch`."""
    begun = []

    def begin(**fields):
        begun.append(ray_ends.Program(code(**fields), tmp_path, nodes.address))
        begun[-1].wait_for_rounds(tmp_path, 10)
        return begun[-1]

    yield begin
    for program in begun:
        program.process.kill()
        program.process.wait()


def goes_on(directory, program):
    program.wait_for_rounds(directory, len(ray_ends.rounds(directory)) + 10)


def ends(directory, program):
    """Has a run end; its summary."""
    (directory / "over").touch()
    ray_ends.wait(lambda: program.process.poll() is not None, "the end of the run")
    assert program.process.returncode == 0, program.said()
    return json.loads((directory / "run" / "summary.json").read_text())


def test_a_worker_leaves_after_its_round_by_sigterm_and_its_seat_is_taken_again(run, tmp_path):
    program = run(max_failures=0)  # one that leaves does not count
    first, _ = ray_ends.trainers(tmp_path)
    os.kill(first, signal.SIGTERM)
    ray_ends.wait(lambda: first not in ray_ends.trainers(tmp_path), "its end")
    ray_ends.wait(lambda: re.search(r"round \d+: worker \d left; what", program.said()), "left")
    ray_ends.wait(lambda: re.search(r"round \d+: worker \d joins", program.said()), "joins")
    goes_on(tmp_path, program)
    assert ends(tmp_path, program).items() >= EXACT.items()
    done = ray_ends.rounds(tmp_path)
    assert done == sorted(set(done))  # none was done again


def test_the_last_worker_saves_by_sigterm_and_all_begin_anew(run, tmp_path):
    program = run(max_failures=0)
    pids = ray_ends.trainers(tmp_path)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    ray_ends.wait(lambda: not {*pids} & {*ray_ends.trainers(tmp_path)}, "their end")
    goes_on(tmp_path, program)
    assert ends(tmp_path, program).items() >= EXACT.items()


def test_all_start_anew_from_the_checkpoint_when_all_are_killed_at_once(run, tmp_path):
    program = run(max_failures=2)
    program.wait_for_rounds(tmp_path, 60)
    for pid in ray_ends.trainers(tmp_path):
        os.kill(pid, signal.SIGKILL)
    goes_on(tmp_path, program)
    assert "all start anew from the last checkpoint" in program.said()
    assert ends(tmp_path, program).items() >= EXACT.items()


def test_ctrl_c_ends_the_run_after_its_round_saved(run, tmp_path):
    program = run()
    workers = ray_ends.trainers(tmp_path)
    program.process.send_signal(signal.SIGINT)
    ray_ends.wait(lambda: program.process.poll() is not None, "the end of the driver")
    ray_ends.wait(lambda: not any(map(ray_ends.parent, workers)), "the end of the workers")
    assert "\nKeyboardInterrupt" in program.said()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.items() >= (EXACT | {"interrupted": True}).items()


def test_a_seat_without_room_is_taken_when_a_machine_comes(run, nodes, tmp_path):
    nodes.lose(1)
    program = run(start_secs=3.0)
    (alone,) = ray_ends.trainers(tmp_path)
    nodes.add(1)
    ray_ends.wait(lambda: re.search(r"round \d+: worker 1 joins", program.said()), "joins")
    goes_on(tmp_path, program)
    assert alone in ray_ends.trainers(tmp_path)
    assert ends(tmp_path, program).items() >= EXACT.items()


def test_a_worker_leaves_a_node_that_is_drained(run, nodes, tmp_path):
    program = run(max_failures=0)
    nodes.drain(0)
    ray_ends.wait(lambda: re.search(r"round \d+: worker 0 left; what", program.said()), "left")
    goes_on(tmp_path, program)
    assert ends(tmp_path, program).items() >= EXACT.items()
    nodes.lose(0)
    nodes.add(0)


def test_fewer_than_min_workers_are_said(nodes, tmp_path):
    nodes.lose(1)
    program = ray_ends.Program(code(start_secs=3.0, min_workers=2), tmp_path, nodes.address)
    ray_ends.wait(lambda: program.process.poll() is not None, "the end of the driver")
    nodes.add(1)
    words = (
        r"ValueError: launch: Ray had room for 1 of 2 seats within \d+ s \(start_secs\), and min"
    )
    assert re.search(words, program.said())
