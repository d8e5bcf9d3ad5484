"""What a round is to do, and the state that it leaves: pure functions of a run's state.

Nothing here computes a gradient or waits for a clock. `Run.round` does what is planned.
"""

from typing import Any

import numpy as np

from hetjax import parts as parts_lib
from hetjax import quota, types
from hetjax.checkpoints import leaves
from hetjax.data import stream as stream_lib
from hetjax.quota import asking
from hetjax.rounds import local, programs, setup
from hetjax.rounds.run_state import Executed, Plan, RoundsState

_EMPTY_ROUNDS = 1000  # in a row, after which a run would have no end


def plan(
    parts: setup.RunParts,
    state: RoundsState,
    *,
    kind: str = programs.MAIN,
    given: types.PyTree = (),
    again: stream_lib.Assignment | None = None,
) -> Plan:
    """The next round: quotas by the policy or the trace, and the microbatches that come next.

    `again` are the microbatches of a past round, to be done once more in place of the next ones.
    The quotas of this round cut them, and no gate closes it.

    Raises:
        ValueError: the trace that is replayed does not fit.
    """
    config, index = parts.config, state.rounds_done
    num_workers = len(parts.devices)
    present = np.ones(num_workers, bool)
    if parts.cluster is not None:
        present = parts.cluster.present_at(index)
    caps = np.where(present, config.quota.max_microbatches or config.budget, 0)
    quotas, limits, policy = _assign(parts, state, kind, present, caps, again)
    may_close = parts.trace is None and again is None
    may_close = may_close and not parts.stream.is_last(state.stream, quotas)
    closing = parts.clock.close(index, quotas) if may_close and parts.gate.closes else None
    if closing is not None and not closing.microbatches_done.any():
        _check_progress(parts, index, quotas)
    if again is None:
        assigned = parts.stream.plan(state.stream, quotas)
    else:
        assigned = parts.stream.again(again, quotas)
    epoch = parts.stream.epoch(state.stream)
    passes, observer, signed = state.passes, parts.observer, False
    if observer is not None:
        signed = any(_balances(parts, index) for index in set(assigned.passes.tolist()))
        if signed:  # all begin a pass with the epoch, or each begins its own
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
        signed=signed,
        active=active(parts, index),
        kind=kind,
        programs=_programs_of(parts, kind, signed=signed),
        given=given,
        is_again=again is not None,
    )


def active(parts: setup.RunParts, round_index: int) -> Any:
    """What the sync phase of a round is told of the exchanges: bool[M], or ()."""
    mixing = parts.reducer.mixing
    return () if mixing is None else mixing.gossip.active(round_index)


def _programs_of(parts: setup.RunParts, kind: str, *, signed: bool) -> programs.Programs:
    """What a round runs."""
    if parts.unsigned is not None and kind == programs.MAIN and not signed:
        return parts.unsigned
    return parts.programs[kind]


def begun_policies(parts: setup.RunParts) -> dict[str, Any]:
    """The states of the quota policy before the first round, one for each kind of round."""
    sizes = len(parts.devices), parts.config.budget
    begun = {kind: parts.policy.init(*sizes) for kind in parts.programs}
    for state in begun.values():
        leaves.check_begun(state, f"{parts.policy_name}init{sizes}")
    return begun


def warm_up_plan(
    parts: setup.RunParts, state: RoundsState, *, kind: str, signed: bool, given: types.PyTree
) -> Plan:
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
        signed=signed,
        active=active(parts, 0),
        kind=kind,
        programs=_programs_of(parts, kind, signed=signed),
        given=given,
    )


def commit(parts: setup.RunParts, plan: Plan, executed: Executed) -> RoundsState:
    """The state after a round; waits for the signs of its examples, where there are any.

    Args:
        parts: of the run.
        plan: what the round was to do.
        executed: what came of it.
    """
    state, policy, work = plan.rounds, plan.policy, executed.work
    if _asks_policy(parts):
        policy = parts.policy.observe(policy, _times(work, plan.present))
        _check_kept(parts, policy, "observe(state, times)")
    stream = state.stream
    if not plan.is_again:  # else its examples are counted already, and the orders stay
        signs = work.example_signs
        if signs is not None:
            signs = _flipped(signs, executed.sums.flips)
        stream = parts.stream.commit(stream, plan.assigned, work.microbatches_done, signs)
    keeps_quotas = plan.is_full or not state.full_quotas.any()
    return RoundsState(
        policies={**state.policies, plan.kind: policy},
        stream=stream,
        passes=plan.passes,
        full_quotas=plan.quotas if keeps_quotas else state.full_quotas,
        rounds_done=state.rounds_done + 1,
        generations=state.generations,
        generation=state.generation + 1,
    )


