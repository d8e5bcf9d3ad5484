"""How did a run go? One self-contained HTML file with its pictures and numbers.

`write_report` takes the configuration, the summary and the lines of ``metrics.jsonl`` of a
run; ``python -m hetjax.training.report DIR`` makes the page again from the files in DIR. The
page needs no script and loads nothing, follows the reader's light or dark mode, and stays
below 2 MB for runs of any length. What is missing or not a number is left out. Drawing is
left to `hetjax.training.pictures`.
"""

from __future__ import annotations

import argparse
import html
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hetjax.training import pictures

WIDE, NARROW = 900, 340  # pixels; the page shows the one that fits the reader's screen
TABLE_ROUNDS = 12  # at each end of the run
Record = Mapping[str, Any]

STYLE = """
:root{color-scheme:light dark;--font:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
--page:#f6f7f9;--card:#fff;--ink:#171b22;--muted:#5d6675;--grid:#e3e6eb;--accent:#5546d6;
--warn:#fff1d6;--w0:#0072b2;--w1:#e69f00;--w2:#009e73;--w3:#cc79a7;--w4:#56b4e9;--w5:#d55e00;
--w6:#8a6d3b;--w7:#7a8894;--on-w0:#fff;--on-w1:#171b22;--on-w2:#fff;--on-w3:#171b22;
--on-w4:#171b22;--on-w5:#fff;--on-w6:#fff;--on-w7:#171b22}
@media (prefers-color-scheme:dark){:root{--page:#0f1216;--card:#181c22;--ink:#eceff4;
--muted:#9aa5b4;--grid:#2d343e;--accent:#a79fff;--warn:#43340f;--w0:#3d9fdc;--w1:#f0ae2a;
--w2:#27b98f;--w3:#dc93bb;--w4:#8fd0f5;--w5:#ee7f33;--w6:#c0a06a;--w7:#a3b0bc;
--on-w0:#0f1216;--on-w1:#0f1216;--on-w2:#0f1216;--on-w3:#0f1216;--on-w4:#0f1216;
--on-w5:#0f1216;--on-w6:#0f1216;--on-w7:#0f1216}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 var(--font)}
main{max-width:972px;margin:0 auto;padding:36px 16px 56px}
h1{font-size:30px;line-height:1.2;margin:0;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:19px;margin:0 0 4px;letter-spacing:-.01em}
p{margin:0}
.about{color:var(--muted);margin-top:8px;font-size:14px}
.note{background:var(--warn);border-radius:10px;padding:10px 16px;margin-top:18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:12px;
margin:24px 0}
.tile,section,details{background:var(--card);border-radius:14px;
box-shadow:0 0 0 1px var(--grid)}
.tile{padding:14px 18px 16px}
.tile dt{font-size:13px;color:var(--muted)}
.tile dd{margin:0;font-size:13px;color:var(--muted);overflow-wrap:anywhere}
.tile dd.value{font-size:25px;font-weight:620;line-height:1.3;color:var(--ink);
letter-spacing:-.02em;font-variant-numeric:tabular-nums}
section{padding:22px 20px 18px;margin:16px 0}
section>p{color:var(--muted);font-size:14.5px;max-width:74ch;margin-bottom:14px}
.key{display:flex;flex-wrap:wrap;gap:6px 20px;font-size:13px;margin:0 0 12px;color:var(--muted)}
.key i{display:inline-block;width:22px;height:12px;border-radius:2px;margin-right:7px;
vertical-align:-1px}
.computing{background:linear-gradient(90deg,var(--w0) 50%,var(--w1) 50%)}
.ramp{background:linear-gradient(90deg,#3e4989,#1f9e89,#bddf26)}
.waiting{background:repeating-linear-gradient(135deg,var(--muted) 0 1px,transparent 1px 4px)}
.grey{background:var(--muted);opacity:.3}
.key i.line{height:0;vertical-align:4px;border-top:3px solid var(--accent)}
.key i.line.ink{border-top:2px dashed var(--ink)}
.key i.line.muted{border-top:2px solid var(--muted)}
.key i.line.dotted{border-top:3px dotted var(--muted)}
.picture{display:block;width:100%;height:auto}
.narrow{display:none;max-width:460px;margin:0 auto}
details{margin:16px 0;padding:14px 20px}
summary{cursor:pointer;font-weight:600}
pre,.scroll{overflow-x:auto;font-size:13px;line-height:1.5}
table{border-collapse:collapse;margin-top:12px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 12px 4px 0;border-bottom:1px solid var(--grid);
white-space:nowrap}
th{color:var(--muted);font-weight:500}
@media (max-width:660px){main{padding-top:22px}h1{font-size:25px}section{padding:18px 14px}
.wide{display:none}.narrow{display:block}.tiles{grid-template-columns:1fr 1fr;gap:10px}
.tile{padding:12px 14px}.tile dd.value{font-size:21px}}
@media print{body{background:none}section,.tile{break-inside:avoid}}
"""


