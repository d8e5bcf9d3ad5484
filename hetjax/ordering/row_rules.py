"""For each primitive: where do the examples lie in its result, if it treats each by itself?

A rule gets the proof, the equation of the whole and of the part, and the relations of what they are
given; it refuses, or returns the relations of what they give. The proof compares all shapes
afterwards, so a rule may trust that a value and its part differ along the axis of the examples
alone. An operand that is the same for both has no such axis, unless it is a scalar.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ordering.row_walk import NotByRowsError, Proof, Relation, Rows, Rule

_MIXES = "it mixes examples"


def _shape(equation: Any, operand: int = 0) -> tuple[int, ...]:
    return equation.invars[operand].aval.shape


def _alone(ins: Sequence[Relation], operand: int = 0) -> Rows:
    """The rows of an operand, where the others are the same for all examples."""
    rows = ins[operand]
    if rows is None or any(r is not None for i, r in enumerate(ins) if i != operand):
        raise NotByRowsError("what it takes depends on the example")
    return rows


def _together(proof: Proof, ins: Sequence[Relation]) -> Rows:
    rows = proof.join(ins)
    if rows is None:
        raise NotByRowsError("it depends on the number of examples")
    return rows


def _apart(axis: int, others: Sequence[int]) -> None:
    if axis in others:
        raise NotByRowsError(_MIXES)


def _elementwise(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    return [proof.join(ins)] * len(whole.outvars)


def _bitcast(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    if whole.outvars[0].aval.shape != _shape(whole):
        raise NotByRowsError("numbers of another width")
    return _elementwise(proof, whole, part, ins)


def _each(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    return list(ins)


def _along(*names: str) -> Rule:
    """Works along the axes that its parameters of these names say, on each line by itself."""

    def rule(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
        proof.same_params(whole, part)
        rows = _together(proof, ins)
        for name in names:
            axes = whole.params[name]
            _apart(rows.axis, axes if isinstance(axes, tuple | list) else (axes,))
        return [rows] * len(whole.outvars)

    return rule


def _without(name: str) -> Rule:
    """As `_along`, and the axes are gone from the result."""

    def rule(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
        proof.same_params(whole, part)
        rows, axes = _together(proof, ins), whole.params[name]
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        _apart(rows.axis, axes)
        out = rows._replace(axis=rows.axis - sum(axis < rows.axis for axis in axes))
        return [out] * len(whole.outvars)

    return rule


def _trailing(count: Callable[[dict], int]) -> Rule:
    """Works along the last `count(params)` axes."""

    def rule(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
        proof.same_params(whole, part)
        rows = _together(proof, ins)
        if rows.axis >= len(_shape(whole)) - count(whole.params):
            raise NotByRowsError(_MIXES)
        return [rows] * len(whole.outvars)

    return rule


def _stack(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    rows, axis = _together(proof, ins), whole.params["axis"]
    return [rows._replace(axis=rows.axis + (axis <= rows.axis))]


def _transpose(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    rows = _alone(ins)
    return [rows._replace(axis=tuple(whole.params["permutation"]).index(rows.axis))]


def _broadcast(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part, "shape")
    if ins[0] is not None:
        rows = _alone(ins)
        return [rows._replace(axis=whole.params["broadcast_dimensions"][rows.axis])]
    return _grown(whole, part)  # the same for all examples, whether it had that axis or not


def _grown(whole: Any, part: Any) -> list[Relation]:
    """All along the axis in which the results differ is equal."""
    shapes = whole.outvars[0].aval.shape, part.outvars[0].aval.shape
    axes = [axis for axis, (w, p) in enumerate(zip(*shapes, strict=True)) if w != p]
    if len(axes) != 1:
        raise NotByRowsError("its shape depends on the number of examples")
    return [Rows(axes[0], None)]


def _iota(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    del ins
    proof.same_params(whole, part, "shape")
    (rows,) = _grown(whole, part)
    if rows is None or rows.axis == whole.params["dimension"]:
        raise NotByRowsError("positions in the batch")
    return [rows]


def _reshape(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part, "new_sizes")
    rows, shape, out = _alone(ins), _shape(whole), whole.outvars[0].aval.shape
    if whole.params["dimensions"] is not None:
        raise NotByRowsError(_MIXES)
    equal = rows.inner is None
    inner = shape[rows.axis] // proof.counts[0] if rows.inner is None else rows.inner
    step = inner * math.prod(shape[rows.axis + 1 :])  # numbers from an example to the next
    span = step * proof.counts[0]
    for axis, size in enumerate(out):
        after = math.prod(out[axis + 1 :])
        if after and step % after == 0 and size * after % span == 0:
            intact = equal and size == shape[rows.axis] and after * inner == step
            return [Rows(axis, None if intact else step // after)]
    raise NotByRowsError("it mixes the examples with something else")


def _pad(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    rows = _alone(ins)
    if tuple(whole.params["padding_config"][rows.axis]) != (0, 0, 0):
        raise NotByRowsError(_MIXES)
    return [rows]


def _slice(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part, "limit_indices")
    rows = _alone(ins)
    for equation in (whole, part):
        params, strides = equation.params, equation.params["strides"]
        all_of_them = params["limit_indices"][rows.axis] == _shape(equation)[rows.axis]
        stride = 1 if strides is None else strides[rows.axis]
        if params["start_indices"][rows.axis] or stride != 1 or not all_of_them:
            raise NotByRowsError("it takes examples by their place in the batch")
    limits = zip(whole.params["limit_indices"], part.params["limit_indices"], strict=True)
    if any(w != p for axis, (w, p) in enumerate(limits) if axis != rows.axis):
        raise NotByRowsError(_MIXES)
    return [rows]


def _dynamic_slice(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part, "slice_sizes")
    rows = _alone(ins)
    if any(e.params["slice_sizes"][rows.axis] != _shape(e)[rows.axis] for e in (whole, part)):
        raise NotByRowsError("it takes examples by their place in the batch")
    return [rows]


def _dynamic_update_slice(
    proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]
) -> list[Relation]:
    proof.same_params(whole, part)
    if None in ins[:2] or any(r is not None for r in ins[2:]):
        raise NotByRowsError("what it takes depends on the example")
    rows = _together(proof, ins[:2])
    if any(_shape(e)[rows.axis] != _shape(e, 1)[rows.axis] for e in (whole, part)):
        raise NotByRowsError("it writes examples by their place in the batch")
    return [rows]


def _dot_general(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    contracting, batch = whole.params["dimension_numbers"]
    found = []
    for side, rows in enumerate(ins):
        if rows is None:
            continue
        _apart(rows.axis, contracting[side])
        if rows.axis in batch[side]:
            axis = tuple(batch[side]).index(rows.axis)
        else:
            taken = {*contracting[side], *batch[side]}
            axis = len(batch[side]) + sum(a not in taken for a in range(rows.axis))
            if side == 1:
                axis += len(_shape(whole)) - len(contracting[0]) - len(batch[0])
        found.append(rows._replace(axis=axis))
    return [proof.join(found)]  # of two, only batch axes can be one


def _conv(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    rows, numbers = _alone(ins), whole.params["dimension_numbers"]
    if rows.axis != numbers.lhs_spec[0] or whole.params["batch_group_count"] != 1:
        raise NotByRowsError(_MIXES)
    return [rows._replace(axis=numbers.out_spec[0])]


def _window(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    rows, params = _together(proof, ins), whole.params
    for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation"):
        if (params.get(name) or [1] * (rows.axis + 1))[rows.axis] != 1:
            raise NotByRowsError(_MIXES)
    if tuple(params["padding"][rows.axis]) != (0, 0):
        raise NotByRowsError(_MIXES)
    return [rows] * len(whole.outvars)


def _gather(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part, "slice_sizes")
    operand, indices = ins
    numbers, shape = whole.params["dimension_numbers"], _shape(whole)
    index_axes = [
        axis for axis in range(len(whole.outvars[0].aval.shape)) if axis not in numbers.offset_dims
    ]  # of the result, for each axis of the indices but the last
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    _same_slices(whole, part, operand)
    if indices is not None and indices.axis >= len(index_axes):
        raise NotByRowsError(_MIXES)
    if operand is None:
        rows = _together(proof, [indices])
        return [rows._replace(axis=index_axes[rows.axis])]
    if indices is None:
        whole_axis = all(
            e.params["slice_sizes"][operand.axis] == _shape(e)[operand.axis] for e in (whole, part)
        )
        if operand.axis in numbers.start_index_map or operand.axis in gone or not whole_axis:
            raise NotByRowsError("it takes examples by their place in the batch")
        return [operand._replace(axis=numbers.offset_dims[kept.index(operand.axis)])]
    together = (operand.axis, indices.axis)
    if together not in _paired(numbers.operand_batching_dims, numbers.start_indices_batching_dims):
        raise NotByRowsError("it takes examples by their place in the batch")
    return [proof.join([r._replace(axis=index_axes[indices.axis]) for r in (operand, indices)])]


def _same_slices(whole: Any, part: Any, operand: Relation) -> None:
    sizes = zip(whole.params["slice_sizes"], part.params["slice_sizes"], strict=True)
    axis = None if operand is None else operand.axis
    if any(w != p for i, (w, p) in enumerate(sizes) if i != axis):
        raise NotByRowsError("its slice_sizes depends on the number of examples")


def _paired(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(one, other, strict=True))


def _scatter(proof: Proof, whole: Any, part: Any, ins: Sequence[Relation]) -> list[Relation]:
    proof.same_params(whole, part)
    operand, indices, updates = ins
    if operand is None or updates is None:
        raise NotByRowsError(_MIXES)
    numbers, shape = whole.params["dimension_numbers"], _shape(whole)
    windows = numbers.update_window_dims
    index_axes = [axis for axis in range(len(_shape(whole, 2))) if axis not in windows]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    if indices is None:
        all_of_them = any(
            operand.axis == axis and updates.axis == window
            for axis, window in zip(kept, windows, strict=True)
        ) and all(_shape(e)[operand.axis] == _shape(e, 2)[updates.axis] for e in (whole, part))
        if not all_of_them or operand.axis in numbers.scatter_dims_to_operand_dims:
            raise NotByRowsError("it writes examples by their place in the batch")
        return [proof.join([operand, updates._replace(axis=operand.axis)])]
    batching = _paired(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    if (operand.axis, indices.axis) not in batching or updates.axis != index_axes[indices.axis]:
        raise NotByRowsError("it writes examples by their place in the batch")
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
# fmt: on

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    # Of keys: what they give has more axes behind, what they are made of one.
    **dict.fromkeys(("random_bits", "random_split", "random_unwrap"), _elementwise),
    "bitcast_convert_type": _bitcast,
    "random_wrap": _trailing(lambda params: 1),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "concatenate": _along("dimension"),
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "split": _along("axis"),
    "top_k": _along("axis"),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        _without("axes"),
    ),
    **dict.fromkeys(("argmax", "argmin"), _without("axes")),
    "squeeze": _without("dimensions"),
    "unstack": _without("axis"),
    "fft": _trailing(lambda params: len(params["fft_lengths"])),
    **dict.fromkeys(("cholesky", "triangular_solve"), _trailing(lambda params: 2)),
    "optimization_barrier": _each,
    "stack": _stack,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reshape": _reshape,
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    **dict.fromkeys(
        (
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_gather_add",
            "select_and_scatter_add",
        ),
        _window,
    ),
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul"), _scatter),
}
