"""Training with balanced orders against a slow reference: orders, signs and parameters."""

import itertools
import json

import jax
import numpy as np
import optax
import pytest

import hetjax.config
from hetjax import ordering
from hetjax.data import rounds, sources
from hetjax.ordering import methods
from hetjax.training import gate, setup
from tests.training import problems

WORKERS, SIZE, BUDGET, EPOCHS = 4, 6, 7, 4
LEARNING_RATE, MOMENTUM = 0.3, 0.9


def example_gradients(data, weights, ids):
    """f[k, FEATURES * CLASSES], one row an example."""
    rows = []
    for i in ids:
        logits = data["x"][i] @ weights
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        probabilities[data["y"][i]] -= 1
        rows.append(np.outer(data["x"][i], probabilities).reshape(-1))
    return np.array(rows).reshape(len(ids), -1)


def sign_of(running_sum, vector):
    return 1 if running_sum @ vector <= 0 else -1


class Balancer:
    """The signs of one round, in the most obvious way, and what is kept between rounds."""

    def __init__(self, method, num_workers, dim, block_pairs):
        self.method, self.block_pairs = method, block_pairs
        self.sums = [np.zeros(dim) for _ in range(num_workers)]  # [0] alone where coordinated
        self.means = [np.zeros(dim) for _ in range(num_workers)]
        self.totals = [(np.zeros(dim), 0) for _ in range(num_workers)]

    def new_pass(self, worker):
        self.sums[worker] = np.zeros_like(self.sums[worker])
        total, count = self.totals[worker]
        if count:  # who did nothing keeps the mean of before
            self.means[worker] = total / count
        self.totals[worker] = (np.zeros_like(total), 0)

    def round(self, gradients):
        """gradients[worker]: a list of f[k, d], one a microbatch. Signs of each worker."""
        if self.method == "d_grab_exact":
            return self.exact(gradients)
        if self.method == "d_grab":
            return self.two_level(gradients)
        if self.method == "grab":
            return [self.grab(w, np.concatenate(g)) if g else [] for w, g in enumerate(gradients)]
        block = 1 if self.method == "pair_balance_exact" else self.block_pairs
        signs = []
        for worker, microbatches in enumerate(gradients):
            found, self.sums[worker] = self.blocks(microbatches, self.sums[worker], block)
            signs.append(found)
        return signs

    def exact(self, gradients):
        signs = [[0] * sum(len(m) for m in microbatches) for microbatches in gradients]
        units = [np.concatenate(m) if m else np.zeros((0, 1)) for m in gradients]
        for pair in range(max(len(u) for u in units) // 2):
            for worker, mine in enumerate(units):
                if 2 * pair + 1 < len(mine):
                    difference = mine[2 * pair] - mine[2 * pair + 1]
                    sign = sign_of(self.sums[0], difference)
                    self.sums[0] = self.sums[0] + sign * difference
                    signs[worker][2 * pair : 2 * pair + 2] = [sign, -sign]
        return signs

    def two_level(self, gradients):
        all_signs, common = [], self.sums[0]
        for microbatches in gradients:
            signs, end = self.blocks(microbatches, common, self.block_pairs)
            all_signs.append((signs, end - common))
        for worker, (signs, signed_sum) in enumerate(all_signs):
            turn = sign_of(self.sums[0], signed_sum)
            self.sums[0] = self.sums[0] + turn * signed_sum
            all_signs[worker] = [turn * s for s in signs]
        return all_signs

    def blocks(self, microbatches, running_sum, block_pairs):
        signs = []
        for units in microbatches:
            for start in range(0, len(units), 2 * block_pairs):
                block = units[start : start + 2 * block_pairs]
                change = np.zeros_like(running_sum)
                for first, second in zip(block[0::2], block[1::2], strict=False):
                    sign = sign_of(running_sum, first - second)
                    change += sign * (first - second)
                    signs += [sign, -sign]
                if len(block) % 2 == 0:
                    running_sum = running_sum + change
                else:
                    signs.append(0)
                    if block_pairs == 1:
                        assert len(block) == 1
        return signs, running_sum

    def grab(self, worker, units):
        signs = []
        for unit in units:
            total, count = self.totals[worker]
            self.totals[worker] = (total + unit, count + 1)
            centred = unit - self.means[worker]
            signs.append(sign_of(self.sums[worker], centred))
            self.sums[worker] = self.sums[worker] + signs[-1] * centred
        return signs


def reference_run(data, weights, trace, *, method, sharing, block_pairs):
    """(units of each commit, their signs), and the weights at the end."""
    num_examples = len(data["y"])
    coordinated = method.startswith("d_grab")
    if sharing == "shared":
        shards, seeds = [np.arange(num_examples)], [(0,)]
    else:
        stream = rounds.PrivateRounds(
            num_examples,
            WORKERS,
            microbatch_size=SIZE,
            method=ordering.random_reshuffling(),
            seed=0,
        )
        shards, seeds = stream.shards, [(0, worker) for worker in range(WORKERS)]
    order = [
        np.random.default_rng((*seed, 0)).permutation(len(shard))
        for seed, shard in zip(seeds, shards, strict=True)
    ]
    left = [list(shard[o]) for shard, o in zip(shards, order, strict=True)]
    placed = [([], []) for _ in shards]
    share = np.full(WORKERS, 1.0)
    if sharing == "private":
        share = np.array([np.float32(len(shard) / num_examples) for shard in shards], np.float64)
    balancer = Balancer(method, WORKERS, weights.size, block_pairs)
    velocity = np.zeros_like(weights)
    processed, epoch, commits = 0, 0, []
    for quotas in trace:
        work = []
        for worker, quota in enumerate(quotas):
            mine = left[0] if sharing == "shared" else left[worker]
            taken, mine[:] = mine[: quota * SIZE], mine[quota * SIZE :]
            work.append([taken[i : i + SIZE] for i in range(0, len(taken), SIZE)])
        gradients = [
            [example_gradients(data, weights, ids) for ids in microbatches] for microbatches in work
        ]
        signs = balancer.round(gradients)
        total, divisor = np.zeros(weights.size), 0.0
        for worker, microbatches in enumerate(gradients):
            if not microbatches:
                continue
            mine = np.concatenate(microbatches)
            if sharing == "shared":
                total, divisor = total + mine.sum(axis=0), divisor + len(mine)
            else:
                total, divisor = total + share[worker] * mine.mean(axis=0), divisor + share[worker]
        velocity = MOMENTUM * velocity + (total / divisor).reshape(weights.shape)
        weights = weights - LEARNING_RATE * velocity
        done = [list(itertools.chain(*m)) for m in work]
        processed += sum(map(len, done))
        groups = (
            [(list(itertools.chain(*done)), list(itertools.chain(*signs)))]
            if sharing == "shared"
            else zip(done, signs, strict=True)
        )
        for index, (units, their_signs) in enumerate(groups):
            if not units:
                continue
            commits.append((units, their_signs))
            placed[index] = (placed[index][0] + units, placed[index][1] + their_signs)
            if left[index]:
                continue
            left[index] = place(*placed[index])
            placed[index] = ([], [])
            if not coordinated:
                for worker in range(WORKERS) if sharing == "shared" else [index]:
                    balancer.new_pass(worker)
        if coordinated and processed // num_examples > epoch:
            epoch = processed // num_examples
            balancer.new_pass(0)
    return commits, weights


def place(units, signs):
    """Fills an order from both ends."""
    order = [None] * len(units)
    low, high = 0, len(units) - 1
    for unit, sign in zip(units, signs, strict=True):
        if sign > 0:
            order[low], low = unit, low + 1
        elif sign < 0:
            order[high], high = unit, high - 1
    for unit, sign in zip(units, signs, strict=True):
        if sign == 0:
            order[low], low = unit, low + 1
    return order


def recorded(monkeypatch, name, calls):
    """Keeps what each commit places, in `calls`."""
    factory = methods.ORDERINGS[name]

    def make(options):
        method = factory(options)

        def place(state, units, signs):
            calls.append((units, signs))
            return method.place(state, units, signs)

        return method._replace(place=place)

    monkeypatch.setitem(methods.ORDERINGS, name, make)


def private_trace(path, data, num_rounds):
    """Quotas that private rounds can serve, by an adaptive run on unequal, changing speeds."""
    result = problems.fit(
        data,
        problems.initial_weights(),
        local="virtual",
        epochs=EPOCHS,
        microbatch_size=SIZE,
        budget=BUDGET,
        data={"sharing": "private"},
        workdir=path,
        cluster={
            "num_workers": WORKERS,
            "secs_per_microbatch": (1, 2, 3, 4),
            "changes": [{"round": 9, "worker": 0, "secs_per_microbatch": 5.0}],
        },
    )
    return [line["quotas"] for line in result.history]


@pytest.mark.parametrize(
    ("method", "block_pairs", "local", "sharing"),
    [
        ("d_grab", 2, "stepped", "shared"),
        ("d_grab", 2, "fused", "private"),
        ("d_grab", 2, "virtual", "private"),
        ("d_grab", 16, "virtual", "shared"),
        ("d_grab_exact", 1, "stepped", "private"),
        ("d_grab_exact", 1, "fused", "shared"),
        ("d_grab_exact", 1, "virtual", "shared"),
        ("pair_balance", 1, "virtual", "private"),
        ("pair_balance_exact", 1, "stepped", "shared"),
        ("grab", 1, "virtual", "private"),
        ("grab", 1, "stepped", "shared"),
    ],
)
def test_orders_and_parameters_equal_the_reference(
    method, block_pairs, local, sharing, monkeypatch, tmp_path, float64
):
    """Unequal and changing quotas, an odd number of examples, a last partial microbatch."""
    data, weights = problems.classification(103), problems.initial_weights()
    if sharing == "shared":
        totals = problems.round_totals(103, EPOCHS, SIZE, BUDGET)
        trace = problems.write_trace(tmp_path / "metrics.jsonl", totals, WORKERS)
    else:
        trace = private_trace(tmp_path, data, EPOCHS)
    commits, expected = reference_run(
        data, weights, trace, method=method, sharing=sharing, block_pairs=block_pairs
    )
    calls = []
    recorded(monkeypatch, method, calls)
    result = problems.fit(
        data,
        weights,
        optimizer=optax.sgd(LEARNING_RATE, momentum=MOMENTUM),
        epochs=EPOCHS,
        microbatch_size=SIZE,
        budget=BUDGET,
        local=local,
        data={"sharing": sharing},
        ordering={"method": method, "block_pairs": block_pairs, "herding_every": 0},
        replay=str(tmp_path / "metrics.jsonl"),
    )
    if sharing == "private":  # commits are positions in the worker's shard there
        stream = rounds.PrivateRounds(
            103, WORKERS, microbatch_size=SIZE, method=ordering.random_reshuffling(), seed=0
        )
        of_shard = {int(unit): i for shard in stream.shards for i, unit in enumerate(shard)}
        commits = [([of_shard[unit] for unit in units], signs) for units, signs in commits]
    assert len(calls) == len(commits)
    for (units, signs), (right_units, right_signs) in zip(calls, commits, strict=True):
        np.testing.assert_array_equal(units, right_units)
        np.testing.assert_array_equal(signs, right_signs)
    np.testing.assert_allclose(result.params, expected, rtol=1e-9)
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0


def orders_of(calls, num_examples):
    """The realised orders of whole passes, shared data."""
    units = np.concatenate([units for units, _ in calls])
    return units[: len(units) // num_examples * num_examples].reshape(-1, num_examples)


def test_gates_absence_and_skipped_microbatches_leave_permutations(monkeypatch):
    """Every order is a permutation at every epoch's end, and the sums stay finite."""
    monkeypatch.setitem(gate.GATES, "third", problems.EveryThird)
    calls = []
    recorded(monkeypatch, "d_grab", calls)
    data = problems.classification(61, np.float32)
    data["x"][17] = np.nan
    result = problems.fit(
        data,
        problems.initial_weights(np.float32),
        epochs=4,
        nonfinite="skip",
        gate={"trigger": "third"},
        ordering={"method": "d_grab", "block_pairs": 1, "herding_every": 0},
        cluster={
            "num_workers": 4,
            "changes": [
                {"round": 2, "worker": 1, "present": False},
                {"round": 9, "worker": 1, "present": True},
            ],
        },
    )
    orders = orders_of(calls, 61)
    assert len(orders) == 4
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(61))
    assert not np.array_equal(orders[0], orders[1])
    assert np.isfinite(result.state.running_sum).all()
    assert np.abs(result.state.running_sum).max() > 0
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0


@pytest.mark.parametrize("method", ["d_grab", "d_grab_exact", "pair_balance"])
def test_balancing_lowers_the_herding_bound(method, float64):
    """At a learning rate of 0 the gradients stay, and the bound halves until its floor."""
    result = problems.fit(
        problems.classification(480),
        problems.initial_weights(),
        optimizer=optax.sgd(0.0),
        local="virtual",
        epochs=6,
        ordering={"method": method, "block_pairs": 2, "herding_every": 1},
        quota={"max_microbatches": 2},
    )
    herding = [line["herding"] for line in result.history if "herding" in line]
    assert [line["epoch"] for line in herding] == [1, 2, 3, 4, 5, 6]
    assert herding[-1]["inf_norm"] < herding[-1]["random_inf_norm"] / 2
    assert herding[-1]["two_norm"] < herding[-1]["random_two_norm"] / 2
    cost = result.summary["ordering"]
    assert cost["method"] == method
    assert cost["param_bytes"] == 15 * 8
    assert cost["microbatch_secs"] > 0


@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_the_herding_bound_equals_the_reference(sharing, monkeypatch, float64):
    data, weights = problems.classification(104), problems.initial_weights()
    states = []
    factory = methods.ORDERINGS["d_grab"]

    def make(options):
        method = factory(options)

        def keep(state, units, signs):
            states.append(method.place(state, units, signs))
            return states[-1]

        return method._replace(place=keep)

    monkeypatch.setitem(methods.ORDERINGS, "d_grab", make)
    result = problems.fit(
        data,
        weights,
        optimizer=optax.sgd(0.0),
        local="virtual",
        epochs=1,
        ordering={"method": "d_grab"},
        data={"sharing": sharing},
        quota={"policy": "equal"},
    )
    gradients = example_gradients(data, weights, np.arange(104))
    if sharing == "shared":  # 4 workers, 8 microbatches of 4
        in_rounds = np.array_split(states[-1].order, [32, 64, 96])
    else:
        stream = rounds.PrivateRounds(
            104, WORKERS, microbatch_size=4, method=ordering.random_reshuffling(), seed=0
        )
        last = states[-WORKERS:]  # the closing commits of the four shards, each of 26
        orders_ = [shard[state.order] for shard, state in zip(stream.shards, last, strict=True)]
        cut = [np.array_split(order, [8, 16, 24]) for order in orders_]
        in_rounds = [np.concatenate(parts) for parts in zip(*cut, strict=True)]
    mean = gradients.mean(axis=0)
    prefixes = np.cumsum([(gradients[ids] - mean).sum(axis=0) for ids in in_rounds], axis=0)
    (herding,) = [line["herding"] for line in result.history if "herding" in line]
    np.testing.assert_allclose(herding["inf_norm"], np.abs(prefixes).max(), rtol=1e-8)
    np.testing.assert_allclose(
        herding["two_norm"], np.linalg.norm(prefixes, axis=1).max(), rtol=1e-8
    )
    assert herding["random_inf_norm"] > 0


def test_a_loss_that_mixes_examples_is_refused():
    def loss_fn(weights, batch, rng):
        centred = {**batch, "x": batch["x"] - batch["x"].mean(axis=0, keepdims=True)}
        return problems.softmax_loss(weights, centred, rng)

    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)
    problems.fit(data, weights, loss_fn=loss_fn, epochs=1)
    for start in (weights, np.zeros_like(weights)):  # at zeros all losses are alike
        with pytest.raises(ValueError, match=r"beside others.*batch statistics.*GroupNorm"):
            problems.fit(data, start, loss_fn=loss_fn, epochs=1, ordering={"method": "d_grab"})