def write_report(
    path: str | pathlib.Path, *, config: Record, summary: Record, history: Sequence[Record]
) -> None:
    """Writes the report of a run as one HTML file that loads nothing from elsewhere.

    Args:
        path: the file to write; an old one is replaced.
        config: the resolved configuration, shown as it is.
        summary: the numbers of the run's end, as in summary.json; those shown are optional.
        history: one record a round, as the lines of metrics.jsonl; it may be empty.
    """
    history = [record for record in history if isinstance(record, Mapping)]
    title = _title(config, summary, history)
    body = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="about">{_text(_about(summary))}</p>',
        *(f'<p class="note">{_text(note)}</p>' for note in _notes(summary, history)),
        _tiles(summary, history),
        *_sections(summary, history),
        _rounds_table(history),
        _details("Configuration", f"<pre>{_text(_pretty(config))}</pre>"),
        _details("Summary, as written to summary.json", f"<pre>{_text(_pretty(summary))}</pre>"),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{_text(title)} · hetjax</title>\n<style>{STYLE}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n</body>\n"
        "</html>\n"
    )
    pathlib.Path(path).write_text(page, encoding="utf-8", errors="replace")


# --- words and numbers -----------------------------------------------------------------------


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _pretty(record: Record) -> str:
    return json.dumps(record, indent=2, default=str, ensure_ascii=False)


def _secs(value: Any) -> str:
    """Seconds in the unit that reads best, empty where there is no number."""
    secs = pictures.number(value)
    if np.isnan(secs):
        return ""
    factor, unit = pictures.time_unit(secs)
    digits = max(0, 2 - int(np.floor(np.log10(max(secs * factor, 1e-2)))))
    return f"{secs * factor:,.{min(digits, 2)}f} {unit}"


def _percent(value: Any) -> str:
    part = pictures.number(value)
    return "" if np.isnan(part) else f"{100 * part:.1f} %"


def _loss(value: Any) -> str:
    loss = pictures.number(value)
    return "" if np.isnan(loss) else f"{loss:.4g}"


def _count(value: Any) -> str:
    amount = pictures.number(value)
    if np.isnan(amount):
        return ""
    return f"{amount:,.0f}" if amount == round(amount) else f"{amount:,.2f}"


def _plural(value: Any, noun: str) -> str:
    amount = _count(value)
    return f"{amount} {noun}{'' if amount == '1' else 's'}" if amount else ""


def _name(config: Record, *fields: str) -> str:
    """The name that a configuration gives a thing: `{"data": {"name": "x"}}` or a string."""
    for field in fields:
        value = config.get(field)
        if isinstance(value, Mapping):
            value = value.get("name") or value.get("dataset")
        if isinstance(value, str) and value:
            return value
    return ""


def _num_workers(summary: Record, history: Sequence[Record]) -> int:
    return pictures.count_workers([*history, summary])


def _title(config: Record, summary: Record, history: Sequence[Record]) -> str:
    names = [_name(config, "data", "dataset", "source"), _name(config, "model")]
    workers = _num_workers(summary, history)
    names.append(_plural(workers, "worker") if workers else "")
    return " · ".join(name for name in names if name) or "A run"


