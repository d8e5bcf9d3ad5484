"""What does the page hold, from top to bottom? Writes it as one HTML file."""

import importlib.resources
import json
from collections.abc import Sequence

import numpy as np

from hetjax.report import sections, series, tiles, words

HEADS = ["round", "epoch", "examples", "loss", "round time", "waiting", "quotas", "evaluated"]


def render(
    *,
    config: series.Record,
    summary: series.Record,
    history: series.History,
    notes: Sequence[str] = (),
    every_secs: int = 0,
) -> str:
    """The report as the text of an HTML file that loads nothing from elsewhere.

    Args:
        config: the resolved configuration, shown as it is.
        summary: the run's final numbers, as in summary.json; all that are shown are optional.
        history: one record a round, as the lines of metrics.jsonl; it may be empty.
        notes: of a run that goes on.
        every_secs: after which the page loads itself anew; 0: never.
    """
    history = series.taken(history)
    title = _title(config, summary, history)
    parts = [tiles.tiles(summary, history), *sections.sections(summary, history)]
    if history:
        table = words.table(HEADS, words.ends(history, _line, "rounds"), kind="rounds")
        parts.append(details("The first and the last rounds in numbers", table))
    return of_run(
        title,
        about=about(summary, "rounds", "epochs"),
        notes=[*notes, *_notes(summary, history)],
        parts=parts,
        config=config,
        summary=summary,
        every_secs=every_secs,
    )


def of_run(
    title: str,
    *,
    about: str,
    notes: Sequence[str],
    parts: Sequence[str],
    config: series.Record,
    summary: series.Record,
    every_secs: int = 0,
) -> str:
    """The page of a run: its head, its parts in HTML, and its configuration and summary as JSON.

    With `every_secs` it loads itself anew so often.
    """
    body = [
        f"<h1>{words.escaped(title)}</h1>",
        f'<p class="about">{words.escaped(about)}</p>',
        *(f'<p class="note">{words.escaped(note)}</p>' for note in notes),
        *parts,
    ]
    shown = {"Configuration": config, "Summary, as written to summary.json": summary}
    for heading, record in shown.items():
        text = json.dumps(record, indent=2, default=str, ensure_ascii=False)
        body.append(details(heading, f"<pre>{words.escaped(text)}</pre>"))
    return frame(title, "\n".join(part for part in body if part), every_secs=every_secs)


def frame(title: str, body: str, *, every_secs: int = 0) -> str:
    """A whole page: its head with the style, and the body in it; loaded anew every so often."""
    refresh = f'<meta http-equiv="refresh" content="{every_secs}">\n' if every_secs else ""
    css = importlib.resources.files("hetjax.report").joinpath("style.css")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"{refresh}"
        f"<title>{words.escaped(title)} · hetjax</title>\n"
        f"<style>\n{css.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def details(heading: str, content: str) -> str:
    """Content that a click on its heading opens."""
    return f"<details><summary>{words.escaped(heading)}</summary>{content}</details>"


def _title(config: series.Record, summary: series.Record, history: series.History) -> str:
    names = [series.part(config, group).get("name", "") for group in ("data", "model")]
    workers = series.count_workers([*history, summary])
    names.append(words.plural(workers, "worker") if workers else "")
    return " · ".join(name for name in names if name) or "A run"


def about(summary: series.Record, *counts: str) -> str:
    """What the run was, in a line; `counts` are numbers of the summary, such as its rounds."""
    parts = [
        *(words.plural(summary.get(name), name[:-1].replace("_", " ")) for name in counts),
        "the speeds of the workers are emulated" if summary.get("emulated") else "",
        str(summary.get("device_kind") or ""),
        f"JAX {summary['jax_version']}" if summary.get("jax_version") else "",
    ]
    return " · ".join(["hetjax report", *(part for part in parts if part)])


def endings(summary: series.Record, step: str) -> list[str]:
    """How the run ended and where it was resumed, by the number of a `step`."""
    notes = []
    if summary.get("interrupted"):
        notes.append("The run was stopped before its end; the report covers what was done.")
    if ended := summary.get("stopped_by"):
        notes.append(f"The run was ended by {ended}.")
    for began in summary.get("resumed") or ():
        notes.append(
            f"The run went on from a checkpoint of {began['saved']}, at {step} {began['round']:,}."
        )
    return notes


def _notes(summary: series.Record, history: series.History) -> list[str]:
    """What a reader must know before the numbers."""
    notes = endings(summary, "round")
    notes += summary.get("notes") or []
    if history and not series.has_clock(summary):
        notes.append("No worker was given a speed, so there are no times of rounds.")
    if not history:
        notes.append("No round was finished, so there is nothing to draw.")
    if told := words.overruns(summary):
        notes.append(f"{told}.")
    skipped = np.nansum(series.column(history, "skipped_examples"))
    if skipped > 0:
        notes.append(f"{skipped:,.0f} examples were skipped because of non-finite numbers.")
    if without := summary.get("rounds_without_update"):
        notes.append(f"{without:,} of {len(history):,} rounds made no update: weights were 0.")
    notes += series.not_finite(history)
    bad = int(np.sum(np.isnan(series.column(history, "loss"))))
    if history and bad == len(history):
        notes.append("No round has a training loss.")
    elif bad:
        notes.append(f"{bad:,} of {len(history):,} rounds have no finite training loss.")
    return notes


def _line(record: series.Record) -> list[str]:
    return [
        words.count(record.get("round")),
        words.count(record.get("epoch")),
        words.count(record.get("examples")),
        words.loss(record.get("loss")) or "-",
        words.time(record.get("round_secs")),
        words.percent(record.get("waiting_fraction")),
        _quotas(record),
        _evaluated(record.get("eval")),
    ]


def _quotas(record: series.Record) -> str:
    """Microbatches given to each worker; if fewer were done, those done "of" those given."""
    given, done = (_numbers(record.get(name)) for name in ("quotas", "microbatches_done"))
    return f"{done} of {given}" if given and done.strip(" -") and done != given else given


def _numbers(values: Sequence[float] | None) -> str:
    return " ".join(words.count(value) or "-" for value in values or ())


def _evaluated(numbers: series.Record | None) -> str:
    known = (numbers or {}).items()
    return ", ".join(f"{name} {series.number(value):.4g}" for name, value in known)
