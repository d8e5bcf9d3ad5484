"""Runs that end early and go on: bit-equal to those that were never interrupted."""

import functools
import json
import os
import signal
from typing import NamedTuple

import numpy as np
import pytest

import hetjax
from hetjax import quota
from hetjax.rounds import resume
from tests.rounds import problems

SPEEDS = {"secs_per_microbatch": [1.0, 1.5, 2.0, 4.0], "clock": "virtual"}
STATIC = {
    "epochs": 2,
    "cluster": {"num_workers": 4, **SPEEDS},
    "quota": {"policy": "static", "proportions": [4, 3, 2, 1]},
    "checkpoint": {"every_rounds": 1},
}
CASES = {
    "all_reduce": {"budget": 13},  # ended after each of 4 rounds, the others after each 3
    "gate": {"gate": "first", "reducer": "ring", "quota": "adaptive"},
    "d_grab": {"ordering": "d_grab", "local": "virtual"},
    "gossip": {"ordering": "pair_balance", "reducer": "matcha", "local": "virtual"},
    "full rounds": {"data": {"last_round": "drop"}, "ordering": "grab", "budget": 9},
    "full private": {"data": {"last_round": "drop", "sharing": "private"}, "local": "fused"},
}


def fit(workdir, *callbacks, **fields):
    data, weights = problems.given(101)
    fields = {**STATIC, "eval_source": data, "workdir": workdir, "callbacks": callbacks, **fields}
    return problems.fit(data, weights, **fields)


@functools.cache
def params_of_a_whole_run():
    return fit(None).params


