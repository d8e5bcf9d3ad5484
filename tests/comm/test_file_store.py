"""Keys that are files, and files that are there whole: what killed and sleeping writers leave."""

import concurrent.futures
import os
import pathlib
import runpy

import pytest

from hetjax import whole
from hetjax.comm import file_store


def test_a_key_is_set_once_whoever_tries(tmp_path):
    """By many threads at once; all read what one of them has set."""

    def try_to(number):
        try:
            file_store.FileStore(tmp_path).key_value_set("decision/3", str(number))
        except FileExistsError:
            return None
        return number

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        set_by = [number for number in threads.map(try_to, range(64)) if number is not None]
    board = file_store.FileStore(tmp_path)
    assert [str(set_by[0])] == [board.key_value_try_get("decision/3")]
    assert len(set_by) == 1
    board.key_value_set("decision/3", "over", allow_overwrite=True)
    board.key_value_set("other", "")
    assert board.key_value_dir_get("decision/") == [("decision/3", "over")]
    board.key_value_delete("decision/3")
    with pytest.raises(KeyError, match="NOT_FOUND"):
        board.key_value_try_get("decision/3")
    with pytest.raises(TimeoutError, match="DEADLINE_EXCEEDED"):
        board.blocking_key_value_get("decision/3", 20)


def test_a_counter_counts_what_all_add(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        add = lambda _: file_store.FileStore(tmp_path).key_value_increment("count", 2)  # noqa: E731
        assert max(threads.map(add, range(50))) == 100


def test_a_name_that_a_killed_writer_leaves_is_never_written_again(tmp_path, monkeypatch):
    """It dies between the link and the unlink; then a process gets its number, and sets a key."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    for number in range(3):
        anew = runpy.run_path(file_store.__file__)["FileStore"](tmp_path)
        with monkeypatch.context() as killed:
            killed.setattr(pathlib.Path, "unlink", lambda *given, **more: None)
            anew.key_value_set(f"decision/{number}", str(number))
    found = sorted(file_store.FileStore(tmp_path).key_value_dir_get("decision/"))
    assert found == [(f"decision/{number}", str(number)) for number in range(3)]


def test_who_slept_while_it_wrote_writes_into_nothing_that_others_read(tmp_path):
    path = tmp_path / "file"
    with whole.written(path) as slow, slow.open("w") as file:
        with whole.written(path) as fast:
            fast.write_text("whole")
        file.write("half")
        file.flush()
        assert path.read_text() == "whole"
    with pytest.raises(ZeroDivisionError), whole.written(path) as new:
        new.write_text(str(1 / 0))
    assert (os.listdir(tmp_path), path.read_text()) == (["file"], "half")
