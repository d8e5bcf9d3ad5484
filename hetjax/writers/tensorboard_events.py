"""Numbers as TensorBoard's event files, written by tensorboardX."""

import json
import pathlib
from typing import Any

from hetjax import extras
from hetjax.writers import kept, records


def tensorboard(
    directory: str | pathlib.Path | None = None, *, every_secs: float = 1.0
) -> records.Writer:
    """Writes event files that `tensorboard --logdir DIRECTORY` shows.

    Scalars, the configuration as hyperparameters and as text, and at the end the summary as text,
    with the place of the report. TensorBoard holds float32. A run that begins anew, or goes on
    from an earlier round, hides later points of the directory.

    Args:
        directory: of one run; None: `tensorboard` in the run's workdir.
        every_secs: how often the newest record is written, evaluations always; 0: every record.

    Returns:
        A writer, for `writers=` of `fit`.

    Raises:
        ModuleNotFoundError: tensorboardX is missing; says how to get it.
        ValueError: when the run begins: there is neither a directory nor a workdir.

    Example:
        >>> writers = [hetjax.writers.tensorboard("runs/mine")]  # doctest: +SKIP
        >>> hetjax.fit(loss_fn, params, optimizer, data, writers=writers)  # doctest: +SKIP
    """
    extras.require("tensorboardX", extra="tensorboard")
    return _TensorBoard(directory, every_secs)


class _TensorBoard:
    name, wants_report = "tensorboard", False  # it shows only text: where the page lies

    def __init__(self, directory: str | pathlib.Path | None, every_secs: float) -> None:
        self._given, self.every_secs = directory, every_secs

    def begin(self, run: records.RunInfo) -> None:
        self._directory = kept.place(run, self._given, "tensorboard", "tensorboard")
        self._file: Any = None

    def write(self, record: records.Record) -> None:
        file = self._opened(record.run)
        for name, value in record.scalars.items():
            file.add_scalar(name, value, record.step)

    def close(self, ended: records.Ended) -> None:
        file = self._opened(ended.run)
        if ended.summary:
            file.add_text("summary", _code(ended.summary))
        if ended.summary and ended.run.workdir is not None:
            file.add_text("report", str(ended.run.workdir / "report.html"))
        file.close()
        self._file = None

    def _opened(self, run: records.RunInfo) -> Any:
        if self._file is None:
            import tensorboardX
            from tensorboardX import summary

            self._file = tensorboardX.SummaryWriter(self._directory, purge_step=run.first_step)
            if run.config:
                for event in summary.hparams(kept.flat(run.config), {"train/loss": 0.0}):
                    self._file.file_writer.add_summary(event)
                self._file.add_text("configuration", _code(run.config))
        return self._file


def _code(value: Any) -> str:
    """JSON, as a block of code in Markdown."""
    return f"```json\n{json.dumps(value, indent=2, default=str)}\n```"
