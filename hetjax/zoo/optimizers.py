"""The optimiser of a configuration: optax parts, and a learning rate by examples processed."""

import optax

from hetjax import parts, schedules
from hetjax.zoo import config as config_lib


def make_schedule(
    optimizer: config_lib.OptimizerConfig, *, epochs: int, rounds_per_epoch: float
) -> optax.Schedule:
    """The learning rate by nominal rounds, as `scale_by_progress` takes it.

    A linear warm-up from 0 over `warmup_epochs`, then the named schedule over what is left.
    """
    peak = optimizer.learning_rate
    warmup_rounds = round(optimizer.warmup_epochs * rounds_per_epoch)
    rounds_left = max(round(epochs * rounds_per_epoch) - warmup_rounds, 1)
    after: optax.Schedule
    match optimizer.schedule:
        case "cosine":
            after = optax.cosine_decay_schedule(peak, rounds_left)
        case "linear":
            after = optax.linear_schedule(peak, 0.0, rounds_left)
        case "step":
            period = round(optimizer.decay_every_epochs * rounds_per_epoch)
            after = optax.exponential_decay(
                peak, max(period, 1), optimizer.decay_factor, staircase=True
            )
        case _:
            after = optax.constant_schedule(peak)
    if not warmup_rounds:
        return after
    warm_up = optax.linear_schedule(0.0, peak, warmup_rounds)
    return optax.join_schedules([warm_up, after], [warmup_rounds])


def make_optimizer(
    config: config_lib.ExperimentConfig, *, num_examples: int
) -> optax.GradientTransformation:
    """Clipping (of the round's reduced gradient), then SGD, Adam or AdamW, then the schedule.

    Weight decay is added to the gradient, and decoupled for `adamw`. In the place of Adam stands
    what a function of one's own makes, such as `optax.scale_by_lion`.
    """
    optimizer = config.optimizer
    links: list[optax.GradientTransformation] = []
    if optimizer.clip_norm:
        links.append(optax.clip_by_global_norm(optimizer.clip_norm))
    decay = [optax.add_decayed_weights(optimizer.weight_decay)] if optimizer.weight_decay else []
    match optimizer.name:
        case "adam":
            links += [*decay, optax.scale_by_adam()]
        case "adamw":
            links += [optax.scale_by_adam(), *decay]
        case path if parts.is_path(path):
            links += [*decay, parts.imported(path)(**dict(optimizer.arguments))]
        case _:
            momentum = optimizer.momentum
            trace = [optax.trace(momentum, nesterov=optimizer.nesterov)] if momentum else []
            links += [*decay, *trace]
    rounds_per_epoch = num_examples / (config.budget * config.microbatch_size)
    if config.data.last_round == "drop" and config.data.sharing == "shared":
        rounds_per_epoch //= 1
    schedule = make_schedule(optimizer, epochs=config.epochs, rounds_per_epoch=rounds_per_epoch)
    return optax.chain(*links, schedules.scale_by_progress(schedule))
