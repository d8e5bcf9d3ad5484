"""Examples that come once: each position of the stream is done once, killed and resumed or not."""

import os
import signal
import textwrap

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax.data import feeding as feeding_lib
from hetjax.data import iterable_feed, iterable_states
from tests import programs
from tests.data import iterables_examples as given
from tests.rounds import problems

GATED = {"num_workers": 4, "secs_per_microbatch": (1.0, 2.0, 3.0, 4.0), "clock": "virtual"}
LENGTH = 61


def loss_fn(params, batch, rng):
    """That of the problem; `params["seen"]` changes where a position is trained on."""
    return problems.softmax_loss(params["w"], batch, rng) + params["seen"][batch["at"]]


def fit(source, *, epochs=3, **fields):
    begun = {"w": problems.initial_weights(np.float32), "seen": np.zeros(given.COUNT, np.float32)}
    rates = optax.sgd(0.3)
    return problems.fit(source, begun, loss_fn=loss_fn, optimizer=rates, epochs=epochs, **fields)


def trained(result):
    """The positions that entered the parameters."""
    return np.flatnonzero(result.params["seen"])


def whole(result, count):
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    assert result.summary["examples_processed"] == count
    np.testing.assert_array_equal(trained(result), np.arange(count))


@pytest.mark.parametrize(("local", "buffer_size"), [("stepped", 0), ("fused", 25), ("virtual", 25)])
def test_each_position_is_done_once_and_none_is_taken_too_many(local, buffer_size):
    taken = []
    source = stream(given.generator(given=taken), buffer_size=buffer_size)
    result = fit(source, local=local)
    whole(result, 3 * LENGTH)
    assert taken == list(range(3 * LENGTH))
    more = fit(source, epochs=2, init_state=result.state)  # where the generator stands
    np.testing.assert_array_equal(trained(more), np.arange(5 * LENGTH))


def test_a_stream_trains_as_the_same_examples_by_index():
    """Without a buffer in the order in which they come; rounds are the same to the bit."""
    rows = [given.example(at) for at in range(LENGTH)]
    fields = {"epochs": 1, "quota": "equal"}
    in_order = fit(rows, ordering=feeding_lib.AS_IT_COMES, **fields)
    found = fit(stream(iter(rows)), **fields)
    np.testing.assert_array_equal(found.params["w"], in_order.params["w"])


