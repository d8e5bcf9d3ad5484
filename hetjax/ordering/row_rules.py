"""For each primitive: where do the examples lie in its result, if it treats each by itself?

A rule gets the proof, the equation of the whole and of the part, and the relations of their
operands. It refuses, or returns the relations of their results. The proof compares all shapes
afterwards, so a rule may trust that a value and its part differ along the axis of the examples
alone. An operand that is the same for both has no such axis, unless it is a scalar.

Most rules are `_alone` or `_together` of a function `(whole, part, rows) -> rows`. It gets the rows
of the operands and returns those of each result.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ordering.row_walk import NotByRowsError, Proof, Relation, Rows, Rule

_MIXES = "it mixes examples"
_MIXES_OTHERS = "it mixes the examples with something else"
_TAKES_PLACES = "it takes examples by their place in the batch"
_WRITES_PLACES = "it writes examples by their place in the batch"

OfRows = Callable[[Any, Any, Rows], Rows]


def _shape(equation: Any, operand: int = 0) -> tuple[int, ...]:
    return equation.invars[operand].aval.shape


def _refuse_if(wrong: bool, reason: str) -> None:
    if wrong:
        raise NotByRowsError(reason)


def _first_alone(ins: Sequence[Relation]) -> Rows:
    """The rows of the first operand, if the others are the same for all examples."""
    if ins[0] is None or any(relation is not None for relation in ins[1:]):
        raise NotByRowsError("what it takes depends on the example")
    return ins[0]


def _all(proof: Proof, ins: Sequence[Relation]) -> Rows:
    """The rows of all operands that are not the same for all examples."""
    rows = proof.join(ins)
    if rows is None:
        raise NotByRowsError("it depends on the number of examples")
    return rows


def _alone(of_rows: OfRows, *but: str) -> Rule:
    """A rule by the rows of the first operand; only the parameters `but` may differ."""

    def rule(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
        proof.same_params(whole, part, *but)
        return [of_rows(whole, part, _first_alone(ins))] * len(whole.outvars)

    return rule


def _together(of_rows: OfRows) -> Rule:
    """A rule by the rows of all operands, which lie along one axis."""

    def rule(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
        proof.same_params(whole, part)
        return [of_rows(whole, part, _all(proof, ins))] * len(whole.outvars)

    return rule


def _elementwise(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    return [proof.join(ins)] * len(whole.outvars)


def _bitcast(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    _refuse_if(whole.outvars[0].aval.shape != _shape(whole), "numbers of another width")
    return _elementwise(proof, whole, part, ins)


def _each(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    return list(ins)


def _lines(name: str, *, removed: bool = False) -> Rule:
    """Works along the axes that a parameter names, on each line by itself; may remove them."""

    def of_rows(whole: Any, part: Any, rows: Rows) -> Rows:
        axes = whole.params[name]
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        _refuse_if(rows.axis in axes, _MIXES)
        num_before = sum(axis < rows.axis for axis in axes)
        return rows._replace(axis=rows.axis - num_before) if removed else rows

    return _together(of_rows)


def _trailing(count: Callable[[dict], int]) -> Rule:
    """Works along the last `count(params)` axes."""

    def of_rows(whole: Any, part: Any, rows: Rows) -> Rows:
        _refuse_if(rows.axis >= len(_shape(whole)) - count(whole.params), _MIXES)
        return rows

    return _together(of_rows)


def _stack(whole: Any, part: Any, rows: Rows) -> Rows:
    return rows._replace(axis=rows.axis + (whole.params["axis"] <= rows.axis))


def _transpose(whole: Any, part: Any, rows: Rows) -> Rows:
    return rows._replace(axis=tuple(whole.params["permutation"]).index(rows.axis))


def _broadcast(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part, "shape")
    if ins[0] is not None:
        rows = _first_alone(ins)
        return [rows._replace(axis=whole.params["broadcast_dimensions"][rows.axis])]
    return [_grown(whole, part)]  # equal for all examples, whether it had their axis or not


def _grown(whole: Any, part: Any) -> Rows:
    """Equal rows along the axis in which the results differ."""
    shapes = whole.outvars[0].aval.shape, part.outvars[0].aval.shape
    axes = [axis for axis, (w, p) in enumerate(zip(*shapes, strict=True)) if w != p]
    _refuse_if(len(axes) != 1, "its shape depends on the number of examples")
    return Rows(axes[0], None)


def _iota(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    del ins
    proof.same_params(whole, part, "shape")
    rows = _grown(whole, part)
    _refuse_if(rows.axis == whole.params["dimension"], "positions in the batch")
    return [rows]


def _reshape(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part, "new_sizes")
    rows, shape, out = _first_alone(ins), _shape(whole), whole.outvars[0].aval.shape
    _refuse_if(whole.params["dimensions"] is not None, _MIXES)
    equal = rows.inner is None
    inner = shape[rows.axis] // proof.counts[0] if rows.inner is None else rows.inner
    step = inner * math.prod(shape[rows.axis + 1 :])  # numbers from one example to the next
    span = step * proof.counts[0]
    for axis, size in enumerate(out):
        after = math.prod(out[axis + 1 :])
        if after and step % after == 0 and size * after % span == 0:
            intact = equal and size == shape[rows.axis] and after * inner == step
            return [Rows(axis, None if intact else step // after)]
    raise NotByRowsError(_MIXES_OTHERS)


def _pad(whole: Any, part: Any, rows: Rows) -> Rows:
    _refuse_if(tuple(whole.params["padding_config"][rows.axis]) != (0, 0, 0), _MIXES)
    return rows


def _slice(whole: Any, part: Any, rows: Rows) -> Rows:
    for params in (whole.params, part.params):
        stride = 1 if params["strides"] is None else params["strides"][rows.axis]
        _refuse_if(bool(params["start_indices"][rows.axis]) or stride != 1, _TAKES_PLACES)
    _refuse_if(not _takes_all(whole, part, rows, "limit_indices"), _TAKES_PLACES)
    _refuse_if(_others_differ(whole, part, rows, "limit_indices"), _MIXES)
    return rows


def _dynamic_slice(whole: Any, part: Any, rows: Rows) -> Rows:
    _refuse_if(not _takes_all(whole, part, rows, "slice_sizes"), _TAKES_PLACES)
    return rows


def _takes_all(whole: Any, part: Any, rows: Rows, name: str) -> bool:
    """Whether a parameter of sizes is as long as the operand along the axis of the examples."""
    return all(e.params[name][rows.axis] == _shape(e)[rows.axis] for e in (whole, part))


def _others_differ(whole: Any, part: Any, rows: Relation, name: str) -> bool:
    """Whether a parameter of sizes differs along another axis than that of the examples."""
    sizes = zip(whole.params[name], part.params[name], strict=True)
    axis = None if rows is None else rows.axis
    return any(w != p for i, (w, p) in enumerate(sizes) if i != axis)


def _dynamic_update_slice(
    proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]
) -> list[Relation]:
    proof.same_params(whole, part)
    if None in ins[:2] or any(r is not None for r in ins[2:]):
        raise NotByRowsError("what it takes depends on the example")
    axis = _all(proof, ins[:2]).axis
    _refuse_if(any(_shape(e)[axis] != _shape(e, 1)[axis] for e in (whole, part)), _WRITES_PLACES)
    return [proof.join(ins[:2])]


def _dot_general(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    contracting, batch = whole.params["dimension_numbers"]
    found = []
    for side, rows in enumerate(ins):
        if rows is None:
            continue
        _refuse_if(rows.axis in contracting[side], _MIXES)
        if rows.axis in batch[side]:
            axis = tuple(batch[side]).index(rows.axis)
        else:
            taken = {*contracting[side], *batch[side]}
            axis = len(batch[side]) + sum(a not in taken for a in range(rows.axis))
            if side == 1:
                axis += len(_shape(whole)) - len(contracting[0]) - len(batch[0])
        found.append(rows._replace(axis=axis))
    return [proof.join(found)]  # two operands can share only batch axes


def _conv(whole: Any, part: Any, rows: Rows) -> Rows:
    numbers = whole.params["dimension_numbers"]
    in_groups = whole.params["batch_group_count"] != 1
    _refuse_if(rows.axis != numbers.lhs_spec[0] or in_groups, _MIXES)
    return rows._replace(axis=numbers.out_spec[0])


def _window(whole: Any, part: Any, rows: Rows) -> Rows:
    params, ones = whole.params, [1] * (rows.axis + 1)
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    _refuse_if(any((params.get(name) or ones)[rows.axis] != 1 for name in names), _MIXES)
    _refuse_if(tuple(params["padding"][rows.axis]) != (0, 0), _MIXES)
    return rows


def _gather(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part, "slice_sizes")
    operand, indices = ins
    numbers, num_axes = whole.params["dimension_numbers"], len(whole.outvars[0].aval.shape)
    # Axes of the result, one for each axis of the indices but the last.
    index_axes = [axis for axis in range(num_axes) if axis not in numbers.offset_dims]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(_shape(whole))) if axis not in gone]
    if _others_differ(whole, part, operand, "slice_sizes"):
        raise NotByRowsError("its slice_sizes depends on the number of examples")
    _refuse_if(indices is not None and indices.axis >= len(index_axes), _MIXES)
    if operand is None:
        rows = _all(proof, [indices])
        return [rows._replace(axis=index_axes[rows.axis])]
    if indices is None:
        by_place = operand.axis in numbers.start_index_map or operand.axis in gone
        all_of_them = _takes_all(whole, part, operand, "slice_sizes")
        _refuse_if(by_place or not all_of_them, _TAKES_PLACES)
        return [operand._replace(axis=numbers.offset_dims[kept.index(operand.axis)])]
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    _refuse_if(batching.get(operand.axis) != indices.axis, _TAKES_PLACES)
    return [proof.join([r._replace(axis=index_axes[indices.axis]) for r in (operand, indices)])]


def _scatter(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    operand, indices, updates = ins
    if operand is None or updates is None:
        raise NotByRowsError(_MIXES)
    numbers = whole.params["dimension_numbers"]
    windows = numbers.update_window_dims
    if indices is None:
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        kept = [axis for axis in range(len(_shape(whole))) if axis not in gone]
        sizes = [(_shape(e)[operand.axis], _shape(e, 2)[updates.axis]) for e in (whole, part)]
        all_of_them = dict(zip(kept, windows, strict=True)).get(operand.axis) == updates.axis
        all_of_them = all_of_them and all(one == other for one, other in sizes)
        by_place = operand.axis in numbers.scatter_dims_to_operand_dims
        _refuse_if(by_place or not all_of_them, _WRITES_PLACES)
        return [proof.join([operand, updates._replace(axis=operand.axis)])]
    index_axes = [axis for axis in range(len(_shape(whole, 2))) if axis not in windows]
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    is_paired = batching.get(operand.axis) == indices.axis
    _refuse_if(not is_paired or updates.axis != index_axes[indices.axis], _WRITES_PLACES)
    return [proof.join([r._replace(axis=operand.axis) for r in (operand, indices, updates)])]


# fmt: off
_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma",
    "log", "log1p", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg",
    "one_minus_square",
    "nextafter", "not", "or", "polygamma", "population_count", "pow", "random_fold_in", "real",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "xor", "zeta",
)
_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax",
    "argmin",
)
_WINDOWS = (
    "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add",
    "select_and_scatter_add",
)
# fmt: on

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    # Of keys: what they give has more axes behind, what they are made of one.
    **dict.fromkeys(("random_bits", "random_split", "random_unwrap"), _elementwise),
    "bitcast_convert_type": _bitcast,
    "random_wrap": _trailing(lambda params: 1),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _lines("axis")),
    "concatenate": _lines("dimension"),
    "rev": _lines("dimensions"),
    "sort": _lines("dimension"),
    "split": _lines("axis"),
    "top_k": _lines("axis"),
    **dict.fromkeys(_REDUCTIONS, _lines("axes", removed=True)),
    "squeeze": _lines("dimensions", removed=True),
    "unstack": _lines("axis", removed=True),
    "fft": _trailing(lambda params: len(params["fft_lengths"])),
    **dict.fromkeys(("cholesky", "triangular_solve"), _trailing(lambda params: 2)),
    "optimization_barrier": _each,
    "stack": _together(_stack),
    "transpose": _alone(_transpose),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reshape": _reshape,
    "pad": _alone(_pad),
    "slice": _alone(_slice, "limit_indices"),
    "dynamic_slice": _alone(_dynamic_slice, "slice_sizes"),
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot_general,
    "conv_general_dilated": _alone(_conv),
    **dict.fromkeys(_WINDOWS, _together(_window)),
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul"), _scatter),
}
