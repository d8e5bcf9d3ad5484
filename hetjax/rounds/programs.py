"""Makes what a kind of round runs: the local phase and the synchronisation of a rule.

Each kind has programs of its own, made of the parts that all kinds share.
"""

import dataclasses
from typing import Any

import jax
import optax

from hetjax import executor, gates, ordering, starting, types
from hetjax import mesh as mesh_lib
from hetjax import parts as parts_lib
from hetjax.comm import communicator as communicator_lib
from hetjax.comm import key_value_store as store_lib
from hetjax.config import experiment as config_lib
from hetjax.local import fused, jitted, rules, stepped
from hetjax.local.virtual import Virtual
from hetjax.rounds import reduce, sync
from hetjax.rounds import setup as setup_lib


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes the programs of each kind of round, of what all kinds share."""

    setup: setup_lib.Setup  # without its programs
    model: types.Model  # before the first round, without worker axis
    begins: starting.Starting

    def make(
        self,
        rule: rules.LocalRule,
        observer: ordering.Observer | None = None,
        optimizer: optax.GradientTransformation | None = None,
        *,
        kind: str = setup_lib.MAIN,
        one_pass: bool = True,
    ) -> setup_lib.Programs:
        """The programs of one kind; without an optimiser its rounds have no update. A round may be
        of several passes, of which the last is given what the others found."""
        setup, mesh = self.setup, self.setup.where.mesh
        steps = rules.with_observer(rule, observer, updates=optimizer is not None)
        sums = _make_sums(self, rule)
        communicator = setup.company.communicator
        has_more = rule.traits.keeps_worker or bool(jax.tree.leaves(self.model.state))
        has_more = observer is not None or (has_more and not communicator.carries_more)
        if not communicator.has_collectives and (has_more or not sums.meet_before):
            raise ValueError(self._refusal(rule))
        # The gathering and the sums of several processes take contributions as they are.
        where = setup.where
        packed = setup.config.form == "stepped" and communicator.alone and where.layout is None
        begin = jitted.InPlace(sync.make_begin(steps, mesh, packed=packed), None, where.of_rows)
        # In one program with the update, where nothing stands between them. Gossip has no sum over
        # the workers there, and XLA would round in another way.
        late = packed and mesh is not None and optimizer is not None and one_pass
        late = late and setup.methods.reducer.mixing is None
        return setup_lib.Programs(
            kind=kind,
            rule=rule,
            updates=optimizer is not None,
            local=_make_local(self, steps, signed=observer is not None, finishes=not late),
            begin=lambda *given: begin.call(*given),
            sync=_make_sync(setup, rule, steps, observer, optimizer, sums, finishes=late),
            sums=sums,
            steps=steps,
            finishes_late=late,
        )

    def _refusal(self, rule: rules.LocalRule) -> str:
        """Of what processes that share a GPU cannot do together."""
        shapes = rules.contribution_shapes(rule, *self.model)
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(shapes)})
        dtypes = dtypes or ["arrays whose shapes depend on what a round is given"]
        methods, weighted = self.setup.methods, weighting(self.setup.config, gossips=False)
        return self.setup.company.communicator.no_collectives + (
            "They can add up gradients in memory: with reducer='all_reduce', an order that looks "
            "at no gradients, such as 'random_reshuffling', data.weighting='example' where shards "
            "are private, a model without state (BatchNorm has some), a rule that keeps nothing of "
            "a worker, and sums of one type, float32 or float64, of 1 GiB at most over all of "
            f"them. This run has the {methods.reducer.name}, the order "
            f"{parts_lib.named(methods.order)}, examples weighted by {weighted}, sums in "
            f"{', '.join(dtypes)}, {len(jax.tree.leaves(self.model.state))} arrays of a "
            "model's state, a rule that keeps "
            f"{'something' if rule.traits.keeps_worker else 'nothing'}. Or start one process, "
            "whose workers local='virtual' plays"
        )


def nominal_examples(config: config_lib.ExperimentConfig) -> int:
    """Of a full round."""
    return config.budget * config.microbatch_size


def weighting(config: config_lib.ExperimentConfig, *, gossips: bool) -> str:
    """What is minimised; without shards and gossip all examples are in one sum."""
    has_parts = gossips or config.data.sharing != "shared"
    return config.data.weighting if has_parts else "example"


def _make_sums(common: Maker, rule: rules.LocalRule) -> communicator_lib.Sums:
    """How the sums meet: before the sync program where they are one plain sum."""
    setup = common.setup
    reducer, communicator = setup.methods.reducer, setup.company.communicator
    weighted = weighting(setup.config, gossips=False)
    in_one_unit = rule.reads.weight_grads is None and weighted == "example"
    if rule.traits.weighs_itself:
        in_one_unit = not rule.traits.by_share or setup.config.data.sharing == "shared"
    if reducer.is_plain_sum and in_one_unit and not communicator.alone:
        shapes = rules.contribution_shapes(rule, *common.model)
        return communicator.sums(shapes, reducer.wire, setup.where.layout)
    return communicator_lib.Sums()


def _make_sync(
    setup: setup_lib.Setup,
    rule: rules.LocalRule,
    steps: rules.LocalSteps,
    observer: ordering.Observer | None,
    optimizer: optax.GradientTransformation | None,
    sums: communicator_lib.Sums,
    *,
    finishes: bool,
) -> jitted.InPlace:
    """What the workers contributed is used up, unless all devices read it in one place."""
    config, reducer, where = setup.config, setup.methods.reducer, setup.where
    how = reduce.How(
        reducer,
        config.cluster.num_workers,
        nominal_examples(config),
        weighting=weighting(config, gossips=reducer.mixing is not None),
        by_share=rule.traits.by_share,
        totals=sums.totals,
        optimizer=optimizer,
        nonfinite=config.nonfinite,
        ema=config.ema,
        values=setup.by_name.values,
        rounds_an_epoch=setup.rounds_an_epoch,
    )
    synchronise = sync.make_sync(how, steps, mesh=where.mesh, observer=observer, finishes=finishes)
    lay = None
    if where.mesh is not None and (where.layout or len(where.own) < where.num_rows):
        whole = mesh_lib.everywhere(where.mesh)

        def lay(made: sync.Synchronised) -> Any:
            placed: dict[str, Any] = {name: where.of_rows(x) for name, x in made._asdict().items()}
            return sync.Synchronised(**(placed | {"metrics": whole, "flips": whole}))

    # Without an update, of a slice's arrays counts alone come back, and lie elsewhere.
    is_kept = sums.meet_before or (where.layout is not None and optimizer is None)
    return jitted.InPlace(synchronise, None if is_kept else 1, lay)


def _make_local(
    common: Maker, steps: rules.LocalSteps, *, signed: bool, finishes: bool
) -> stepped.Stepped | fused.Fused | Virtual:
    setup = common.setup
    config, methods, clock, where = setup.config, setup.methods, setup.speeds.clock, setup.where
    if config.form == "virtual":
        return Virtual(
            steps,
            config.cluster.num_workers,
            clock=clock,
            signed=signed,
            same_evidence=methods.order.coordinated,
            replicas_equal=methods.reducer.keeps_replicas_equal,
        )
    if config.form == "fused" and where.mesh is not None:
        most = sizes(config).max_microbatches
        return fused.Fused(steps, where.mesh, clock=clock, max_microbatches=most)
    gate = None
    if methods.gate.closes and not config.replay and not clock.virtual:
        alone = len(where.own) == len(where.devices)
        communicator = setup.company.communicator
        board = None if alone else store_lib.RoundStore("gate", lambda: communicator.round_number)
        gate = gates.begin(methods.gate, board)
    return stepped.Stepped(
        steps,
        where,
        clock=clock,
        gate=gate,
        heartbeats=setup.company.heartbeats,
        begins=common.begins,
        signed=signed,
        depth=config.dispatch_depth or (1 if gate or where.devices[0].platform == "cpu" else 2),
        finishes=finishes,
        eager=config.form == executor.EAGER,
    )


def sizes(config: config_lib.ExperimentConfig) -> ordering.Sizes:
    """For which an order's observer is made."""
    most = min(config.quota.max_microbatches or config.budget, config.budget)
    return ordering.Sizes(config.cluster.num_workers, config.microbatch_size, most)