def test_a_buffer_shuffles_as_the_page_says():
    """Blocks of the buffer's size, each by the seed, the pass and its number; a pass cuts them."""
    source = stream(examples_per_epoch=11, buffer_size=4).of_run(5)
    feeding = iterable_feed.IterableFeed(source, [jax.devices()[0]], leads=True)
    for start in (0, 11):
        wanted = []
        for block, first in enumerate(range(start, start + 11, 4)):
            size = min(4, start + 11 - first)
            order = np.random.default_rng((5, start // 11, block)).permutation(size)
            wanted += (first + order).tolist()
        ids = np.append(np.arange(11, dtype=np.int32), np.int32(-1))
        feeding.read_ahead(ids.reshape(2, 6), np.full(2, start // 11))
        found = feeding.load(0, ids.reshape(2, 6), start // 11).examples["at"]
        assert found.reshape(-1)[:11].tolist() == wanted
    feeding.close()


def test_what_a_gate_returns_is_kept_and_done():
    gate = {"trigger": "quorum", "quorum": 5, "in_flight": "drop"}
    whole(fit(stream(buffer_size=9), gate=gate, cluster=GATED, local="virtual"), 3 * LENGTH)


def stream(iterable=None, **fields):
    iterable = given.generator() if iterable is None else iterable
    return hetjax.stream(iterable, **{"examples_per_epoch": LENGTH, **fields})


def test_batches_are_split():
    loader = given.Loader(122, 8)  # the last batch has 2
    whole(fit(stream(loader), epochs=2), 122)
    batches = iter(given.Loader(64, 16))
    whole(fit(stream(batches, examples_per_epoch=64, batched=True), epochs=1), 64)
    with pytest.raises(ValueError, match=r"gave no batch after 0 examples.*batched=False"):
        fit(stream(batched=True))


@pytest.mark.parametrize("last", ["pad", "drop", "fill"])
def test_an_iterable_that_ends_within_an_epoch_ends_the_run_with_what_came(last, tmp_path, capsys):
    def source(count):
        return stream(given.generator(count), buffer_size=8)

    fields = {"data": {"last": last}, "workdir": tmp_path, "quota": "equal"}
    result = fit(source(99), **fields)
    told = capsys.readouterr().err.splitlines()
    (line,) = [line for line in told if "CPU devices" not in line]
    ended = "the generator ended in epoch 1: 38 examples of it came, and examples_per_epoch=61"
    assert ended in line
    assert "The run ends here, after" in line
    came = 99 if last != "drop" else 60 + 36
    assert result.summary["examples_processed"] == came
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    assert result.summary["interrupted"]
    assert len(trained(result)) == came
    loaded = hetjax.load(tmp_path)  # it is saved
    np.testing.assert_array_equal(loaded.params["seen"], result.params["seen"])
    if last == "pad":  # the run goes on where more come
        more = fit(source(500), **fields)
        whole(more, 3 * LENGTH)


def test_a_run_that_steps_says_that_the_iterable_has_ended():
    fields = {"budget": 4, "cluster": {"num_workers": 2}, "local": "virtual"}
    with problems.run(stream(given.generator(20)), **fields) as run:
        state = run.init()
        while not run.done(state):
            state, report = run.round(state)
        assert report.read().counts.examples_processed == 20
        with pytest.raises(ValueError, match="the generator ended in epoch 0: 20 examples"):
            run.round(state)


KINDS = {
    "generator": (given.generator, True),
    "again": (lambda given_: given.Again(LENGTH, given_), True),
    "state of the iterable": (given.WithState, False),
    "state of the iterator": (given.WithStates, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_goes_on_misses_and_doubles_nothing(kind, tmp_path, capsys):
    make, skips = KINDS[kind]
    fields = {"quota": "equal", "checkpoint": {"every_rounds": 1}}

    def run(taken, **more):
        iterable = make(given=taken) if kind == "generator" else make(taken)
        return fit(stream(iterable, buffer_size=16), **fields, **more)

    plain = run([])

    def end(line):
        if line.round == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run([], workdir=tmp_path, callbacks=[end], raise_on_interrupt=True)
    capsys.readouterr()
    taken = []
    result = run(taken, workdir=tmp_path)
    whole(result, 3 * LENGTH)
    for name in ("w", "seen"):
        np.testing.assert_array_equal(result.params[name], plain.params[name])
    said = capsys.readouterr().err
    assert ("skipped the first" in said) == skips
    if not skips:
        assert min(taken[4:]) > LENGTH - 20  # the first four are looked at before the run


PROGRAM = """
    import os, pathlib, signal, sys
    import numpy as np
    import hetjax
    hetjax.use_cpu_workers(4)
    from tests.data import iterables_examples as given
    from tests.rounds import test_iterables as here

    workdir, dies = sys.argv[1:]
    source = here.stream(given.WithState([]), buffer_size=8)

    def die(line):
        if dies == "dies" and line.round == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    result = here.fit(source, workdir=workdir, callbacks=[die], checkpoint={"every_rounds": 2})
    here.whole(result, 3 * here.LENGTH)
"""


def test_a_process_that_is_killed_loses_nothing(tmp_path):
    for how, code in (("dies", -signal.SIGKILL), ("lives", 0)):
        command = ["-c", textwrap.dedent(PROGRAM), str(tmp_path / "run"), how]
        found = programs.run(command, tmp_path)
        assert found.returncode == code, found.stderr
    assert "going on with the run" in found.stderr


def test_an_iterable_that_fails_says_where_and_does_not_seem_to_end():
    def failing():
        yield from given.generator(50)
        raise OSError("the disk is gone")

    def changing():
        yield from given.generator(20)
        yield {"x": np.zeros(3, np.float32)}

    with pytest.raises(ValueError, match=r"generator failed after 50 examples: OSError: the disk"):
        fit(stream(failing()))
    with pytest.raises(ValueError, match="example 20 differs from the first of the stream"):
        fit(stream(changing()))


class Buffered(given.WithState):
    """As shuffled streams of Hugging Face: the state knows what was read, not what is held."""

    seed, draws, yields = 3, False, 0

    def __iter__(self):
        held, rng = [], np.random.default_rng(self.seed)
        for example in super().__iter__():
            noise = {"noise": np.random.default_rng().random()} if self.draws else {}
            held.append(example | noise)
            if len(held) == 12:
                yield held.pop(rng.integers(12))


class Drawing(given.WithState):
    def __iter__(self):
        for example in super().__iter__():
            yield example | {"noise": np.random.default_rng().random()}


LEFT_OUT = {
    "a buffer": (Buffered, {}, "skipped the first 32 examples of the Buffered, whose state leaves"),
    "a buffer, drawing": (Buffered, {"draws": True}, "skipped the first 32 examples"),
    "a buffer without a seed": (Buffered, {"seed": None}, "with other examples than were due"),
    "nothing, drawing": (Drawing, {}, ""),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_state_leaves_out_is_found_and_skipped_to_or_told(name, tmp_path, capsys):
    make, attributes, message = LEFT_OUT[name]

    def run(directory, stop=-1):
        def end(line):
            if line.round == stop:
                raise KeyboardInterrupt

        iterable = make()
        vars(iterable).update(attributes)
        fields = {"quota": "equal", "checkpoint": {"every_rounds": 1}, "callbacks": [end]}
        return fit(stream(iterable), workdir=tmp_path / directory, **fields)

    plain = run("plain")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop=1)
    capsys.readouterr()
    result, told = run("stopped"), capsys.readouterr().err
    assert message in told
    assert ("skipped" in told or "due" in told) == bool(message)
    same = np.array_equal(trained(result), trained(plain))
    assert same == (name != "a buffer without a seed")


REFUSED = {
    "ordering": ({"ordering": "d_grab"}, r"ordering\.method: got 'd_grab' with a hetjax.stream"),
    "private": ({"data": {"sharing": "private"}}, r"data\.sharing: got 'private'"),
    "readers": ({"data": {"readers": 4}}, r"data: got feed='auto', readers=4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_examples_that_come_again_is_refused(name):
    fields, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        fit(stream(), **fields)


def test_what_is_given_in_place_of_a_stream_is_told_of_it():
    rows = [given.example(at) for at in range(8)]
    refused = [
        (lambda: fit(rows, eval_source=stream()), r"eval_source: got a hetjax\.stream"),
        (lambda: hetjax.stream(3, examples_per_epoch=5), "got a int; give what `for example in …`"),
        (lambda: stream(examples_per_epoch=0), "per_epoch: got 0, must be an integer of at least"),
        (lambda: fit(stream(given.generator(0))), "the generator gave no example"),
    ]
    for iterable in (given.generator(), given.Again(9), given.Loader(9, 3)):
        said = r"hetjax\.stream\(…, examples_per_epoch=N\)"
        refused.append((lambda iterable=iterable: fit(iterable), said))
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_states_come_back_as_they_were():
    state = {
        "a": [1, (2.5, None)],
        3: {"b": b"\x00\xff"},
        "c": np.arange(6).reshape(2, 3),
        "d": True,
    }
    state["e"] = np.float32(0.1)
    found = iterable_states.decode(iterable_states.encode(state))
    np.testing.assert_array_equal(found.pop("c"), state.pop("c"))
    assert found == state
    assert type(found["e"]) is np.float32
    with pytest.raises(TypeError, match="it holds a set"):
        iterable_states.encode({"a": {1}})


def test_loaders_of_pytorch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = [given.example(at) for at in range(LENGTH)]
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    whole(fit(stream(loader), epochs=1), LENGTH)
    state = torch.arange(5, dtype=torch.uint8)
    assert torch.equal(iterable_states.decode(iterable_states.encode(state)), state)


def of_grain(rows):
    grain = pytest.importorskip("grain.python", reason="grain is not installed")
    sampler = grain.IndexSampler(len(rows), grain.ShardOptions(0, 1), num_epochs=1)
    return grain.DataLoader(data_source=rows, sampler=sampler, worker_count=0)


def of_hugging_face(rows):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")

    def make():
        yield from rows

    return datasets.IterableDataset.from_generator(make).with_format("numpy")


@pytest.mark.parametrize("make", [of_grain, of_hugging_face])
def test_loaders_of_other_libraries_go_on_by_their_own_state(make, tmp_path, capsys):
    rows = [given.example(at) for at in range(3 * LENGTH)]

    def run(**fields):
        source = stream(make(rows), buffer_size=8)
        return fit(source, workdir=tmp_path, checkpoint={"every_rounds": 1}, **fields)

    def end(line):
        if line.round == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(callbacks=[end], raise_on_interrupt=True)
    capsys.readouterr()
    whole(run(), 3 * LENGTH)
    assert "skipped" not in capsys.readouterr().err
