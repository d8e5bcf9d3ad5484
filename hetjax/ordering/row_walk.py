"""Walks two programs of one form side by side: how do the part's values follow from the whole's?

The rules for primitives that call programs (functions, branches, loops) are here, those for
primitives that compute in `row_rules`. `by_rows` says what is shown, and what rows are.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_JAX = os.path.dirname(jax.__file__)
_HETJAX = os.path.dirname(os.path.dirname(__file__))


class NotByRowsError(ValueError):
    """A program was not shown to treat each example by itself; the message says where.

    Attributes:
        primitive: the name of the equation that it was not shown for, innermost.
        place: the user's line that it comes from; '' if JAX does not tell.
    """

    primitive = place = ""

    def __str__(self) -> str:
        parts = [self.primitive, super().__str__(), self.place]
        return ": ".join(part for part in parts if part)


class Rows(NamedTuple):
    """The part's value holds those rows of the whole's that belong to its examples.

    Seen as [outer, N, inner], the whole's axis `axis` has the examples in the middle.
    """

    axis: int
    inner: int | None = 1  # None: all rows are equal, so any will do


Relation = Rows | None
"""None: the part's value is the whole's."""


class Proof:
    """A walk through two programs of the same form.

    Args:
        counts: of examples, N of the whole and n of the part.
        rules: for each primitive the relations of its results, from those of what it takes.
    """

    def __init__(self, counts: tuple[int, int], rules: Mapping[str, "Rule"]) -> None:
        self.counts, self._rules = counts, rules

    def program(self, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
        """The relations of the results, from those of the arguments."""
        (whole, whole_consts), (part, part_consts) = _opened(whole), _opened(part)
        if len(whole.eqns) != len(part.eqns) or len(whole_consts) != len(part_consts):
            raise NotByRowsError("the program has another form for fewer examples")
        known: dict[Any, tuple[Any, Relation]] = {}  # whole's variable: part's, their relation
        for one, other in zip(whole_consts, part_consts, strict=True):
            if not self.equal(one, other):
                raise NotByRowsError("a constant depends on the number of examples")
        relations = [*[None] * len(whole.constvars), *ins]
        pairs = zip([*whole.constvars, *whole.invars], [*part.constvars, *part.invars], strict=True)
        for (one, other), relation in zip(pairs, relations, strict=True):
            self._check(one, other, relation)
            known[one] = other, relation
        for one, other in zip(whole.eqns, part.eqns, strict=True):
            taken = self._taken(known, one.invars, other.invars)
            for w, p, relation in zip(
                one.outvars, other.outvars, self.equation(one, other, taken), strict=True
            ):
                known[w] = p, relation
        return self._taken(known, whole.outvars, part.outvars)

    def equation(self, whole: Any, part: Any, ins: Sequence[Relation]) -> Sequence[Relation]:
        """The relations of an equation's results."""
        name = whole.primitive.name
        try:
            if part.primitive.name != name or len(whole.outvars) != len(part.outvars):
                raise NotByRowsError("for fewer examples something else is computed")
            if whole.effects or part.effects:
                raise NotByRowsError("it has effects")
            rule = _CALLS.get(name) or self._rules.get(name)
            if all(i is None for i in ins) and self._unchanged(whole, part):
                return [None] * len(whole.outvars)
            if rule is None:
                raise NotByRowsError("it is not known to treat each example by itself")
            outs = rule(self, whole, part, ins)
            for one, other, out in zip(whole.outvars, part.outvars, outs, strict=True):
                self._check(one, other, out)
            return outs
        except NotByRowsError as error:
            error.primitive, error.place = error.primitive or name, error.place or _place(whole)
            raise
        except (AssertionError, AttributeError, LookupError, TypeError) as error:
            raise NotByRowsError(f"{name} has another form than is known: {error}") from error

    def same_params(self, whole: Any, part: Any, *but: str) -> None:
        """Refuses equations whose parameters differ, but for those of the names given."""
        for name in self._differing(whole, part, but):
            raise NotByRowsError(f"its {name} depends on the number of examples")

    def _differing(self, whole: Any, part: Any, but: Sequence[str] = ()) -> Iterator[str]:
        """The names of parameters, but for these, that differ between two equations."""
        for name in whole.params.keys() | part.params.keys():
            if name not in but and not self.equal(whole.params.get(name), part.params.get(name)):
                yield name

    def equal(self, one: Any, other: Any) -> bool:
        """Whether two parameters, constants or programs are the same."""
        if one is other:
            return True
        if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
            return False
        if hasattr(one, "eqns") and hasattr(other, "eqns"):
            try:
                outs = self.program(one, other, [None] * len(_opened(one)[0].invars))
            except NotByRowsError:
                return False
            return all(out is None for out in outs)
        if isinstance(one, list | tuple) and type(one) is type(other):
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(self.equal(a, b) for a, b in pairs)
        if hasattr(one, "__array__") and hasattr(other, "__array__"):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if jax.dtypes.issubdtype(one.dtype, jax.dtypes.extended):  # random keys
                one, other = jax.random.key_data(one), jax.random.key_data(other)
            return np.asarray(one).tobytes() == np.asarray(other).tobytes()
        return type(one) is type(other) and bool(one == other)

    def join(self, relations: Sequence[Relation]) -> Relation:
        """The relation that holds for all of several values that are used alike."""
        rows = {r for r in relations if r is not None}
        if not rows:
            return None
        inners = {r.inner for r in rows} - {None}
        if len({r.axis for r in rows}) > 1 or len(inners) > 1:
            raise NotByRowsError("the examples lie along different axes")
        return Rows(next(iter(rows)).axis, inners.pop() if inners else None)

    def _unchanged(self, whole: Any, part: Any) -> bool:
        """Whether two equations compute the same from the same operands."""
        shapes = ([v.aval for v in eqn.outvars] for eqn in (whole, part))
        same_shapes = all(a.shape == b.shape for a, b in zip(*shapes, strict=True))
        return same_shapes and not any(self._differing(whole, part))

    def _taken(self, known: dict, whole: Sequence[Any], part: Sequence[Any]) -> list[Relation]:
        """The relations of variables or literals that stand in the same place."""
        taken: list[Relation] = []
        if len(whole) != len(part):
            raise NotByRowsError("the program has another form for fewer examples")
        for one, other in zip(whole, part, strict=True):
            if hasattr(one, "val") or hasattr(other, "val"):
                if not self.equal(getattr(one, "val", self), getattr(other, "val", self)):
                    raise NotByRowsError("a number depends on how many examples there are")
                taken.append(None)
                continue
            twin, relation = known[one]
            if twin is not other:
                raise NotByRowsError("the program has another form for fewer examples")
            taken.append(relation)
        return taken

    def _check(self, whole: Any, part: Any, relation: Relation) -> None:
        """Refuses a relation that cannot be between values of these shapes."""
        expected = list(whole.aval.shape)
        if relation is not None:
            axis, inner = relation
            num_whole, num_part = self.counts
            if axis >= len(expected) or expected[axis] % (num_whole * (inner or 1)):
                raise NotByRowsError("it mixes the examples with something else")
            expected[axis] = expected[axis] // num_whole * num_part
        if tuple(expected) != part.aval.shape or whole.aval.dtype != part.aval.dtype:
            raise NotByRowsError("its shape depends on the number of examples")


