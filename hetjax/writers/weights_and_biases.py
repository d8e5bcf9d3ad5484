"""Numbers as a run of Weights & Biases."""

import os
from typing import Any

from hetjax import extras
from hetjax.writers import kept, records


def wandb(project: str = "hetjax", *, every_secs: float = 1.0, **options: Any) -> records.Writer:
    """Logs a run to Weights & Biases: scalars, the configuration, the summary, and the report.

    The run is opened before training begins, so that W&B may ask for a key. A resumed run goes on
    with the same run there, whose id the workdir keeps; W&B passes over steps that it has. The
    environment variable `WANDB_MODE=offline` keeps all on this machine, for `wandb sync`.

    Args:
        project: that the run belongs to.
        every_secs: how often the newest record is written, evaluations always; 0: every record.
        **options: of `wandb.init`, such as `entity`, `name`, `tags`, `mode`, `dir`.

    Returns:
        A writer, for `writers=` of `fit`.

    Raises:
        ModuleNotFoundError: wandb is missing; says how to get it.

    Example:
        >>> writers = [hetjax.writers.wandb("mine", mode="offline")]  # doctest: +SKIP
        >>> hetjax.fit(loss_fn, params, optimizer, data, writers=writers)  # doctest: +SKIP
    """
    extras.require("wandb", extra="wandb")
    return _WeightsAndBiases(project, every_secs, options)


class _WeightsAndBiases:
    name = "wandb"

    def __init__(self, project: str, every_secs: float, options: dict[str, Any]) -> None:
        self._project, self.every_secs, self._options = project, every_secs, options

    def begin(self, run: records.RunInfo) -> None:
        import wandb as wandb_lib

        given: dict[str, Any] = {"project": self._project, "config": dict(run.config)}
        if run.workdir is not None:
            os.makedirs(run.workdir, exist_ok=True)
            given |= {"dir": str(run.workdir), "name": run.name}
        if found := kept.load(run, "wandb"):
            given |= {"id": found["id"], "resume": "allow"}
        settings = wandb_lib.Settings(console="off")  # the run's own lines stay as they are
        self._run: Any = wandb_lib.init(**{"settings": settings, **given, **self._options})
        kept.save(run, "wandb", {"id": self._run.id})

    def write(self, record: records.Record) -> None:
        self._run.log(dict(record.scalars), step=record.step)

    def close(self, ended: records.Ended) -> None:
        import wandb as wandb_lib

        if ended.report:
            self._run.log({"report": wandb_lib.Html(ended.report, inject=False)})
        for name, value in ended.summary.items():
            self._run.summary[f"summary/{name}"] = value
        self._run.finish(exit_code=int(ended.status != "finished"))
