"""What `compare_orders` compares: its tasks and example orders, as data.

A run is one task, one order, one learning rate and one seed; everything else is equal for all
orders of a task. Parts of the data are the first images of the original files. The sizes are such
that all but the whole of MNIST take about 85 minutes on 2 cores; `--stage=plan` estimates it anew:

| task | images | epochs | rounds | runs, at most | minutes of one core |
|---|---|---|---|---|---|
| mnist_logistic | 10,000 | 20 | 12,500 | 54 | 22 |
| cifar10_lenet_16 | 1,280 | 80 | 1,600 | 30 | 50 |
| cifar10_lenet_quotas | 1,280 | 80 | 1,280 | 15 | 14 |
| cifar10_lenet_64 | 1,024 | 120 | 960 | 12 | 43 |
| where (5 variants) | 384 to 6,400 | 15 to 250 | 1,500 to 3,200 | 20 | 38 |
| mnist_logistic_whole | 60,000 | 20 | 75,000 | 18 | 43 |
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

BASELINE = "random_reshuffling"  # D-RR: what every other order is compared with


class Arm(NamedTuple):
    label: str
    colour: str
    cost: float  # of a round, over a plain one: for the estimate of the time left alone


ARMS = {  # by `ordering.method`; the colours can be told apart by everybody
    BASELINE: Arm("D-RR", "#30343b", 1.0),
    "fixed_map": Arm("fixed map", "#e69f00", 1.0),
    "shuffle_once": Arm("shuffle once", "#cc79a7", 1.0),
    "grab": Arm("independent GraB, exact", "#8a6d3b", 1.5),
    "pair_balance_exact": Arm("independent PairBalance, exact", "#009e73", 1.5),
    "d_grab_exact": Arm("D-GraB, exact", "#d55e00", 1.5),
    "d_grab": Arm("D-GraB, two-level", "#0072b2", 1.5),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A problem, its orders, and the learning rates that each order is tuned over."""

    name: str
    title: str
    dataset: str
    model: str
    num_train: int  # the first images of the training part
    epochs: int
    num_workers: int
    microbatch_size: int
    budget: int  # microbatches a round, over all workers
    learning_rates: tuple[float, ...]
    round_millis: float  # of a plain round, on one core: for the estimate of the time left alone
    arms: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)  # the rate is tuned with the first
    same_rate: float = 0.0  # all seeds of all arms at this learning rate, too; 0: no
    num_test: int = 500
    weight_decay: float = 0.0
    momentum: float = 0.9
    input_max: float = 255.0
    group: str = ""  # of tasks that are shown in one table
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)  # of `fit`

    @property
    def batch_size(self) -> int:
        return self.budget * self.microbatch_size

    @property
    def num_rounds(self) -> int:
        """Rounds of one run."""
        return self.epochs * math.ceil(self.num_train / self.batch_size)

    def settings(self) -> dict[str, Any]:
        """What the result of a run depends on, beside order, learning rate and seed."""
        kept = dataclasses.asdict(self)
        for name in (
            "title",
            "learning_rates",
            "arms",
            "seeds",
            "same_rate",
            "round_millis",
            "group",
        ):
            del kept[name]
        return json.loads(json.dumps(kept))

    def run_secs(self, method: str) -> float:
        """A guess."""
        return 8 + self.num_rounds * self.round_millis * ARMS[method].cost / 1e3

    def most_runs(self, method: str) -> int:
        """Tuning, the other seeds at the arm's own learning rate, and maybe at the same one."""
        rates, others = len(self.learning_rates), len(self.seeds) - 1
        again = others if self.same_rate else 0
        return rates + others + again


class Run(NamedTuple):
    task: Task
    method: str
    learning_rate: float
    seed: int

    @property
    def key(self) -> tuple[str, float, int]:
        """Of its result, among those of the task."""
        return self.method, self.learning_rate, self.seed

    @property
    def name(self) -> str:
        return f"{self.method}-lr{self.learning_rate:g}-seed{self.seed}"


def _equal_quotas(num_workers: int) -> dict[str, Any]:
    """One microbatch a worker and round, each worker with a shard of its own."""
    return {
        "cluster": {"num_workers": num_workers},
        "quota": {"policy": "equal", "max_microbatches": 1},
        "data": {"sharing": "private"},
    }


