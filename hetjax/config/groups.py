"""The fields of a configuration with their defaults and units, in groups.

`arguments` of a group are the options of the part that it names, which the part's factory checks
(`hetjax.config.kinds`). Data sets by name, reference models and their optimisers are in
`hetjax.zoo.config`.
"""

import dataclasses
from typing import Annotated, Any

from hetjax.cluster import emulate
from hetjax.config import fields, kinds
from hetjax.parts.options import (
    choice,
    count_or,
    flag,
    integer,
    number,
    numbers,
    one_or_several,
    several,
    text,
)

LINE_SEARCH = "L-BFGS and line searches try several points an update; a round has one gradient"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How the examples reach the workers."""

    feed: Annotated[
        str, choice("auto", "resident", "streamed", says="data on each device, or read ahead")
    ] = "auto"
    readers: Annotated[
        int | str, count_or("processes:", says="threads that read a source, or processes")
    ] = 1
    last: Annotated[
        str, choice("auto", "pad", "fill", "drop", says="a pass's last microbatch that is not full")
    ] = "auto"
    last_round: Annotated[
        str, choice("keep", "drop", says="an epoch's last round that is not full")
    ] = "keep"
    sharing: Annotated[
        str, choice("shared", "private", "process_local", says="one order, shards, or own parts")
    ] = "shared"
    weighting: Annotated[
        str, choice("shard", "example", "shard_mean", says="whose examples count how much")
    ] = "shard"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuotaConfig:
    """How many microbatches each worker computes in a round."""

    policy: Annotated[str, text(says="what finds the quotas")] = "adaptive"
    max_microbatches: Annotated[int, integer(says="cap of every worker; 0: the budget")] = 0
    arguments: Annotated[Any, fields.ARGUMENTS] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderingConfig:
    """The order of the examples."""

    method: Annotated[str, text(says="what finds each epoch's order")] = "random_reshuffling"
    arguments: Annotated[Any, fields.ARGUMENTS] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReducerConfig:
    """What a synchronisation does."""

    name: Annotated[str, text(says="what a synchronisation does")] = "all_reduce"
    arguments: Annotated[Any, fields.ARGUMENTS] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig:
    """What closes a round before all quotas are done."""

    trigger: Annotated[str, text(says="what closes a round early")] = "none"
    in_flight: Annotated[
        str, choice("finish", "drop", says="microbatches that are computing when it closes")
    ] = "finish"
    arguments: Annotated[Any, fields.ARGUMENTS] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """What a worker does with its microbatches."""

    name: Annotated[
        str, text(says="what a worker does with its microbatches; or 'module:function'")
    ] = kinds.DEFAULT_RULE
    arguments: Annotated[Any, fields.ARGUMENTS] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The workers, and the speeds that are emulated."""

    num_workers: Annotated[int, integer(at_least=1, says="with those that join later")] = 4
    secs_per_microbatch: Annotated[
        tuple[float, ...], numbers(above=0.0, says="emulated, one for each worker; (): real speeds")
    ] = ()
    overhead_secs: Annotated[
        float | tuple[float, ...],
        one_or_several(number(at_least=0.0), says="emulated, of a round, beside the microbatches"),
    ] = 0.0
    delay: Annotated[
        str, choice(*emulate.DELAYS, says="how emulated times vary about their means")
    ] = "constant"
    delay_cv: Annotated[float, number(above=0.0, says="deviation / mean, of delay 'gamma'")] = 0.1
    delay_per: Annotated[str, choice(*emulate.DELAY_PER, says="what a delay is drawn for")] = (
        "microbatch"
    )
    changes: Annotated[
        tuple[emulate.Change, ...],
        fields.records(emulate.Change, says="of speeds and presence, by round"),
    ] = ()
    clock: Annotated[
        str, choice("wall", "virtual", says="emulated workers sleep, or times are added up")
    ] = "wall"
    seed: Annotated[int, integer(at_least=-1, says="of emulated times; -1: that of the run")] = -1
    platforms: Annotated[
        tuple[str, ...], several(text(), says="of JAX, such as ('cuda', 'cpu'); (): the default")
    ] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlicesConfig:
    """The devices of each worker: axes and their sizes are `arguments`; without any it has one."""

    shard: Annotated[str, text(may_be_empty=True, says="'fsdp' or 'module:function'")] = ""
    arguments: Annotated[Any, fields.ARGUMENTS] = ()

    @property
    def axes(self) -> dict[str, int]:
        """Their sizes; one may be 0, for what is left."""
        return dict(self.arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run with a workdir is saved; at its end it always is."""

    every_secs: Annotated[
        float, number(at_least=0.0, says="seconds between two checkpoints; 0: not by the clock")
    ] = 60.0
    every_rounds: Annotated[int, integer(says="rounds between two; 0: not by rounds")] = 0
    keep: Annotated[int, integer(at_least=1, says="how many of the newest ones stay")] = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One run, checked. Make it with `experiment.validate`."""

    seed: Annotated[int, integer(says="of the order, of random keys and of emulated noise")] = 0
    epochs: Annotated[int, integer(at_least=1, says="passes over the data")] = 20
    microbatch_size: Annotated[int, integer(at_least=1, says="examples in one")] = 16
    budget: Annotated[int, integer(at_least=1, says="microbatches a round, of all workers")] = 20
    max_rounds: Annotated[int, integer(says="rounds after which the run ends; 0: no limit")] = 0
    eval_every: Annotated[int, integer(at_least=1, says="epochs between two evaluations")] = 1
    eval_every_rounds: Annotated[int, integer(says="rounds between further ones; 0: none")] = 0
    best_by: Annotated[str, text(may_be_empty=True, says="metric of the best; '': the loss")] = ""
    best_mode: Annotated[str, choice("min", "max", says="which of its values is the best")] = "min"
    ema: Annotated[
        float,
        number(at_least=0.0, below=1.0, says="decay of an average of the parameters; 0: none"),
    ] = 0.0
    local: Annotated[
        str, choice("stepped", "fused", "virtual", says="what calls the workers' function")
    ] = "stepped"
    dispatch_depth: Annotated[
        int,
        integer(says="microbatches that a device has; 0: 2 on accelerators without a gate, or 1"),
    ] = 0
    replay: Annotated[str, text(may_be_empty=True, says="metrics.jsonl with the quotas")] = ""
    nonfinite: Annotated[
        str, choice("stop", "skip", "skip_update", says="at a loss or gradient that is not finite")
    ] = "stop"
    compilation_cache: Annotated[
        str, text(says="directory of compiled programs; auto: the user's cache; off: none")
    ] = "auto"
    loss_over: Annotated[
        str, choice("auto", "example", "microbatch", says="what an example's loss may depend on")
    ] = "auto"
    debug: Annotated[bool, flag(says="rounds without compiled programs, for print and pdb")] = False
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    quota: QuotaConfig = dataclasses.field(default_factory=QuotaConfig)
    ordering: OrderingConfig = dataclasses.field(default_factory=OrderingConfig)
    reducer: ReducerConfig = dataclasses.field(default_factory=ReducerConfig)
    gate: GateConfig = dataclasses.field(default_factory=GateConfig)
    rule: RuleConfig = dataclasses.field(default_factory=RuleConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    slices: SlicesConfig = dataclasses.field(default_factory=SlicesConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)

    @property
    def form(self) -> str:
        """Of the local phase: eager, or else `local`. The setup has decided it."""
        return "eager" if self.debug else self.local
