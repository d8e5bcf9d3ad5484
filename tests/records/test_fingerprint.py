"""A workdir goes on with the run that it holds, and with no other one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests.rounds import problems

FIELDS = {
    "epochs": 2,
    "microbatch_size": 4,
    "budget": 8,
    "cluster": {"num_workers": 2, "secs_per_microbatch": [1.0, 2.0], "clock": "virtual"},
    "quota": {"policy": "static", "proportions": [2, 1]},
    "progress": False,
}
DATA = problems.classification(64, np.float32)
WEIGHTS = problems.initial_weights(np.float32)


def scaled_loss(scale):
    def loss_fn(weights, batch, rng):
        return scale * problems.softmax_loss(weights, batch, rng)

    return loss_fn


def fit(workdir, **other):
    given = {
        "loss_fn": scaled_loss(np.float32(1.0)),
        "params": WEIGHTS,
        "optimizer": optax.sgd(0.3, momentum=0.9),
        "source": DATA,
        **FIELDS,
        **other,
    }
    return hetjax.fit(workdir=workdir, raise_on_interrupt=False, **given)


def cut(workdir, **other):
    return fit(workdir, callbacks=[problems.press_ctrl_c(lambda line: line.round == 1)], **other)


class Items:
    """The same data, an example at a time."""

    def __init__(self, changed=0.0):
        self.changed = np.float32(changed)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": DATA["x"][index] + self.changed, "y": DATA["y"][index]}


LOSS, OPTIMIZER = "the loss computes something else", "the optimizer updates"
INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
OTHERS = {
    "learning rate": ({"optimizer": optax.sgd(0.1, momentum=0.9)}, OPTIMIZER),
    "injected rate": ({"optimizer": INJECTED}, OPTIMIZER),
    "params": ({"params": WEIGHTS + 1}, "initial parameters have other values"),
    "loss": ({"loss_fn": lambda w, b, r: problems.softmax_loss(w, b, r) ** 2}, LOSS),
    "array in the loss": ({"loss_fn": scaled_loss(jnp.full((4,), 2.0))}, LOSS),
    "values": ({"source": DATA | {"x": DATA["x"] + 1}}, "the data hold other values"),
    "items": ({"source": Items(changed=1.0)}, "the data hold other values"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_what_began_otherwise_is_refused_and_can_be_forced(name, tmp_path, capsys):
    other, message = OTHERS[name]
    first = cut(tmp_path, source=Items()) if name == "items" else cut(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=rf"{message}.*resume=False begins.*resume='force'"):
        fit(tmp_path, **other)
    assert files(tmp_path) == before
    anew = fit(tmp_path / "anew", resume=False, **other)
    assert "resumed" not in anew.summary
    if name == "injected rate":
        return  # its state has another structure
    forced = fit(tmp_path, resume="force", **other)
    assert message in capsys.readouterr().err
    assert forced.history[: len(first.history)] == first.history


def files(workdir):
    return {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


FINISHED_OTHERS = {
    "learning rate": OTHERS["learning rate"],
    "length": ({"source": problems.classification(48, np.float32)}, "have 48 examples, and had 64"),
    "epochs": ({"epochs": 1}, "belongs to another configuration"),
}


@pytest.mark.parametrize("name", FINISHED_OTHERS)
def test_a_finished_run_is_written_over_by_the_same_call_alone(name, tmp_path):
    other, message = FINISHED_OTHERS[name]
    first = fit(tmp_path)
    before = files(tmp_path)
    for resume in (True, False, "force"):
        with pytest.raises(ValueError, match=rf"{message}.*resume='overwrite'"):
            fit(tmp_path, resume=resume, **other)
    assert files(tmp_path) == before
    again = fit(tmp_path)
    np.testing.assert_array_equal(again.params, first.params)
    assert "resumed" not in again.summary
    over = fit(tmp_path, resume="overwrite", **other)
    assert "resumed" not in over.summary
    assert [line["round"] for line in over.history] == list(range(len(over.history)))
    np.testing.assert_array_equal(over.params, fit(None, **other).params)


def test_overwrite_begins_a_run_anew_that_is_not_finished_either(tmp_path, monkeypatch):
    cut(tmp_path)
    over = fit(tmp_path, resume="overwrite", seed=1)
    np.testing.assert_array_equal(over.params, fit(None, seed=1).params)
    monkeypatch.setenv("HETJAX_ATTEMPT", "1")  # a supervisor keeps what the attempt before did
    again = fit(tmp_path, resume="overwrite", seed=1, callbacks=[no_round])
    np.testing.assert_array_equal(again.params, over.params)
    with pytest.raises(ValueError, match="fit: resume is 'yes'; allowed are True, False, 'force'"):
        fit(tmp_path, resume="yes")


def no_round(line):
    pytest.fail("a round was done")


def test_data_of_another_length_cannot_be_forced(tmp_path):
    cut(tmp_path)
    for resume in (True, "force"):
        with pytest.raises(ValueError, match=r"have 48 examples, and had 64.*keeps both$"):
            fit(tmp_path, source=problems.classification(48, np.float32), resume=resume)


def test_the_same_run_written_otherwise_goes_on_and_says_so(tmp_path, capsys):
    first = cut(tmp_path)
    assert "SIGINT ended the run after 3 rounds" in capsys.readouterr().err

    def loss_fn(parameters, examples, key):  # other names, the same program
        return np.float32(1.0) * problems.softmax_loss(parameters, examples, key)

    again = fit(tmp_path, loss_fn=loss_fn, params=WEIGHTS.copy())
    said = capsys.readouterr().err
    assert f"going on with the run in {str(tmp_path)!r} from round 3" in said
    assert again.history[:3] == first.history
    assert [began["round"] for began in again.summary["resumed"]] == [3]
    assert "went on from a checkpoint of" in (tmp_path / "report.html").read_text()
    np.testing.assert_array_equal(again.params, fit(None).params)


def test_more_epochs_go_on_and_fewer_are_refused(tmp_path, capsys):
    short = fit(tmp_path)
    longer = fit(tmp_path, epochs=3)
    assert "from round 4, with more: epochs 2 to 3" in capsys.readouterr().err
    assert longer.history[: len(short.history)] == short.history
    np.testing.assert_array_equal(longer.params, fit(None, epochs=3).params)
    with pytest.raises(ValueError, match="epochs: 3 there, 2 here"):
        fit(tmp_path)


def test_a_schedule_of_the_new_length_takes_the_state_over(tmp_path, capsys):
    def optimizer(rounds):
        return optax.sgd(lambda count: 0.1 * (1 - count.astype(np.float32) / rounds))

    said = "as a schedule over all epochs does; its state goes on"
    fit(tmp_path, optimizer=optimizer(4))
    assert restored(tmp_path, optimizer=optimizer(6), epochs=3) == 4
    assert said in capsys.readouterr().err
    longer = fit(tmp_path, optimizer=optimizer(6), epochs=3)
    assert said in capsys.readouterr().err
    assert int(longer.state.opt_state[1].count[0]) == 6


def test_a_run_that_a_callback_ended_is_finished(tmp_path, monkeypatch, capsys):
    def enough(line):
        return line.round == 1

    first = fit(tmp_path, callbacks=[enough])
    assert first.summary["stopped_by"] == "callback enough"
    assert not first.summary["interrupted"]
    assert "callback enough ended the run after 3 rounds" in capsys.readouterr().err
    again = fit(tmp_path, callbacks=[enough])
    assert len(again.history) == len(first.history) == 3
    assert "going on" not in capsys.readouterr().err
    assert again.history[0]["round"] == 0
    monkeypatch.setenv("HETJAX_ATTEMPT", "1")  # a supervisor does not train past a callback
    again = fit(tmp_path, callbacks=[no_round])
    assert again.summary["stopped_by"] == "callback enough"
    np.testing.assert_array_equal(again.params, first.params)


def test_an_initial_state_is_what_a_run_began_with(tmp_path):
    half, other = fit(None, epochs=1), fit(None, epochs=1, seed=1)
    first = cut(tmp_path, init_state=half.state)
    with pytest.raises(ValueError, match="initial parameters have other values"):
        fit(tmp_path, init_state=other.state)
    again = fit(tmp_path, params=None, init_state=half.state)
    assert again.history[:3] == first.history
    np.testing.assert_array_equal(again.params, fit(None, init_state=half.state).params)


def restored(workdir, *, force=False, params=WEIGHTS, optimizer=None, source=DATA, **other):
    """The rounds that a run which steps has done when it goes on from what `fit` left."""
    loss_fn = other.pop("loss_fn", scaled_loss(np.float32(1.0)))
    optimizer = optimizer or optax.sgd(0.3, momentum=0.9)
    fields = {name: value for name, value in (FIELDS | other).items() if name != "progress"}
    with hetjax.Run(loss_fn, params, optimizer, source, **fields) as run:
        return run.restore(workdir, force=force).rounds_done


OTHER_FIELDS = {"seed": 3, "budget": 6, "microbatch_size": 2, "ordering": "shuffle_once"}
OTHER_FIELDS |= {"gate": {"trigger": "first"}, "nonfinite": "skip", "data": {"last": "drop"}}
OTHER_FIELDS |= {"reducer": "ring", "epochs": 1}


def test_a_run_that_steps_refuses_what_fit_refuses(tmp_path):
    cut(tmp_path)
    for name, other in OTHER_FIELDS.items():
        for call in (fit, restored):
            with pytest.raises(ValueError, match=f"another configuration .{name}"):
                call(tmp_path, **{name: other})
    others = {"ema": 0.9, "quota": {"policy": "equal"}, "cluster": {"num_workers": 2}}
    assert restored(tmp_path, epochs=3, **others) == 3


@pytest.mark.parametrize("name", ["learning rate", "loss"])
def test_a_run_that_steps_goes_on_with_what_began_alike_or_is_forced(name, tmp_path, capsys):
    other, message = OTHERS[name]
    cut(tmp_path)
    assert restored(tmp_path) == restored(tmp_path / "checkpoints") == 3
    with pytest.raises(ValueError, match=rf"^restore: .*{message}.*, and force=True goes on"):
        restored(tmp_path, **other)
    assert message not in capsys.readouterr().err
    assert restored(tmp_path, force=True, **other) == 3
    said = capsys.readouterr().err
    assert "as force=True says: " in said
    assert message in said


def test_an_initial_state_takes_the_optimiser_along():
    whole = fit(None)
    half = fit(None, epochs=1)
    rest = fit(None, epochs=1, params=None, init_state=half.state)
    assert int(rest.state.progress_rounds[0]) == int(whole.state.progress_rounds[0]) == 4
    other = fit(None, epochs=1)
    trace = jax.tree.leaves(half.state.opt_state)[0]
    assert np.abs(np.asarray(trace)).max() > 0
    assert not np.array_equal(rest.params, other.params)
    with pytest.raises(ValueError, match=r"init_state is a dict; it must be a hetjax.TrainState"):
        fit(None, init_state={"params": WEIGHTS})
    with pytest.raises(ValueError, match=r"not of this model and optimizer.*trace"):
        fit(None, init_state=half.state, optimizer=optax.sgd(0.3))


def test_an_optimiser_that_is_given_anew_to_a_kept_state_is_told(tmp_path, capsys):
    def injected(rate):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)

    first = cut(tmp_path, optimizer=injected(0.3))
    seen, otherwise = "(learning_rate: given 0.1, kept 0.3)", "the optimizer updates otherwise"

    def lines(call, **given):
        capsys.readouterr()
        call(**given)
        told = capsys.readouterr().err.splitlines()
        return [line for line in told if "optimizer" in line]

    with pytest.raises(ValueError, match=r"given 0\.1, kept 0\.3.*force=True goes on"):
        restored(tmp_path, optimizer=injected(0.1))
    for rate in (0.1, 0.3):
        is_other = rate == 0.1
        told = lines(restored, workdir=tmp_path, optimizer=injected(rate), force=True)
        assert len(told) == is_other
        assert all(otherwise in line and seen in line and "checkpoint's" in line for line in told)
        told = lines(fit, workdir=None, optimizer=injected(rate), init_state=first.state)
        assert len(told) == is_other
        assert all(seen in line and "that of init_state" in line for line in told)
    scheduled = injected(lambda count: 0.3 / (1 + count.astype(np.float32)))
    state = fit(None, optimizer=scheduled).state
    assert not lines(fit, workdir=None, optimizer=scheduled, init_state=state)
    (told,) = lines(fit, workdir=tmp_path, optimizer=injected(0.1), resume="force")
    assert all(words in told for words in (otherwise, seen, "checkpoint's"))
