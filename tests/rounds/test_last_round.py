"""`data.last_round="drop"`: an epoch's last round that is not full is left out, and counted."""

import functools

import numpy as np
import pytest

import hetjax
from hetjax.zoo import config as config_lib
from hetjax.zoo import optimizers
from tests.data import iterables_examples as given
from tests.rounds import problems

SPEEDS = {"num_workers": 4, "secs_per_microbatch": (1.0, 1.5, 2.0, 4.0), "clock": "virtual"}
DROP = {"last_round": "drop"}


def fit(num_examples=130, **fields):
    """Rounds of 32 examples, of which 130 have four and two more."""
    fields = {"data": DROP, "cluster": SPEEDS, "epochs": 3, "quota": "equal", **fields}
    return problems.train(num_examples, eval_source=problems.given(45)[0], **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"quota": "adaptive", "local": "fused"},
        {"cluster": SPEEDS | {"changes": ({"round": 5, "worker": 1, "present": False},)}},
        {"data": DROP | {"last": "drop", "feed": "streamed"}},
        *({"ordering": name} for name in ("shuffle_once", "block_reshuffling", "fixed_map")),
        *({"ordering": name, "local": "virtual"} for name in ("grab", "d_grab", "d_grab_exact")),
    ],
    ids=str,
)
def test_all_rounds_are_full_and_what_is_left_out_is_told(fields):
    result = fit(**fields)
    assert [sum(line["quotas"]) for line in result.history] == [8] * 12
    assert all(line["full"] and line["examples"] == 32 for line in result.history)
    assert [line["epoch"] for line in result.history] == [0] * 4 + [1] * 4 + [2] * 4
    told = {"rounds": 12, "epochs": 3, "examples_processed": 384, "examples_dropped": 6}
    told |= {"examples_missing": 0, "examples_duplicated": 0}
    assert result.summary | told == result.summary
    is_fixed = fields.get("ordering") == "shuffle_once"  # whose last two are never done
    assert result.summary["examples_never_processed"] == (2 if is_fixed else 0)
    assert len([line for line in result.history if "eval" in line]) == 3
    assert "384 processed, 0 missing, 0 duplicated, 6 dropped" in repr(result)


def test_the_last_round_is_kept_by_default_and_a_whole_one_is_never_dropped():
    kept = fit(data={})
    assert [sum(line["quotas"]) for line in kept.history] == [8, 8, 8, 8, 1] * 3
    assert "examples_dropped" not in kept.summary
    assert "examples_dropped" not in fit(128).summary
    for last_round in ("keep", "drop"):
        same = fit(128, data={"last_round": last_round})
        np.testing.assert_array_equal(same.params, fit(128, data={}).params)
    with pytest.raises(ValueError, match=r"data\.last_round: got 'drop' with 31 .* of 32: nothing"):
        fit(31)
    with pytest.raises(ValueError, match=r"data\.last_round: got 'all', must be one of keep, drop"):
        fit(data={"last_round": "all"})


def test_what_a_gate_returns_is_done_all_the_same():
    result = fit(gate="first", cluster=SPEEDS)
    summary = result.summary
    assert summary["gate"]["returned_fraction"] > 0
    assert (summary["examples_processed"], summary["examples_dropped"]) == (384, 6)
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0


@pytest.mark.parametrize("quotas", [(4, 2, 1, 1), (2, 2, 2, 2)])
def test_a_worker_of_private_data_leaves_out_what_is_less_than_its_quota(quotas):
    """Shards of 33, 33, 32, 32, or 64, 32, 17, 17: two examples of a pass fill no round."""
    sizes = {"policy": "static", "proportions": quotas}
    result = fit(quota=sizes, data=DROP | {"sharing": "private"}, epochs=5)
    assert all(line["quotas"] == list(quotas) for line in result.history)
    assert all(line["examples"] == 32 for line in result.history)
    assert result.summary["rounds"] == 21  # 5 * 130 examples, rounded up
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    assert result.summary["examples_dropped"] == 2 * 5  # five passes of four rounds


@pytest.mark.parametrize(
    ("came", "processed", "dropped", "ends"),
    [(500, 3 * 48, 3 * 13, False), (99, 48 + 32, 13 + 6, True), (120, 96, 26, True)],
)
def test_an_iterable_that_ends_leaves_out_what_fills_no_round(
    came, processed, dropped, ends, capsys
):
    """61 examples an epoch in rounds of 16: three, and 13 are passed over. It ends with 38 examples
    of the second epoch, or with all but the last two, of which none is trained."""
    source = hetjax.stream(given.generator(came), examples_per_epoch=61, buffer_size=8)
    fields = {"cluster": {"num_workers": 2}, "local": "virtual", "budget": 4, "epochs": 3}
    result = problems.fit(source, problems.given()[1], data=DROP, **fields)
    assert result.summary["examples_processed"] == processed
    assert result.summary["examples_dropped"] == dropped
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    assert ("the generator ended in epoch" in capsys.readouterr().err) == ends


def test_a_schedule_of_epochs_ends_with_the_last_round():
    fields = {"epochs": 3, "budget": 8, "microbatch_size": 4, "data": DROP}
    fields |= {"optimizer": {"name": "sgd", "learning_rate": 1.0, "schedule": "cosine"}}
    config = config_lib.validate(fields)
    optimizer = optimizers.make_optimizer(config, num_examples=130)
    state = optimizer.init(np.ones(1, np.float32))
    update = functools.partial(optimizer.update, np.ones(1, np.float32), state)
    rates = [update(progress=np.float32(done))[0][0] for done in (0, 6, 12)]
    np.testing.assert_allclose(rates, [-1, -0.5, 0], atol=1e-6)
