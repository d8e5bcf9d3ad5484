"""The results of a study: lines that only grow, though a process be killed while it adds one."""

from concurrent import futures

from experiments.comparisons import kept


def test_lines_come_back_in_the_order_in_which_they_were_added(tmp_path):
    path = tmp_path / "new" / "runs.jsonl"
    assert kept.read(path) == ()
    for number in range(3):
        kept.append(path, {"number": number})
        assert kept.read(path)[-1] == {"number": number}
    assert [record["number"] for record in kept.read(path)] == [0, 1, 2]


def test_a_last_line_that_was_cut_short_is_said_and_the_study_goes_on(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    whole = '{"a": 1}\n{"a": 2}\n'
    for end in range(len('{"a": 1}\n') + 1, len(whole)):
        path.write_text(whole[:end])
        assert kept.read(path) == ({"a": 1},)
        assert "runs.jsonl: the last line is cut short" in capsys.readouterr().err
        kept.append(path, {"a": 3})
        assert kept.read(path) == ({"a": 1}, {"a": 3})
        assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_several_may_add_at_once(tmp_path):
    path = tmp_path / "runs.jsonl"
    with futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: kept.append(path, {"n": n, "long": "x" * 9000}), range(40)))
    assert sorted(record["n"] for record in kept.read(path)) == list(range(40))
