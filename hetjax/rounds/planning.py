"""What a round is to do, and the state that it leaves: pure functions of a run's state.

Nothing here computes a gradient or waits for a clock. `Run.round` does what is planned.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from hetjax import parts as parts_lib
from hetjax import quota, types
from hetjax.checkpoints import leaves
from hetjax.data import stream as stream_lib
from hetjax.local import stepped
from hetjax.quota import policies
from hetjax.rounds import setup as setup_lib
from hetjax.rounds.run_state import Executed, Plan, RoundsState

_EMPTY_ROUNDS = 1000  # in a row, after which a run would have no end


def plan(
    setup: setup_lib.Setup,
    state: RoundsState,
    *,
    kind: str = setup_lib.MAIN,
    given: types.PyTree = (),
    again: stream_lib.Assignment | None = None,
) -> Plan:
    """The next round: quotas by the policy or the trace, and the microbatches that come next.

    `again` are the microbatches of a past round, to be done once more in place of the next ones.
    The quotas of this round cut them, and no gate closes it.

    Raises:
        ValueError: the trace that is replayed does not fit.
    """
    config, index, stream = setup.config, state.rounds_done, setup.stream
    caps = np.full(len(setup.where.devices), config.quota.max_microbatches or config.budget)
    caps[~setup.company.communicator.present] = 0
    if setup.speeds.cluster is not None:
        caps[~setup.speeds.cluster.present_at(index)] = 0
    quotas, limits, policy = _assign(setup, state, kind, caps, again)
    may_close = setup.speeds.trace is None and again is None
    may_close = may_close and not stream.is_last(state.stream, quotas)
    closing = None
    if may_close and setup.methods.gate.closes:
        closing = setup.speeds.clock.close(index, quotas)
    if closing is not None:
        limits = closing.microbatches_done
        if not limits.any():
            _check_progress(setup, index, quotas)
    assigned = stream.plan(state.stream, quotas) if again is None else stream.again(again, quotas)
    passes, observer, signed = state.passes, setup.methods.observer, False
    if observer is not None:
        signed = any(_balances(setup, index) for index in set(assigned.passes.tolist()))
        if signed and observer.coordinated:  # all begin a pass with the epoch
            passes = np.full(caps.size, stream.epoch(state.stream))
        elif signed:  # each begins its own
            passes = assigned.passes
    return Plan(
        state,
        stepped.LocalPlan(index, assigned, limits, setup.feed, may_close),
        quotas=quotas,
        caps=caps,
        closing=closing,
        policy=policy,
        passes=passes,
        signed=signed,
        active=setup.methods.reducer.active(index),
        programs=setup.programs.of(kind, signed=signed),
        given=given,
        is_again=again is not None,
    )


def begun_policies(setup: setup_lib.Setup) -> dict[str, Any]:
    """The states of the quota policy before the first round, one for each kind of round."""
    sizes = len(setup.where.devices), setup.config.budget
    begun = {kind: setup.methods.policy.init(*sizes) for kind in setup.programs.of_kind}
    for state in begun.values():
        leaves.check_begun(state, f"{setup.policy_name}init{sizes}")
    return begun


def warm_up_plan(
    setup: setup_lib.Setup, state: RoundsState, *, kind: str, signed: bool, given: types.PyTree
) -> Plan:
    """A round of one microbatch of padding for every worker: compiles all, changes nothing."""
    num_workers = len(setup.where.devices)
    padding = np.full((num_workers, setup.config.microbatch_size), stream_lib.PADDING, np.int32)
    starts, passes = np.arange(num_workers + 1), np.zeros(num_workers, int)
    assigned = stream_lib.Assignment(padding, starts, passes)
    return Plan(
        state,
        stepped.LocalPlan(None, assigned, assigned.quotas, setup.feed),
        quotas=assigned.quotas,
        caps=assigned.quotas,
        passes=state.passes,
        signed=signed,
        active=setup.methods.reducer.active(0),
        programs=setup.programs.of(kind, signed=signed),
        given=given,
    )


def commit(setup: setup_lib.Setup, plan: Plan, executed: Executed) -> RoundsState:
    """The state after a round; waits for the signs of its examples, where there are any.

    Args:
        setup: of the run.
        plan: what the round was to do.
        executed: what came of it.
    """
    state, policy, work, kind = plan.rounds, plan.policy, executed.work, plan.programs.kind
    if setup.asks_policy:
        # What a worker's process needs before its compute is its own, too.
        host_secs = np.where(work.microbatches_done > 0, work.host_secs, 0.0)
        first, last = work.first_secs + host_secs, work.compute_secs + host_secs
        done, present = work.microbatches_done.copy(), plan.caps > 0
        policy = setup.methods.policy.observe(policy, quota.RoundTimes(done, first, last, present))
        _check_kept(setup, policy, "observe(state, times)")
    stream = state.stream
    if not plan.is_again:  # else its examples are counted already, and the orders stay
        if (signs := work.example_signs) is not None:
            signs = _flipped(signs, executed.sums.flips)
        stream = setup.stream.commit(stream, plan.local.assigned, work.microbatches_done, signs)
    return state._replace(
        policies={**state.policies, kind: policy},
        stream=stream,
        passes=plan.passes,
        rounds_done=state.rounds_done + 1,
        generation=state.generation + 1,
    )


def _assign(
    setup: setup_lib.Setup,
    state: RoundsState,
    kind: str,
    caps: np.ndarray,
    again: stream_lib.Assignment | None,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """`(quotas, limits, policy's state)`: by the policy, or as the trace has them."""
    config, stream, policy = setup.config, setup.stream, state.policies[kind]
    total = len(again.example_ids) if again is not None else 0
    if total > caps.sum():
        raise ValueError(
            f"again: got {total} microbatches, and present workers may have {caps.tolist()}; raise "
            "quota.max_microbatches"
        )
    if setup.speeds.trace is None:
        total = total or stream.total(state.stream, config.budget, gated=setup.methods.gate.closes)
        if setup.asks_policy:
            quotas, policy = policies.assigned(setup.methods.policy, policy, total, caps)
            _check_kept(setup, policy, "assign(state, total, caps)")
        else:
            quotas = np.array([total])
        if again is None:
            quotas = stream.fitted(state.stream, quotas, caps > 0)
        else:
            quotas = stream.again(again, quotas).quotas
        return quotas, quotas, policy
    if state.rounds_done >= len(setup.speeds.trace):
        raise ValueError(f"replay: {config.replay!r} has only {len(setup.speeds.trace)} rounds")
    quotas, done = setup.speeds.trace[state.rounds_done]
    if again is None:
        total = stream.total(state.stream, config.budget)
        served = stream.fitted(state.stream, quotas, quotas > 0)
        fits = quotas.sum() <= total and np.all((quotas <= served) & (done <= quotas))
    else:  # all of it once more, and private examples by their own workers
        fits = quotas.sum() == total and np.all(done == quotas)
        fits = fits and np.array_equal(stream.again(again, quotas).quotas, quotas)
    if not fits or np.any(quotas > caps):
        raise ValueError(
            f"replay: round {state.rounds_done} of {config.replay!r} has quotas {quotas.tolist()}, "
            f"and here are {total} microbatches, caps {caps.tolist()}: the configuration is another"
        )
    return quotas, done, policy


def _check_kept(setup: setup_lib.Setup, policy: Any, call: str) -> None:
    """Refuses a state of a user's policy whose form has changed."""
    if setup.policy_form is not None:
        leaves.check_kept(policy, setup.policy_form, f"{setup.policy_name}{call}")


