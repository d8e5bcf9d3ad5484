"""Training with balanced orders, slowly and in the most obvious way, in NumPy."""

import itertools

import numpy as np

from hetjax import ordering
from hetjax.data import stream as stream_lib

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


def private_shards(num_examples):
    """The ids of each worker's shard."""
    reshuffled = ordering.random_reshuffling()
    fields = {"microbatch_size": SIZE, "ordering": reshuffled, "seed": 0}
    return stream_lib.PrivateStream(num_examples, WORKERS, **fields).shards


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
        examples = [np.concatenate(m) if m else np.zeros((0, 1)) for m in gradients]
        for pair in range(max(len(u) for u in examples) // 2):
            for worker, mine in enumerate(examples):
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
        for examples in microbatches:
            for start in range(0, len(examples), 2 * block_pairs):
                block = examples[start : start + 2 * block_pairs]
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

    def grab(self, worker, examples):
        signs = []
        for example in examples:
            total, count = self.totals[worker]
            self.totals[worker] = (total + example, count + 1)
            centred = example - self.means[worker]
            signs.append(sign_of(self.sums[worker], centred))
            self.sums[worker] = self.sums[worker] + signs[-1] * centred
        return signs


def reference_run(data, weights, trace, *, method, sharing, block_pairs, balance_every=1):
    """(examples of each commit, their signs), and the weights at the end.

    Passes between those that are balanced keep their order; a round of such passes alone has no
    signs.
    """
    num_examples = len(data["y"])
    coordinated = method.startswith("d_grab")
    if sharing == "shared":
        shards, seeds = [np.arange(num_examples)], [(0,)]
    else:
        shards, seeds = private_shards(num_examples), [(0, w) for w in range(WORKERS)]
    order = [
        np.random.default_rng((*seed, 0)).permutation(len(shard))
        for seed, shard in zip(seeds, shards, strict=True)
    ]
    left = [list(shard[o]) for shard, o in zip(shards, order, strict=True)]
    begun, passes = [list(own) for own in left], [0] * len(shards)
    placed = [([], []) for _ in shards]
    share = np.full(WORKERS, 1.0)
    if sharing == "private":
        share = np.array([len(shard) / num_examples for shard in shards])
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
        signed = any(index % balance_every == 0 for index in passes)
        signs = [[None] * sum(map(len, m)) for m in gradients]
        if signed:
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
        for index, (examples, their_signs) in enumerate(groups):
            if not examples:
                continue
            commits.append((examples, their_signs if signed else None))
            placed[index] = (placed[index][0] + examples, placed[index][1] + their_signs)
            if left[index]:
                continue
            if passes[index] % balance_every == 0:
                begun[index] = place(*placed[index])
            left[index] = list(begun[index])
            placed[index], passes[index] = ([], []), passes[index] + 1
            if not coordinated:
                for worker in range(WORKERS) if sharing == "shared" else [index]:
                    balancer.new_pass(worker)
        if coordinated and processed // num_examples > epoch:
            epoch = processed // num_examples
            balancer.new_pass(0)
    return commits, weights


def place(examples, signs):
    """Fills an order from both ends."""
    order = [None] * len(examples)
    low, high = 0, len(examples) - 1
    for example, sign in zip(examples, signs, strict=True):
        if sign > 0:
            order[low], low = example, low + 1
        elif sign < 0:
            order[high], high = example, high - 1
    for example, sign in zip(examples, signs, strict=True):
        if sign == 0:
            order[low], low = example, low + 1
    return order
