"""Makes what never changes in a run, top to bottom; no loop, nothing is trained yet."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from hetjax import executor, gates, ordering, placement, slices, starting, topology, types, wires
from hetjax import mesh as mesh_lib
from hetjax import parts as parts_lib
from hetjax.cluster import emulate
from hetjax.comm import allgather_work, backends, broadcast_once, runtime
from hetjax.comm import communicator as communicator_lib
from hetjax.config import experiment as config_lib
from hetjax.config import kinds
from hetjax.data import feeding, owned
from hetjax.inputs import arguments, order, refusals, replay, rule_identity
from hetjax.liveness import heartbeats as heartbeats_lib
from hetjax.local import clocks, embeddings, gradients, rules, wired
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib
from hetjax.losses import stateful
from hetjax.quota import policies
from hetjax.rounds import programs, state
from hetjax.rounds import setup as setup_lib

logger = logging.getLogger(__name__)


def build(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation | None,
    source: Any,
    *,
    given: arguments.Given,
    per_example_rng: bool,
    more_rules: Mapping[str, rules.LocalRule],
    heartbeats: heartbeats_lib.Heartbeats,
    solved: broadcast_once.BroadcastOnce,
    begins: starting.Starting,
    by_name: named_lib.Beside,
    communicator: communicator_lib.Communicator | None,
    several: bool,
    shard: Any = None,
) -> setup_lib.Setup:
    """Checks what only the data and the devices can tell, and makes what a run needs.

    Args:
        loss_fn, params, optimizer, source: as of `Run`.
        given: the configuration, checked, its parts, and what a worker does with its microbatches.
        per_example_rng: as of `fit`.
        more_rules: of further kinds of rounds, by name, which have no update.
        heartbeats: say what this process does.
        solved: numbers that were solved before.
        begins: told of what takes long.
        by_name: what the loss may ask for.
        communicator: another run's, of the same processes.
        several: whether the run has several processes.
        shard: as for `fit`.

    Raises:
        ValueError: more workers than devices, a loss that is not one number an example, a trace
            that does not fit, an order that needs gradients with a rule that computes something
            else, or data that cannot be read.
    """
    config, chosen = given.config, given.parts
    num_workers = config.cluster.num_workers
    where, own = place_workers(config), owned.Owned(source, config.data.sharing, several=several)
    model_state = _state_of(loss_fn, chosen.reducer)
    of_model = params, by_name.frozen, model_state
    layout = slices.layout(config.slices, where, shard, loss_fn, *of_model)
    where = dataclasses.replace(where, layout=layout)
    if config.form == executor.EAGER and where.leads and communicator is None:
        logger.info(executor.TOLD)
    trace = replay.read_trace(config.replay, num_workers) if config.replay else None
    feeding.check(config, source, chosen, leads=where.leads or own.part is not None)

    first, keys = feeding.first_examples(config, source, per_example_rng=per_example_rng)
    of_loss = loss_fn, params, optimizer, first, keys, by_name.named
    with slices.seen(layout):
        tried = _try(given, *of_loss, leads=where.leads)
    rule, observer = tried.rule, tried.observer

    # What the rounds are made of.
    last = _last_of_pass(config, loss_fn, changes_state=tried.changes_state)
    stream = feeding.make_stream(config, own, where, chosen, last=last)
    rounds = math.ceil(stream.examples_per_epoch / programs.nominal_examples(config))
    policy = policies.of_epochs(chosen.quota, rounds)
    reducer = chosen.reducer.for_run(topology.RunFacts(num_workers, config.seed, solved))
    methods = setup_lib.Methods(policy, chosen.ordering, observer, reducer, chosen.gate)
    cluster, emulated = make_cluster(config), bool(config.cluster.secs_per_microbatch)
    clock = _make_clock(config, chosen.gate, cluster if emulated else None)
    feed = feeding.make_feed(config, own, where, progress=begins.shown)
    communicator = communicator or _meet(where, chosen.reducer)
    gather = _make_gathering(communicator, config, observer, [rule, *more_rules.values()])
    company = setup_lib.Company(communicator, gather, heartbeats, solved)

    begun = state.make_train_state(
        params,
        optimizer,
        observer=observer,
        rule=rule,
        model_state=model_state,
        values=by_name.values.begun,
        num_workers=where.num_rows,
        averages=config.ema > 0,
        memory_rows=setup_lib.memory_rows(config, observer),
        mesh=where.mesh,
        layout=layout,
    )
    setup = setup_lib.Setup(
        config,
        loss_fn,
        per_example_rng,
        where,
        methods,
        setup_lib.Speeds(clock, cluster, emulated, trace),
        stream,
        feed,
        company,
        begun,
        by_name,
        notes=tuple(getattr(source, "notes", ())),
        looks_at=None if tried.looks is None else (source, first),
    )
    maker = programs.Maker(setup, types.Model(params, model_state, by_name.named), begins)
    return dataclasses.replace(setup, programs=_programs(maker, tried, optimizer, more_rules))


def _programs(
    maker: programs.Maker,
    tried: "_Tried",
    optimizer: optax.GradientTransformation | None,
    more_rules: Mapping[str, rules.LocalRule],
) -> setup_lib.Kinds:
    """Of all kinds of rounds."""
    _, passes, rule, observer, looks = tried
    _check_more(more_rules, observer)
    main = maker.make(rule, observer, optimizer, one_pass=passes is None)
    more = {kind: maker.make(each, kind=kind) for kind, each in more_rules.items()}
    has_unsigned = observer is not None and maker.setup.methods.order.balances is not None
    return setup_lib.Kinds(
        {setup_lib.MAIN: main} | more,
        unsigned=maker.make(rule, None, optimizer) if has_unsigned else None,
        embedding=None if passes is None else setup_lib.Embedding(passes, maker.make(passes.first)),
        plain=None if looks in (None, rule) else maker.make(looks),
    )


class _Tried(NamedTuple):
    """What a loss was found to be, and what follows from it."""

    changes_state: bool  # a call of it changes the model's state
    passes: embeddings.Passes | None  # of a loss over a whole round
    rule: rules.LocalRule
    observer: ordering.Observer | None
    looks: rules.LocalRule | None  # whose sums are to show that its examples are apart


def _try(
    given: arguments.Given,
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation | None,
    first: types.PyTree,
    keys: jax.Array,
    named: types.Named,
    *,
    leads: bool,
) -> _Tried:
    """Tries the loss, the rule and the order on the first microbatch and its key or keys."""
    config, chosen, rule, _ = given
    per_example_rng, on_first = keys.ndim > 0, (loss_fn, params, first)
    with executor.of(config.form), named_lib.scope(named):
        traced = losses_lib.check_loss(*on_first, keys)
        passes, rule = embeddings.passes_of(*on_first, keys, config, chosen, rule)
        if runtime.current().seats:
            refusals.check_apart(config, chosen, one_pass=passes is None)
        rule_identity.check(rule, *on_first, optimizer, per_example_rng=per_example_rng)
        of_loss, alone = (loss_fn, traced), rule is not None and rule.traits.by_example
        rule = gradients.rule_of(rule, *of_loss, per_example_rng=per_example_rng)
        sizes, changes_state = programs.sizes(config), traced.changes_state
        observer = order.make(chosen.ordering, sizes, rule, *on_first, changes_state=changes_state)
    if leads and observer is not None and observer.dear and config.form != executor.EAGER:
        name = kinds.name_of("ordering", chosen.ordering)
        logger.warning(f"ordering.method={name!r}: {observer.dear}")
    is_meant = config.loss_over == "microbatch" and not alone
    is_meant = changes_state or is_meant or passes is not None
    is_apart = losses_lib.is_apart(loss_fn) or config.microbatch_size == 1
    compares = observer is not None and observer.compares
    looks = not (is_meant or is_apart or compares) and parts_lib.is_ours(rule)
    seen = gradients.rule_of(None, *of_loss, per_example_rng=per_example_rng) if alone else rule
    if (wire := chosen.reducer.wire) != wires.FLOAT32:
        refusals.check_wire(wire, config)
        rule = wired.wired(rule, wire)
    return _Tried(changes_state, passes, rule, observer, seen if looks else None)


def _meet(where: placement.Placement, reducer: topology.Reducer) -> communicator_lib.Communicator:
    """How the processes meet; says which devices are idle, and that a single worker gossips."""
    num_workers, num_devices = len(where.devices), jax.device_count()
    on_cpu = where.mesh is not None and jax.default_backend() == "cpu"
    used = 0 if where.mesh is None else where.mesh.size
    if on_cpu and where.leads and used < num_devices:
        logger.warning(
            f"{num_workers} worker(s) on {num_devices} CPU devices: the others are idle, and make "
            f"rounds slower. Call hetjax.use_cpu_workers({used}) before JAX is first used"
        )
    reducer.tell_if_alone(num_workers)
    return backends.make(where.mesh, num_workers)


def place_workers(config: config_lib.ExperimentConfig) -> placement.Placement:
    """On a device each, or all on the first one."""
    num_workers = config.cluster.num_workers
    if (own := runtime.current().membership) is not None:
        mesh = mesh_lib.make_worker_mesh(1, slices=slices.sizes(config, 1))
        devices = [mesh.devices.flat[0]] * num_workers
        return placement.Placement(mesh, devices, [own.process_id], lambda: own.leads)
    if config.local == "virtual":
        return placement.Placement(None, [jax.devices()[0]] * num_workers, list(range(num_workers)))
    if platforms := config.cluster.platforms:
        devices = mesh_lib.devices_of(platforms, num_workers)
        return placement.Placement(None, devices, list(range(num_workers)))
    mesh = mesh_lib.make_worker_mesh(num_workers, slices=slices.sizes(config, num_workers))
    return placement.Placement(mesh, mesh_lib.worker_devices(mesh), mesh_lib.own_workers(mesh))


def _check_more(
    more_rules: Mapping[str, rules.LocalRule], observer: ordering.Observer | None
) -> None:
    """Refuses kinds of rounds that an order or a checkpoint cannot have."""
    if setup_lib.MAIN in more_rules:
        raise ValueError(f"rules: {setup_lib.MAIN!r} is the run's own rule; give it as rule=")
    if more_rules and observer is not None:
        raise ValueError(
            f"rules: {', '.join(more_rules)} find no signs of examples, which the order needs: "
            "take one without, such as ordering='random_reshuffling'"
        )
    for kind, rule in more_rules.items():
        rules.check(rule)
        if rule.traits.keeps_worker:
            raise ValueError(
                f"rules: {kind!r} keeps something for each worker; only the run's own rule (rule=) "
                "may"
            )


def _make_clock(
    config: config_lib.ExperimentConfig, gate: gates.Gate, cluster: emulate.EmulatedCluster | None
) -> clocks.WorkerClock:
    """The workers' clock; a gate whose two forms disagree has no place on any."""
    gates.check(gate, config.cluster.num_workers, config.budget)
    virtual = config.local == "virtual" or config.cluster.clock == "virtual"
    return clocks.WorkerClock(
        cluster,
        virtual=virtual,
        num_workers=config.cluster.num_workers,
        gate=gate if virtual and gate.closes else None,
        drop=config.gate.in_flight == "drop",
    )


