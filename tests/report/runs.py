"""Runs that never happened, for reports."""

import json
import re

from hetjax import report

CONFIG = {"data": {"name": "digits"}, "model": {"name": "lenet"}, "seed": 3}
SUMMARY = {
    "test_accuracy": 0.9731,
    "best_test_accuracy": 0.9812,
    "test_loss": 0.1234,
    "train_loss": 0.0567,
    "rounds": 20,
    "epochs": 2,
    "examples_processed": 35_940,
    "examples_missing": 3,
    "examples_duplicated": 17,
    "wall_secs": 61.5,
    "round_secs_mean": 0.0412,
    "optimal_round_secs": 0.0403,
    "fraction_of_optimum": 0.978,
    "equal_split_secs": 0.0824,
    "waiting_fraction": 0.0219,
    "quotas": [8, 6, 4, 2],
    "emulated": True,
}
GATE = {
    "trigger": "first",
    "closes": "when the first worker has finished its quota",
    "returned_fraction": 0.314,
    "in_flight": "finish",
}
GOSSIP = {"spectral_gap": 0.25, "num_exchanges": 3}
GOSSIP |= {"consensus_distance": 0.5, "consensus_relative": 0.02}
CONSENSUS = {"distance": 0.5, "relative": 0.02}


def make_gated_history(num_rounds, num_workers, **replaced):
    """Rounds of quotas 4, in which the last worker finishes but one microbatch."""
    done = [4] * (num_workers - 1) + [1]
    fields = {
        "quotas": lambda i: [4] * num_workers,
        "microbatches_done": lambda i: done,
        "examples_counted": lambda i: [16 * number for number in done],
    }
    return make_history(num_rounds, num_workers, **(fields | replaced))


def make_gossip_history(num_rounds, num_workers, **replaced):
    """Rounds of replicas that differ: measured and tried at the end of each epoch of two."""
    fields = {
        "bytes_sent": lambda i: 248_024 * num_workers,
        "consensus": lambda i: CONSENSUS | {"relative": 0.5 / (1 + i)} if i % 2 else None,
        "eval": lambda i: (
            {
                "test_loss": 0.5,
                "test_accuracy": 0.9,
                "worst_test_loss": 0.7,
                "worst_test_accuracy": 0.8,
            }
            if i % 2
            else None
        ),
    }
    return make_history(num_rounds, num_workers, rounds_per_epoch=2, **(fields | replaced))


def section(page, heading):
    """The HTML of the section of that heading; empty where the page has none."""
    found = re.search(rf"<section><h2>{heading}.*?</section>", page, re.DOTALL)
    return found.group() if found else ""


def make_history(num_rounds, num_workers, *, rounds_per_epoch=10, **replaced):
    """A run of `num_rounds` rounds; each replaced field is given as a function of the round."""
    history = []
    for i in range(num_rounds):
        quotas = [2 + (j + i // 7) % 3 for j in range(num_workers)]
        compute = [0.01 * quota * (1 + 0.1 * j) for j, quota in enumerate(quotas)]
        record = {
            "round": i,
            "epoch": i // rounds_per_epoch,
            "examples": 32 * sum(quotas),
            "examples_processed": 320 * (i + 1),
            "loss": 2.0 / (1 + i),
            "quotas": quotas,
            "microbatches_done": quotas,
            "compute_secs": compute,
            "start_secs": 0.5 * i,
            "round_secs": max(compute) + 0.002,
            "local_secs": max(compute),
            "waiting_fraction": 0.25,
            "present": [True] * num_workers,
        }
        if i % rounds_per_epoch == rounds_per_epoch - 1:
            record["eval"] = {"test_loss": 1.0 / (1 + i), "test_accuracy": 0.9}
        record |= {name: value(i) for name, value in replaced.items()}
        history.append(record)
    return history


def save_lines(directory, history, end=""):
    lines = [json.dumps(record) + "\n" for record in history]
    (directory / "metrics.jsonl").write_text("".join(lines) + end)


def save(directory, history, *, config=CONFIG, summary=SUMMARY, end=""):
    """Writes the files of a run, and `end` after the last line of its metrics."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_lines(directory, history, end)
    if summary:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def write(directory, *, config=CONFIG, summary=SUMMARY, history=()):
    """The text of the page that is written for a run."""
    path = directory / "report.html"
    text = report.render(config=config, summary=summary, history=list(history))
    path.write_text(text, encoding="utf-8")
    return text
