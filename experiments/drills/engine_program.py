"""A script as a user has it, which trains under any engine; it tells when it had done what.

    HETJAX_DRILL_TOLD=DIR python -m experiments.drills.engine_program --workdir=DIR

Each process writes a file of its own in that directory, with seconds of the clock that all
processes of a machine share.
"""

import json
import os
import pathlib
import sys
import time

TOLD_VARIABLE = "HETJAX_DRILL_TOLD"
STAGES = ("started", "imported", "joined", "loaded")
NUM_ROUNDS, _ROUNDS_PER_EPOCH, _NUM_WORKERS = 60, 5, 4


def _own_start() -> float:
    """When this process began, in the seconds of `time.monotonic`."""
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def read(directory: pathlib.Path) -> list[float] | None:
    """When the last process came to the end of each stage; None: not all have told all.

    Of the first stage it is the first process that counts.
    """
    told = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    if len(told) < _NUM_WORKERS:
        return None
    ends = [[line[stage] for line in told] for stage in STAGES]
    return [min(ends[0]), *map(max, ends[1:])]


def main(workdir: str) -> None:
    """Trains on static quotas 4, 3, 2, 1, with a checkpoint every ten rounds."""
    told = {"started": _own_start()}
    import jax
    import numpy as np
    import optax

    import hetjax

    told["imported"] = time.monotonic()
    hetjax.join_processes()
    told["joined"] = time.monotonic()
    hetjax.use_cpu_workers(1)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(1438, 64)).astype(np.float32)
    data = {"x": x, "label": np.argmax(x @ rng.normal(size=(64, 10)), -1)}
    params = {
        "hidden": rng.normal(size=(64, 128), scale=0.1).astype(np.float32),
        "out": rng.normal(size=(128, 10), scale=0.1).astype(np.float32),
    }

    def loss_fn(params, batch, rng):
        logits = jax.nn.relu(batch["x"] @ params["hidden"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    told["loaded"] = time.monotonic()
    unnamed = pathlib.Path(os.environ[TOLD_VARIABLE]) / f"{os.getpid()}"
    unnamed.write_text(json.dumps(told))
    unnamed.rename(unnamed.with_suffix(".json"))
    hetjax.fit(
        loss_fn,
        params,
        optax.sgd(0.05, momentum=0.9),
        data,
        workdir=workdir,
        progress=False,
        epochs=NUM_ROUNDS // _ROUNDS_PER_EPOCH,
        microbatch_size=16,
        budget=20,
        quota={"policy": "static", "proportions": [4, 3, 2, 1]},
        checkpoint={"every_rounds": 10, "every_secs": 0},
    )


if __name__ == "__main__":
    main(sys.argv[1].removeprefix("--workdir="))