def end_after(every, workdir, **fields):
    """One run, ended after each `every` rounds and started again: (result, number of starts)."""
    stop = problems.press_ctrl_c(lambda line: line.round % every == every - 1)
    for starts in range(1, 100):
        result = fit(workdir, stop, **fields)
        if not result.summary["interrupted"]:
            return result, starts
    raise AssertionError("the run does not come to its end")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_cut_again_and_again_is_bit_equal(name, tmp_path, float64):
    whole = fit(None, **CASES[name])
    every = 1 if name == "all_reduce" else 3
    cut, starts = end_after(every, tmp_path, **CASES[name])
    assert starts == -(-len(whole.history) // every) > 1
    assert len(cut.history) == len(whole.history)
    np.testing.assert_array_equal(cut.params, whole.params)
    np.testing.assert_array_equal(cut.best_params, whole.best_params)
    assert cut.history == [json.loads(line) for line in read_lines(tmp_path)]
    keys = ("quotas", "microbatches_done", "loss", "eval", "round_secs", "bytes_sent")
    for mine, theirs in zip(cut.history, whole.history, strict=True):
        assert {k: mine.get(k) for k in keys} == {k: theirs.get(k) for k in keys}
    times = dict.fromkeys(("wall_secs", "ordering", "start", "resumed"))
    assert cut.summary | times == whole.summary | times


def read_lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def stop_at(round_index):
    return problems.press_ctrl_c(lambda line: line.round == round_index)


def test_what_was_done_after_the_checkpoint_is_done_again_and_told(tmp_path):
    class Crash(Exception):
        pass

    def crash(line):
        if line.round == 5:
            raise Crash

    every = {"checkpoint": {"every_rounds": 4}}
    with pytest.raises(Crash):
        fit(tmp_path, crash, **every)
    assert len(read_lines(tmp_path)) == 6
    result = fit(tmp_path, **every)
    assert result.summary["examples_recomputed"] == 2 * 32
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    assert [line["round"] for line in result.history] == list(range(len(result.history)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reducer", "ordering"), [("all_reduce", "d_grab"), ("matcha", "pair_balance")]
)
def test_another_number_of_workers_goes_on(reducer, ordering, tmp_path):
    fields, rounds = {"reducer": reducer, "ordering": ordering}, []
    before = fit(tmp_path, stop_at(4), **fields)
    cluster = {"num_workers": 3, "secs_per_microbatch": [1.0, 2.0, 3.0], "clock": "virtual"}
    fewer = {"cluster": cluster, "quota": "adaptive"}
    result = fit(tmp_path, lambda line: rounds.append(line.round), **fields, **fewer)
    assert rounds[0] == len(before.history)
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    assert result.summary["examples_processed"] == 2 * 101
    assert result.summary["train_loss"] < before.history[0]["loss"]
    assert len(result.history[-1]["quotas"]) == 3


POLICIES = {
    "static": {"policy": "static", "proportions": [4, 3, 2, 1]},
    "other proportions": {"policy": "static", "proportions": [1, 1, 1, 1]},
    "adaptive": {"policy": "adaptive"},
    "own": {"policy": "tests.own_parts.policy:one_at_a_time"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("static", "adaptive"),
        ("static", "other proportions"),  # of a state of the same form
        ("adaptive", "own"),
    ],
)
def test_another_quota_policy_begins_anew_and_says_so(before, after, tmp_path, capfd):
    fit(tmp_path, stop_at(3), quota=POLICIES[before])
    result = fit(tmp_path, quota=POLICIES[after])
    told = capfd.readouterr().err
    assert f"quota.policy={POLICIES[after]['policy']!r} begins anew and learns from" in told
    assert f"in the checkpoint of round 4 the policy is {POLICIES[before]['policy']!r}" in told
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    fresh = fit(None, quota=POLICIES[after], max_rounds=1).history[0]
    assert result.history[4]["quotas"] == fresh["quotas"]


def test_shards_that_others_would_cut_otherwise_are_refused(tmp_path):
    """By another policy, or by another number of workers."""
    private = {"data": {"sharing": "private"}, "local": "virtual"}
    fit(tmp_path, stop_at(2), **private)
    with pytest.raises(ValueError, match=r"shards of \[40, 30, 20, 11\] .* of \[26, 25, 25, 25\]"):
        fit(tmp_path, quota="adaptive", **private)
    cluster = {"num_workers": 2, "secs_per_microbatch": [1.0, 2.0], "clock": "virtual"}
    with pytest.raises(ValueError, match=r"has 4 workers and this run 2"):
        fit(tmp_path, **private, cluster=cluster, quota="adaptive")


class Growing(NamedTuple):
    seen: tuple[float, ...] = ()


@hetjax.parts.factory
def remembering():
    """A policy whose state has one number more after each round."""
    equal = quota.equal()

    def observe(state, times):
        return Growing((*state.seen, float(times.compute_secs.max())))

    def assign(state, total, caps):
        return equal.assign(equal.init(len(caps), total), total, caps)[0], state

    return quota.QuotaPolicy(lambda num_workers, budget: Growing(), assign, observe)


def test_a_policy_whose_state_grows_is_refused_when_it_first_does(tmp_path):
    message = (
        r"test_resume:remembering': observe\(state, times\) returned a state with state/seen/0 "
        r"float64\[\], where init made nothing"
    )
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, quota=remembering(), local="virtual")
    text, message = quota.equal()._replace(init=lambda num_workers, budget: "equal"), "'state' is a"
    with pytest.raises(ValueError, match=rf"init\(4, 8\) returned a state .*saved: {message} str"):
        problems.train(quota=text, local="virtual")


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, capfd):
    fit(tmp_path, stop_at(5))
    directory = tmp_path / resume.DIRECTORY
    newest = max(directory.iterdir())
    victim = next(path for path in (newest / "arrays").rglob("*") if path.is_file())
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    result = fit(tmp_path)
    assert f"{newest.name}.damaged" in capfd.readouterr().err
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    np.testing.assert_array_equal(result.params, params_of_a_whole_run())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(number, tmp_path):
    def send(line):
        if line.round == 2:
            os.kill(os.getpid(), number)

    result = fit(tmp_path, send, checkpoint={"every_secs": 0.0})
    assert result.summary["stopped_by"] == number.name
    assert len(list((tmp_path / resume.DIRECTORY).iterdir())) == 1
    again = fit(tmp_path, checkpoint={"every_secs": 0.0})
    assert again.history[: len(result.history)] == result.history
    np.testing.assert_array_equal(again.params, params_of_a_whole_run())


def test_lost_lines_of_the_metrics_are_told(tmp_path, capsys):
    fit(tmp_path, stop_at(4))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(read_lines(tmp_path)[:2]) + '\n{"round": 2, "ep')
    result = fit(tmp_path)
    assert "has 2 whole lines of 5 rounds" in capsys.readouterr().err
    assert result.summary["examples_processed"] == 2 * 101
