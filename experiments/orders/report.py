"""The report of the study: a Markdown file and its pictures, of what lies in the results alone.

Every sentence that judges is computed from the results. It needs no JAX.
"""

import pathlib
from collections.abc import Mapping, Sequence

from experiments.orders import page, pictures, results, tables
from experiments.orders.arms import ARMS, BASELINE
from experiments.orders.page import Block
from experiments.orders.tasks import Task

TITLE = "Balanced example orders on the papers' tasks"


def write(directory: pathlib.Path, tasks: Sequence[Task]) -> pathlib.Path:
    """Writes README.md and the pictures; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    single = [task for task in tasks if not task.group]
    found = {task.name: results.arms_of(directory, task) for task in tasks}
    bounds = {
        task.name: results.own_bounds(
            found[task.name], results.read_records(directory, task, results.HERDING)
        )
        for task in single
    }
    blocks: list[Block] = [page.Heading("Example orders", 1)]
    if not any(task.is_own for task in tasks):
        from experiments.orders import figures

        judged = figures.rows([found[task.name] for task in single], bounds)
        blocks = [
            page.Heading(TITLE, 1),
            *_HEAD,
            page.Heading("Figures"),
            page.Table(figures.Row._fields, judged),
            page.Text(_FIGURES),
        ]
    blocks += [
        page.Heading("Gain and balance"),
        page.Text(_BALANCE),
        tables.gain_table([found[task.name] for task in single], bounds),
    ]
    for task in single:
        blocks += _task(directory, found[task.name], bounds[task.name])
    for group in dict.fromkeys(task.group for task in tasks if task.group):
        blocks += _group({task.name: found[task.name] for task in tasks if task.group == group})
    path = directory / "README.md"
    path.write_text(page.markdown(blocks))
    return path


def _task(directory: pathlib.Path, own: results.Arms, bounds: results.Records) -> list[Block]:
    task, records = own.task, results.read_records(directory, own.task)
    blocks: list[Block] = [page.Heading(task.title), page.Text(tables.setup(task))]
    lacking = [ARMS[arm].label for arm in task.arms if arm in own.lacking]
    if not records:
        return [*blocks, page.Text("**Not run yet.**")]
    if lacking:
        blocks.append(page.Text(f"**Not complete:** runs of {'; '.join(lacking)} are missing."))
    if own.runs.get(BASELINE):
        path = directory / f"{task.name}.svg"
        pictures.draw(path, own, task.metric)
        blocks += [
            page.Picture(path, "Loss against epochs and time, and the metric"),
            tables.arms_table(own),
        ]
    same = results.arms_of(directory, task, same_rate=True)
    if task.same_rate and same.rates != own.rates and same.runs.get(BASELINE):
        blocks += [
            page.Text(f"All at the learning rate {task.same_rate:g}:"),
            tables.arms_table(same),
        ]
    if task.is_tuned:
        blocks.append(tables.grid_table(task, records))
    if herding := tables.herding_table(bounds):
        blocks.append(herding)
    lines = tables.sentences(own, records)
    return [*blocks, page.Bullets(lines)] if lines else blocks


def _group(found: Mapping[str, results.Arms]) -> list[Block]:
    chosen = next(iter(found.values())).task
    says = (
        f"Variants of {chosen.title} (`{chosen.shown_file}`) with "
        f"{chosen.experiment.cluster.num_workers} workers, not tuned; training loss, n seeds."
    )
    return [
        page.Heading("Where it holds"),
        page.Text(says),
        tables.group_table(found),
    ]


_FIGURES = (
    "n: tasks. Epochs, losses and time are those of two-level D-GraB. A loss is below or above "
    "another by more than the spread. Time counts what ordering costs. The cost of a step is over "
    "that of a plain one; every second epoch: the order is made anew as often."
)

_BALANCE = (
    "Two-level D-GraB against D-RR on each task, whose section begins with its name. A training "
    "loss is in spreads below (-) or above that of others.\n\n"
    "In theory a balanced order gains on two conditions. Gradients change little within an epoch: "
    "then the herding bound stays far below that of a random order. The bound is the largest sum "
    "of centred gradients on the way through the epoch. And the bound of a random order is not "
    "small already. Both bounds are of runs of seed 0, done once more. They are in the 2-norm, at "
    "the parameters that the epoch before has come to: after the first epoch that was measured → "
    "after the last."
)

_HEAD = (
    page.Text("Rebuilt from the results in `runs/` and `herding/` by"),
    page.Text("```sh\npython -m experiments.compare_orders --stage=report\n```"),
    page.Text("Without `--stage` what is missing is done first; `--stage=plan` says what that is."),
    page.Text(
        "One example is ordered: an image, a sentence, a chunk of text from a zero state, a window "
        "of a series. Heads on features of sentences stand for those on a frozen encoder; there is "
        "no pretrained encoder here. With such features RTE is at chance. Data is private and the "
        "learning rate constant. The seeds are 0, 1, 2 where a title does not say otherwise."
    ),
    page.Text(
        "**The first table of a section** has each order at its own rate. The training loss is "
        "measured without an update, after each epoch. D-RR, two-level D-GraB, the fixed map and "
        "block reshuffling are each tuned over the same rates, by the lowest loss with the first "
        "seed. Where the best rate is at an end of the grid another rate follows. The other orders "
        "take two-level D-GraB's.\n\n"
        "**The second table** has these rates. In brackets are the epochs to D-RR's lowest at the "
        "same rate, over D-RR's.\n\n"
        "**The third table** has herding bounds of the order to come, with rounds as timesteps. "
        "They are over those of a random order at the same parameters."
    ),
    page.Text(
        "Left out, for time:\n\n"
        "- exact orders on the hashed words of CoLA and SST-2, on the MLP and on the transformer; "
        "PairBalance in blocks stands for the exact one on three of these\n"
        "- the rest of WikiText-2, and of CIFAR-10 for ResNet-8\n"
        "- 16 and 64 workers on the whole of CIFAR-10, 16 on CoLA and RTE, 64 on all heads, 32 on "
        "M4\n"
        "- epochs enough to memorise a whole set\n"
        "- what else a section says\n\n"
        "The LSTM with all words, the transformer and ResNet-8 with 64 workers need a GPU, and "
        "none was at hand."
    ),
    page.Text(
        "- **Mean ± spread** is over the seeds. The spread is half the distance from the least to "
        "the greatest. A difference counts from one spread on, the larger of the two.\n"
        "- **The lowest loss** of a run is over its epochs. Its mean over the epochs tells how "
        "fast it went down, over that of D-RR with the same seed.\n"
        "- **Epochs to D-RR's lowest**: until the loss is at most the lowest that random "
        "reshuffling (D-RR) reaches with the same seed. They are over the epochs that D-RR needs "
        'for it. "Not by 1 of 3": one seed never does.\n'
        "- **Time** is epochs times the seconds of the processor for an epoch. They are measured "
        "apart, all orders in turn in one process on one core, workers one after the other: the "
        "cost in arithmetic. Orders over D-RR are medians of three or five turns, which differ by "
        "about a tenth.\n"
        "- **In the pictures** lines are means, and bands go from the least to the greatest seed. "
        "The dotted line is the mean of D-RR's lowest losses. An axis of time ends at three times "
        "D-RR's at the latest."
    ),
)
