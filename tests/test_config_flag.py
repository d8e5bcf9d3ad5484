"""`--config=FILE --config.field=value`: overrides on both kinds of file, mistakes, status 2."""

from __future__ import annotations

import json
import pathlib

import pytest
from absl import flags

from experiments import config_flag
from experiments.bilevel import settings
from hetjax import quota
from hetjax.cluster import emulate
from hetjax.config import fields
from hetjax.zoo import config

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
DIGITS, CLEANING, GAN = (
    str(CONFIGS / f"{name}.py") for name in ("digits", "digits_cleaning", "gaussians_gan")
)


def parsed(*arguments, schema=None):
    """The flags of a command line of its own, as a program has them."""
    values, argv = flags.FlagValues(), ["program", *arguments]
    config_flag.define(schema, flag_values=values, argv=argv)
    config_flag.parse_flags(argv, flag_values=values)
    return values


def run(*arguments, schema=None):
    return config_flag.get(flag_values=parsed(*arguments, schema=schema))


@pytest.fixture(params=["py", "json"])
def path(request, tmp_path):
    if request.param == "py":
        return DIGITS
    copied = tmp_path / "config.json"
    copied.write_text(json.dumps(config.to_dict(config.validate(config.load(DIGITS)))))
    return str(copied)


def test_a_field_of_the_command_line_is_known_from_one_of_the_file(path):
    """And from one of another command line in the process."""
    other = parsed(f"--config={path}", "--config.budget=24")
    values = parsed(f"--config={path}", "--config.local=stepped")
    given = {(name, config_flag.is_given(name, flag_values=values)) for name in ("local", "budget")}
    assert given == {("local", True), ("budget", False)}
    assert config_flag.is_given("budget", flag_values=other)
    assert not config_flag.is_given("local", flag_values=other)


def test_overrides_work_the_same_on_both_kinds_of_file(path, capsys):
    experiment = run(
        *(f"--config={path}", "--config.epochs=3", "--config.budget", "24"),
        *("--config.optimizer.learning_rate=1", "--config.optimizer.nesterov"),
        *("--config.quota.policy=static", "--config.quota.proportions=4,3,2,1"),
        *("--config.model.hidden=64", "--config.cluster.overhead_secs=(0.1,0,0,0)"),
        "--config.cluster.changes=({'round':3,'worker':0,'present':False},)",
    )
    assert (experiment.epochs, experiment.budget, experiment.model.hidden) == (3, 24, (64,))
    assert (experiment.optimizer.learning_rate, experiment.optimizer.nesterov) == (1.0, True)
    assert experiment.quota.arguments == (("proportions", (4.0, 3.0, 2.0, 1.0)),)
    assert experiment.cluster.overhead_secs == (0.1, 0.0, 0.0, 0.0)
    assert experiment.cluster.changes == (emulate.Change(round=3, worker=0, present=False),)
    assert experiment.cluster.secs_per_microbatch == (0.024, 0.032, 0.048, 0.096)
    with pytest.raises(SystemExit):
        run(f"--config={path}", "--config.quota.polcy=x")
    assert "policy='adaptive' has no such option. Did you mean" in capsys.readouterr().err


def test_options_of_ones_own_part_are_given_by_name_or_together(tmp_path):
    own = "--config.quota.policy=tests.own_parts.policy:one_at_a_time"
    alone = run(f"--config={DIGITS}", own, "--config.quota.least=2")
    together = run(f"--config={DIGITS}", own, "--config.quota.arguments={'least': 2}")
    assert alone == together
    assert alone.quota.arguments == (("least", 2),)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(alone)))
    file = f"--config={tmp_path / 'config.json'}"
    assert run(file, "--config.quota.least=3").quota.arguments == (("least", 3),)
    other = run(file, "--config.quota.policy=equal", "--config.quota.arguments={}")
    assert other.quota.arguments == ()


def test_a_program_may_have_fields_of_its_own():
    cleaning = (f"--config={CLEANING}", "--config.estimator.name=implicit_cg", "--config.seed=3")
    found = run(*cleaning, schema=settings.SCHEMA)
    assert (found.estimator.name, found.seed) == ("implicit_cg", 3)
    found = run(f"--config={GAN}", "--config.gan.hidden=3", schema=settings.SCHEMA)
    assert found.gan.hidden == 3


MISTAKES = [
    (DIGITS, ["--config.quota.polcy=x"], "has no such option. Did you mean 'quota.policy'?"),
    (DIGITS, ["--config.=2.0"], "'': there is no such field. There are: seed, epochs, "),
    (DIGITS, ["--config.budget=1e3"], "budget: got 1000.0, must be an integer of at least 1."),
    (DIGITS, ["--config.quota=x"], "quota: got 'x', but it is a group of fields. Set quota.poli"),
    (
        *(DIGITS, ["--config.data.name=sst2", "--config.data.length=3"]),
        "data.length: the data set 'sst2' has no such option; it has features, num_fea",
    ),
    (CLEANING, ["--config.estimator.nme=x"], "estimator.nme: there is no such field"),
    (GAN, ["--config.data.num_train=3"], "runs on one device and does not read it"),
    (GAN, ["--config.search.channels=3"], "Set problem='search'"),
    (DIGITS, ["--confg=x"], "Unknown command line flag 'confg'"),
    (DIGITS, ["--epochs=3"], "--epochs=3: epochs is a field of the configuration; write --con"),
    (DIGITS, ["--epochs", "3"], "write --config.epochs=3."),
    (None, [], "--config is missing. Give a file first, such as --config=configs/digits.py."),
    ("", [], "'': a configuration is a .py file with get_config(), or a .json file."),
]


@pytest.mark.parametrize(("file", "arguments", "message"), MISTAKES)
def test_a_mistake_ends_with_our_message_and_status_2(file, arguments, message, capsys):
    arguments = arguments if file is None else [f"--config={file}", *arguments]
    with pytest.raises(SystemExit) as ended:
        run(*arguments, schema=settings.SCHEMA if file in (CLEANING, GAN) else None)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_help_shows_every_field_with_its_default_and_ends_well(capsys):
    with pytest.raises(SystemExit) as ended:
        run("--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    for name, option in fields.leaves(config.ExperimentConfig):
        assert f"  --config.{name}={option.default!r}" in lines
    assert "passes over the data; an integer of at least 1" in shown
    assert "of dead_band: least relative change that is acted on; a finite number" in shown
    words = " ".join(shown.split())
    assert f"one of {', '.join(quota.POLICIES)}, or the import path" in words
