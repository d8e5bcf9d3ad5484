"""The report of the study: a Markdown file and an HTML page of what lies in the results alone.

Every sentence that judges is computed from the results. It needs no JAX.
"""

import pathlib
from collections.abc import Mapping, Sequence

from experiments.orders import figures, page, pictures, results, tables
from experiments.orders.arms import ARMS, BASELINE
from experiments.orders.page import Block
from experiments.orders.tasks import Task

TITLE = "Balanced example orders on the papers' tasks"


def write(directory: pathlib.Path, tasks: Sequence[Task]) -> pathlib.Path:
    """Writes README.md, index.html and the pictures; returns the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    single = [task for task in tasks if not task.group]
    found = {task.name: results.arms_of(directory, task) for task in tasks}
    bounds = {
        task.name: results.own_bounds(
            found[task.name], results.read_records(directory, task, results.HERDING)
        )
        for task in single
    }
    judged = figures.rows([found[task.name] for task in single], bounds)
    blocks: list[Block] = [
        page.Heading(TITLE, 1),
        *_HEAD,
        page.Heading("Figures"),
        page.Table(("figure", "target", "reached"), judged),
    ]
    balance = tables.balance_table([found[task.name] for task in single], bounds)
    if balance:
        blocks += [page.Heading("Gain and balance"), page.Text(_BALANCE), balance]
    for task in single:
        blocks += _task(directory, found[task.name], bounds[task.name])
    for group in dict.fromkeys(task.group for task in tasks if task.group):
        blocks += _group({task.name: found[task.name] for task in tasks if task.group == group})
    (directory / "README.md").write_text(page.markdown(blocks))
    path = directory / "index.html"
    path.write_text(page.html(TITLE, blocks))
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
            page.Picture(path, "Training loss against epochs and against time, and the metric"),
            page.Text("Each order at its own learning rate:"),
            tables.arms_table(own),
        ]
    same = results.arms_of(directory, task, same_rate=True)
    if task.same_rate and same.rates != own.rates and same.runs.get(BASELINE):
        blocks += [
            page.Text(f"All at the learning rate {task.same_rate:g}:"),
            tables.arms_table(same),
        ]
    if task.is_tuned:
        says = (
            f"Lowest training loss at every learning rate, seed {task.seeds[0]}, and in brackets "
            "epochs to that of D-RR at the same rate, over D-RR's:"
        )
        blocks += [page.Text(says), tables.grid_table(task, records)]
    herding = tables.herding_table(bounds)
    if herding:
        says = (
            "Herding bound of the order to come, of rounds as timesteps, and over that of a random "
            f"order at the same parameters, seed {task.seeds[0]}:"
        )
        blocks += [page.Text(says), herding]
    lines = tables.sentences(own, records)
    return [*blocks, page.Bullets(lines)] if lines else blocks


def _group(found: Mapping[str, results.Arms]) -> list[Block]:
    chosen = next(iter(found.values())).task
    says = (
        f"Variants of {chosen.title} (`configs/{chosen.config}.py`) with "
        f"{chosen.experiment.cluster.num_workers} workers, not tuned; training loss."
    )
    return [
        page.Heading("Where it holds"),
        page.Text(says),
        tables.group_table(found),
    ]


_BALANCE = (
    "Theory has a balanced order gain where gradients change little within an epoch. Then its "
    "herding bound, the largest sum of centred gradients on the way through the epoch, stays far "
    "below that of a random order at the parameters that the epoch before has come to. And there "
    "has to be something to gain: a bound of a random order that is not small already. Both were "
    "measured in D-GraB's runs of seed 0, done once more, in the 2-norm: after the first epoch "
    "that was measured and after the last."
)

_HEAD = (
    page.Text("Rebuilt from the results in `runs/` and `herding/` by"),
    page.Text("```sh\npython -m experiments.compare_orders --stage=report\n```"),
    page.Text(
        "and without `--stage` what is missing is done first; `--stage=plan` says what that is. "
        "The unit that is ordered is one example: an image, a sentence, a chunk of text from a "
        "zero state, a window of a series. Heads on features of sentences stand for those on a "
        "frozen encoder; there is no pretrained encoder here. With such features RTE is at chance, "
        "so its training loss alone says something."
    ),
    page.Text(
        "Training loss: without an update, after each epoch, over the part of the training "
        "examples that each section names. D-RR, two-level D-GraB, the fixed map and block "
        "reshuffling are each tuned over the same learning rates: theirs is the one with the "
        "lowest training loss with the first seed; where that is at an end of the grid, another "
        "rate follows there. The other orders take two-level D-GraB's. Everything else is equal."
    ),
    page.Text(
        "Left out, for time: exact orders on the hashed words of CoLA and SST-2, on the MLP and on "
        "the transformer, where gradients of single examples are dear (PairBalance in blocks "
        "stands for the exact one on three of these), and what else a section says; the "
        "rest of WikiText-2 for the text models and of CIFAR-10 for ResNet-8, as the titles say; "
        "16 and 64 workers on the whole of CIFAR-10, which small parts of it have, 16 on CoLA and "
        "RTE, 64 on all heads, 32 on M4; epochs enough to memorise a whole set. The LSTM with all "
        "words, the transformer and ResNet-8 with 64 workers were left for a GPU, and none was at "
        "hand. LeNet's 64 workers take batches of 128: a microbatch holds a pair at least."
    ),
    page.Text(
        '"Mean ± spread" is over the seeds, and the spread is half the distance from the least to '
        "the greatest. By more than the spread: the means differ by more than the larger of the "
        "two spreads; else within the spread. The lowest loss of a run is over its epochs; the "
        "mean over the epochs of the training loss tells how fast it went down; it is also given "
        "over that of D-RR with the same seed, whose model begins the same: seeds differ more "
        "than orders do. Epochs to D-RR's lowest: until the training loss is at most the lowest "
        "that random reshuffling (D-RR) reaches with the same seed, over the epochs that D-RR "
        "needs for it."
    ),
    page.Text(
        "Runs disturb each other's clocks. So time is epochs times the seconds of the processor "
        "for an epoch, measured apart, all orders in turn in one process on one core, without "
        "evaluation; what an order takes over D-RR is the median over three or five turns, which "
        "differ by about a tenth. Where it is three, the first turn of an order of every second "
        "epoch holds some compiling. All workers are "
        "played one after the other on that core: it is the "
        "cost in arithmetic, and says nothing of communication. In the pictures, lines are means, "
        "bands go from the least to the greatest seed, and the dotted line is the mean of D-RR's "
        "lowest losses; the first epoch does not set the scale of the loss, and an axis of time "
        "ends at three times D-RR's at the latest."
    ),
)
