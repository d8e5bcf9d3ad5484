"""What a task of the study is: a configuration of `configs/`, and what the study sets of it.

Loss, model, data and optimiser are those of the configuration. The study says how many examples,
workers and epochs, at which learning rates, with which orders and seeds. A run is one task, one
order, one learning rate and one seed; everything else is equal for all orders of a task.
"""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from experiments import command_line, own
from experiments.orders import arms
from hetjax.zoo import config as config_lib

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
# One microbatch a worker and round, each worker with a shard of its own, one learning rate.
COMMON = {
    "quota.policy": "equal",
    "quota.max_microbatches": 1,
    "data.sharing": "private",
    "optimizer.schedule": "constant",
    "optimizer.warmup_epochs": 0.0,
    "best_by": "",
    "best_mode": "min",
}
# What a result does not depend on, and what a run is named by.
_NOT_SETTINGS = ("seed", "optimizer.learning_rate", "data.dir", "compilation_cache")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A problem, its orders, and the learning rates that they are tuned over."""

    name: str
    title: str
    config: str  # a file of `configs/`, without its suffix; or the path of a file of one's own
    changes: Mapping[str, Any] = dataclasses.field(hash=False)  # of its fields, dotted
    learning_rates: tuple[float, ...]  # ascending; more are added where the best one is at an end
    round_millis: float  # of a plain round, on one core: for the estimate of the time left alone
    arms: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)  # the rates are tuned with the first
    same_rate: float = 0.0  # all seeds of all arms at this learning rate, too; 0: no
    every: int = 1  # training loss is that of every so many-th of the training examples
    num_eval: int = 0  # examples that are evaluated, the first ones; 0: all
    convex: bool = False
    group: str = ""  # of tasks that are shown in one table

    @property
    def file(self) -> pathlib.Path:
        """That has the configuration."""
        own = pathlib.Path(self.config)
        return own if own.suffix else CONFIGS / f"{self.config}.py"

    @property
    def shown_file(self) -> str:
        """As a report has it."""
        return self.config if self.is_own else f"configs/{self.config}.py"

    @property
    def is_own(self) -> bool:
        """Whether it is none of the study."""
        return bool(pathlib.Path(self.config).suffix)

    @functools.cached_property
    def experiment(self) -> config_lib.ExperimentConfig:
        """The configuration as the study has it, at the file's own learning rate and seed."""
        return self._checked({})

    @functools.cached_property
    def metric(self) -> str:
        """What is measured of the set that is evaluated, beside its loss."""
        if self.is_own:
            return self.changes.get("best_by") or self._file().best_by or "loss"
        return self._file().best_by or "accuracy"

    @property
    def is_tuned(self) -> bool:
        return len(self.learning_rates) > 1

    @property
    def batch_size(self) -> int:
        return self.experiment.budget * self.experiment.microbatch_size

    @property
    def epoch_rounds(self) -> int:
        return math.ceil(self.experiment.data.num_train / self.batch_size)

    @property
    def num_rounds(self) -> int:
        """Rounds of one run."""
        return self.experiment.epochs * self.epoch_rounds

    @property
    def is_emulated(self) -> bool:
        """Whether its workers have emulated speeds."""
        return bool(self.experiment.cluster.secs_per_microbatch)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What the result of a run depends on, beside order, learning rate and seed.

        The fields of the configuration that are not as by default, and what is measured.
        """
        defaults = config_lib.to_dict(config_lib.validate({}))
        found = _difference(config_lib.to_dict(self.experiment), defaults)
        code = own.digests(found)
        more = {"code": code} if code else {}
        return {"config": found, "every": self.every, "num_eval": self.num_eval, **more}

    def configured(
        self, run: "Run", data_dir: str | None, changes: Mapping[str, Any] | None = None
    ) -> config_lib.ExperimentConfig:
        """The configuration of a run, with further changes of dotted fields."""
        return self._checked(
            {
                "seed": run.seed,
                "optimizer.learning_rate": run.learning_rate,
                **({"data.dir": data_dir} if data_dir else {}),
                **{f"ordering.{k}": v for k, v in arms.ARMS[run.arm].ordering.items()},
                **(changes or {}),
            }
        )

    def run_secs(self, arm: str, epoch_secs: float | None = None) -> float:
        """What a run takes, at a measured time of an epoch, or at a guess; a tenth evaluates."""
        if epoch_secs is None:
            epoch_secs = self.epoch_rounds * self.round_millis * arms.ARMS[arm].cost / 1e3
        return 8 + 1.1 * self.experiment.epochs * epoch_secs

    def most_runs(self, arm: str) -> int:
        """Tuning, the other seeds at the arm's own learning rate, and maybe at the same one."""
        tuning = len(self.learning_rates) if arm in arms.TUNED else 1
        return tuning + len(self.seeds) - 1 + (len(self.seeds) if self.same_rate else 0)

    def _file(self) -> ml_collections.ConfigDict:
        return config_lib.load(self.file)

    def _checked(self, changes: Mapping[str, Any]) -> config_lib.ExperimentConfig:
        given = {**COMMON, **self.changes, **changes}.items()
        loaded = self._file().to_dict()
        return config_lib.validate(
            command_line.overridden(config_lib.ExperimentConfig, loaded, given)
        )