def _assign(
    parts: setup.RunParts,
    state: RoundsState,
    kind: str,
    present: np.ndarray,
    caps: np.ndarray,
    again: stream_lib.Assignment | None,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """`(quotas, limits, policy's state)`: by the policy, or as the trace has them."""
    config, stream, policy = parts.config, parts.stream, state.policies[kind]
    total = len(again.example_ids) if again is not None else 0
    if total > caps.sum():
        raise ValueError(
            f"again: {total} microbatches are to be done once more, and the workers that are "
            f"present may have {caps.tolist()}; raise quota.max_microbatches or lower the budget"
        )
    if parts.trace is None:
        gated = parts.gate.closes
        total = total or stream.total(state.stream, config.budget, gated=gated)
        if _asks_policy(parts):
            quotas, policy = asking.assigned(parts.policy, policy, total, caps)
            _check_kept(parts, policy, "assign(state, total, caps)")
        else:
            quotas = np.array([total])
        if again is None:
            quotas = stream.fitted(state.stream, quotas, present)
        else:
            quotas = stream.again(again, quotas).quotas
        return quotas, quotas, policy
    if state.rounds_done >= len(parts.trace):
        raise ValueError(
            f"replay: {config.replay!r} has {len(parts.trace)} rounds, and here is one more; ask "
            "for fewer, or replay with the configuration that wrote it"
        )
    quotas, done = parts.trace[state.rounds_done]
    if again is None:
        total = stream.total(state.stream, config.budget)
        served = stream.fitted(state.stream, quotas, quotas > 0)
        fits = quotas.sum() <= total and np.all((quotas <= served) & (done <= quotas))
    else:  # all of it once more, and of private examples by those who have them
        fits = quotas.sum() == total and np.all(done == quotas)
        fits = fits and np.array_equal(stream.again(again, quotas).quotas, quotas)
    if not fits or np.any(quotas > caps):
        raise ValueError(
            f"replay: round {state.rounds_done} of {config.replay!r} has quotas "
            f"{quotas.tolist()}, but here it has {total} microbatches, caps {caps.tolist()}; "
            "replay with the configuration that wrote it"
        )
    return quotas, done, policy


def _asks_policy(parts: setup.RunParts) -> bool:
    """Whether a round has a choice of quotas: a trace has none, nor have hetjax's own policies for
    one worker. A user's may have other reasons to be asked."""
    has_choice = len(parts.devices) > 1 or parts.policy_form is not None
    return parts.trace is None and has_choice


def _check_kept(parts: setup.RunParts, policy: Any, call: str) -> None:
    """Refuses a state of a user's policy whose form has changed."""
    if parts.policy_form is not None:
        leaves.check_kept(policy, parts.policy_form, f"{parts.policy_name}{call}")


def _balances(parts: setup.RunParts, pass_index: int) -> bool:
    """Whether the order needs the signs of a pass."""
    if parts.method.balances is None:
        return True
    answer = parts.method.balances(pass_index)
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    raise ValueError(
        f"ordering: {parts_lib.named(parts.method)}: balances({pass_index}) returned "
        f"{parts_lib.shown(answer)}; it must return True or False, whether place needs the signs "
        "of that pass"
    )


def _check_progress(parts: setup.RunParts, index: int, quotas: np.ndarray) -> None:
    """Refuses a gate that gives up all that is in flight, in round after round."""
    for later in range(index + 1, index + _EMPTY_ROUNDS):
        closing = parts.clock.close(later, quotas)
        if closing is None or closing.microbatches_done.any():
            return
    raise ValueError(
        f"gate: with gate.in_flight='drop' {parts_lib.named(parts.gate)} closes rounds of the "
        f"quotas {quotas.tolist()} before a microbatch is finished, and nothing was finished in "
        f"{_EMPTY_ROUNDS} rounds from round {index} on; let it close later, or set "
        "gate.in_flight='finish'"
    )


def _times(work: local.Work, present: np.ndarray) -> quota.RoundTimes:
    """What the policy is told: what a worker's process needs before its compute is its own too."""
    host_secs = np.where(work.microbatches_done > 0, work.host_secs, 0.0)
    return quota.RoundTimes(
        work.microbatches_done.copy(),
        work.first_secs + host_secs,
        work.compute_secs + host_secs,
        present.copy(),
    )


def _flipped(signs: list[np.ndarray], flips: Any) -> list[np.ndarray]:
    """The example signs of each worker, multiplied as the coordination says: `Synchronised`."""
    return [
        own * (flip if flip.ndim == 0 else flip[: own.size].reshape(own.shape))
        for own, flip in zip(signs, np.asarray(flips), strict=True)
    ]
