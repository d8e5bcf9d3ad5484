"""Which order does the next pass have, and what must the host keep for it?

An order is a pair of pure functions, `init` and `place` of an `Ordering`, in NumPy
alone. A state is a NamedTuple of arrays, ints and tuples of ints, whose shapes do not change.
`place` spends the state that it is given, as donation does: it may write into its arrays, so only
the state that comes out may be used. It does not write to the examples and the signs. How an
example gets its sign is not decided here.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from hetjax import parts
from hetjax.ordering.ordering import COUPLED, Ordering

_SEE = (
    "ordering.method: grab, grab_random_sign, pair_balance_exact and d_grab_exact add up gradients "
    "of single examples. Here these are not that of the microbatch, whose examples see each other "
    "(batch statistics?). Take 'random_reshuffling', or give hetjax.per_example(loss)"
)


class Placing(NamedTuple):
    """The host side of an ordering: `Ordering(*parts, make_observer=…)`."""

    init: Callable[[int, tuple[int, ...]], Any]
    """`(num_examples, seed) -> state`"""

    place: Callable[[Any, np.ndarray, np.ndarray | None], Any]
    """`(state, realised_examples i32[k], example_signs i8[k] or None) -> state`; spends the state
    that it is given"""


class DrawnState(NamedTuple):
    """The state of an order that signs do not change."""

    order: np.ndarray  # i32[num_examples]
    seed: tuple[int, ...]
    pass_index: int
    num_placed: int  # examples of this pass that were committed


class PlacedState(NamedTuple):
    """The state of an order that is made of the pass before it."""

    order: np.ndarray  # i32[num_examples]
    realised: np.ndarray  # i32[num_examples]: this pass's examples as they were committed, then 0
    signs: np.ndarray  # i8[num_examples]: their signs, then 0
    pass_index: int
    num_placed: int  # examples of this pass that were committed


class PairedState(NamedTuple):
    """The state of an order in which every second pass is the one before it, backwards."""

    order: np.ndarray  # i32[num_examples]
    realised: np.ndarray  # i32[num_examples]: this pass's examples as they were committed, then 0
    seed: tuple[int, ...]
    pass_index: int
    num_placed: int  # examples of this pass that were committed


@parts.factory
def random_reshuffling() -> Ordering:
    """A fresh permutation for each pass; private shards draw independently.

    It is drawn only from (seed, pass). So the order of any pass is known without those before it,
    and does not depend on quotas.

    Example:
        >>> order = random_reshuffling()
        >>> state = order.init(4, (0,))
        >>> sorted(state.order.tolist())
        [0, 1, 2, 3]
        >>> order.place(state, state.order, None).pass_index
        1
    """
    return Ordering(*_drawn(_permutation))


@parts.factory
def synchronised_reshuffling() -> Ordering:
    """As random reshuffling, with the same order on all workers of private data.

    `seed[0]` and the pass name it. Example i has the i-th number of one random stream as its key,
    and the order sorts by key. So two shards of different sizes agree on the order of the positions
    that both have.

    Example:
        >>> init = synchronised_reshuffling().init
        >>> small, large = init(3, (0, 5)).order, init(6, (0, 9)).order
        >>> large[large < 3].tolist() == small.tolist()
        True
    """

    def draw(num_examples: int, seed: tuple[int, ...], pass_index: int) -> np.ndarray:
        keys = np.random.default_rng((*seed[:1], pass_index)).random(num_examples)
        return np.argsort(keys, kind="stable").astype(np.int32)

    return Ordering(*_drawn(draw))


@parts.factory
def shuffle_once() -> Ordering:
    """Random reshuffling's first order, kept for good."""
    return Ordering(*made_of(_drawn(_permutation), lambda pass_index: False))


