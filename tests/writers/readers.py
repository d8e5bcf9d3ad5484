"""What a tracker has kept, as its own reader gives it back: {step: {name: number}}."""

import collections
import csv
import json
import struct

import numpy as np


def read_csv(workdir):
    with (workdir / "scalars.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        int(row["step"]): {k: float(v) for k, v in row.items() if v != "" and k != "step"}
        for row in rows
    }


def read_tensorboard(workdir):
    """By TensorBoard's EventAccumulator, or without it by tensorboardX's own records."""
    directory = workdir / "tensorboard"
    found = collections.defaultdict(dict)
    try:
        from tensorboard.backend.event_processing import event_accumulator
    except ImportError:
        for event in _events(directory):
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found[event.step][value.tag] = value.simple_value
        return dict(found)
    events = event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found[event.step][name] = event.value
    return dict(found)


def texts_of_tensorboard(workdir):
    """Texts by their names."""
    return {
        value.tag.removesuffix("/text_summary"): value.tensor.string_val[0].decode()
        for event in _events(workdir / "tensorboard")
        for value in event.summary.value
        if value.WhichOneof("value") == "tensor"
    }


def purges_of_tensorboard(workdir):
    """From which steps on the files say that what was before is void."""
    events = _events(workdir / "tensorboard")
    return [event.step for event in events if event.HasField("session_log")]


def _events(directory):
    """The records of the event files, in order: length, its checksum, data, their checksum."""
    from tensorboardX.proto import event_pb2

    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            yield event
            at += 16 + length


def read_wandb(workdir):
    found = {}
    for record in records_of_wandb(workdir):
        if record.WhichOneof("record_type") == "history":
            row = {
                item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            numbers = {k: v for k, v in row.items() if not k.startswith("_") and k != "report"}
            found.setdefault(row["_step"], {}).update(numbers)
    return found


def records_of_wandb(workdir):
    """The records of the files of all offline runs, by W&B's own declarations, in order.

    A file is a log in LevelDB's form: after 7 bytes blocks of 32 KiB, of pieces of records.
    """
    from wandb.proto import wandb_internal_pb2

    for path in sorted(
        workdir.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime
    ):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last piece
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                yield record
                whole = b""


def read_mlflow(workdir):
    client, run = client_of_mlflow(workdir)
    found = collections.defaultdict(dict)
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            assert name not in found[point.step], "logged twice"
            found[point.step][name] = point.value
    return dict(found)


def client_of_mlflow(workdir):
    """MLflow's client, and the only run in its store."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{workdir / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'hetjax'")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "csv": read_csv,
}


def equal(found, sent):
    """Whether these are the same steps, names and numbers; in float32 where a tracker has that."""
    if found.keys() != sent.keys():
        return False
    return all(
        found[step].keys() == sent[step].keys()
        and all(_same(found[step][name], number) for name, number in sent[step].items())
        for step in sent
    )


def _same(found, sent):
    if isinstance(found, str):  # as W&B writes what is not finite
        found = float(found)
    wide = np.array_equal(float(found), float(sent), equal_nan=True)
    return wide or np.array_equal(np.float32(found), np.float32(sent), equal_nan=True)