@pytest.mark.parametrize("method", ["grab_random_sign", "frozen"])
@pytest.mark.parametrize("feed", ["resident", "streamed"])
def test_other_orders_run_with_weights_and_streamed_data(method, feed, monkeypatch):
    def loss_fn(weights, batch, rng):
        kept = jax.random.bernoulli(rng, 0.8, batch["x"].shape)
        losses = problems.softmax_loss(weights, {**batch, "x": batch["x"] * kept}, rng)
        return losses, 1.0 + batch["y"]

    calls = []
    recorded(monkeypatch, method, calls)
    result = problems.fit(
        problems.classification(61, np.float32),
        problems.initial_weights(np.float32),
        loss_fn=loss_fn,
        local="virtual",
        epochs=4,
        data={"feed": feed},
        ordering={"method": method, "freeze_after": 2},
    )
    orders = orders_of(calls, 61)
    np.testing.assert_array_equal(np.sort(orders), np.tile(np.arange(61), (4, 1)))
    assert np.array_equal(orders[2], orders[3]) == (method == "frozen")
    assert not np.array_equal(orders[1], orders[2])
    assert result.history[-1]["herding"]["random_inf_norm"] > 0


@pytest.mark.parametrize("local", ["stepped", "virtual"])
def test_a_round_in_which_nobody_finishes(local, tmp_path):
    quotas = [[1, 1, 1, 1]] * 4
    done = [[0, 0, 0, 0], *quotas[1:]]
    lines = [
        json.dumps({"quotas": q, "microbatches_done": d}) for q, d in zip(quotas, done, strict=True)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    result = problems.fit(
        problems.classification(64, np.float32),
        problems.initial_weights(np.float32),
        local=local,
        epochs=1,
        budget=4,
        replay=str(tmp_path / "metrics.jsonl"),
        ordering={"method": "d_grab", "herding_every": 0},
    )
    assert result.summary["examples_processed"] == 48


def test_a_pass_that_is_cut_goes_on_to_the_same_orders(float64):
    """All that an order needs lies in the training state and in the stream."""
    data, weights = problems.classification(61), problems.initial_weights()
    config = hetjax.config.validate(
        {
            "local": "virtual",
            "microbatch_size": 4,
            "budget": 4,
            "cluster": {"num_workers": 4},
            "ordering": {"method": "d_grab", "block_pairs": 1},
        },
        choices=setup.registries(),
    )
    source = sources.as_source(data)

    def begin():
        parts = setup.build(
            problems.softmax_loss,
            weights,
            optax.sgd(0.1),
            source,
            config=config,
            per_example_rng=False,
        )
        return parts, parts.state, parts.local.fresh()

    def go_on(parts, state, accumulated, num_rounds):
        epoch = parts.stream.epoch
        for _ in range(num_rounds):
            if parts.stream.epoch > epoch:
                epoch = parts.stream.epoch
                state, accumulated = parts.new_pass(state, accumulated, np.ones(4, bool))
            quotas = np.array([2, 1, 1, 0])
            quotas = quotas if parts.stream.total(4) == 4 else np.array([1, 0, 0, 0])
            plan = parts.stream.plan(quotas)
            result = parts.local.run(
                0, state, accumulated, plan, rngs=[parts.rng] * 4, limits=plan.quotas
            )
            state, accumulated, _, turns = parts.sync(state, result.accumulated, parts.shares)
            signs = [s * t for s, t in zip(result.unit_signs, np.asarray(turns), strict=True)]
            parts.stream.commit(plan, result.microbatches_done, signs)
        return state, accumulated

    parts, state, accumulated = begin()
    state, accumulated = go_on(parts, state, accumulated, 6)
    saved = jax.device_get((state, accumulated)), parts.stream.save()
    state, _ = go_on(parts, state, accumulated, 7)
    again, _, _ = begin()
    again.stream.restore(saved[1])
    restored, _ = go_on(again, *jax.device_put(saved[0]), 7)
    jax.tree.map(np.testing.assert_array_equal, again.stream.save(), parts.stream.save())
    np.testing.assert_array_equal(restored.params, state.params)
    assert parts.stream.epoch == again.stream.epoch == 3