def _unequal_quotas(num_rounds: int) -> dict[str, Any]:
    """Speeds 4:3:2:1 on the virtual clock, 1:2:3:4 from the middle of the run on."""
    secs = (1 / 4, 1 / 3, 1 / 2, 1.0)
    changes = [
        {"round": num_rounds // 2, "worker": worker, "secs_per_microbatch": value}
        for worker, value in enumerate(reversed(secs))
    ]
    return {
        "cluster": {"secs_per_microbatch": secs, "clock": "virtual", "changes": changes},
        "quota": {"policy": "adaptive"},
        "data": {"sharing": "shared"},
    }


_PLAIN = (BASELINE, "fixed_map", "shuffle_once")
_ALL = (*_PLAIN, "pair_balance_exact", "d_grab_exact", "d_grab")

MNIST = Task(
    name="mnist_logistic",
    title="Logistic regression on 10,000 images of MNIST, n = 4",
    dataset="mnist",
    model="logistic",
    num_train=10_000,
    epochs=20,
    num_workers=4,
    microbatch_size=4,
    budget=4,
    learning_rates=(0.005, 0.01, 0.02, 0.05, 0.1),
    same_rate=0.05,
    round_millis=1.5,
    arms=_ALL,
    num_test=2_000,
    fields=_equal_quotas(4),
)
MNIST_WHOLE = dataclasses.replace(
    MNIST,
    name="mnist_logistic_whole",
    title="Logistic regression on the whole of MNIST, n = 4",
    num_train=60_000,
    learning_rates=(0.005, 0.02),
    same_rate=0.02,
    arms=(BASELINE, "d_grab_exact", "d_grab"),
)
LENET_16 = Task(
    name="cifar10_lenet_16",
    title="LeNet on CIFAR-10, n = 16",
    dataset="cifar10",
    model="lenet",
    num_train=1_280,
    epochs=80,
    num_workers=16,
    microbatch_size=4,
    budget=16,
    learning_rates=(0.01, 0.02, 0.04),
    round_millis=37,
    arms=_ALL,
    weight_decay=1e-2,
    fields=_equal_quotas(16),
)
LENET_64 = dataclasses.replace(
    LENET_16,
    name="cifar10_lenet_64",
    title="LeNet on CIFAR-10, n = 64",
    num_train=1_024,
    epochs=120,
    num_workers=64,
    microbatch_size=2,
    budget=64,
    learning_rates=(0.02, 0.04),
    round_millis=170,
    arms=(BASELINE, "fixed_map", "d_grab"),
    fields=_equal_quotas(64),
)
_QUOTAS = dataclasses.replace(
    LENET_16,
    name="cifar10_lenet_quotas",
    title="LeNet on CIFAR-10, n = 4, quotas 4:3:2:1, speeds reversed in the middle",
    num_workers=4,
    microbatch_size=8,
    budget=10,
    round_millis=24,
    arms=(BASELINE, "fixed_map", "d_grab"),
)
LENET_QUOTAS = dataclasses.replace(_QUOTAS, fields=_unequal_quotas(_QUOTAS.num_rounds))


def _where(name: str, title: str, rate: float, **changes: Any) -> Task:
    """A variant of `LENET_16` at one learning rate, for D-RR and D-GraB, one seed if not said."""
    fields: dict[str, Any] = {"arms": (BASELINE, "d_grab"), "seeds": (0,), **changes}
    return dataclasses.replace(
        LENET_16,
        name=f"where_{name}",
        title=title,
        group="where",
        learning_rates=(rate,),
        **fields,
    )


WHERE = (
    _where("no_decay", "no weight decay, lr 0.01", 0.01, weight_decay=0.0),
    _where(
        "more_decay",
        "weight decay 0.03, lr 0.01",
        0.01,
        weight_decay=0.03,
        arms=(BASELINE, "fixed_map", "d_grab_exact", "d_grab"),
        seeds=(0, 1, 2),
    ),
    _where("small", "384 images, 250 epochs, lr 0.01", 0.01, num_train=384, epochs=250),
    _where("large", "6,400 images, 15 epochs, lr 0.01", 0.01, num_train=6_400, epochs=15),
    _where("slow", "160 epochs, lr 0.005", 0.005, epochs=160),
)
TASKS = {
    task.name: task
    for task in (
        MNIST,
        LENET_16,
        LENET_QUOTAS,
        LENET_64,
        *WHERE,
        MNIST_WHOLE,
    )
}
