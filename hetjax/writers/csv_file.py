"""Numbers as a table that any program reads: a row a record, a column a name."""

import csv as csv_lib
import pathlib
from typing import Any, TextIO

from hetjax import whole
from hetjax.writers import kept, records


def csv(path: str | pathlib.Path | None = None, *, every_secs: float = 0.0) -> records.Writer:
    """Writes a CSV file with the column `step` and one for each name; empty where there is none.

    A resumed run goes on with the rows before it; any other one writes the file anew.

    Args:
        path: of the file; None: `scalars.csv` in the run's workdir.
        every_secs: how often the newest record is written; 0: every record.

    Returns:
        A writer, for `writers=` of `fit`.

    Raises:
        ValueError: when the run begins: there is neither a path nor a workdir.

    Example:
        >>> import csv, hetjax, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "numbers.csv"
        >>> with hetjax.writers.sending([hetjax.writers.csv(path)]) as send:
        ...     send({"round": 0, "loss": 0.5})
        >>> next(csv.DictReader(path.read_text().splitlines()))
        {'step': '0', 'train/loss': '0.5'}
    """
    return _Csv(path, every_secs)


class _Csv:
    name, wants_report = "csv", False

    def __init__(self, path: str | pathlib.Path | None, every_secs: float) -> None:
        self._given, self.every_secs = path, every_secs
        self._file: TextIO | None = None

    def begin(self, run: records.RunInfo) -> None:
        self._path = pathlib.Path(kept.place(run, self._given, "scalars.csv", "csv"))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        in_workdir = self._given is None and run.lead is not None
        self._written = run.lead.written if in_workdir else whole.written
        rows = []
        self._columns = ["step"]
        if run.first_step and self._path.exists():
            with self._path.open(newline="") as file:
                reader = csv_lib.DictReader(file)
                rows = [row for row in reader if int(row["step"]) < run.first_step]
                self._columns = list(reader.fieldnames or self._columns)
        self._write_anew(rows)

    def write(self, record: records.Record) -> None:
        if new := [name for name in record.scalars if name not in self._columns]:
            with self._path.open(newline="") as file:
                rows = list(csv_lib.DictReader(file))
            self._columns += new
            self._write_anew(rows)
        self._table.writerow({"step": record.step, **record.scalars})

    def close(self, ended: records.Ended) -> None:
        if self._file is not None:
            self._file.close()

    def _write_anew(self, rows: list[dict[str, Any]]) -> None:
        """The rows, with all columns that are known."""
        if self._file is not None:
            self._file.close()
        with self._written(self._path) as new:
            self._file = new.open("w", newline="", buffering=1)
            self._table = csv_lib.DictWriter(self._file, self._columns, lineterminator="\n")
            self._table.writeheader()
            self._table.writerows(rows)
