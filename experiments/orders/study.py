"""The tasks of the study, in the order in which they are run: cheap and telling ones first.

`--stage=plan` prints how many runs and minutes of one core each of them is. Sizes are the largest
that shards and batches divide: an epoch has whole rounds, and each pass takes every example once.
"""

from typing import Any

from experiments.orders.arms import ALWAYS, BASELINE, LEADER, SAVING, TUNED
from experiments.orders.tasks import Task

# Where gradients of single examples take too long.
_LIGHT = (*TUNED, "shuffle_once")
_BLOCKS = (*_LIGHT, "pair_balance")
_FEW = (BASELINE, LEADER, "block_reshuffling")  # of variants of a task
_ENOUGH = 6  # epochs, for an order that is made anew of every second one


def _task(
    config: str,
    title: str,
    *,
    examples: int,
    batch: int,
    epochs: int,
    rates: tuple[float, ...],
    millis: float,
    n: int = 4,
    name: str = "",
    arms: tuple[str, ...] = ALWAYS,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Task:
    """A task with one microbatch a worker and round."""
    sizes = {
        "data.num_train": examples,
        "cluster.num_workers": n,
        "microbatch_size": batch // n,
        "budget": n,
        "epochs": epochs,
    }
    return Task(
        name=name or (config if n == 4 else f"{config}_{n}"),
        title=f"{title}, n = {n}",
        config=config,
        changes=sizes | ({} if n == 4 else {"local": "virtual"}) | (changes or {}),
        learning_rates=rates,
        round_millis=millis,
        arms=(*arms, SAVING) if epochs >= _ENOUGH and "group" not in options else arms,
        **options,
    )


def _unequal(budget: int, *, reversed_at: int = 0, quorum: int = 0) -> dict[str, Any]:
    """Speeds 4:3:2:1 on the virtual clock and adaptive quotas, of one order over all examples.

    The speeds are reversed in a round, or all times are random and a gate closes the rounds.
    """
    secs = (1 / 4, 1 / 3, 1 / 2, 1.0)
    changes: dict[str, Any] = {
        "budget": budget,
        "cluster.secs_per_microbatch": secs,
        "cluster.clock": "virtual",
        "local": "virtual",
        "quota.policy": "adaptive",
        "quota.max_microbatches": 0,
        "data.sharing": "shared",
    }
    if quorum:
        random = {"cluster.delay": "gamma", "cluster.delay_cv": 0.5}
        changes |= {**random, "gate.trigger": "quorum", "gate.quorum": quorum}
    if reversed_at:
        changes["cluster.changes"] = tuple(
            {"round": reversed_at, "worker": worker, "secs_per_microbatch": value}
            for worker, value in enumerate(reversed(secs))
        )
    return changes


_GATED = "adaptive quotas of speeds 4:3:2:1, random times, a quorum of 8 of 10 microbatches"

# Heads on features of sentences: convex


def _head(
    config: str, title: str, *, n: int = 4, every: int = 1, changes: Any = None, **sizes: Any
) -> Task:
    return _task(config, title, batch=32, n=n, every=every, convex=True, changes=changes, **sizes)


_SST2 = {"examples": 67_328, "every": 4}
_HASHED = {"rates": (0.3, 0.5, 0.9, 1.6, 2.7), "millis": 3.5}
_SVD = {"rates": (0.0003, 0.00055, 0.001, 0.0017, 0.003), "millis": 1.5}
_HEADS = (
    _head("cola_svd", "CoLA, 768 features", examples=8_544, epochs=30, **_SVD),
    _head("rte_svd", "RTE, 768 features", examples=2_464, epochs=30, **_SVD),
    _head("cola_hashed", "CoLA, hashed words", examples=8_544, epochs=20, arms=_BLOCKS, **_HASHED),
    _head("sst2_svd", "SST-2, 768 features", epochs=8, **_SST2, **_SVD),
)
_LATER_HEADS = (
    _head(
        "rte_hashed",
        "RTE, hashed words",
        examples=2_464,
        epochs=20,
        **(_HASHED | {"rates": (2.7, 4.556, 7.688)}),
    ),
    _head("sst2_hashed", "SST-2, hashed words", epochs=6, arms=_BLOCKS, **_SST2, **_HASHED),
    _head(
        "sst2_svd",
        "SST-2, 768 features",
        n=16,
        epochs=8,
        **_SST2,
        **(_SVD | {"rates": (0.0003, 0.00055, 0.001, 0.0017)}),
    ),
    _head(
        "cola_svd",
        "CoLA, 768 features, without momentum",
        name="cola_svd_plain",
        examples=8_544,
        epochs=30,
        arms=_FEW,
        changes={"optimizer.momentum": 0.0},
        **(_SVD | {"rates": (0.0055, 0.01, 0.017, 0.03)}),
    ),
    _head(
        "cola_svd",
        "CoLA, 768 features, four times the epochs",
        name="cola_svd_long",
        examples=8_544,
        epochs=120,
        arms=_FEW,
        **(_SVD | {"rates": (0.00015, 0.0003, 0.00055, 0.001, 0.0017)}),
    ),
)

# MNIST


def _mnist(name: str, title: str, *, examples: int, **options: Any) -> Task:
    return _task(
        "mnist_logistic",
        title,
        name=name,
        examples=examples,
        batch=16,
        epochs=20,
        millis=1.5,
        num_eval=2_000,
        convex=True,
        changes={"local": "virtual"} | options.pop("changes", {}),
        **options,
    )


_MNIST = _mnist(
    "mnist_logistic",
    "Logistic regression on 10,000 images of MNIST",
    examples=10_000,
    rates=(0.005, 0.01, 0.02, 0.05, 0.1),
    same_rate=0.05,
)
_MNIST_WHOLE = _mnist(
    "mnist_logistic_whole",
    "Logistic regression on the whole of MNIST",
    examples=60_000,
    rates=(0.005, 0.01, 0.02),
    same_rate=0.02,
)
_MNIST_GATE = _mnist(
    "mnist_logistic_gate",
    f"Logistic regression on 10,000 images of MNIST, {_GATED}",
    examples=10_000,
    rates=(0.02, 0.04, 0.08),
    arms=_BLOCKS,
    changes=_unequal(10, quorum=8),
)

# Small parts of CIFAR-10, many epochs

_PAPERS = {"optimizer.weight_decay": 1e-2}  # as published; the configuration has less
_SMALL = {"local": "virtual", **_PAPERS}


def _small(name: str, title: str, *, n: int = 16, changes: Any = None, **options: Any) -> Task:
    fields = {"examples": 1_280, "batch": 64, "epochs": 80, "rates": (0.01, 0.02, 0.04)}
    return _task(
        "cifar10_lenet_papers",
        title,
        name=name,
        n=n,
        num_eval=500,
        changes=_SMALL | (changes or {}),
        **{"millis": 37.0, **fields, **options},
    )


_LENET_16 = _small("cifar10_lenet_16", "LeNet on 1,280 images of CIFAR-10")
_LENET_64 = _small(
    "cifar10_lenet_64",
    "LeNet on 1,024 images of CIFAR-10",
    n=64,
    examples=1_024,
    batch=128,
    epochs=120,
    rates=(0.02, 0.04),
    millis=170.0,
    arms=TUNED,
)
_LENET_QUOTAS = _small(
    "cifar10_lenet_quotas",
    "LeNet on 1,280 images of CIFAR-10, quotas 4:3:2:1, speeds reversed in the middle",
    n=4,
    batch=32,
    changes=_unequal(10, reversed_at=640),
    millis=24.0,
    arms=_LIGHT,
)


def _where(name: str, title: str, rate: float, **options: Any) -> Task:
    """A variant of `_LENET_16` at one learning rate, for D-RR and D-GraB, one seed if not said."""
    chosen = {"arms": (BASELINE, "d_grab"), "seeds": (0,), **options}
    return _small(f"where_{name}", title, group="where", rates=(rate,), **chosen)


_WHERE = (
    _where("no_decay", "no weight decay, lr 0.01", 0.01, changes={"optimizer.weight_decay": 0.0}),
    _where(
        "more_decay",
        "weight decay 0.03, lr 0.01",
        0.01,
        changes={"optimizer.weight_decay": 0.03},
        seeds=(0, 1, 2),
        arms=(BASELINE, "fixed_map", "d_grab_exact", "d_grab"),
    ),
    _where("small", "384 images, 250 epochs, lr 0.01", 0.01, examples=384, epochs=250),
    _where("large", "6,400 images, 15 epochs, lr 0.01", 0.01, examples=6_400, epochs=15),
    _where("slow", "160 epochs, lr 0.005", 0.005, epochs=160),
)

# The whole of CIFAR-10, text and series


def _lenet(name: str, millis: float, *, n: int = 4, changes: Any = None, **options: Any) -> Task:
    sizes = {"examples": 49_984, "batch": 64, "epochs": 4, "rates": (0.005, 0.01, 0.02)}
    return _task(
        "cifar10_lenet_papers",
        options.pop("title", "LeNet on CIFAR-10"),
        name=name,
        n=n,
        millis=millis,
        every=4,
        changes=_PAPERS | (changes or {}),
        **{**sizes, **options},
    )


_LENET_GATE = _lenet(
    "cifar10_lenet_gate",
    32.0,
    title=f"LeNet on CIFAR-10, {_GATED}",
    batch=32,
    arms=_LIGHT,
    changes=_unequal(10, quorum=8),
)
# The first parts of long sets, so that there is time for the epochs that an order needs to show.
_LSTM = {"examples": 9_936, "batch": 16, "epochs": 3, "every": 4, "millis": 40.0}
_STEPPED = {"local": "stepped"}  # half the time of "virtual" with balanced orders

TASKS = {
    task.name: task
    for task in (
        *_HEADS,
        _MNIST,
        _MNIST_GATE,
        _task(
            "m4_weekly",
            "M4 weekly",
            examples=357_888,
            batch=64,
            epochs=4,
            rates=(5e-4, 1.5e-3, 4.5e-3),
            millis=2.0,
            arms=ALWAYS,
            every=8,
        ),
        _MNIST_WHOLE,
        *_LATER_HEADS,
        _lenet("cifar10_lenet_whole", 15.0),
        _task(
            "wikitext2_lstm",
            "LSTM on a sixth of WikiText-2",
            rates=(5.0, 10.0, 20.0),
            changes=_STEPPED,
            **_LSTM,
        ),
        _task(
            "wikitext2_lstm",
            "LSTM on a sixth of WikiText-2 under Adam",
            name="wikitext2_lstm_adam",
            rates=(1e-3, 3e-3, 9e-3),
            changes={**_STEPPED, "optimizer.name": "adam"},
            arms=_LIGHT,
            **_LSTM,
        ),
        _head(
            "sst2_hashed",
            "SST-2, hashed words",
            n=16,
            epochs=4,
            arms=_BLOCKS,
            **_SST2,
            **(_HASHED | {"rates": (0.9, 1.6, 2.7), "millis": 10.0}),
        ),
        _LENET_GATE,
        _LENET_16,
        _LENET_QUOTAS,
        _LENET_64,
        *_WHERE,
        _task(
            "fashion_mnist_mlp",
            "MLP on Fashion-MNIST",
            examples=59_968,
            batch=64,
            epochs=10,
            rates=(0.01, 0.03, 0.09),
            millis=6.0,
            changes={"local": "virtual"},
            every=4,
            arms=_BLOCKS,
        ),
        _task(
            "wikitext2_transformer",
            "Transformer on an eighth of WikiText-2",
            examples=2_048,
            batch=32,
            epochs=3,
            rates=(5e-4, 1.5e-3, 4.5e-3),
            millis=750.0,
            arms=_LIGHT,
        ),
        _task(
            "cifar10_resnet8",
            "ResNet-8 on 8,000 images of CIFAR-10",
            examples=8_000,
            batch=64,
            epochs=4,
            rates=(0.02, 0.06, 0.18),
            millis=115.0,
            every=4,
            num_eval=2_000,
        ),
    )
}
