"""Every command of every page: its program reads the arguments as the page has them."""

import json
import re
import shlex
import tomllib

import pytest

from hetjax.zoo import config
from tests import programs
from tests.pages.blocks import PAGES, ROOT, blocks, blocks_of, name_of, without_code

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OURS = ("hetjax", "experiments")
MODULES = {"docs", "jupytext", "mypy", "pip", "pytest", "sphinx", "tests", "venv"}
TOOLS = {
    *(".", ".ci/run", ".ci/site", "cd", "export", "git", "jupyter", "ls", "mypy"),
    *("pre-commit", "ruff"),
}


def lines_of(text):
    """The commands of a block: without comments, continued lines joined, apart at `&&`."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for command in re.split(r"\s(?:&&|\|\||;|\||&)\s", line.removeprefix("$ ")):
            if words := shlex.split(command, comments=True):
                yield words


def commands_of(path):
    """Each command of a page, in blocks and between backticks, as words."""
    for block in blocks_of(path):
        if block.language in ("sh", "console") and not block.why_not:
            yield from lines_of(block.text)
    prose = " ".join(without_code(path).split())
    for text in re.findall(r"`[^`]*?(python -m [^`]+)`", prose):
        yield [word.strip("\"'") for word in text.split()]


def cut(words):
    """A command without the variables before it, and without what becomes of its output."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    words = [  # without what a reader fills in
        word.strip("[]") if word[0] == "[" else word for word in words if "…" not in word
    ]
    ends = [i for i, word in enumerate(words) if word[0] in "<>" or word[:2] in ("2>", "&>")]
    return words[: min(ends, default=len(words))]


def programs_of(words):
    """(module, arguments) of each of our programs that a command runs; refuses one not known."""
    words = cut(words)
    tool, *rest = words
    if tool == "pip":
        named = re.findall(r"(?:hetjax|\.)\[([\w,]+)\]", " ".join(rest))
        assert set(",".join(named).split(",")) - {""} <= EXTRAS.keys(), words
    elif tool == "python" and rest == ["-m"]:  # and a reader's own module
        return
    elif tool == "python" and rest[0] == "-m":
        module, *arguments = rest[1:]
        if module.partition(".")[0] not in OURS:
            assert module.partition(".")[0] in MODULES, words
            return
        yield (
            module,
            tuple(each for each in arguments if not re.search("^--config=.*[A-Z]{3}", each)),
        )
        if module == "hetjax.launch" and "--" in arguments:
            yield from programs_of(arguments[arguments.index("--") + 1 :])
    elif tool == "python":
        assert rest[0] == "script.py" or (ROOT / rest[0]).exists(), words
    else:
        assert tool in TOOLS, f"{words}: mark the block <!-- not run: why -->"


COMMANDS = {
    command: path for path in PAGES for words in commands_of(path) for command in programs_of(words)
}


@pytest.fixture
def checkout(tmp_path):
    """A directory as a reader has it, with the record of the README's first command.

    And with the file that a page has a reader write.
    """
    (tmp_path / "my_config.py").write_text(blocks(ROOT / "docs/commands.md")[1][1])
    for name in ("configs", "experiments", "hetjax", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs/digits").mkdir(parents=True)
    digits = config.validate(config.load(ROOT / "configs/digits.py"))
    written = json.dumps(config.to_dict(digits))
    (tmp_path / "runs/digits/config.json").write_text(written)
    return tmp_path


def dry(command, directory):
    return programs.run(["-m", "tests.pages.dry", command[0], *command[1]], directory)


@pytest.mark.parametrize(
    "command", COMMANDS, ids=[f"{each[0]}-{i}" for i, each in enumerate(COMMANDS)]
)
def test_a_program_takes_the_arguments_of_the_page(command, checkout):
    ran = dry(command, checkout)
    assert ran.returncode == 0, f"{name_of(COMMANDS[command])}: {ran.stderr[-3000:]}"


@pytest.mark.parametrize(
    "command",
    [
        ("experiments.train", ("--config=configs/digits.py", "--config.quota.mingain=1")),
        ("experiments.compare_orders", ("--no_such=1",)),
        ("hetjax.launch", ("--cpu=1", "--workers=1", "--", "python")),
        ("hetjax.zoo.prepare", ("--no_such",)),
    ],
    ids=lambda command: command[0],
)
def test_wrong_arguments_are_found(command, checkout):
    assert dry(command, checkout).returncode != 0


def test_a_tool_that_ci_has_not_is_found():
    with pytest.raises(AssertionError, match="mark the block"):
        list(programs_of(["srun", "--ntasks=4", "python"]))
    with pytest.raises(AssertionError):
        list(programs_of(["pip", "install", "hetjax[nothing]"]))
    text = "pip install -e '.[dev]' && python -m experiments.option_tables > a.md  # why\n"
    assert list(lines_of(text))[1] == ["python", "-m", "experiments.option_tables", ">", "a.md"]
    assert list(programs_of(["A=1", "python", "-m", "experiments.option_tables", ">", "a"])) == [
        ("experiments.option_tables", ())
    ]