def _balances(setup: setup_lib.Setup, pass_index: int) -> bool:
    """Whether the order needs the signs of a pass."""
    if setup.methods.order.balances is None:
        return True
    answer = setup.methods.order.balances(pass_index)
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    raise ValueError(
        f"ordering: {parts_lib.named(setup.methods.order)}: balances({pass_index}) returned "
        f"{parts_lib.shown(answer)}; it must return True or False"
    )


def _check_progress(setup: setup_lib.Setup, index: int, quotas: np.ndarray) -> None:
    """Refuses a gate that gives up all that is in flight, in round after round."""
    for later in range(index + 1, index + _EMPTY_ROUNDS):
        closing = setup.speeds.clock.close(later, quotas)
        if closing is None or closing.microbatches_done.any():
            return
    raise ValueError(
        f"gate: {parts_lib.named(setup.methods.gate)} drops all of {quotas.tolist()} in "
        f"{_EMPTY_ROUNDS} rounds from {index} on; close later, or set gate.in_flight='finish'"
    )


def _flipped(signs: list[np.ndarray], flips: Any) -> list[np.ndarray]:
    """The example signs of each worker, multiplied as the coordination says: `Synchronised`."""
    return [
        own * (flip if flip.ndim == 0 else flip[: own.size].reshape(own.shape))
        for own, flip in zip(signs, np.asarray(flips), strict=True)
    ]


class References(NamedTuple):
    """How long a round would take at the true speeds, of the computing only."""

    optimal_secs: float
    bound_secs: float  # with microbatches of any size
    equal_split_secs: float


def references(setup: setup_lib.Setup, plan: Plan) -> References | None:
    """None where the true speeds are not known, or a gate may close the round."""
    if setup.speeds.cluster is None or not setup.speeds.emulated or setup.methods.gate.closes:
        return None
    costs = setup.speeds.cluster.costs_at(plan.local.round_index or 0)
    passes = 1.0 if setup.programs.embedding is None else 2.0
    return _references(
        (passes * costs.overhead_secs).tobytes(),
        (passes * costs.secs_per_microbatch).tobytes(),
        int(plan.quotas.sum()),
        plan.caps.tobytes(),
        setup.config.data.sharing != "shared",
    )


@functools.lru_cache(256)
def _references(
    overhead: bytes, secs: bytes, total: int, caps: bytes, every_worker: bool
) -> References:
    costs = quota.WorkerCosts(np.frombuffer(overhead), np.frombuffer(secs))
    most = np.frombuffer(caps, np.int64)
    equal = quota.largest_remainder((most > 0).astype(np.float64), total, caps=most)
    best = quota.solve_quotas(costs, total, caps=most)
    if every_worker:  # private data: no shard may be left out
        best = stream_lib.with_every_worker(best, most > 0)
    return References(
        float(costs.round_secs(best).max()),
        quota.continuous_bound_secs(costs, total, caps=most),
        float(costs.round_secs(equal).max()),
    )
