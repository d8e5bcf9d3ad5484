"""The problems that run on one device, by the names of `problem`: what each shows, and its run."""

import importlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from experiments.bilevel import files, gan, one_device, search, settings, sinusoids
from experiments.bilevel.one_device import Record
from hetjax.report import canvas, line_panels, page, sections, tiles, words

_COLOURS = (canvas.ACCENT, canvas.WORKERS[0], canvas.WORKERS[2], canvas.WORKERS[5])


class Kind(NamedTuple):
    """A problem."""

    title: str
    make: Callable[[settings.TrainConfig], one_device.Made]
    shown: tuple[str, ...]  # numbers of a record
    says: Callable[[Record], str]
    """From a summary: the number that says whether it is solved, beside what it has to be."""


def _few_shot(summary: Record) -> str:
    last = str(max(sinusoids.EVALUATED))
    own, joint = summary["medians"][last], summary["joint_training"]["medians"][last]
    return (
        f"median error {own:.3g} after {last} steps on new tasks, {joint:.3g} by joint training; "
        f"at most {sinusoids.MOST_OF_JOINT:g} of it is asked for"
    )


def _search(summary: Record) -> str:
    accuracies = (summary[f"{name}_accuracy"] for name in ("found", "right", "best_decoys"))
    found, right, decoys = map(words.percent, accuracies)
    return (
        f"{' and '.join(summary['found'])} found, a {search.OPERATIONS[search.RIGHT]} on each edge "
        f"is right; trained alone {found} on the test set, right ones {right}, decoys {decoys}"
    )


def _gan(summary: Record) -> str:
    return (
        f"{summary['modes']} of {gan.NUM_MODES} modes, {words.percent(summary['share_near'])} of "
        "the points within three deviations of one"
    )


KINDS = {
    "few_shot": Kind(
        "Few-shot learning of sinusoids",
        sinusoids.make,
        tuple(f"error_after_{steps}" for steps in sinusoids.EVALUATED),
        _few_shot,
    ),
    "search": Kind(
        "Architecture search on signed digits",
        search.make,
        ("least_right_weight", "test_accuracy"),
        _search,
    ),
    "gan": Kind("Eight Gaussians, generated", gan.make, ("modes",), _gan),
}


ARMS: dict[str, tuple[str, ...]] = {
    "search": ("value_gap", "implicit_cg", "unrolled", "first_order"),
    "gan": ("value_gap", "implicit_neumann", "unrolled", "first_order"),
}
"""What `compare_bilevel` compares: estimators, each with the numbers of the file in `configs/`."""
FILES = {"search": "digits_search", "gan": "gaussians_gan"}  # in configs/
SEEDS = (0, 1, 2, 3, 4)  # settings were chosen on seeds 100 and 101


def compared(task: str, arm: str, seed: int) -> Record:
    """A record of the comparison."""
    config = importlib.import_module(f"configs.{FILES[task]}").get_config()
    config.estimator.name, config.seed = arm, seed
    checked = settings.validate_train(config)
    plain = settings.to_dict(checked)
    names = ("lower", "upper", "estimator", task)
    return {
        **run(checked),
        "arm": arm,
        "seed": seed,
        "settings": {name: plain[name] for name in names},
    }


def run(
    config: settings.TrainConfig,
    workdir: pathlib.Path | None = None,
    *,
    progress: bool = False,
) -> Record:
    """Solves a checked configuration, leaves its files in a workdir, returns its summary.

    Raises:
        ValueError: a loss is not finite, or there are not so many images.
    """
    kind, began, shown = KINDS[config.problem], time.perf_counter(), time.monotonic()

    def on_record(record: Record) -> None:
        nonlocal shown
        if progress and time.monotonic() - shown > 2:
            shown = time.monotonic()
            numbers = "  ".join(f"{name} {record[name]:.4g}" for name in kind.shown)
            print(f"{record['step']:6d} hypergradients  {numbers}", flush=True)

    summary, history = one_device.solve(config, kind.make(config), on_record=on_record)
    summary |= {"wall_secs": time.perf_counter() - began, "jax_version": jax.__version__}
    if workdir is not None:
        lines = "".join(json.dumps(record) + "\n" for record in history)
        files.write_whole(workdir / "metrics.jsonl", lines)
        files.write_whole(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
        text = render(settings.to_dict(config), summary, history)
        files.write_whole(workdir / "report.html", text)
    return summary


def table(summary: Record) -> str:
    """What a run ended with, for a terminal."""
    each = summary["cost_of_a_hypergradient"]
    return (
        f"{KINDS[summary['problem']].title}, by {summary['estimator']}: "
        f"{'solved' if summary['solved'] else 'not solved'}.\n"
        f"{KINDS[summary['problem']].says(summary)}\n"
        f"{summary['hypergradients']:,} hypergradients of {each['gradients']} gradients and "
        f"{each['hessian_products'] + each['cross_products']} products in "
        f"{summary['train_secs']:.1f} s; {summary['wall_secs']:.1f} s with all."
    )


def render(config: Record, summary: Record, history: list[Record]) -> str:
    """The page of a run as the text of an HTML file."""
    kind = KINDS[summary["problem"]]
    losses: list[line_panels.Line] = [
        ("upper_loss", _COLOURS[0], "-", "F, the upper loss"),
        ("lower_loss", _COLOURS[1], "-", "f, the lower loss"),
    ]
    own: list[line_panels.Line] = [
        (name, colour, "-", name.replace("_", " "))
        for name, colour in zip(kind.shown, _COLOURS, strict=False)
    ]
    parts = [
        sections.section(
            heading,
            caption,
            lambda width, lines=lines, heading=heading: line_panels.draw_lines(
                heading.lower(), history, lines, width=width
            ),
            key=line_panels.key(lines),
        )
        for heading, caption, lines in (
            ("What is asked for", f"In the end: {kind.says(summary)}.", own),
            ("Losses", "At the lower variable that each hypergradient reached.", losses),
        )
    ]
    end = [
        ("Solved", "yes" if summary["solved"] else "no", ""),
        ("Hypergradients", words.count(summary["hypergradients"]), summary["estimator"]),
        (
            "Time",
            words.time(summary["train_secs"]),
            f"compiled in {words.time(summary['compile_secs'])}",
        ),
    ]
    return page.of_run(
        f"{kind.title} · {summary['estimator']}",
        about=page.about(summary, "hypergradients") + f" · seed {config['seed']}",
        notes=[],
        parts=[tiles.grid(end), *parts],
        config=config,
        summary=summary,
    )
