"""Numbers as a run of MLflow."""

import os
import pathlib
import re
import time
from typing import Any

from hetjax import extras
from hetjax.writers import kept, records

_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 900, 100, 500  # of one call; of a parameter
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


def mlflow(
    tracking_uri: str | None = None,
    *,
    experiment: str = "hetjax",
    run_name: str | None = None,
    every_secs: float = 1.0,
) -> records.Writer:
    """Logs a run to MLflow: metrics, the configuration as parameters, the report as an artifact.

    A resumed run goes on with the same run there, whose id the workdir keeps; steps that it has
    are not logged again. Characters that MLflow does not allow in a name become `_`.

    Args:
        tracking_uri: of the store; None: the environment variable `MLFLOW_TRACKING_URI`, or
            without it `mlflow.db`, an SQLite file, in the run's workdir.
        experiment: that the run belongs to; made where it is missing.
        run_name: None: the name of the workdir.
        every_secs: how often the newest record is written, evaluations always; 0: every record.

    Returns:
        A writer, for `writers=` of `fit`.

    Raises:
        ModuleNotFoundError: mlflow is missing; says how to get it.
        ValueError: when the run begins: there is neither a store nor a workdir.

    Example:
        >>> writers = [hetjax.writers.mlflow("sqlite:///mlflow.db")]  # doctest: +SKIP
        >>> hetjax.fit(loss_fn, params, optimizer, data, writers=writers)  # doctest: +SKIP
    """
    extras.require("mlflow", "sqlalchemy", extra="mlflow")
    return _MLflow(tracking_uri, experiment, run_name, every_secs)


class _MLflow:
    name = "mlflow"

    def __init__(
        self, uri: str | None, experiment: str, run_name: str | None, every_secs: float
    ) -> None:
        self._uri, self._experiment, self._run_name = uri, experiment, run_name
        self.every_secs = every_secs

    def begin(self, run: records.RunInfo) -> None:
        self._client: Any = None
        self._place = self._uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        self._artifacts: str | None = None
        self._run_id, self._last_step = "", -1
        if not self._place:
            self._place = f"sqlite:///{kept.place(run, None, 'mlflow.db', 'mlflow')}"
            self._artifacts = pathlib.Path(kept.place(run, None, "mlflow", "mlflow")).as_uri()

    def write(self, record: records.Record) -> None:
        from mlflow import entities

        client, now = self._opened(record.run), int(time.time() * 1000)
        if record.step <= self._last_step:
            return
        metrics = [
            entities.Metric(_allowed(name), float(value), now, record.step)
            for name, value in record.scalars.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_METRICS])
        self._last_step = record.step

    def close(self, ended: records.Ended) -> None:
        client = self._opened(ended.run)
        if ended.report:
            client.log_text(self._run_id, ended.report, "report.html")
        if ended.summary:
            client.log_dict(self._run_id, dict(ended.summary), "summary.json")
        client.set_terminated(self._run_id, _STATUS[ended.status])
        self._client = None

    def _opened(self, run: records.RunInfo) -> Any:
        """The client, with its run: a new one, or that which goes on."""
        if self._client is not None:
            return self._client
        import mlflow as mlflow_lib
        from mlflow import entities

        client = mlflow_lib.MlflowClient(self._place)
        known = client.get_experiment_by_name(self._experiment)
        if known is None:
            number = client.create_experiment(self._experiment, artifact_location=self._artifacts)
        else:
            number = known.experiment_id
        found = kept.load(run, "mlflow")
        if found.get("store") == self._place:
            self._run_id = found["run_id"]
            self._last_step = self._newest_step(client)
            client.update_run(self._run_id, status="RUNNING")
        else:
            name = self._run_name or run.name
            self._run_id = client.create_run(number, run_name=name).info.run_id
            kept.save(run, "mlflow", {"store": self._place, "run_id": self._run_id})
            given = [
                entities.Param(_allowed(key), str(value)[:_MOST_CHARACTERS])
                for key, value in kept.flat(run.config).items()
            ]
            for first in range(0, len(given), _MOST_PARAMS):
                client.log_batch(self._run_id, params=given[first : first + _MOST_PARAMS])
        self._client = client
        return client

    def _newest_step(self, client: Any) -> int:
        names = client.get_run(self._run_id).data.metrics
        histories = (client.get_metric_history(self._run_id, name) for name in list(names)[:3])
        return max((point.step for history in histories for point in history), default=-1)


def _allowed(name: str) -> str:
    """The name, in the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)
