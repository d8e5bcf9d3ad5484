"""What an estimator computes between two requests, on each worker's own row of its variables.

An estimator's program (`bilevel.machine`) is walked through on the host; what it computes from one
request to the next is one jitted program for all workers, made once for each such way.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hetjax import mesh as mesh_lib
from hetjax import trees, types
from hetjax.bilevel import machine, per_example, vectors
from hetjax.bilevel.problem import At, Kind
from hetjax.bilevel.rounds import carried_leaves, rules
from hetjax.liveness import blocking_waits
from hetjax.rounds import reduce, sync
from hetjax.topology import gossip, reducers

_AXIS = mesh_lib.WORKER_AXIS


class NextRequest(NamedTuple):
    """The next request; leaves `[W, ...]`."""

    point: rules.Point
    batch: jax.Array  # i32[W]: number of the batch, among those of its level


Stopped = tuple[types.PyTree, machine.Steps, NextRequest | None]
"""`(carry, left, what is asked for)`; None at the end."""


class Stepping:
    """Computes what is between the requests of one estimator.

    Args:
        estimator: whose requests they are.
        optimizer: of x.
        x: the upper variable, without worker axis; tells shapes.
        mesh: the workers'; None for the array form.
        reducer: how workers average, where it gossips.
    """

    def __init__(
        self,
        estimator: machine.Estimator,
        optimizer: optax.GradientTransformationExtraArgs,
        x: types.PyTree,
        *,
        mesh: Mesh | None,
        reducer: reducers.Reduction,
    ) -> None:
        self.program = estimator.program(x)
        self._estimator, self.optimizer = estimator, optimizer
        self._mesh, self._reducer = mesh, reducer
        self._has_vector, self._num_tangents = uses(self.program)
        self._made: dict[Any, Callable] = {}
        self._carried: dict[int, carried_leaves.CarriedLeaves] = {}

    def begin(self, x: types.PyTree, y: types.PyTree, kept: machine.State | None) -> Stopped:
        """`(carry, left, asked)` before the first request of a hypergradient; leaves `[W, ...]`.

        Args:
            x: the upper variable.
            y: where the lower level begins, where nothing says it.
            kept: of the hypergradient before.
        """

        def begun(x, y, kept):
            carry = self._estimator.begin(x, y, kept)
            return jax.tree.map(jnp.copy, _strong(carry))  # it will be used up, and x will not

        make = self._jitted(("begin", kept is None), lambda form: form.each(begun), donate=())
        return self._on(make(x, y, kept), self.program)

    def receive(
        self,
        carry: types.PyTree,
        left: machine.Steps,
        sums: sync.Synchronised,
        active: types.Exchanges,
        did: Any,
    ) -> Stopped:
        """Takes an answer, uses up the carry, and goes on to the next request, or to the end.

        Args:
            carry, left: where the request was made, and the steps that were left then.
            sums: of the round.
            active: the exchanges of this round, of a reducer that gossips; or ().
            did: f32[W], from `Level.did`, of a reducer that gossips; or ().
        """
        ask = machine.next_ask(left)

        def taken(form, carry, mean, own, active, did):
            def one(carry, mean, own, did):
                answer = rules.answer_of(mean, own, carry.x, ask.what)
                if self._reducer.mixing is None:
                    return ask.receive(carry, answer)
                scaled = jax.tree.map(lambda loss: loss * did.astype(loss.dtype), answer.loss)
                new = ask.receive(carry, answer._replace(loss=scaled))  # which is only told
                names = (*ask.moves, *ask.keeps)
                old, moved = ({n: getattr(each, n) for n in names} for each in (carry, new))
                return new._replace(**trees.select(did > 0, moved, old))

            new = form.each(one)(carry, mean, own, did)
            if self._reducer.mixing is None or not ask.moves:
                return new
            before, after = ({n: getattr(each, n) for n in ask.moves} for each in (carry, new))
            return new._replace(**self._mixed(form, before, after, active))

        return self._on(carry, left[1:], ask, taken, (sums.mean, sums.own, active, did))

    def _on(
        self,
        carry: types.PyTree,
        left: machine.Steps,
        ask: machine.Ask | None = None,
        taken: Callable | None = None,
        given: tuple = (),
    ) -> Stopped:
        """On to the next request; what is computed on the way is one program."""
        while True:
            thens, left = machine.stop(left)
            stop = left[0] if left else None
            carried = carried_leaves.NONE
            if isinstance(stop, machine.Ask):
                carried = self._carried_of(stop, carry)
            make = functools.partial(self._way, thens, stop, carried, taken)
            carry, told = self._jitted((id(ask), thens, id(stop)), make)(carry, *given)
            if not isinstance(stop, machine.Repeat):
                return carry, left, None if stop is None else carried.whole(carry, told)
            left = (machine.Repeat(int(first(told)), stop.steps), *left[1:])
            ask, taken, given = None, None, ()

    def _way(
        self,
        thens: tuple[Callable, ...],
        stop: machine.Step | None,
        carried: carried_leaves.CarriedLeaves,
        taken: Callable | None,
        form: reduce.Form,
    ) -> Callable:
        """What is computed up to a stop: `(carry, *given) -> (carry, what is asked there)`."""

        def way(carry: Any, *given: Any) -> tuple[Any, Any]:
            if taken is not None:
                carry = taken(form, carry, *given)
            for function in thens:
                carry = form.each(function)(carry)
            match stop:
                case machine.Ask():
                    asked = form.each(functools.partial(self._asked, stop))(carry)
                    return carry, carried.made(asked)
                case machine.Repeat(fewer=fewer) if fewer is not None:
                    return carry, form.each(fewer)(carry)
            return carry, ()

        return way

    def _carried_of(self, ask: machine.Ask, carry: types.PyTree) -> carried_leaves.CarriedLeaves:
        """Which leaves of a request lie in the carry already."""
        if id(ask) not in self._carried:
            row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), carry)
            self._carried[id(ask)] = carried_leaves.find(functools.partial(self._asked, ask), row)
        return self._carried[id(ask)]

    def _asked(self, ask: machine.Ask, carry: types.PyTree) -> NextRequest:
        at: At = ask.at(carry)
        vector: types.PyTree = ()
        if self._has_vector:
            vector = at.vector if ask.what.kind is Kind.PRODUCTS else vectors.zeros_like(at.y)
        tangents = at.tangents
        if self._num_tangents and ask.what.kind is not Kind.TANGENTS:
            tangents = vectors.stack_of((at.x, at.y), self._num_tangents)
        point = rules.Point(at.x, at.y, vector, tangents)
        return NextRequest(_strong(point), jnp.asarray(at.batch, jnp.int32))

    def _mixed(
        self, form: reduce.Form, before: types.PyTree, after: types.PyTree, active: types.Exchanges
    ) -> types.PyTree:
        """What moved, averaged with the neighbours' before or after the move."""
        mixing = self._reducer.mixing
        assert mixing is not None
        if not mixing.before_update:
            return form.mix(after, active)
        mixed = form.mix(before, active)
        return jax.tree.map(lambda mixed, b, a: mixed + (a - b), mixed, before, after)

    def end(
        self,
        carry: types.PyTree,
        x: types.PyTree,
        opt: types.PyTree,
        steps_done: Any,
        active: types.Exchanges,
        did: Any,
    ) -> tuple[types.PyTree, types.PyTree, machine.State, dict[str, Any]]:
        """`(x, opt, kept, info)` after the update of x; uses up opt.

        The optimiser is given F as `value` and the outer steps before this one, f32[W], as
        `progress`. With a reducer that gossips a worker that did nothing has no update, and info is
        the mean over the workers.
        """

        def updated(form, carry, x, opt, done, active, did):
            def one(carry, x, opt, done, did):
                found = self._estimator.end(carry)
                grads = self._gathered(found.grad_x)
                grads = jax.tree.map(lambda g, leaf: g.astype(leaf.dtype), grads, x)
                loss = found.info.upper_loss  # () where no request asks for it
                given = {"value": jnp.nan if isinstance(loss, tuple) else loss, "progress": done}
                changes, new_opt = self.optimizer.update(grads, opt, x, **given)
                info = found.info._asdict() | {"hypergradient_norm": vectors.norm(grads)}
                del info["cost"]
                new = optax.apply_updates(x, changes)
                if self._reducer.mixing is not None:
                    info = jax.tree.map(functools.partial(jax.lax.pmean, axis_name=_AXIS), info)
                    new, new_opt = _of_one_who_did(did > 0, (x, opt), (new, new_opt))
                return new, new_opt, found.state, info

            new, new_opt, kept, info = form.each(one)(carry, x, opt, done, did)
            (before, _), (after, rows) = per_example.split(x), per_example.split(new)
            if self._reducer.mixing is not None and after:  # rows are alike on all workers
                new = per_example.joined(new, self._mixed(form, before, after, active), rows)
            return new, new_opt, kept, info

        make = self._jitted("end", lambda form: functools.partial(updated, form), donate=(2,))
        return make(carry, x, opt, steps_done, active, did)

    def _gathered(self, grad_x: types.PyTree) -> types.PyTree:
        """With the rows of all examples: each worker has those of the examples that it did."""
        shared, own = per_example.split(grad_x)
        if not own:
            return grad_x
        # With gossip a worker divides as if the mean over the workers were taken.
        gather = jax.lax.psum if self._reducer.mixing is None else jax.lax.pmean
        return per_example.joined(grad_x, shared, gather(own, _AXIS))

    def own_bytes(self, x: types.PyTree, num_workers: int) -> float:
        """That all workers send of the rows of x in an outer step, by a sum round a ring.

        Where they gossip, by two: of the gradients, and of the rows after the update.
        """
        size = trees.num_bytes(per_example.split(x)[1])
        times = 1 if self._reducer.mixing is None else 2
        return times * gossip.ring_copies(num_workers) * num_workers * size

    def mixed_bytes(
        self, moves: tuple[str, ...], carry: types.PyTree, active: types.Exchanges
    ) -> float:
        """That all workers send of what a request moves to their neighbours, where they gossip."""
        if self._reducer.mixing is None or not moves:
            return 0.0
        leaves = jax.tree.leaves([getattr(carry, name) for name in moves])
        copy = trees.num_bytes(leaves) / leaves[0].shape[0]
        return self._reducer.copies_sent(active) * copy

    def _jitted(
        self, key: Any, make: Callable[[reduce.Form], Callable], donate: tuple[int, ...] = (0,)
    ) -> Callable:
        if key not in self._made:
            self._made[key] = _on_rows(make, self._mesh, self._reducer, donate)
        return self._made[key]


