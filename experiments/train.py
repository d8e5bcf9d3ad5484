"""Trains a configured model on unequal workers.

    python -m experiments.train --config=configs/digits.py --workdir=DIR [--config.FIELD=VALUE …]

DIR gets config.json, metrics.jsonl, summary.json and report.html.
"""

import pathlib
import sys
from typing import Any, NoReturn

from absl import app, flags, logging

from experiments import config_flag
from hetjax.processes import endings, join, watch

config_flag.define()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of this run; made if it is missing.")
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Of this process in a run of several, from 0; found where a launcher says."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Of the run.", 1)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")


def train_and_evaluate(
    config: Any,
    workdir: str | pathlib.Path | None,
    *,
    progress: bool = True,
    place: join.Place | None = None,
) -> Any:
    """Runs a checked configuration; returns a `hetjax.FitResult`.

    Raises:
        ValueError: what only the data, the devices or the other processes could tell.
    """
    import hetjax

    join.join(place)
    hetjax.use_cpu_workers(_own_workers(config, place))

    import optax
    from flax import nnx

    from experiments import problems
    from hetjax import models, optimizers
    from hetjax.data import datasets, sources

    dataset = datasets.load(config.data.name, config.data.dir or None)
    if dataset.num_classes is None or dataset.example_shape is None:
        raise ValueError(
            f"data.name: {config.data.name!r} has no images with class labels, which the "
            "reference models need; for other data call hetjax.fit with a loss of your own"
        )
    train = dataset.train
    if config.data.num_train > len(train):
        raise ValueError(
            f"data.num_train: got {config.data.num_train}, but {config.data.name!r} has "
            f"{len(train)} training examples. Lower it, or set it to 0 for all of them"
        )
    if config.data.num_train:
        train = sources.first(train, config.data.num_train)
    options = {"hidden": config.model.hidden} if config.model.name == "mlp" else {}
    model = models.make(
        config.model.name,
        dataset.example_shape,
        dataset.num_classes,
        rngs=nnx.Rngs(config.seed),
        input_max=16.0 if config.data.name == "digits" else 255.0,
        **options,
    )

    def metrics(model: nnx.Module, batch: Any) -> Any:
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return {"loss": losses, "accuracy": logits.argmax(-1) == batch["label"]}

    loss_fn, params = hetjax.nnx_loss(model, problems.cross_entropy)
    return hetjax.fit(
        loss_fn,
        params,
        optimizers.make_optimizer(config, num_examples=len(train)),
        train,
        eval_source=dataset.test,
        metrics_fn=hetjax.nnx_metrics(model, metrics),
        workdir=workdir,
        config=config,
        progress=progress,
    )


def _own_workers(config: Any, place: join.Place | None) -> int:
    num_workers = config.cluster.num_workers
    if config.local == "virtual":
        if place is not None:
            raise ValueError(
                f"local: got 'virtual', which plays all workers in one process, and this run has "
                f"{place.num_processes}. Start one process, or set local='stepped'"
            )
        return 1
    num_processes = 1 if place is None else place.num_processes
    if num_workers % num_processes:
        raise ValueError(
            f"cluster.num_workers={num_workers} with {num_processes} processes: each has the same "
            f"number of workers. Set --config.cluster.num_workers={num_processes}, or a multiple"
        )
    return num_workers // num_processes


def _end(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        _end(f"Unexpected arguments: {' '.join(argv[1:])}. {config_flag.misplaced(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # not every data set that is opened
    config = config_flag.get()
    workdir = _WORKDIR.value
    if workdir is None:
        _end("--workdir is missing: the directory that gets this run's files.")
    workdir = pathlib.Path(workdir).expanduser()
    place = None
    try:
        place = join.find_place(_PROCESS_ID.value, _NUM_PROCESSES.value, _COORDINATOR.value)
        result = train_and_evaluate(config, workdir, place=place)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        if place is not None and endings.is_loss_of_others(error):
            raise
        watch.tell(f"refused its input: {error}", code=2)
        _end(str(error))
    if place is None or place.process_id == 0:
        from hetjax.records import results

        print(results.aligned(results.summary_rows(result.summary)))
        print(f"Report: {workdir / 'report.html'}")
    if result.summary["interrupted"]:
        sys.exit(143 if result.summary["stopped_by"] == "SIGTERM" else 130)


if __name__ == "__main__":
    app.run(main, flags_parser=config_flag.parse_flags)
