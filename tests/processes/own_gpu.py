"""One process of several that see the same two GPUs; which of them JAX is to take goes to a file.

python -m tests.processes.own_gpu PROCESS_ID NUM_PROCESSES COORDINATOR DIRECTORY
"""

import json
import pathlib
import sys

import jax

import hetjax
from hetjax.processes import gpus


def main(process_id, num_processes, coordinator, directory):
    gpus.visible = lambda: ["0000:07:00.0", "0000:0F:00.0"]
    hetjax.join_processes(int(process_id), int(num_processes), coordinator)
    took = jax.config.read("jax_cuda_visible_devices")
    pathlib.Path(directory, f"took-{process_id}.json").write_text(json.dumps(took))


if __name__ == "__main__":
    main(*sys.argv[1:])
