"""What is said: on stderr by default, above a bar that moves, and by `logging` for who takes it."""

import io
import logging
import sys

import pytest
import tqdm

import hetjax
from tests import programs

OWN = 'logging.getLogger("hetjax")'
KEEP = 'hetjax.compiled.keep("/proc/none")'  # which cannot be made
SPEAK = f"import hetjax.compiled; {KEEP}"
SAID = "compiled programs are not kept in '/proc/none': "
SHOWN, TAKEN = f"hetjax: {SAID}", f"hetjax.compiled WARNING {SAID}"
FORM = "format='%(name)s %(levelname)s %(message)s'"
SETS = {  # what a user has set: the lines on stderr begin so
    "nothing": ("pass", [SHOWN]),
    "a level": (f"{OWN}.setLevel(logging.ERROR)", []),
    "a handler": (f"{OWN}.addHandler(logging.FileHandler('log'))", []),
    "the root logger": (f"logging.basicConfig({FORM})", [TAKEN]),
    "a handler that does nothing": ("logging.root.addHandler(logging.NullHandler())", [SHOWN]),
    "absl's program": (
        f"from experiments import command_line as c; c.run(lambda: {KEEP})",
        [SHOWN],
    ),
}


def test_what_is_said_stands_on_a_line_of_its_own(monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    with tqdm.tqdm(total=4, file=told) as bar:
        bar.update(1)
        logging.getLogger(f"{hetjax.__name__}.training").info("it goes on")
    shown = [line.split("\r")[-1] for line in told.getvalue().split("\n")]
    assert "hetjax: it goes on" in shown


@pytest.mark.parametrize("what", SETS)
def test_a_user_silences_and_collects_what_is_said(tmp_path, what):
    sets, begin = SETS[what]
    program = f"import logging, hetjax.compiled\n{sets}\n{SPEAK}"
    ended = programs.run(["-c", program], tmp_path)
    lines = ended.stderr.splitlines()
    assert [line[: len(first)] for line, first in zip(lines, begin, strict=True)] == begin
    collected = tmp_path / "log"
    assert not collected.exists() or collected.read_text().startswith(SAID)
    assert collected.exists() == (what == "a handler")


def test_a_launched_process_speaks_as_one_alone_does(tmp_path):
    program = (  # what is set before the import stays
        "import logging, os\n"
        f"if os.environ['HETJAX_PROCESS_ID'] == '0': {SETS['a level'][0]}\n"
        f"elif os.environ['HETJAX_PROCESS_ID'] == '1': {SETS['the root logger'][0]}\n"
        f"{SPEAK}"
    )
    launcher = ["-m", "hetjax.launch", "--workers=3", "--", sys.executable, "-c", program]
    said = programs.run(launcher, tmp_path).stderr
    assert sorted(line[:30] for line in said.splitlines() if line.startswith("[")) == [
        f"[1] {TAKEN}"[:30],
        f"[2] {SHOWN}"[:30],
    ], said
    assert "hetjax.launch: 3 workers; " in said
