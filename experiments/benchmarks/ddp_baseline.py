"""The training that `benchmarks.processes` compares with: PyTorch's DistributedDataParallel, Gloo.

    python -m hetjax.launch --workers=4 --start_secs=inf -- \\
        python experiments/benchmarks/ddp_baseline.py \\
        --model=mlp --images=IMAGES.npy --labels=LABELS.npy --batch=4096 --steps=20 --out=OUT.json

Each process computes an equal part of the batch. Needs torch and NumPy, and nothing of hetjax, so
that any interpreter that has them can run it. Without the launcher's variables in the environment
it is one process, without communication.
"""

import argparse
import itertools
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

_NUM_CLASSES = 10


def make_model(name: str, *, height: int = 32, width: int = 32, channels: int = 3) -> nn.Module:
    """The same models as `hetjax.zoo.models`: `lenet`, and the MLP with three layers of 1024."""
    if name == "mlp":
        widths = [height * width * channels, 1024, 1024, 1024]
        hidden = [
            part
            for width_in, width_out in itertools.pairwise(widths)
            for part in (nn.Linear(width_in, width_out), nn.ReLU())
        ]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(widths[-1], _NUM_CLASSES))
    rest = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * rest[0] * rest[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, _NUM_CLASSES),
    )


def load_images(path: pathlib.Path, *, channels_last: bool) -> torch.Tensor:
    """u8[N, channels, height, width] from a file of u8[N, height, width, channels]."""
    images = torch.from_numpy(np.load(path)).permute(0, 3, 1, 2)
    return images if channels_last else images.contiguous()


def own_batches(
    num_examples: int, batch_size: int, *, rank: int, num_ranks: int
) -> Iterator[torch.Tensor]:
    """Ids of this process's part of each batch, without end; a new order each epoch."""
    own_size = batch_size // num_ranks
    for epoch in range(1_000_000):
        order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(epoch))
        own = order[rank::num_ranks]
        yield from own[: len(own) // own_size * own_size].split(own_size)


def train(flags: argparse.Namespace, *, rank: int, num_ranks: int) -> dict[str, Any]:
    """Runs the steps; what the process with rank 0 saw of them."""
    torch.manual_seed(0)
    images = load_images(flags.images, channels_last=flags.channels_last)
    labels = torch.from_numpy(np.load(flags.labels)).long()
    _, channels, height, width = images.shape
    model: Any = make_model(flags.model, height=height, width=width, channels=channels)
    if flags.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if flags.compile:
        model = torch.compile(model)
    if num_ranks > 1:
        model = nn.parallel.DistributedDataParallel(
            model,
            gradient_as_bucket_view=not flags.plain,
            static_graph=not flags.plain,
            bucket_cap_mb=flags.bucket_mb,
        )
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, fused=None if flags.plain else True
    )
    batches = own_batches(len(images), flags.batch, rank=rank, num_ranks=num_ranks)
    stamps, loss = [time.perf_counter()], torch.zeros(())
    for _, ids in zip(range(flags.steps), batches, strict=False):
        optimizer.zero_grad(set_to_none=flags.plain)
        loss = loss_fn(model(images[ids].float() / 255), labels[ids])
        loss.backward()
        optimizer.step()
        stamps.append(time.perf_counter())
    return {
        "step_secs": np.diff(stamps).tolist(),
        "examples": flags.batch // num_ranks * num_ranks,
        "loss": loss.item(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "num_params": sum(p.numel() for p in model.parameters()),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", choices=("lenet", "mlp"), required=True)
    parser.add_argument("--images", type=pathlib.Path, required=True, help="u8[N, h, w, c], .npy")
    parser.add_argument("--labels", type=pathlib.Path, required=True, help="int[N], .npy")
    parser.add_argument("--batch", type=int, required=True, help="examples, of all processes")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="gets the result, JSON")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0: as torch chooses")
    parser.add_argument("--bucket_mb", type=int, default=25, help="of gradients, for one message")
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="torch's defaults; otherwise gradients are views of the buckets, the graph is static "
        "and the optimiser fused",
    )
    return parser.parse_args(argv)


def main() -> None:
    flags = parse()
    if flags.threads:
        torch.set_num_threads(flags.threads)
    rank = int(os.environ.get("HETJAX_PROCESS_ID", "0"))
    num_ranks = int(os.environ.get("HETJAX_NUM_PROCESSES", "1"))
    if num_ranks > 1:
        coordinator = os.environ["HETJAX_COORDINATOR"]
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{coordinator}", rank=rank, world_size=num_ranks
        )
    result = train(flags, rank=rank, num_ranks=num_ranks)
    if rank == 0:
        flags.out.write_text(json.dumps(result))
    if num_ranks > 1:
        distributed.barrier()  # process 0 holds the store that the others may still ask
        distributed.destroy_process_group()
        os._exit(0)  # a thread of torch's may abort the process that ends otherwise


if __name__ == "__main__":
    main()
