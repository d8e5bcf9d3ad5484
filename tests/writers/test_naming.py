"""How numbers are called in a tracker."""

import pytest

from hetjax.writers import naming

LINE = {
    "round": 7,
    "epoch": 1,
    "loss": 0.25,
    "quotas": [3, 1],
    "microbatches_done": [3, 1],
    "compute_secs": [0.3, 0.1],
    "local_secs": 0.4,
    "present": [True, True],
    "full": True,
    "metrics": {"accuracy": 0.5},
    "learning_rate": 0.1,
}


def test_numbers_of_a_round_are_named_as_trackers_have_them():
    assert naming.scalars(LINE) == {
        "round/epoch": 1,
        "train/loss": 0.25,
        "workers/0/quota": 3,
        "workers/1/quota": 1,
        "workers/0/microbatches": 3,
        "workers/1/microbatches": 1,
        "workers/0/compute_secs": 0.3,
        "workers/1/compute_secs": 0.1,
        "round/local_secs": 0.4,
        "train/accuracy": 0.5,
        "train/learning_rate": 0.1,
        "workers/0/waiting": pytest.approx(0.25),
        "workers/1/waiting": pytest.approx(0.75),
    }


@pytest.mark.parametrize(
    ("sets", "name", "found"),
    [
        (["test"], "test_loss", "eval/loss"),
        (["val", "test"], "val_accuracy", "val/accuracy"),
        (["val", "val_hard"], "val_hard_top_5", "val_hard/top_5"),
        (["a", "b"], "worst_b_loss", "b/worst_loss"),
        ([], "test_loss", "eval/test_loss"),
    ],
)
def test_evaluated_sets_are_named(sets, name, found):
    assert naming.scalars({"round": 0, "eval": {name: 1.0}}, sets) == {found: 1.0}


def test_of_many_workers_only_the_least_and_the_largest_quota_are_written():
    many = {"quotas": list(range(1, 101)), "compute_secs": [0.1] * 100}
    found = naming.scalars({"round": 0, "local_secs": 0.2, **many})
    assert found == {
        "round/local_secs": 0.2,
        "workers/least_quota": 1,
        "workers/largest_quota": 100,
    }


def test_an_outer_step_has_its_losses_and_its_kinds():
    line = {"step": 2, "upper_loss": 1.0, "rounds": 3, "examples": {"upper": 8}}
    kinds = {"upper: gradient in x": {"rounds": 1, "secs": 0.5, "quotas": [2, 1]}}
    assert naming.scalars({**line, "kinds": kinds}) == {
        "train/upper_loss": 1.0,
        "step/rounds": 3,
        "examples/upper": 8,
        "upper_gradient_in_x/rounds": 1,
        "upper_gradient_in_x/secs": 0.5,
        "upper_gradient_in_x/workers/0/quota": 2,
        "upper_gradient_in_x/workers/1/quota": 1,
    }