def _of_one_who_did(
    did: jax.Array, old: tuple[types.PyTree, types.PyTree], new: tuple[types.PyTree, types.PyTree]
) -> tuple[types.PyTree, types.PyTree]:
    """x and its optimiser's state: the old ones where a worker did nothing.

    Rows of examples move on all workers alike, and so then does the optimiser's state.
    """
    (old_x, old_opt), (new_x, new_opt) = old, new
    (before, _), (after, rows) = per_example.split(old_x), per_example.split(new_x)
    # What updates rows and shared numbers by one norm would move the rows of workers apart.
    rows = jax.tree.map(functools.partial(jax.lax.pmean, axis_name=_AXIS), rows)
    x = per_example.joined(new_x, trees.select(did, after, before), rows)
    return x, new_opt if rows else trees.select(did, new_opt, old_opt)


def _on_rows(
    make: Callable[[reduce.Form], Callable],
    mesh: Mesh | None,
    reducer: reducers.Reduction,
    donate: tuple[int, ...],
) -> Callable:
    """A function of rows `[W, ...]`, of one of each worker; an argument named `active` is whole."""
    if mesh is None:
        return jax.jit(make(reduce.array(reducer, None)), donate_argnums=donate)
    function = make(reduce.collective(reducer, None))

    def body(*arguments: Any) -> Any:
        found = function(*(a if _is_whole(a) else trees.first_row(a) for a in arguments))
        return trees.add_row_axis(jax.tree.map(jnp.asarray, found))  # of an own estimator: numbers

    def run(*arguments: Any) -> Any:
        specs = tuple(P() if _is_whole(given) else P(_AXIS) for given in arguments)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(_AXIS), check_vma=False)
        return mapped(*arguments)

    jitted = jax.jit(run, donate_argnums=donate)

    def waited_for(*arguments: Any) -> Any:
        with blocking_waits.Wait("synchronise"):
            return jitted(*arguments)

    return waited_for


def _is_whole(given: Any) -> bool:
    """Whether it says which exchanges are active: bool[M], the same for all workers."""
    return getattr(given, "dtype", None) == jnp.bool_


def _strong(tree: types.PyTree) -> types.PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), tree)


def first(rows: jax.Array) -> Any:
    """The number of this process's first worker, on the host."""
    with blocking_waits.Wait("synchronise"):
        return jax.device_get(rows.addressable_shards[0].data).reshape(-1)[0]


def uses(program: tuple[machine.Step, ...]) -> tuple[bool, int]:
    """Whether a program asks for products, and how many tangents it has."""
    found = [what for what, _ in machine.asked_for(program)]
    has_vector = any(what.kind is Kind.PRODUCTS for what in found)
    return has_vector, max((what.num_tangents for what in found), default=0)
