import json
import os
import pathlib
import resource
import shutil

import numpy as np
import pytest

from experiments.drills import checkpoints as checkpoints_lib
from hetjax.checkpoints import checkpoint, files
from tests.checkpoints import checkpoints
from tests.launcher import launches


def flip(path: pathlib.Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def files_of(step: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    checkpoints.save_all(directory, [1, 2])
    return directory


@pytest.fixture
def pair(two, tmp_path):
    """A directory with the checkpoints 1 and 2, to be damaged."""
    return shutil.copytree(two, tmp_path / "run")


def assert_falls_back(directory, capfd, reason: str) -> None:
    saved = checkpoint.newest(directory)
    assert saved.step == 1
    checkpoints.assert_equal_arrays(saved.arrays, checkpoints.arrays_of(1))
    assert checkpoints.names_in(directory) == ["00000001", "00000002.damaged"]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "00000002' is damaged (" in lines[0]
    assert reason in lines[0]
    assert "set aside as '00000002.damaged'; the one before it is taken" in lines[0]


def test_one_flipped_bit_anywhere_is_found(two, tmp_path, capfd):
    rng = np.random.default_rng(0)
    for trial, path in enumerate(files_of(two / "00000002")):
        directory = shutil.copytree(two, tmp_path / str(trial))
        name = path.relative_to(two)
        flip(directory / name, int(rng.integers(8 * path.stat().st_size)))
        reason = "manifest.json is not what" if name.name == "manifest.json" else "the SHA-256 sum"
        assert_falls_back(directory, capfd, reason)


def test_any_flipped_bit_of_the_manifest_is_found(pair):
    path = pair / "00000002" / "manifest.json"
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 7):
        flip(path, bit)
        with pytest.raises(files.DamageError):
            files.verify(path.parent)
        path.write_bytes(content)
    files.verify(path.parent)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: os.truncate(largest(step), 100), "the SHA-256 sum of"),
        (lambda step: largest(step).unlink(), "is missing"),
        (lambda step: (step / "manifest.json").unlink(), "No such file"),
        (lambda step: (shutil.rmtree(step), step.touch()), "Not a directory"),
        (lambda step: (step / "arrays" / "new").touch(), "arrays/new is not in manifest.json"),
        (lambda step: (step / "link").symlink_to("about.json"), "link (a link) is not in"),
        (lambda step: link_to_copy(largest(step)), "is missing"),
        (lambda step: (step / "manifest.json").write_text("[" * 99999), "manifest.json is not"),
        (lambda step: swap(step / "manifest.json"), "manifest.json is not what was written"),
        (lambda step: swap(step / "about.json"), "the SHA-256 sum of about.json is another"),
        (lambda step: seal(step / "arrays" / "_METADATA", "{}"), "Orbax cannot read it"),
        (lambda step: seal(step / "about.json", None), "the arrays are not those that were saved"),
    ],
)
def test_damage_is_set_aside_and_the_one_before_is_used(pair, capfd, damage, reason):
    damage(pair / "00000002")
    assert_falls_back(pair, capfd, reason)


def largest(step: pathlib.Path) -> pathlib.Path:
    return max(files_of(step), key=lambda path: path.stat().st_size)


def link_to_copy(path: pathlib.Path) -> None:
    copy = path.rename(path.parents[4] / "copy")
    path.symlink_to(copy)
    copy.rename(path.parents[5] / "copy")


def swap(path: pathlib.Path) -> None:
    """Takes the same file of the other checkpoint."""
    shutil.copy(path.parent.with_name("00000001") / path.name, path)


def seal(path: pathlib.Path, text: str | None) -> None:
    """Writes a file of a checkpoint anew, or with another type of an array, and sums that agree."""
    if text is None:
        described = json.loads(path.read_text())
        described["arrays"]["order"] = ["int64", [9]]
        text = json.dumps(described)
    path.write_text(text)
    step = path.parents[path.parent.name == "arrays"]
    (step / "manifest.json").unlink()
    files.seal(step, 2)


def test_a_second_damaged_one_has_a_name_of_its_own(pair, capfd):
    for step in (2, 3):
        shutil.copytree(pair / "00000001", pair / "00000003", dirs_exist_ok=True)
        (pair / f"0000000{step}" / "manifest.json").unlink()
    assert checkpoint.newest(pair).step == 1
    shutil.copytree(pair / "00000002.damaged", pair / "00000002")
    assert checkpoint.newest(pair).step == 1
    damaged = ["00000002.damaged", "00000002.damaged-2", "00000003.damaged"]
    assert checkpoints.names_in(pair) == ["00000001", *damaged]
    assert len(capfd.readouterr().err.splitlines()) == 3


def refuse(path, *args):
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_file_entry", refuse, "cannot be read: .*Permission denied"),
        ("_FORMAT", 0, "has format 1; this version of hetjax reads 0"),
    ],
)
def test_what_may_not_be_read_and_a_newer_format_are_no_damage(
    name, value, words, pair, monkeypatch
):
    monkeypatch.setattr(files, name, value)
    with pytest.raises(ValueError, match=words):
        checkpoint.newest(pair)
    assert checkpoints.names_in(pair) == ["00000001", "00000002"]


# Disks


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="no checkpoints can be kept in"):
        checkpoint.Checkpoints(tmp_path / "run")
    with pytest.raises(ValueError, match=r"cannot be read: .*Not a directory"):
        checkpoint.newest(tmp_path / "run")


def big(num_mb: int) -> dict[str, np.ndarray]:
    return {f"w{i}": np.random.default_rng(i).normal(size=(1 << 17)) for i in range(num_mb)}


def test_a_file_that_grows_too_large_leaves_the_earlier_checkpoints(pair):
    store = checkpoint.Checkpoints(pair)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        store.save(3, big(1), {})
        with pytest.raises(ValueError, match=r"checkpoint 3 .*: File too large; .* untouched"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.names_in(pair) == ["00000001", "00000002"]
    assert checkpoint.newest(pair).step == 2
    store.save(3, big(1), {})  # there is room again
    store.close()
    assert checkpoint.newest(pair).step == 3


QUIET = """
import sys
from absl import app
import numpy as np
from hetjax.checkpoints import checkpoint
def main(argv):
    store = checkpoint.Checkpoints(argv[1])
    store.save(1, {"w": np.arange(5.0)}, {})
    store.close()
    checkpoint.newest(argv[1])
    assert "orbax" in " ".join(sys.modules)
assert "orbax.checkpoint" not in sys.modules
app.run(main)
"""


def test_nothing_is_logged_and_orbax_comes_late(tmp_path):
    done = launches.python(QUIET, tmp_path, JAX_PLATFORMS="cpu", PYTHONWARNINGS="error")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.slow
def test_a_short_drill_finds_all_damage_and_every_kill(tmp_path):
    path = tmp_path / "results" / "drill.jsonl"
    for _ in range(2):  # the second adds to the first
        text = checkpoints_lib.run(12, path)
    damaged, killed = (checkpoints_lib.add_up(path, drill) for drill in ("damage", "kill"))
    assert damaged == {"trials": 24, "found": 24, "silent": 0, "fell_back": 24, "runs": 2}
    assert (killed["trials"], killed["found"], killed["wrong_values"]) == (6, 6, 0)
    assert "| damaged checkpoints found and set aside | all | 24 of 24 | 24 |" in text
