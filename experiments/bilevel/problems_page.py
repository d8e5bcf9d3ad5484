"""The sections of the comparison on the problems of one device."""

from experiments import markdown
from experiments.bilevel import estimators, gan, problems, search, sinusoids
from experiments.bilevel.results import Record, Stat
from hetjax.report import words

COMMIT = "427037a"  # of the code that made the lines

_DECOYS = ", ".join(name for name in search.OPERATIONS if name != search.OPERATIONS[search.RIGHT])
_SAYS = {
    "search": (
        f"A DARTS cell with two edges, of {len(search.OPERATIONS)} operations each. The inputs are "
        "the halves of a digit, the sign of every pixel drawn at random. So a convolution with a "
        f"full-wave rectifier (|h|) is right on both edges. Decoys are {_DECOYS}. Solved: the "
        "right operation has the largest weight on both edges.\n\n"
        "Accuracies are those of networks trained on training and validation images alike. They "
        "have the operations that were found, the right ones, and the decoys with the largest "
        "weights. The cell was designed anew after the first ones had failed: the outputs of "
        "operations and node are normalised, and |h| took the place of max(h, 0).\n"
    ),
    "gan": (
        "A generator and a discriminator, networks of two hidden layers. A mode is found if at "
        f"least {100 * gan.LEAST_SHARE:.0f} % of {gan.NUM_SEEN:,} points are within three "
        f"deviations of it at the end. Solved: all {gan.NUM_MODES}. The first order is the usual "
        "GAN, whose generator takes the discriminator as constant.\n"
    ),
}
_COLUMNS = {
    "search": (
        ("least weight of a right operation", "least_right_weight"),
        ("accuracy, found", "found_accuracy"),
        ("right", "right_accuracy"),
        ("decoys", "best_decoys_accuracy"),
    ),
    "gan": (("points near a mode", "share_near"),),
}


def section(task: str, records: dict[str, list[Record]]) -> str:
    """A table of the runs of `search` or `gan`, an estimator a row."""
    columns = _COLUMNS[task]
    head = ("method", "solved", *(name for name, _ in columns), "seconds", "work")
    if task == "gan":
        head = (*head, "modes of each seed")
    rows = []
    for arm in problems.ARMS[task]:
        if not (runs := records.get(arm)):
            continue
        row = [
            estimators.METHODS[arm].title,
            f"{sum(run['solved'] for run in runs)} of {len(runs)}",
            *(f"{Stat.of(100 * run[field] for run in runs)} %" for _, field in columns),
            f"{Stat.of(run['train_secs'] for run in runs).mean:.1f}",
            words.count(Stat.of(run["work"] for run in runs).mean),
        ]
        if task == "gan":
            row.append(", ".join(str(run["modes"]) for run in runs))
        rows.append(row)
    return "\n".join([_SAYS[task], _made(task), markdown.table(head, rows) + "\n"])


def _made(task: str) -> str:
    return (
        f"Made by `python -m experiments.compare_bilevel --only={task}`, of the code at commit "
        f"{COMMIT}. A run is that of `experiments.train_bilevel --config=configs/"
        f"{problems.FILES[task]}.py --config.estimator.name=METHOD --config.seed=SEED`. Settings "
        "were chosen on seeds 100 and 101.\n"
    )


def solved_few_shot(records: dict[str, list[Record]]) -> str:
    """In how many seeds each way is good enough beside joint training, with as many shots."""
    said = []
    for arm, runs in records.items():
        name, _, shots = arm.rpartition(", ")
        joint = {run["seed"]: run for run in records.get(f"joint training, {shots}", ())}
        both = [(run, joint[run["seed"]]) for run in runs if run["seed"] in joint]
        if name != "joint training" and both:
            good = sum(sinusoids.is_solved(*pair) for pair in both)
            said.append(f"{arm}: {good} of {len(both)}")
    return (
        f"\nSolved, if the median after {max(sinusoids.EVALUATED)} steps is at most "
        f"{sinusoids.MOST_OF_JOINT:g} of that of joint training of the same seed: "
        f"{'; '.join(said)}. The value gap makes ten clipped steps for each y; it and seeds 3 and "
        f"4 are of the code at commit {COMMIT}.\n"
        if said
        else ""
    )