def _last_of_pass(
    config: config_lib.ExperimentConfig, loss_fn: losses_lib.LossFn, *, changes_state: bool
) -> str:
    """What becomes of a pass's last microbatch that is not full.

    Padding is for losses whose examples are known to be apart: all processes know it alike.

    Raises:
        ValueError: padding would be part of what the model's state is made of.
    """
    is_told = getattr(loss_fn, "takes_mask", False)
    if config.data.last == "auto":
        is_apart = config.loss_over == "example" or losses_lib.is_apart(loss_fn)
        return "pad" if is_told or (is_apart and not changes_state) else "fill"
    if config.data.last == "pad" and changes_state and not is_told:
        raise ValueError(
            "data.last: got 'pad', and the model's state would hold padding. Take 'fill' or "
            "'drop', or a loss that is given mask f32[B]"
        )
    return config.data.last


def _state_of(loss_fn: losses_lib.LossFn, reducer: topology.Reducer) -> types.PyTree:
    """The model's, before the first round; () where it keeps none.

    Raises:
        ValueError: it has sums, and the reducer gossips.
    """
    if not isinstance(loss_fn, stateful.StatefulLoss):
        return ()
    if reducer.gossips and stateful.SUM in loss_fn.modes:
        raise ValueError(
            "state_reduce: got 'sum', and a reducer that gossips takes means. Take "
            "reducer='all_reduce'"
        )
    return loss_fn.model_state