def _about(summary: Record) -> str:
    parts = [_plural(summary.get("rounds"), "round"), _plural(summary.get("epochs"), "epoch")]
    if summary.get("emulated"):
        parts.append("the speeds of the workers are emulated")
    parts += [str(summary[key]) for key in ("device_kind",) if summary.get(key)]
    parts += [f"JAX {summary['jax_version']}"] if summary.get("jax_version") else []
    return " · ".join(["hetjax report", *(part for part in parts if part)])


def _notes(summary: Record, history: Sequence[Record]) -> list[str]:
    notes = []
    if summary.get("interrupted"):
        notes.append("The run was stopped before its end; the report covers what was done.")
    if not history:
        notes.append("No round was finished, so there is nothing to draw.")
    skipped = np.nansum(pictures.column(history, "skipped_examples"))
    if skipped > 0:
        notes.append(f"{skipped:,.0f} examples were skipped because of non-finite numbers.")
    bad = int(np.sum(np.isnan(pictures.column(history, "loss"))))
    if bad:
        notes.append(f"{bad:,} of {len(history):,} rounds have no finite training loss.")
    return notes


def _tiles(summary: Record, history: Sequence[Record]) -> str:
    """The key numbers: `(what, number, the line below)`, those without a number left out."""
    emulated = ", emulated speeds" if summary.get("emulated") else ""
    best = _percent(summary.get("best_test_accuracy"))
    mean, optimum, equal = (
        pictures.number(summary.get(key))
        for key in ("round_secs_mean", "optimal_round_secs", "equal_split_secs")
    )
    ratio = equal / mean if mean > 0 and equal > 0 else float("nan")
    speed = "" if np.isnan(ratio) else f"{ratio:.2f}\N{MULTIPLICATION SIGN}"
    accuracy = _percent(summary.get("test_accuracy"))
    test, train = _loss(summary.get("test_loss")), _loss(summary.get("train_loss"))
    losses = [("best", best), ("test loss", test), ("training loss", train)]
    below = ", ".join(f"{name} {value}" for name, value in losses if value)
    loss_name, loss = ("Test loss", test) if test else ("Training loss", train)
    missing, twice = (_count(summary.get(f"examples_{k}")) for k in ("missing", "duplicated"))
    both = f"{missing} and {twice}" if missing and twice else ""
    processed = _plural(summary.get("examples_processed"), "example")
    optimum_text = f"optimum {_secs(optimum)}{emulated}" if optimum > 0 else ""
    tiles = [
        ("Test accuracy", accuracy, below),
        (loss_name, "" if accuracy else loss, train and test and f"training loss {train}"),
        ("Mean round", _secs(mean), optimum_text),
        (
            "Against the optimum",
            _percent(summary.get("fraction_of_optimum")),
            f"of the speed of the best possible quotas{emulated}",
        ),
        ("Against an equal split", speed, f"as fast; equal takes {_secs(equal)}{emulated}"),
        ("Waiting", _percent(summary.get("waiting_fraction")), "of the workers' time"),
        ("Missing and duplicated", both, processed and f"of {processed} processed"),
        ("Quotas at the end", *_last_quotas(summary, history)),
        ("Wall time", _secs(summary.get("wall_secs")), _plural(summary.get("rounds"), "round")),
    ]
    cells = [
        f'<div class="tile"><dt>{_text(what)}</dt><dd class="value">{_text(value)}</dd>'
        f"<dd>{_text(below)}</dd></div>"
        for what, value, below in tiles
        if value
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


def _last_quotas(summary: Record, history: Sequence[Record]) -> tuple[str, str]:
    """The last quotas; those before it where the last round only had an epoch's rest to do."""
    values = pictures.matrix([summary], "quotas")[-1]
    full = pictures.full_rounds(history)
    before = pictures.matrix(full[-1:], "quotas")[-1] if full else values
    if not np.nansum(values) >= np.nansum(before):
        values = before
    if not np.isfinite(values).any():
        return "", ""
    if len(values) <= 6:
        return " : ".join(_count(value) or "-" for value in values), "microbatches a round"
    low, high = np.nanmin(values), np.nanmax(values)
    return f"{low:.0f} to {high:.0f}", f"microbatches a round, {len(values)} workers"


# --- sections --------------------------------------------------------------------------------


def _sections(summary: Record, history: Sequence[Record]) -> list[str]:
    if not history:
        return []
    sections = []
    if pictures.count_workers(history):
        sections += [
            _section(
                "Who computes, who waits",
                _timeline_caption(history),
                _both(lambda w: pictures.timeline(history, width=w, rounds=6 if w > 500 else 3)),
                key=_timeline_key(history),
            ),
            _section(
                "Quotas",
                _quotas_caption(history) + _left_out(history),
                _both(lambda w: pictures.quotas(history, width=w)),
            ),
        ]
    sections.append(
        _section(
            "Time of a round",
            _round_time_caption(summary, history) + _left_out(history),
            _both(lambda w: pictures.round_times(history, summary, width=w)),
        )
    )
    sections.append(
        _section(
            "Loss",
            "Against time it shows how soon a loss is reached, which is what good quotas "
            "improve; against epochs, how much each pass over the data teaches, whatever the "
            "speeds.",
            _both(lambda w: pictures.losses(history, summary, width=w)),
            key=_line_key("loss", history, training=True),
        )
    )
    if pictures.evaluations(history, "accuracy"):
        sections.append(
            _section(
                "Accuracy",
                "The share of examples classified correctly, at each evaluation.",
                _both(lambda w: pictures.accuracies(history, summary, width=w)),
                key=_line_key("accuracy", history, training=False),
            )
        )
    return sections


def _both(draw: Callable[[int], str]) -> str:
    return "".join(
        f'<div class="{name}">{draw(width)}</div>'
        for name, width in (("wide", WIDE), ("narrow", NARROW))
    )


def _section(heading: str, caption: str, picture: str, *, key: str = "") -> str:
    return (
        f"<section><h2>{_text(heading)}</h2><p>{_text(caption)}</p>"
        + (f'<div class="key">{key}</div>' if key else "")
        + f"{picture}</section>"
    )


def _left_out(history: Sequence[Record]) -> str:
    short = len(history) - len(pictures.full_rounds(history))
    return " The short last round of each epoch is left out." if short else ""


def _round_time_caption(summary: Record, history: Sequence[Record]) -> str:
    words = (
        "From the start of a round to the start of the next; the number beside the run is the "
        "median of its last 20 rounds. Triangles at the top are rounds that took longer still."
    )
    best = [summary.get("optimal_round_secs")] + [r.get("optimal_round_secs") for r in history]
    if np.isnan([pictures.number(secs) for secs in best]).all():
        return words
    return (
        f"{words} The optimum is that of the best whole-numbered quotas for the true speeds: "
        "the closer the run lies to it, the less is left to gain."
    )


def _quotas_caption(history: Sequence[Record]) -> str:
    words = "Microbatches that each worker is given a round."
    if pictures.count_workers(history) > pictures.NUM_COLOURS:
        return f"{words} Bright is many, dark is few; rows of one colour have settled."
    return f"{words} Steps show where the quotas moved; flat lines have settled."


def _timeline_caption(history: Sequence[Record]) -> str:
    words = (
        "Each bar is one worker in one round, with the number of microbatches it computed. "
        "With good quotas all bars of a round end together."
    )
    waiting = pictures.column(pictures.full_rounds(history), "waiting_fraction")
    waiting = waiting[np.isfinite(waiting)]
    if len(waiting) < 4:
        return words
    first, last = waiting[0], float(np.mean(waiting[-min(6, len(waiting) - 1) :]))
    return (
        f"{words} Waiting was {_percent(first)} of the workers' time in the first round and "
        f"{_percent(last)} in the last ones."
    )


def _timeline_key(history: Sequence[Record]) -> str:
    many = pictures.count_workers(history)
    filled = "ramp" if many > pictures.NUM_COLOURS else "computing"
    empty = "grey" if many > 16 else "waiting"
    return (
        f'<span><i class="{filled}"></i>computing</span>'
        f'<span><i class="{empty}"></i>waiting for the slowest</span>'
        "<span>gap: synchronisation; a long pause is cut short and its length written</span>"
    )


def _line_key(ending: str, history: Sequence[Record], *, training: bool) -> str:
    styles = ["line", "line ink", "line dotted"]
    names = pictures.in_order(list(pictures.evaluations(history, ending)))
    pairs = [("line muted", "training, each round")] if training else []
    pairs += list(zip(styles, [name.replace("_", " ") for name in names], strict=False))
    return "".join(f'<span><i class="{css}"></i>{_text(name)}</span>' for css, name in pairs)


def _details(heading: str, content: str) -> str:
    return f"<details><summary>{_text(heading)}</summary>{content}</details>"


def _rounds_table(history: Sequence[Record]) -> str:
    """The first and the last rounds as numbers."""
    if not history:
        return ""
    heads = [
        "round",
        "epoch",
        "examples",
        "loss",
        "round time",
        "waiting",
        "quotas",
        "evaluated",
    ]
    lines = []
    for part in pictures.first_and_last(history, TABLE_ROUNDS):
        lines += [_table_row(record) for record in part]
        lines.append("")
    hidden = len(history) - 2 * TABLE_ROUNDS
    gap = f'<tr><td colspan="{len(heads)}">… {hidden:,} rounds …</td></tr>' if hidden > 0 else ""
    lines = lines[:-1]
    rows = "".join(line or gap for line in lines)
    head = "".join(f"<th>{name}</th>" for name in heads)
    table = f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
    return _details("The first and the last rounds in numbers", table)


def _table_row(record: Record) -> str:
    loss = pictures.number(record.get("loss"))
    quotas = record.get("quotas")
    evaluated = record.get("eval")
    cells = [
        _count(record.get("round")),
        _count(record.get("epoch")),
        _count(record.get("examples")),
        f"{loss:.4g}" if loss == loss else "-",
        _secs(record.get("round_secs")),
        _percent(record.get("waiting_fraction")),
        " ".join(_count(q) or "-" for q in quotas) if isinstance(quotas, list | tuple) else "",
        ", ".join(f"{name} {pictures.number(value):.4g}" for name, value in evaluated.items())
        if isinstance(evaluated, Mapping)
        else "",
    ]
    return f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"


# --- from the files of a run -----------------------------------------------------------------


def read_run(directory: pathlib.Path) -> tuple[dict, dict, list[dict]]:
    """`(config, summary, history)` of a work directory; a summary may be missing.

    Raises:
        ValueError: where a file is missing or is not JSON. A last line that was cut off while
            it was being written is left out.
    """
    config = _read_json(directory / "config.json")
    summary_path = directory / "summary.json"
    summary = _read_json(summary_path) if summary_path.exists() else {}
    metrics = directory / "metrics.jsonl"
    if not metrics.exists():
        raise ValueError(f"{metrics} is missing: a work directory of a hetjax run has one")
    history: list[dict] = []
    lines = metrics.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        try:
            history.append(json.loads(line))
        except ValueError as error:
            if i + 1 < len(lines):
                raise ValueError(f"{metrics}, line {i + 1} is not JSON: {error}") from error
    return config, summary, history


def _read_json(path: pathlib.Path) -> dict:
    if not path.exists():
        raise ValueError(f"{path} is missing: a work directory of a hetjax run has one")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m hetjax.training.report DIR``."""
    parser = argparse.ArgumentParser(
        prog="python -m hetjax.training.report",
        description="Writes report.html again from the files of a run.",
    )
    parser.add_argument("directory", type=pathlib.Path, help="the work directory of the run")
    directory = parser.parse_args(arguments).directory
    try:
        config, summary, history = read_run(directory)
    except ValueError as error:
        parser.error(str(error))
    write_report(directory / "report.html", config=config, summary=summary, history=history)
    print(directory / "report.html")


if __name__ == "__main__":
    main()
