"""The training that `benchmarks.beside_torchft` compares with: torchft's DDP over Gloo.

    TORCHFT_LIGHTHOUSE=http://127.0.0.1:PORT \\
        python -m hetjax.launch --runtime=apart --workers=4 -- \\
        python experiments/benchmarks/torchft_baseline.py \\
        --model=lenet --images=IMAGES.npy --labels=LABELS.npy --batch=2048 --channels_last \\
        --steps=1000000000 --out=DIRECTORY

A process is a replica group of torchft with one rank. It computes an equal part of the batch until
it is stopped; started again, it takes the parameters from one that lives. Each step that is
committed is a line of a file of its own: when, the step's number, how many groups took part.
Needs torch, torchft and NumPy, and nothing of hetjax.
"""

import datetime
import itertools
import json
import os
import time
from typing import Any

import ddp_baseline
import numpy as np
import torch
import torchft
from torch import distributed, nn

_SEAT, _NUM_SEATS = int(os.environ["HETJAX_PROCESS_ID"]), int(os.environ["HETJAX_NUM_PROCESSES"])


class _Mended(torchft.DistributedDataParallel):
    """Lives when another dies: that of torchft 0.2.0 raises where its all-reduce fails (`ddp.py`,
    line 76), although its `Manager` has noted the failure."""

    @staticmethod
    def _comm_hook(
        state: torchft.Manager, bucket: distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:  # DDP looks at the annotations
        state.allreduce(bucket.buffer()).wait()  # in place; False where it failed
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced


def _manager(model: nn.Module, optimizer: torch.optim.Optimizer) -> torchft.Manager:
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def load(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,
        replica_id=f"seat_{_SEAT}_",
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=10),
        quorum_timeout=datetime.timedelta(seconds=20),
    )


def main() -> None:
    flags = ddp_baseline.parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    images = ddp_baseline.load_images(flags.images, channels_last=flags.channels_last)
    labels = torch.from_numpy(np.load(flags.labels)).long()
    model = ddp_baseline.make_model(flags.model).to(memory_format=torch.channels_last)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    manager = _manager(model, base)
    parallel = _Mended(manager, model)
    optimizer = torchft.Optimizer(manager, base)
    batches = ddp_baseline.own_batches(len(images), flags.batch, rank=_SEAT, num_ranks=_NUM_SEATS)
    loss_fn = nn.CrossEntropyLoss()
    with open(flags.out / f"{_SEAT}.{os.getpid()}.jsonl", "w", buffering=1) as log:
        for ids in itertools.islice(batches, flags.steps):
            optimizer.zero_grad()
            loss_fn(parallel(images[ids].float() / 255), labels[ids]).backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                line = [time.time(), manager.current_step(), manager.num_participants()]
                log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
