"""The table of the tasks: every number of it is one of the files beside it."""

from experiments.benchmarks import tasks


def test_the_page_of_results_is_made_of_the_files_beside_it():
    results = tasks.read_results()
    assert results
    assert (tasks.RESULTS / "README.md").read_text() == tasks.page(results)
    for name, result in results.items():
        value = result["numbers"][tasks.TARGETS[name].metric]
        assert f"| {tasks.TARGETS[name].shown(value)}" in tasks.table(results)


def test_what_is_missed_and_what_was_not_run_is_said():
    numbers = {"val_perplexity": 140.2, "best_val_perplexity": 139.0}
    found = {"wikitext2_lstm": {"numbers": numbers, "epochs": 3.0, "wall_secs": 1234.5}}
    lines = {line.split("`")[1]: line for line in tasks.table(found).splitlines()[2:]}
    assert lines["wikitext2_lstm"] == (
        "| `wikitext2_lstm` | val perplexity | ≤ 130 | 140.2 (missed) | 139 | 3 | 1,234 |"
    )
    assert "not run" in lines["m4_weekly"]
    assert lines.keys() == tasks.TARGETS.keys()
