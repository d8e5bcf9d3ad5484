"""Some cases of `experiments/drills/own_parts.py`: what own parts get for a wrong value."""

import pytest

from experiments.drills import own_part_cases, own_parts

NUMBERS = {case.name: index for index, case in enumerate(own_part_cases.CASES)}
SOME = [
    ("policy/assign/NaN", "virtual"),
    ("policy/assign/for an absent one", "stepped"),
    ("policy/observe/growing", "fused"),
    ("order/init/repeated", "virtual"),
    ("order/place/growing", "stepped"),
    ("order/observe/shape", "virtual"),
    ("gate/closes_at/NaN", "virtual"),
    ("gate/is_open/None", "stepped"),
    ("cluster/microbatch_ends/backwards", "virtual"),
    ("callback/it/two truths", "virtual"),
    ("metrics_fn/it/of means", "virtual"),
    ("source/__getitem__/text", "virtual"),
    ("graph/edges/apart", "virtual"),
    ("reducer/collective/type", "stepped"),
    ("rule/finish/weight NaN", "virtual"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), SOME)
def test_a_wrong_value_is_refused_by_a_sentence_that_names_it(name, form):
    outcome, sentence = own_parts.tried(NUMBERS[name], form)
    assert outcome == "refused", sentence


def test_what_trains_or_raises_something_else_is_no_refusal(monkeypatch):
    def raises(form):
        raise KeyError(form)

    right = own_part_cases.Case("it/trains/", lambda form: None, ("it",))
    wrong, short = right._replace(train=raises), right._replace(train=lambda form: int("it"))
    monkeypatch.setattr(
        own_part_cases, "CASES", (right, wrong, short, short._replace(says=("ab",)))
    )
    found = [own_parts.tried(index, "virtual")[0] for index in range(4)]
    assert found == ["trained", "raw", "refused", "without ['ab']"]


def test_a_case_that_hangs_is_killed_and_the_others_go_on(monkeypatch, tmp_path):
    """The process is a stand-in that begins the second case and is not heard of again."""
    program = tmp_path / "python"
    text = (
        "import json, os, time\n"
        "for index, form in json.loads(os.environ['HETJAX_OWN_PARTS']):\n"
        "    print('OWN_PARTS ' + json.dumps([index, form, 'begins']), flush=True)\n"
        "    time.sleep(600 if index == 1 else 0)\n"
        "    print('OWN_PARTS ' + json.dumps([index, form, 'refused', 'so']), flush=True)\n"
    )
    program.write_text(text)
    monkeypatch.setattr(own_parts, "command", lambda: [own_parts.sys.executable, str(program)])
    cases = [(index, "virtual") for index in range(4)]
    found = [(index, outcome) for index, _, outcome, _ in own_parts.outcomes(cases, 3.0)]
    assert found == [(0, "refused"), (1, "hung"), (2, "refused"), (3, "refused")]
