"""The programs that people run: `--help`, mistakes in flags, and `~` in paths."""

import ast
import json
import pathlib

import pytest

from hetjax.report import __main__ as report_command
from hetjax.zoo import config as config_lib
from tests import programs

ROOT = pathlib.Path(__file__).parent.parent
PROGRAMS = {
    "experiments.train": ("--workdir", "--config.optimizer.learning_rate=0.05"),
    "experiments.train_bilevel": ("--workdir", "--config.estimator.name='value_gap'"),
    "experiments.compare": ("--seeds=0", "--set=cluster.num_workers=4"),
    "experiments.simulate": ("--workers=8,64,1000,10000", "--microbatch_secs=0.1"),
    "experiments.compare_orders": ("--data_dir", "--minutes=inf"),
    "experiments.compare_bilevel": ("--data_dir", "--stage=all"),
    "hetjax.launch": ("--workers WORKERS", "--heartbeat_secs"),
    "hetjax.report": ("the work directory of the run",),
    "hetjax.zoo.prepare": ("--data_dir DIR",),
}


def run(*command, how="-m", **environment):
    return programs.run([how, *command], ROOT, **environment)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_says_what_can_be_set_and_ends_well(program):
    done = run(program, "--help")
    assert done.returncode == 0, done.stderr
    for text in PROGRAMS[program]:
        assert text in done.stdout
    assert len(done.stdout.splitlines()) > 5


def test_programs_run_one_after_another_in_one_python(tmp_path):
    """As in a notebook; each has its own flags and defaults."""
    texts = {path: path.read_text() for path in (ROOT / "experiments").rglob("*.py")}
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for p in texts
        if "app.run(" in texts[p] or "command_line.run(main" in texts[p]
    ]
    code = f"""
import runpy, sys
trains = ["--config=configs/digits.py", "--config.max_rounds=1", "--workdir={tmp_path}"]
names = [(name, ["--help"]) for name in {names}]
trained = [("experiments.train", trains), ("experiments.train", trains[:2])]
for name, arguments in [*trained[:1], *names, *trained, *names[::5]]:
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        print("ended", name, end.code or 0)
"""
    done = run(code, how="-c")
    assert done.returncode == 0, done.stderr
    ended = [line.split() for line in done.stdout.splitlines() if line.startswith("ended")]
    assert len(ended) > len(names) + 3 > 25
    assert [line[1:] for line in ended if line[2] != "0"] == [["experiments.train", "2"]]
    assert "--workdir is missing" in done.stderr


def test_programs_that_tests_import_have_no_flag_twice():
    imports = set()  # whichever of them the tests of one process import
    for path in ROOT.glob("tests/**/test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
                imports.add(ast.unparse(node))
    assert len(imports) > 20
    done = run("\n".join(sorted(imports)), how="-c")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["experiments.compare", "--epochs=3"], 2, "write --set=epochs=3."),
        (["experiments.simulate", "--wrkers=3"], 2, "Unknown command line flag 'wrkers'. Did you"),
        (["experiments.simulate", "--workers=8,x"], 1, "'x' is no number; give numbers such as "),
        (["experiments.simulate", "--wait_for=neighbours"], 1, "gossip, such as --reducers=d_psgd"),
        (["experiments.compare_orders", "--jobs=0"], 2, "--help shows all flags"),
        (["experiments.train", "epochs=3", "--config=configs/digits.py"], 2, "--config.epochs=3."),
    ],
)
def test_a_mistake_in_a_flag_gets_one_message(command, code, message):
    done = run(*command)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# `~`


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "~").exists()


@pytest.mark.slow
def test_the_home_directory_is_meant_on_the_command_line(home):
    fields = {"epochs": 1, "data": {"num_train": 64}, "cluster": {"clock": "virtual"}}
    fields["cluster"] |= {"num_workers": 2, "secs_per_microbatch": [1.0, 2.0]}
    (home / "config.json").write_text(json.dumps(fields))
    command = ["experiments.train", "--config=~/config.json", "--workdir=~/run"]
    done = run(*command, HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert f"Report: {home}/run/report.html" in done.stdout
    assert (home / "run" / "report.html").exists()
    done = run(*command, "--config.replay=~/none.jsonl", HOME=str(home))
    assert f"{home}/none.jsonl" in done.stderr
    (home / "run" / "report.html").unlink()
    report_command.main(["~/run"])
    assert (home / "run" / "report.html").exists()
    assert not (ROOT / "~").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", '{"epochs": 3}'), ("a.py", "def get_config():\n  return {'epochs': 3}\n")],
)
def test_the_home_directory_is_meant_for_a_configuration(name, text, home):
    (home / name).write_text(text)
    assert config_lib.load(f"~/{name}").epochs == 3
    with pytest.raises(ValueError, match=f"{home}/b{name}: cannot be read"):
        config_lib.load(f"~/b{name}")
