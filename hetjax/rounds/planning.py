"""What a round is to do, and the state that it leaves: pure functions of a run's state.

Nothing here computes a gradient or waits for a clock. `Run.execute` does what is planned.
"""

from typing import Any

import numpy as np

from hetjax import parts as parts_lib
from hetjax import quota, types
from hetjax.rounds import gathering, local, programs, setup, sync
from hetjax.rounds.run_records import Plan, RunState


def plan(
    parts: setup.RunParts, state: RunState, *, kind: str = programs.MAIN, given: types.PyTree = ()
) -> Plan:
    """The next round: quotas by the policy or the trace, and the microbatches that come next.

    Raises:
        ValueError: the trace that is replayed does not fit.
    """
    config, index = parts.config, state.rounds_done
    num_workers = len(parts.devices)
    present = np.ones(num_workers, bool)
    if parts.cluster is not None:
        present = parts.cluster.present_at(index)
    caps = np.where(present, config.quota.max_microbatches or config.budget, 0)
    quotas, limits, policy = _assign(parts, state, kind, present, caps)
    may_close = parts.trace is None and not parts.stream.is_last(state.stream, quotas)
    closing = parts.clock.close(index, quotas) if may_close else None
    assigned = parts.stream.plan(state.stream, quotas)
    epoch = parts.stream.epoch(state.stream)
    passes, observer = state.passes, parts.observer
    if observer is not None:  # all begin a pass with the epoch, or each begins its own
        passes = np.full(num_workers, epoch) if observer.coordinated else assigned.passes
    return Plan(
        state=state,
        round_index=index,
        epoch=epoch,
        assigned=assigned,
        quotas=quotas,
        limits=limits if closing is None else closing.microbatches_done,
        caps=caps,
        present=present,
        is_full=int(quotas.sum()) == config.budget,
        may_close=may_close,
        closing=closing,
        policy=policy,
        passes=passes,
        active=parts.active(index),
        kind=kind,
        given=given,
    )


def warm_up_plan(parts: setup.RunParts, state: RunState, *, kind: str, given: types.PyTree) -> Plan:
    """A round of one microbatch of padding for every worker: compiles all, changes nothing."""
    num_workers = len(parts.devices)
    assigned = local.warm_up_plan(num_workers, parts.config.microbatch_size)
    return Plan(
        state=state,
        round_index=None,
        epoch=0,
        assigned=assigned,
        quotas=assigned.quotas,
        limits=assigned.quotas,
        caps=assigned.quotas,
        present=np.ones(num_workers, bool),
        is_full=False,
        may_close=True,
        closing=None,
        policy=None,
        passes=state.passes,
        active=parts.active(0),
        kind=kind,
        given=given,
    )


def commit(
    parts: setup.RunParts,
    state: RunState,
    plan: Plan,
    done: gathering.Done,
    clocks: gathering.Clocks,
    sums: sync.Synchronised,
) -> RunState:
    """The state after a round; waits for the signs of its examples, where there are any.

    Args:
        parts: of the run.
        state: before the round.
        plan: what it was to do.
        done: what all workers did of it.
        clocks: and when.
        sums: what the devices made of it.
    """
    policy = plan.policy
    if parts.trace is None:  # of a trace the policy was never asked
        policy = parts.policy.observe(policy, _times(done, clocks))
    stream = parts.stream.commit(
        state.stream, plan.assigned, done.microbatches_done, done.flipped_signs()
    )
    keeps_quotas = plan.is_full or not state.full_quotas.any()
    return RunState(
        train=sums.state,
        carried=sums.carried if plan.kind == programs.MAIN else state.carried,
        policies={**state.policies, plan.kind: policy},
        stream=stream,
        passes=plan.passes,
        full_quotas=plan.quotas if keeps_quotas else state.full_quotas,
        rounds_done=state.rounds_done + 1,
        lineage=state.lineage,
        generation=state.generation + 1,
    )


def _assign(
    parts: setup.RunParts, state: RunState, kind: str, present: np.ndarray, caps: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Any]:
    """`(quotas, limits, policy's state)`: by the policy, or as the trace has them."""
    config, stream, policy = parts.config, parts.stream, state.policies[kind]
    if parts.trace is None:
        gated = parts.gate.closes
        total = stream.total(state.stream, config.budget, gated=gated)
        quotas, policy = _checked(parts.policy.assign(policy, total, caps), total, caps)
        quotas = stream.fitted(state.stream, quotas, present)
        return quotas, quotas, policy
    quotas, done = parts.trace[state.rounds_done]
    served = stream.fitted(state.stream, quotas, quotas > 0)
    total = stream.total(state.stream, config.budget)
    if quotas.sum() > total or np.any((quotas > caps) | (quotas > served) | (done > quotas)):
        raise ValueError(
            f"replay: round {state.rounds_done} of {config.replay!r} has quotas "
            f"{quotas.tolist()}, but here it has {total} microbatches, caps {caps.tolist()}; "
            "replay with the configuration that wrote it"
        )
    return quotas, done, policy


def _checked(assigned: Any, total: int, caps: np.ndarray) -> tuple[np.ndarray, Any]:
    """`(quotas, policy's state)`, where they are what a policy may assign."""
    is_pair = isinstance(assigned, tuple) and len(assigned) == 2
    quotas = np.asarray(assigned[0]) if is_pair else np.zeros(0)
    is_right = quotas.shape == caps.shape and quotas.dtype.kind in "iu"
    if is_right and quotas.sum() == total and (quotas >= 0).all() and (quotas <= caps).all():
        return quotas, assigned[1]
    got = quotas.tolist() if is_pair else parts_lib.shown(assigned)
    raise ValueError(
        f"quota: assign(state, total={total}, caps={caps.tolist()}) of the policy returned {got}. "
        "It must return (quotas, state): whole numbers, one for each worker, from 0 to its cap, "
        "whose sum is total; hetjax.quota.largest_remainder(weights, total, caps=caps) makes such"
    )


def _times(done: gathering.Done, clocks: gathering.Clocks) -> quota.RoundTimes:
    """What the policy is told: what a worker's process needs before its compute is its own too."""
    host_secs = np.where(done.microbatches_done > 0, clocks.host_secs, 0.0)
    return quota.RoundTimes(
        done.microbatches_done, clocks.first_secs + host_secs, clocks.compute_secs + host_secs
    )