def of_file(
    text: str,
    common: Sequence[str],
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    orders: Sequence[str],
) -> Task:
    """A task of one's own: a file and, behind it, fields that are different.

    Workers have a microbatch a round of a shard of their own, as in the study, and an epoch is as
    many whole rounds as the training examples fill.

    Raises:
        ValueError: the file or a field is wrong, an order is not known, or nothing is evaluated.
    """
    from experiments import tasks as tasks_lib

    file, *fields = text.split()
    given = dict(command_line.given_fields([*common, *fields], behind=file))
    if wrong := [each for each in orders if each not in arms.ARMS]:
        raise ValueError(f"--orders: got {', '.join(wrong)}, must be of {', '.join(arms.ARMS)}.")
    title = " ".join([pathlib.Path(file).stem, *fields])
    task = Task(
        name="-".join(re.findall(r"\w+", title)),
        title=title,
        config=file,
        changes=given,
        learning_rates=tuple(sorted(rates)),
        round_millis=5.0,
        arms=tuple(dict.fromkeys([arms.BASELINE, *orders])),
        seeds=tuple(seeds),
    )
    workers = given.get("cluster.num_workers") or task._file().cluster.num_workers
    local = {"local": "virtual"} if workers > 4 else {}
    task = dataclasses.replace(task, changes={**local, **given, "budget": workers})
    config = task.experiment
    data = tasks_lib.load(config.data)
    if not data.evals:
        raise ValueError(f"{file}: {config.data.name!r} has no set beside 'train' to evaluate.")
    size = (config.data.num_train or len(data.train)) // task.batch_size * task.batch_size
    if not size:
        raise ValueError(f"{file}: {len(data.train)} examples fill no round of {task.batch_size}.")
    return dataclasses.replace(
        task,
        changes={**task.changes, "data.num_train": size},
        learning_rates=task.learning_rates or (config.optimizer.learning_rate,),
    )


class Run(NamedTuple):
    task: Task
    arm: str
    learning_rate: float
    seed: int

    @property
    def key(self) -> tuple[str, float, int]:
        """Of its result, among those of the task."""
        return self.arm, self.learning_rate, self.seed

    @property
    def name(self) -> str:
        return f"{self.arm}-lr{self.learning_rate:g}-seed{self.seed}"


def _difference(
    found: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """The dotted fields whose values are not the defaults."""
    different: dict[str, Any] = {}
    for name, value in found.items():
        dotted, default = f"{prefix}{name}", defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
            different |= _difference(value, default, f"{dotted}.")
        elif value != default and dotted not in _NOT_SETTINGS:
            different[dotted] = value
    return different