def made_of(inner: Placing, balances: Callable[[int], bool]) -> Placing:
    """The inner order, made anew after some passes; after the others it stays as it is.

    Args:
        inner: parts of this module; the state is theirs. They see only these passes.
        balances: given a pass's number, from 0: whether the next order is made of that pass.

    Example:
        >>> init, place = made_of(balanced(), lambda pass_index: pass_index < 1)
        >>> second = place(init(9, (0,)), np.arange(9), np.ones(9))
        >>> third = place(second, second.order, None)
        >>> (third.order == second.order).all(), third.pass_index
        (np.True_, 2)
    """

    def place(state: Any, realised_examples: np.ndarray, example_signs: np.ndarray | None) -> Any:
        if balances(state.pass_index):
            return inner.place(state, realised_examples, example_signs)
        return _placed(state, len(realised_examples), lambda state: state.order, {})

    return Placing(inner.init, place)


def balanced() -> Placing:
    """Each pass places its examples for the next one by their signs, as `place_signed`.

    The first order is random reshuffling's. GraB, PairBalance and D-GraB all place so; they differ
    in where the signs come from.

    Example:
        >>> init, place = balanced()
        >>> state = place(init(5, (0,)), np.array([4, 0, 3]), np.array([1, -1, -1]))
        >>> place(state, np.array([1, 2]), np.array([1, 0])).order.tolist()
        [4, 1, 2, 3, 0]

    References:
        Guo, Cooper, et al., "Coordinating distributed example orders for provably accelerated
        training", 2023, arXiv 2302.00845. The paper has an even number of examples.
    """

    def init(num_examples: int, seed: tuple[int, ...]) -> PlacedState:
        realised, signs = np.zeros(num_examples, np.int32), np.zeros(num_examples, np.int8)
        return PlacedState(_permutation(num_examples, seed, 0), realised, signs, 0, 0)

    return _recorded(init, lambda state: place_signed(state.realised, state.signs))


@parts.factory
def fixed_map() -> Ordering:
    """Each pass's even positions ascending, then its odd ones descending: no look at the data.

    That is balanced placement by signs +, -, +, -, ... Comparing with it separates what balancing
    gains from what not reshuffling gains.

    Example:
        >>> order = fixed_map()
        >>> order.place(order.init(5, (0,)), np.array([4, 0, 3, 1, 2]), None).order.tolist()
        [4, 3, 2, 1, 0]
    """
    init, place_balanced = balanced()

    def place(state, realised_examples, example_signs):
        positions = state.num_placed + np.arange(len(realised_examples))
        return place_balanced(state, realised_examples, 1 - 2 * (positions % 2))

    return Ordering(init, place)


