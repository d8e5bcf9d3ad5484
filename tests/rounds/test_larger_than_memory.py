"""A source that is larger than memory is streamed; whole numbers wider than 32 bits are told of."""

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax import memory
from hetjax.data import feed, leaves, sources
from tests.data.test_trial import choose
from tests.rounds import problems

FREE = 1000


def groups(monkeypatch, tmp_path, lines, files, available=FREE):
    """A machine with these control groups."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable: {available} kB\n")
    (proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_CGROUPS", root)


V2 = {"a/b/memory.max": "max", "a/memory.max": 5000, "a/memory.current": 2000}
V2 |= {"a/memory.stat": "anon 5\ninactive_file 700", "a/b/memory.stat": "", "a/b/memory.current": 1}
V1 = {"memory/x/memory.limit_in_bytes": 4000, "memory/x/memory.usage_in_bytes": 3900}
V1 |= {"memory/x/memory.stat": "total_inactive_file 50"}
V1 |= {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 9}


@pytest.mark.parametrize(
    ("lines", "files", "free"),
    [
        (["0::/a/b"], V2, 5000 - 2000 + 700),
        (["5:memory:/x", "0::/a/b"], V1 | {f"unified/{k}": v for k, v in V2.items()}, 150),
    ],
    ids=["version 2, of a group above", "both"],
)
def test_the_smallest_limit_says_what_is_free(lines, files, free, monkeypatch, tmp_path):
    groups(monkeypatch, tmp_path, lines, files)
    assert memory.free_bytes() == free


def test_of_other_systems_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    assert memory.free_bytes() is None


class Made:
    """Examples that are made when they are read: of 8 kB each."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": np.full(2048, index, np.float32)}


@pytest.mark.parametrize("of_arrays", [False, True])
def test_examples_that_do_not_fit_are_streamed_and_a_line_says_so(of_arrays, monkeypatch, capsys):
    source = Made(100)
    if of_arrays:
        source = sources.load_all(source)
    size = 100 * 8192
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 * size * 4 // 3 + 8)
    assert choose(source, capsys) == (feed.ResidentFeed, "")
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 * size * 4 // 3 - 8)
    kind, said = choose(source, capsys)
    assert kind is feed.StreamedFeed
    assert f"the 100 examples of {type(source).__name__} take about 819 kB (1.64 MB with" in said
    assert "2.18 MB of memory are free. So the feed is 'streamed'" in said
    kind, said = choose(source, capsys, asked="resident")
    assert kind is feed.ResidentFeed
    assert "data.feed='streamed' reads ahead" in said
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    assert choose(source, capsys) == (feed.ResidentFeed, "")


def test_an_evaluation_reads_what_does_not_fit_anew(monkeypatch, capsys):
    data, weights = problems.given(600)

    def metrics(params, batch):
        return {"loss": problems.softmax_loss(params, batch, None)}

    whole = hetjax.evaluate(weights, data, metrics)
    monkeypatch.setattr(memory, "free_bytes", lambda: 10)
    assert hetjax.evaluate(weights, data, metrics) == whole
    assert "Each evaluation reads it anew" in capsys.readouterr().err


PROGRAM = textwrap.dedent("""
    import sys

    import jax.numpy as jnp
    import numpy as np
    import optax

    import hetjax

    class Made:
        def __len__(self):
            return 10_000

        def __getitem__(self, index):
            return {"x": np.full(1_000_000, index % 7, np.float32)}  # 4 MB, 40 GB in all

    def loss_fn(w, batch, rng):
        return (batch["x"].mean(1) * w - 1.0) ** 2

    result = hetjax.fit(
        loss_fn, jnp.zeros(()), optax.sgd(0.01), Made(), workers=1, microbatch_size=4, budget=4,
        max_rounds=4, progress=False,
    )
    print(result.summary["rounds"], result.summary["train_loss"])
""")


@contextlib.contextmanager
def memory_group(limit):
    """A control group with a limit, of version 1 or 2; skips the test where none can be made."""
    for root, name in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = pathlib.Path("/sys/fs/cgroup") / root / f"hetjax-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group with a limit of memory can be made here")


@pytest.mark.slow
def test_forty_gigabytes_train_under_a_limit_of_four():
    """In a control group; of version 1 or 2, whichever this machine lets the test make."""
    with memory_group(4_000_000_000) as group:
        enter = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        found = subprocess.run(
            [sys.executable, "-c", enter + PROGRAM],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[0] == "4"
    assert "the 10,000 examples of Made take about 40.0 GB" in found.stderr
    assert "So the feed is 'streamed'" in found.stderr


# Whole numbers of 64 bits

BIG = 5_000_000_000


def looked_up(params, batch, rng):
    return (params[batch["id"] % 7] - 1.0) ** 2


@pytest.mark.parametrize(("feed_name", "as_rows"), [("resident", False), ("streamed", True)])
def test_whole_numbers_beyond_32_bits_are_told_before_the_first_round(feed_name, as_rows):
    ids = np.arange(40) + np.where(np.arange(40) == 3, BIG, 0)
    data = [{"id": value} for value in ids] if as_rows else {"id": ids}
    with pytest.raises(ValueError, match=r"example 3: leaf \['id'\] holds 5000000003"):
        problems.fit(data, jnp.zeros(7), loss_fn=looked_up, data={"feed": feed_name})


def test_of_wide_types_the_values_count(float64):
    leaves.check_narrow({"a": np.array([2**31 - 1, -(2**31)]), "b": np.zeros(0, np.int64)})
    with pytest.raises(ValueError, match="example 9: leaf item holds 4294967296"):
        leaves.check_narrow(np.array([[0, 2**32 - 1], [1, 2**32]], np.uint64), np.array([4, 9]))
    feed.check_narrow({"a": np.array([BIG])})  # with 64 bits it fits
    with pytest.raises(ValueError, match=r"example 1 .*\['a'\] is 5000000000, which 32 bits"):
        sources.read([{"a": 1}, {"a": BIG}], 1)