def _opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """A program and its constants, whether it is closed or not."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def _place(equation: Any) -> str:
    """The user's line that an equation comes from, if JAX tells."""
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    frames = [
        frame
        for frame in getattr(traceback, "frames", ())
        if not frame.file_name.startswith((_JAX, _HETJAX + os.sep))
    ]
    outside = [frame for frame in frames if "site-packages" not in frame.file_name]
    for frame in (outside or frames)[:1]:
        return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def _call(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> Sequence[Relation]:
    name = next(name for name in ("jaxpr", "call_jaxpr") if name in whole.params)
    return proof.program(whole.params[name], part.params[name], ins)


def _cond(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> Sequence[Relation]:
    index, *operands = ins
    if index is not None:
        raise NotByRowsError("the branch depends on an example")
    branches = zip(whole.params["branches"], part.params["branches"], strict=True)
    outs = [proof.program(one, other, operands) for one, other in branches]
    return [proof.join(relations) for relations in _alike(outs)]


def _alike(rows: Sequence[Sequence[Relation]]) -> Iterator[Sequence[Relation]]:
    for relations in zip(*rows, strict=True):
        if len({r is None for r in relations}) > 1:
            raise NotByRowsError("one branch gives an example's value, the other a common one")
        yield relations


def _steady(
    proof: Proof, carry: Sequence[Relation], step: Callable[[Sequence[Relation]], list[Relation]]
) -> tuple[Sequence[Relation], list[Relation]]:
    """Relations of a loop's carry that a step keeps, and those of the step's results."""
    while True:
        outs = step(carry)
        kept = [proof.join(pair) for pair in _alike([carry, outs[: len(carry)]])]
        if kept == list(carry):
            return kept, outs
        carry = kept


def _while(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> Sequence[Relation]:
    proof.same_params(whole, part, "cond_jaxpr", "body_jaxpr")
    num_cond, num_body = whole.params["cond_nconsts"], whole.params["body_nconsts"]
    of_cond, of_body = ins[:num_cond], ins[num_cond : num_cond + num_body]

    def through(name: str, consts: Sequence[Relation], carry: Sequence[Relation]) -> list:
        return proof.program(whole.params[name], part.params[name], [*consts, *carry])

    carry, _ = _steady(
        proof, ins[num_cond + num_body :], lambda carry: through("body_jaxpr", of_body, carry)
    )
    if through("cond_jaxpr", of_cond, carry) != [None]:
        raise NotByRowsError("how often it repeats depends on an example")
    return carry


def _scan(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> Sequence[Relation]:
    proof.same_params(whole, part, "jaxpr")
    if "ft_in" in whole.params:  # from JAX 0.11 on
        groups = whole.params["ft_in"].update(tuple(ins)).unpack()
        num_consts, num_carry = (len(list(group)) for group in groups[:2])
    else:
        num_consts, num_carry = whole.params["num_consts"], whole.params["num_carry"]
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]
    slices: list[Relation] = []
    for relation in ins[num_consts + num_carry :]:
        if relation is not None and relation.axis == 0:
            raise NotByRowsError("it goes through the examples one after the other")
        slices.append(relation and relation._replace(axis=relation.axis - 1))
    carry, outs = _steady(
        proof,
        carry,
        lambda carry: proof.program(
            whole.params["jaxpr"], part.params["jaxpr"], [*consts, *carry, *slices]
        ),
    )
    stacked = [r and r._replace(axis=r.axis + 1) for r in outs[num_carry:]]
    return [*carry, *stacked]


Rule = Callable[[Proof, Any, Any, Sequence[Relation]], Sequence[Relation]]
"""`(proof, whole's equation, part's equation, relations taken) -> relations given`, or refuses."""

_CALLS: dict[str, Rule] = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"), _call
    ),
    "custom_jvp_call": _call,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
