"""The comparison of configurations: arms, that it resumes, its figures, its picture."""

import json

import pytest

import hetjax
from experiments.comparisons import comparison, kept
from hetjax.local import gradients
from tests.rounds import problems

pytestmark = pytest.mark.slow

FILE = "configs/digits.py"
SMALL = [
    *("epochs=1", "local=virtual", "cluster.clock=virtual", "cluster.delay=exponential"),
    *("data.num_train=160", "model.name=logistic", "microbatch_size=4", "budget=8"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compare")
    arms = comparison.read_arms([FILE, f"{FILE} gate.trigger=first reducer.name=d_psgd"], SMALL)
    return comparison.compare(arms, [3, 4], directory, jobs=0), directory, arms


def test_arms_are_files_with_fields_and_are_named_by_them():
    arms = comparison.read_arms(
        ["configs/digits.py,configs/mnist_logistic.py", f"{FILE} gate.trigger=first"], ["epochs=7"]
    )
    assert [arm.label for arm in arms] == ["digits", "mnist_logistic", "digits, gate.trigger=first"]
    assert [arm.fields["epochs"] for arm in arms] == [7, 7, 7]
    assert arms[2].fields["gate"]["trigger"] == "first"
    tuples = comparison.read_arms([FILE, f"{FILE} cluster.secs_per_microbatch=(1,2,3,4)"], [])
    assert tuples[1].fields["cluster"]["secs_per_microbatch"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([FILE], "fewer than two arms"),
        ([FILE, f"{FILE} epoch=3"], "epoch: there is no such field. Did you mean 'epochs'?"),
        ([FILE, f"{FILE} gate.triger=first"], "gate.triger: .* Did you mean 'gate.trigger'?"),
        ([FILE, FILE], "the same"),
        (
            [FILE, f"{FILE} rule.name=tests.test_compare:without_loss"],
            "without_loss' adds up no loss, and training losses are compared. Give it a loss_sum",
        ),
    ],
)
def test_messages(texts, message):
    with pytest.raises(ValueError, match=message):
        comparison.read_arms(texts, [])


@hetjax.parts.factory
def without_loss():
    sums = gradients.gradient_sums(problems.softmax_loss)
    return sums._replace(reads=sums.reads._replace(loss_sum=None))


def test_arms_meet_the_same_delays_and_have_a_row_each(found, tmp_path):
    result, _, _ = found
    plain, gated = (result.records[arm.label] for arm in result.arms)
    assert set(plain) == set(gated) == {3, 4}
    for seed in (3, 4):  # a round closes no later than the blocking one of the same delays
        assert gated[seed]["clock"][0] <= plain[seed]["clock"][0]
    assert plain[3]["clock"] != plain[4]["clock"]
    assert all(r["summary"]["examples_missing"] == 0 for r in gated.values())
    lines = comparison.table(result).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| digits |")
    assert "gate.trigger=first" in lines[3]
    comparison.draw(tmp_path / "picture.png", result)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_second_call_runs_nothing(found, monkeypatch):
    result, directory, arms = found
    before = comparison.path_of(directory).read_text()
    assert len(before.splitlines()) == 4
    before = before.replace('"loss": "by_kind", ', "")  # of before there was this field
    comparison.path_of(directory).write_text(before)
    monkeypatch.setattr(comparison, "train", None)
    again = comparison.compare(arms, [3, 4], directory, jobs=0)
    assert comparison.table(again) == comparison.table(result)
    assert before == comparison.path_of(directory).read_text()


def test_tuning_takes_the_rate_that_is_first_at_the_target(tmp_path, monkeypatch):
    arms = comparison.read_arms([FILE, f"{FILE} gate.trigger=first"], SMALL)

    def train(run, directory):
        rate, gated = run.rate, run.arm.fields["gate"]["trigger"] == "first"
        best = 0.2 if gated else 0.1
        losses = [2.0, 1.0 if rate == best else 1.5, 0.5, 0.4]
        record = {"clock": [1, 2, 3, 4], "examples": [10] * 4, "losses": losses, "evals": []}
        record |= {"summary": {"examples_processed": 40, "epochs": 4.0}, "diverged": False}
        kept.append(comparison.path_of(directory), {**record, "settings": run.settings})

    run_all = lambda runs, directory, jobs: [train(run, directory) for run in runs]  # noqa: E731
    monkeypatch.setattr(comparison, "run_all", run_all)
    result = comparison.compare(arms, [0, 1], tmp_path, rates=(0.1, 0.2), target=1.0, window=1.0)
    assert list(result.rates.values()) == [0.1, 0.2]
    records = kept.read(comparison.path_of(tmp_path))
    assert len({json.dumps(record["settings"]) for record in records}) == 2 * 3
    with pytest.raises(ValueError, match="--target_loss"):
        comparison.compare(arms, [0], tmp_path, rates=(0.1,))