@parts.factory
def block_reshuffling(
    *,
    block_size: Annotated[
        int, parts.integer(unit="examples", says="in each fixed block; 0: the square root of all")
    ] = 0,
) -> Ordering:
    """Fixed blocks of examples in a fresh sequence, and each second pass the one before, backwards.

    Needs no gradients. The first order is random reshuffling's. It is cut into blocks, the last one
    maybe smaller. A block keeps its examples and their order inside it. Counted from 0, passes 2,
    4, … have the blocks in a sequence drawn only from (seed, pass). Passes 1, 3, … are exactly the
    realised order of the pass before them, backwards.

    Args:
        block_size: examples; 0: the whole number nearest to the square root of num_examples.

    Example:
        >>> order = block_reshuffling(block_size=2)
        >>> order.place(order.init(5, (0,)), np.array([4, 0, 3, 1, 2]), None).order.tolist()
        [2, 1, 3, 0, 4]

    References:
        Nguyen, Phan, Kalagnanam, "Learning to shuffle: block reshuffling and reversal schemes for
        stochastic optimization", 2026, arXiv 2604.00260, whose two components these are. The
        abstract says neither how large a block is nor what is drawn inside it. Here it has the
        square root, and nothing is drawn inside.
    """

    def draw(num_examples: int, seed: tuple[int, ...], pass_index: int) -> np.ndarray:
        fixed = _permutation(num_examples, seed, 0)
        if not pass_index:
            return fixed
        size = block_size or max(1, round(math.sqrt(num_examples)))
        sequence = _permutation(-(-num_examples // size), seed, pass_index)
        return np.concatenate([fixed[i * size : (i + 1) * size] for i in sequence])

    def next_order(state: PairedState) -> np.ndarray:
        if state.pass_index % 2 == 0:
            return state.realised[::-1].copy()
        return draw(len(state.order), state.seed, state.pass_index + 1)

    def init(num_examples: int, seed: tuple[int, ...]) -> PairedState:
        realised = np.zeros(num_examples, np.int32)
        return PairedState(draw(num_examples, seed, 0), realised, seed, 0, 0)

    return Ordering(*_recorded(init, next_order))


def place_signed(examples: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The order that a whole pass leaves, filled from both ends.

    An example of sign 1 takes the next free place from the left, one of sign -1 the next from the
    right. Those of sign 0 share the places left in the middle, in order of arrival. With pairs of
    opposite signs and one example of sign 0, that one has place ⌊k/2⌋. So it is no longer the last,
    and the next pass (for k >= 3) leaves another one without a partner.

    Args:
        examples: i[k], as they came.
        signs: i8[k] of 1, -1, 0.

    Returns:
        i[k]: the next pass's order.

    Raises:
        ValueError: there are not as many signs as examples.

    Example:
        >>> place_signed(np.arange(7), np.array([1, -1, -1, 1, -1, 1, 0])).tolist()
        [0, 3, 5, 6, 4, 2, 1]
    """
    _check_lengths(examples, signs)
    return np.concatenate([examples[signs > 0], examples[signs == 0], examples[signs < 0][::-1]])


def _permutation(num_examples: int, seed: tuple[int, ...], pass_index: int) -> np.ndarray:
    return np.random.default_rng((*seed, pass_index)).permutation(num_examples).astype(np.int32)


def _drawn(draw: Callable[[int, tuple[int, ...], int], np.ndarray]) -> Placing:
    """An order that `draw(num_examples, seed, pass_index)` gives for each pass."""

    def init(num_examples: int, seed: tuple[int, ...]) -> DrawnState:
        return DrawnState(draw(num_examples, seed, 0), seed, 0, 0)

    return _recorded(init, lambda state: draw(len(state.order), state.seed, state.pass_index + 1))


def _recorded(
    init: Callable[[int, tuple[int, ...]], Any], next_order: Callable[[Any], np.ndarray]
) -> Placing:
    """Placing whose state keeps examples and signs of a pass, if it has fields for them.

    Args:
        init: as of `Placing`.
        next_order: from the state at the end of a pass.
    """

    def place(state: Any, realised_examples: np.ndarray, example_signs: np.ndarray | None) -> Any:
        records = {}
        if hasattr(state, "realised"):
            records["realised"] = realised_examples
        if hasattr(state, "signs"):
            if example_signs is None:
                raise ValueError("a balanced order was given examples without signs")
            _check_lengths(realised_examples, example_signs)
            if np.any(np.abs(example_signs) == COUPLED):
                raise ValueError(_SEE)
            records["signs"] = example_signs
        return _placed(state, len(realised_examples), next_order, records)

    return Placing(init, place)


def _placed(
    state: Any, count: int, next_order: Callable[[Any], np.ndarray], records: dict[str, np.ndarray]
) -> Any:
    """The state with `count` more examples; its arrays named in `records` get these values.

    Raises:
        ValueError: there are more examples than the pass has left.
    """
    left = len(state.order) - state.num_placed
    if count > left:
        raise ValueError(f"{count} examples were committed to a pass that has {left} left")
    for name, values in records.items():
        getattr(state, name)[state.num_placed : state.num_placed + count] = values
    if count < left:
        return state._replace(num_placed=state.num_placed + count)
    order = next_order(state)
    for name in records:
        getattr(state, name)[:] = 0
    return state._replace(order=order, pass_index=state.pass_index + 1, num_placed=0)


def _check_lengths(examples: np.ndarray, signs: np.ndarray) -> None:
    if len(examples) != len(signs):
        raise ValueError(f"{len(signs)} signs for {len(examples)} examples")
