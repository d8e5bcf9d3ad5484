"""Slow, obvious NumPy references that tests compare against."""

import itertools

import numpy as np


def greedy_quotas(overhead_secs, secs_per_microbatch, total, caps, current):
    """Gives one microbatch at a time to the worker that would be done with it first."""
    quotas = [0] * len(caps)
    for _ in range(total):
        choices = []
        for worker, quota in enumerate(quotas):
            if quota < caps[worker]:
                secs = overhead_secs[worker] + secs_per_microbatch[worker] * (quota + 1)
                choices.append((secs, quota + 1 > current[worker], worker))
        quotas[min(choices)[-1]] += 1
    return np.array(quotas)


def shortest_round_secs(overhead_secs, secs_per_microbatch, total, caps):
    """Tries every division of the microbatches."""
    best = np.inf
    for quotas in itertools.product(*(range(cap + 1) for cap in caps)):
        if sum(quotas) == total:
            secs = [
                overhead_secs[worker] + secs_per_microbatch[worker] * quota if quota else 0.0
                for worker, quota in enumerate(quotas)
            ]
            best = min(best, max(secs))
    return best


def two_parameter_fit(observations):
    """Weighted least squares of (starts, microbatches, secs), weights 1/microbatches."""
    rows = [(starts, count) for starts, count, _ in observations]
    root = np.array([count**-0.5 for _, count, _ in observations])
    secs = np.array([secs for _, _, secs in observations])
    solution, *_ = np.linalg.lstsq(np.array(rows) * root[:, None], secs * root, rcond=None)
    return solution


def softmax_regression(x, y, weights, rounds, *, learning_rate, momentum):
    """Momentum SGD on the pooled batch of each round, on one device.

    x f64[N, d], y i[N], weights f64[d, classes], rounds: the example ids of each. Returns the
    weights after the last round and the mean loss of each.
    """
    velocity = np.zeros_like(weights)
    losses = []
    for ids in rounds:
        gradient, loss = np.zeros_like(weights), 0.0
        for i in ids:
            logits = x[i] @ weights
            probabilities = np.exp(logits - logits.max())
            probabilities /= probabilities.sum()
            loss -= np.log(probabilities[y[i]])
            probabilities[y[i]] -= 1
            gradient += np.outer(x[i], probabilities)
        velocity = momentum * velocity + gradient / len(ids)
        weights = weights - learning_rate * velocity
        losses.append(loss / len(ids))
    return weights, np.array(losses)


def shuffled_rounds(num_examples, round_sizes, seed):
    """The example ids of each round under random reshuffling; a round ends with its epoch."""
    epoch, rounds, left = -1, [], []
    for size in round_sizes:
        if len(left) == 0:
            epoch += 1
            left = np.random.default_rng((seed, epoch)).permutation(num_examples)
        rounds.append(left[:size])
        left = left[size:]
    return rounds


def pair_balance_signs(diffs, running_sum):
    """The greedy signs of PairBalance: diffs f[K, d] in sequence, running_sum f[d]."""
    running_sum, signs = np.array(running_sum), []
    for diff in diffs:
        sign = 1 if np.dot(running_sum, diff) <= 0 else -1
        running_sum = running_sum + sign * diff
        signs.append(sign)
    return np.array(signs, np.int8), running_sum


def mean_round_secs(levels, ratios, quotas):
    """Mean over rounds of the slowest worker's seconds, levels[r][i]·(quotas[i] + ratios[i])."""
    rounds = []
    for row in levels:
        secs = [0.0]
        for level, ratio, quota in zip(row, ratios, quotas, strict=True):
            if quota > 0:
                secs.append(level * (quota + ratio))
        rounds.append(max(secs))
    return sum(rounds) / len(rounds)


def laplacian(edges, num_workers):
    """D − A of edges, each given once."""
    adjacent = np.zeros((num_workers, num_workers))
    for i, j in edges:
        adjacent[i, j] = adjacent[j, i] = 1
    return np.diag(adjacent.sum(axis=0)) - adjacent