def _make_gathering(
    communicator: communicator_lib.Communicator,
    config: config_lib.ExperimentConfig,
    observer: ordering.Observer | None,
    all_rules: list[rules.LocalRule],
) -> allgather_work.WorkAllGather | None:
    if communicator.alone:
        return None
    sizes = programs.sizes(config)
    return allgather_work.WorkAllGather(
        communicator,
        most_signs=0 if observer is None else sizes.microbatch_size * sizes.max_microbatches,
        microbatch_size=sizes.microbatch_size,
        most_numbers=max(
            2 * len(rule.reads.metrics) + 2 * rule.traits.weighs_itself for rule in all_rules
        ),
    )


def make_cluster(config: config_lib.ExperimentConfig) -> emulate.EmulatedCluster | None:
    """The emulated speeds and presence, if the configuration says either.

    Without speeds the cluster tells presence alone; its times are arbitrary.
    """
    cluster = config.cluster
    if not cluster.secs_per_microbatch and not cluster.changes:
        return None
    return emulate.EmulatedCluster(
        cluster.secs_per_microbatch or (1.0,) * cluster.num_workers,
        cluster.overhead_secs,
        delay=cluster.delay,
        delay_cv=cluster.delay_cv,
        delay_per=cluster.delay_per,
        changes=cluster.changes,
        seed=config.seed if cluster.seed < 0 else cluster.seed,
    )
