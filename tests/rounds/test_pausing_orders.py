"""Orders that are made anew of some passes alone: the others find no signs and keep the order."""

import dataclasses
import functools

import numpy as np
import pytest

from hetjax.rounds import setup
from tests.rounds import problems
from tests.rounds.order_comparison import compare_with_reference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "balance_every", "local", "sharing"),
    [
        ("d_grab", 2, "stepped", "shared"),
        ("d_grab", 3, "fused", "private"),
        ("d_grab_exact", 2, "virtual", "shared"),
        ("pair_balance", 2, "stepped", "private"),
    ],
)
def test_orders_that_are_not_made_anew_of_each_pass_equal_the_reference(
    method, balance_every, local, sharing, tmp_path, float64
):
    compare_with_reference(
        tmp_path, method, local, sharing, block_pairs=2, balance_every=balance_every
    )


class Counting:
    """A local phase that counts its rounds."""

    def __init__(self, inner):
        self.inner, self.rounds = inner, 0

    def run(self, *arguments, **options):
        self.rounds += 1
        return self.inner.run(*arguments, **options)

    def close(self):
        self.inner.close()


@pytest.mark.parametrize(
    ("options", "signed"),
    [
        ({"method": "d_grab", "balance_every": 2}, [True, False, True, False]),
        ({"method": "pair_balance", "balance_every": 3}, [True, False, False, True]),
        ({"method": "frozen", "freeze_after": 0}, [False] * 4),
    ],
)
def test_passes_that_keep_their_order_find_no_signs(options, signed):
    with problems.run(epochs=4, ordering={**options}, local="virtual") as run:
        state = run.init()
        both = run.setup.programs.main, run.setup.programs.unsigned
        main, unsigned = (each._replace(local=Counting(each.local)) for each in both)
        kinds = dataclasses.replace(
            run.setup.programs, of_kind={setup.MAIN: main}, unsigned=unsigned
        )
        run.setup = dataclasses.replace(run.setup, programs=kinds)
        for is_signed in signed:
            before = main.local.rounds, unsigned.local.rounds
            for _ in range(2):
                state, _ = run.round(state)
            done = main.local.rounds - before[0], unsigned.local.rounds - before[1]
            assert done == ((2, 0) if is_signed else (0, 2))
        assert run.done(state)


@pytest.mark.slow
@pytest.mark.parametrize(("local", "last_round"), [("stepped", 3), ("virtual", 1), ("virtual", 4)])
def test_a_run_cut_in_any_pass_goes_on_to_the_same_parameters(local, last_round, tmp_path):
    """Two rounds a pass; the second and the fourth pass find no signs."""

    fields = {"ordering": {"method": "d_grab", "balance_every": 2}, "local": local, "epochs": 4}
    train = functools.partial(problems.train, 61, quota="equal", **fields)
    stop = problems.press_ctrl_c(lambda line: line.round == last_round)
    begun = train(workdir=tmp_path, callbacks=[stop])
    assert begun.summary["interrupted"]
    resumed = train(workdir=tmp_path)
    assert resumed.summary["rounds"] == 8
    np.testing.assert_array_equal(resumed.params, train().params)
