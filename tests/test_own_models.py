"""Models, data, losses and metrics of one's own, by import path, in each of the commands."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import command_line, own, train
from experiments.bilevel import baselines, rounds, settings
from experiments.bilevel import data as data_lib
from experiments.comparisons import comparison
from experiments.orders import results, schedule
from experiments.orders import tasks as order_tasks
from hetjax.zoo import config as config_lib

HERE = "tests.own_parts.task"
FILE = """
from {module} import {name} as config


def get_config():
    experiment = config.base()
    experiment.data.name, experiment.model.name = "{here}:load", "{here}:Net"
    experiment.loss, experiment.metrics = "{here}:loss", "{here}:metrics"
    experiment.microbatch_size = 4
    return experiment
"""
SMALL = ["epochs=2", "budget=8", "local=virtual"]
CLEANING = [
    *("data.num_train=40", "data.num_validation=20", "microbatch_size=10", "local=virtual"),
    *("eval_every=1", "upper.steps=1", "upper.optimizer=sgd", "estimator.steps=1"),
]


def write(directory, module="hetjax.zoo", name="config"):
    path = directory / "my_config.py"
    path.write_text(FILE.format(module=module, name=name, here=HERE))
    return str(path)


def configured(directory, *fields):
    given = command_line.given_fields([*SMALL, *fields], behind="")
    loaded = config_lib.load(write(directory)).to_dict()
    overridden = command_line.overridden(config_lib.ExperimentConfig, loaded, given)
    return config_lib.validate(overridden)


def do_train(directory, *fields):
    config = configured(directory, *fields)
    result = train.train_and_evaluate(config, directory / "run", progress=False)
    recorded = json.loads((directory / "run" / "config.json").read_text())
    assert recorded["model"]["name"] == config.model.name
    return [result.summary["test_accuracy"]]


def do_bilevel(directory, *fields):
    loaded = settings.load(write(directory, "experiments.bilevel", "settings")).to_dict()
    texts = (each.partition("=") for each in (*CLEANING, *fields))
    given = [(n, command_line.read_field(settings.TrainConfig, n, text)) for n, _, text in texts]
    found = command_line.overridden(settings.TrainConfig, loaded, given)
    config = settings.validate_train(found)
    data = data_lib.make(config.data, config.seed)
    summary = rounds.clean(config, data, directory / "run")[0].summary
    both = baselines.run(config, data, summary["kept_fraction"])["both"]
    return [summary["test_accuracy"], both["test_accuracy"]]


def do_compare(directory, *fields):
    grid = ["optimizer.learning_rate=.05,.5", "model.arguments.width=4,8"]
    grid = grid if not fields else grid[:1]
    arms = comparison.read_arms([write(directory)], [*SMALL, *fields], grid)
    found = comparison.compare(arms, [0], directory, jobs=0)
    assert len(comparison.table(found).splitlines()) == 2 + len(arms)
    assert [arm.fields["optimizer"]["learning_rate"] for arm in arms] == [0.05, 0.05, 0.5, 0.5]
    assert "model.arguments.width=8" in arms[1].label
    code = comparison.Run(arms[0], 0, None).settings["code"]
    assert f"{HERE}:Net" in code  # a run of other code is done again
    return [found.records[arm.label][0]["summary"]["test_accuracy"] for arm in arms]


def do_orders(directory, *fields):
    options = {"rates": [], "seeds": [0], "orders": ["fixed_map"]}
    task = order_tasks.of_file(write(directory), ["epochs=2", *fields], **options)
    schedule.run_all([task], directory, data_dir=None, num_jobs=0)
    records = results.read_records(directory, task).values()
    assert {record["arm"] for record in records} == {"random_reshuffling", "fixed_map"}
    assert task.experiment.data.num_train == 112  # seven rounds of 16, of 120
    return [record["metric_values"][-1] for record in records]


COMMANDS = {"train": do_train, "train_bilevel": do_bilevel}
COMMANDS |= {"compare": do_compare, "compare_orders": do_orders}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_model_data_loss_and_metrics_of_ones_own(command, tmp_path):
    figures = COMMANDS[command](tmp_path)
    assert np.isfinite(figures).all()
    assert min(figures) > 0.2


TEXT = "tests.test_own_models:text"
WRONG = {
    f"data.name={TEXT}": f"data.name: '{TEXT}' returned 'text'. Data is {{'train': …, 'test': …}}",
    f"model.name={TEXT}": f"model.name: '{TEXT}' returned 'text'. A model is a flax.nnx.Module;",
    f"loss={TEXT}": f"loss: '{TEXT}' returned 'text' of",
    f"metrics={TEXT}": f"metrics: '{TEXT}' returned 'text' of",
    "loss=no.module:loss": "loss: 'no.module:loss' cannot be imported: No module named 'no'",
}


def text(*args, **named):
    return "text"


def scalar(model, batch):
    return jnp.mean(model(batch["x"]))


def with_more(rngs):
    return lambda params, batch, rng: batch["x"], np.ones(3), {"fields": {}}


@pytest.mark.parametrize("given", WRONG)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_a_function_returned(command, given, tmp_path):
    with pytest.raises((ValueError, RuntimeError)) as raised:
        COMMANDS[command](tmp_path, given)
    assert WRONG[given] in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        (f"model.name={HERE}:linen_net",),
        (f"model.name={HERE}:weights", f"loss={HERE}:loss_of_weights", "metrics=by_kind"),
        (f"model.name={HERE}:pair", "loss=by_kind", "metrics=by_kind"),
        (f"model.name={HERE}:annealed", "loss=by_kind", "metrics=by_kind"),
        (
            *(f"data.name={HERE}:load_known", "model.name=mlp", "loss=by_kind"),
            *("metrics=by_kind", "data.num_train=100", "optimizer.schedule=cosine"),
        ),
        (f"model.name={HERE}:of_digits", "data.name=digits", "loss=by_kind", "metrics=by_kind"),
        ("optimizer.name=optax:scale_by_lion", "optimizer.learning_rate=.01"),
        (f"data.augmentation={HERE}:noisy", "data.arguments.num_examples=80"),
    ],
)
def test_forms_of_models_and_other_functions_train(fields, tmp_path):
    config = configured(tmp_path, "epochs=6", *fields)
    result = train.train_and_evaluate(config, None, progress=False)
    losses = [line["loss"] for line in result.history]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert result.summary["examples_missing"] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["loss=nomodule:loss"], r"'nomodule:loss' cannot .*looked for in .* PYTHONPATH"),
        ([f"loss={HERE}:no_such"], "has no attribute 'no_such'"),
        ([f"loss={__name__}:HERE"], "is 'tests.own_parts.task', must be a function"),
        ([f"loss={__name__}:scalar"], r"scalar' returned float32\[\] of 4 examples"),
        (["model.arguments.widht=3"], "cannot be called with rngs, widht. It may name rngs, batch"),
        (["data.arguments.n=3"], "cannot be called with n. It may name dir"),
        (["model.name=mlp", "model.arguments.width=3"], "reference models need"),
        ([f"data.name={HERE}:load_known", "model.name=mlp", "model.arguments.a=3"], "takes none"),
        (["loss=by_kind"], "loss: missing. The kind of these examples has none"),
        (["model.name=" + f"{__name__}:with_more", "loss=by_kind"], r"gives \['fields'\]"),
        ([f"model.name={HERE}:pair"], r"returns \(loss_fn, params\); give no loss"),
        ([f"data.name={HERE}:loss"], "cannot be called with nothing. It may name dir"),
        ([f"optimizer.name={__name__}:text"], "returned 'text'. An optimiser is an optax"),
        (["model.name=Net"], "or 'module:function' of your own"),
    ],
)
def test_what_cannot_be_used_is_told(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train.train_and_evaluate(configured(tmp_path, *fields), None, progress=False)


def test_an_error_inside_is_told_with_its_line_and_a_problem_that_has_its_own_refuses_others():
    with pytest.raises(ValueError, match="loss: problem='gan' has its own"):
        settings.validate_train({"problem": "gan", "loss": f"{HERE}:loss"})
    with pytest.raises(ValueError, match="broadcast") as raised:
        own.called("model.name", f"{__name__}:broken", {}, {})
    assert own.told(raised.value).startswith(f"{__file__}, line ")


def broken():
    return np.zeros(2) + np.zeros(3)
