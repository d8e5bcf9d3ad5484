"""The report of a cleaning run: one HTML file that loads nothing from elsewhere."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.bilevel import baselines
from hetjax.report import bilevel, canvas, line_panels, page, sections, series, tiles, words
from hetjax.report.series import Record

if TYPE_CHECKING:
    pass


LOSSES: list[line_panels.Line] = [
    ("validation_loss", canvas.ACCENT, "-", "F, the validation loss"),
    ("lower_loss", canvas.WORKERS[0], "-", "f, the weighted training loss"),
]
_ACCURACY: list[line_panels.Line] = [
    ("test_accuracy", canvas.ACCENT, "-", "test"),
    ("validation_accuracy", canvas.MUTED, "--", "validation"),
]
_LEVELS: list[line_panels.Line] = [  # baselines
    ("oracle", canvas.WORKERS[2], ":", "oracle, test"),
    ("validation", canvas.WORKERS[5], ":", "validation alone, test"),
    ("both", canvas.INK, ":", "both, test"),
]
_F1: list[line_panels.Line] = [
    ("f1_true_labels", canvas.ACCENT, "-", "right labels"),
    ("f1_drawn", canvas.WORKERS[5], "-", "labels not drawn"),
]


def render(
    *, config: Record, summary: Record, history: Sequence[Record], rounds: Sequence[Record]
) -> str:
    """The page as the text of an HTML file.

    Args:
        config: the resolved configuration.
        summary: as in summary.json.
        history: the records.
        rounds: of both levels, in their order.
    """
    title = f"Data cleaning · {config['data']['name']} · {summary['estimator']}"
    parts = [*_sections(summary, history), *bilevel.round_sections(summary, rounds)]
    return page.of_run(
        title,
        about=_about(config, summary),
        notes=_notes(summary),
        parts=[tiles.grid(_tiles(summary)), *parts],
        config=config,
        summary=summary,
    )


def rows(summary: Record) -> list[tuple[str, ...]]:
    """The end of a run beside the baselines: a head, and then a row each, as texts."""
    head = ("", "test accuracy", "F1, right labels", "F1, not drawn", "kept")

    def row(name: str, accuracy: Any, found: Record) -> tuple[str, ...]:
        numbers = (found.get(key) for key in ("f1_true_labels", "f1_drawn", "kept_fraction"))
        return (name, words.percent(accuracy), *map(words.percent, numbers))

    method = summary["estimator"]
    return [
        head,
        row(f"{method}: y", summary["test_accuracy"], summary),
        row(f"{method}: retrained", summary["retrained_test_accuracy"], summary),
        *(
            row(baselines.TITLES[name], found["test_accuracy"], found)
            for name, found in summary["baselines"].items()
        ),
    ]


def _about(config: Record, summary: Record) -> str:
    data = config["data"]
    return " · ".join(
        [
            "hetjax report",
            f"{data['num_train']:,} polluted, {data['num_validation']:,} validation and "
            f"{summary['num_test']:,} test images",
            words.plural(summary["hypergradients"], "hypergradient"),
            f"seed {config['seed']}",
            f"JAX {summary['jax_version']}",
        ]
    )


def _notes(summary: Record) -> list[str]:
    if not summary["diverged"]:
        return []
    return ["The validation loss became infinite; the run ended there."]


def _tiles(summary: Record) -> list[tiles.Tile]:
    base = summary["baselines"]
    gain = 100 * (summary["retrained_test_accuracy"] - base["both"]["test_accuracy"])
    oracle, validation = (base[name]["test_accuracy"] for name in ("oracle", "validation"))
    retrained = f"{gain:+.1f} points against training on both, oracle {words.percent(oracle)}"
    trimming = "small-loss trimming {}".format
    of_labels, of_drawn = (base["trimming"][name] for name in ("f1_true_labels", "f1_drawn"))
    products = words.plural(summary["products"], "product")
    steps = f"{words.count(summary['gradients'])} gradients, {products}"
    workers = words.plural(summary["num_workers"], "worker")
    percents = [
        ("Accuracy, retrained", "retrained_test_accuracy", retrained),
        ("Accuracy of y", "test_accuracy", f"validation alone {words.percent(validation)}"),
        ("F1 by right labels", "f1_true_labels", trimming(words.percent(of_labels))),
        ("F1 by labels not drawn", "f1_drawn", trimming(words.percent(of_drawn))),
    ]
    first = f"first step after {words.time(summary['compile_secs'])}"
    waited = f"of the time of {workers}" + ", emulated speeds" * summary["emulated"]
    return [
        *((title, words.percent(summary[name]), text) for title, name, text in percents),
        ("Time", words.time(summary["train_secs"]), first),
        ("Rounds", words.count(summary["rounds"]), steps),
        ("Waiting", words.percent(summary["waiting_fraction"]), waited),
    ]


def _sections(summary: Record, history: Sequence[Record]) -> list[str]:
    has_gap = bool(np.isfinite(series.column(history, "gap")).any())
    which, what = ("gap", "f(x, y) - f(x, z)") if has_gap else ("residual", "of the linear system")
    has_third = bool(np.isfinite(series.column(history, which)).any())
    of_third = f" Below, the {which}: {what}." if has_third else ""
    of_third += " It is below 0 while z is not yet at its minimum." if has_gap else ""
    base = summary["baselines"]
    levels = [(100 * base[name]["test_accuracy"], colour) for name, colour, *_ in _LEVELS]
    third: line_panels.Line = (which, canvas.WORKERS[2], "-", which)
    return [
        sections.section(
            "Clean and polluted, told apart",
            "How many examples have which weight, at the record with the lowest F. "
            "An example counts as clean above 1/2.",
            lambda width: draw_weights(summary["weights"], width=width),
            key=line_panels.key(
                [
                    ("", canvas.WORKERS[0], "-", "right label"),
                    ("", canvas.WORKERS[5], "-", "wrong label"),
                ]
            ),
        ),
        sections.section(
            "How well, over steps and time",
            "F1 of the examples with weights above 1/2: against those with right labels, and "
            "against those whose labels were not drawn anew. About one drawn label in ten is "
            "right, so the second cannot reach 100 %.",
            lambda width: line_panels.draw_lines("f1", history, _F1, width=width, percent=True),
            key=line_panels.key(_F1),
        ),
        sections.section(
            "Accuracy",
            f"Of y, in percent; step {summary['chosen_step']} has the lowest F, "
            "and is the one that is taken.",
            lambda width: line_panels.draw_lines(
                "accuracy", history, _ACCURACY, width=width, percent=True, levels=levels
            ),
            key=line_panels.key(_ACCURACY + _LEVELS),
        ),
        sections.section(
            "Losses",
            "F and f at the lower variable that was reached." + of_third,
            lambda width: (
                line_panels.draw_lines("losses", history, LOSSES, width=width)
                + (
                    line_panels.draw_lines(which, history, [third], width=width)
                    if has_third
                    else ""
                )
            ),
            key=line_panels.key(LOSSES + [third] * has_third),
        ),
        sections.section("Beside training without cleaning", _TABLE, None, below=_table(summary)),
    ]


_TABLE = (
    "Every baseline is a model trained to its minimum with the same ridge. Retrained: on all "
    "examples, each by its weight, and validation. Trimming keeps as many examples as the method "
    "does, those with the smallest losses of a model, and trains on them and validation."
)


def _table(summary: Record) -> str:
    head, *others = rows(summary)
    cells = "".join(f"<th>{words.escaped(name)}</th>" for name in head)
    lines = "".join(
        f"<tr>{''.join(f'<td>{words.escaped(cell)}</td>' for cell in row)}</tr>" for row in others
    )
    return f'<div class="scroll"><table class="names"><tr>{cells}</tr>{lines}</table></div>'


@canvas.own_settings
def draw_weights(weights: Record, *, width: int) -> str:
    """Two histograms over each other."""
    figure = canvas.make_figure(width, 250)
    axes = canvas.add_axes(figure, 46, 24, width - 46 - 8, 180)
    edges = np.array(weights["edges"])
    for name, colour in (("right", canvas.WORKERS[0]), ("wrong", canvas.WORKERS[5])):
        axes.stairs(weights[name], edges, fill=True, color=colour, alpha=0.55, linewidth=0)
        axes.stairs(weights[name], edges, color=colour, linewidth=1.4)
    axes.axvline(0.5, color=canvas.MUTED, linewidth=1, linestyle=":")
    axes.set_xlim(0, 1)
    axes.set_xlabel("weight, sigmoid of x", **canvas.AXIS_LABEL)
    canvas.whole_ticks(axes)
    canvas.title(axes, "examples")
    label = "Histogram of the weights of examples with right and with wrong labels"
    return canvas.to_svg(figure, f"weights-{width}", label)
