import copy
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ordering import orders

METHODS = {
    "random_reshuffling": orders.random_reshuffling,
    "synchronised_reshuffling": orders.synchronised_reshuffling,
    "shuffle_once": orders.shuffle_once,
    "fixed_map": orders.fixed_map,
    "block_reshuffling": orders.block_reshuffling,
    "blocks_of_3": lambda: orders.block_reshuffling(block_size=3),
    "balanced": orders.balanced,
    "frozen": lambda: orders.made_of(orders.balanced(), lambda index: index < 2),
}
NUM_PASSES = 4

all_methods = pytest.mark.parametrize("name", METHODS)
sizes = st.integers(1, 23)
seeds = st.tuples(st.integers(0, 9), st.integers(0, 9))


def lists_of(values, length):
    return st.lists(st.sampled_from(values), min_size=length, max_size=length)


@st.composite
def passes(draw):
    """(num_examples, for each pass (signs, the rounds' sizes))."""
    num_examples = draw(sizes)
    each = []
    for _ in range(NUM_PASSES):
        signs = draw(lists_of([1, -1, 0], num_examples))
        cuts = draw(st.lists(st.integers(0, num_examples), max_size=6))
        bounds = [0, *sorted(cuts), num_examples]
        rounds = [stop - start for start, stop in itertools.pairwise(bounds)]  # some are empty
        each.append((np.array(signs, np.int8), rounds))
    return num_examples, each


@st.composite
def pair_signs(draw, num_examples):
    """Signs of pairs in a row, and 0 for the one without a partner."""
    firsts = draw(lists_of([1, -1], num_examples // 2))
    signs = [sign for first in firsts for sign in (first, -first)]
    return np.array(signs + [0] * (num_examples % 2), np.int8)


def place_slowly(examples, signs):
    """Fills the next order's places one example at a time, as the papers say it."""
    places = [None] * len(examples)
    left, right, middle = 0, len(examples) - 1, []
    for example, sign in zip(examples, signs, strict=True):
        if sign == 1:
            places[left] = int(example)
            left += 1
        elif sign == -1:
            places[right] = int(example)
            right -= 1
        else:
            middle.append(int(example))
    for position, place in enumerate(places):
        if place is None:
            places[position] = middle.pop(0)
    return places


def order_slowly(name, num_examples, seed, order, pass_index, signs):
    """The next pass's order, from this one's and the number of passes done with it."""
    if name == "random_reshuffling":
        return np.random.default_rng((*seed, pass_index)).permutation(num_examples).tolist()
    if name == "synchronised_reshuffling":
        keys = np.random.default_rng((seed[0], pass_index)).random(num_examples).tolist()
        return sorted(range(num_examples), key=lambda example: keys[example])
    if name == "fixed_map":
        return order[::2] + order[1::2][::-1]
    if name in ("block_reshuffling", "blocks_of_3"):
        return blocks_slowly(name, num_examples, seed, order, pass_index)
    if name == "balanced" or (name == "frozen" and pass_index <= 2):
        return place_slowly(order, signs)
    return order


def blocks_slowly(name, num_examples, seed, order, pass_index):
    """One block after the other, or the pass before from its end to its beginning."""
    if pass_index % 2:
        return list(reversed(order))
    size = 3 if name == "blocks_of_3" else max(1, round(num_examples**0.5))
    left = np.random.default_rng((*seed, 0)).permutation(num_examples).tolist()
    blocks = []
    while left:
        blocks.append(left[:size])
        left = left[size:]
    sequence = np.random.default_rng((*seed, pass_index)).permutation(len(blocks))
    return [example for index in sequence for example in blocks[index]]


def checked(place):
    """`place`, which may write into the state alone, keeps nothing else, and keeps all shapes."""

    def checked_place(state, examples, signs):
        shapes = [np.shape(field) for field in state]
        examples, signs = examples.copy(), signs.copy()
        examples.flags.writeable = signs.flags.writeable = False
        state = place(state, examples, signs)
        examples.flags.writeable = signs.flags.writeable = True
        examples[:], signs[:] = -77, -77  # whoever kept them has nonsense now
        assert [np.shape(field) for field in state] == shapes
        return state

    return checked_place


def work_through(place, state, signs, rounds):
    """One pass, in rounds of the given sizes."""
    order, start = state.order.copy(), 0
    for size in rounds:
        part = slice(start, start + size)
        state = checked(place)(state, order[part], signs[part])
        start += size
    return state


@all_methods
@settings(max_examples=60, deadline=None)
@given(problem=passes(), seed=seeds)
def test_every_pass_has_the_oracle_s_order_however_it_is_cut_into_rounds(name, problem, seed):
    num_examples, each = problem
    init, place, *_ = METHODS[name]()
    state, whole = init(num_examples, seed), init(num_examples, seed)
    for pass_index, (signs, rounds) in enumerate(each):
        assert sorted(state.order.tolist()) == list(range(num_examples))
        assert state.order.dtype == np.int32
        assert (state.pass_index, state.num_placed) == (pass_index, 0)
        given = state.order.tolist(), pass_index + 1, signs.tolist()
        expected = order_slowly(name, num_examples, seed, *given)
        state = work_through(place, state, signs, rounds)
        assert state.order.tolist() == expected
        whole = checked(place)(whole, whole.order, signs)
        for field, other in zip(state, whole, strict=True):
            np.testing.assert_array_equal(field, other)


@all_methods
def test_all_methods_but_the_synchronised_begin_with_the_same_order(name):
    first = METHODS[name]().init(50, (3, 1)).order
    reshuffled = orders.random_reshuffling().init(50, (3, 1)).order
    assert (name != "synchronised_reshuffling") == np.array_equal(first, reshuffled)


@settings(max_examples=60, deadline=None)
@given(
    num_examples=sizes.map(lambda half: 2 * half + 1),
    seed=seeds,
    microbatch_size=st.sampled_from([2, 4, 8]),
    data=st.data(),
)
def test_the_unit_without_a_partner_is_another_one_in_each_pass(
    num_examples, seed, microbatch_size, data
):
    """Whole microbatches may be committed in any order, as gates make them."""
    init, place = orders.balanced()
    state, before = init(num_examples, seed), None
    for _ in range(NUM_PASSES):
        order = state.order.copy()
        alone = order[-1]
        assert alone != before
        signs = data.draw(pair_signs(num_examples))
        cuts = np.arange(microbatch_size, num_examples, microbatch_size)
        parts = list(zip(np.split(order, cuts), np.split(signs, cuts), strict=True))
        for part, part_signs in data.draw(st.permutations(parts)):
            state = place(state, part, part_signs)
        assert state.order[num_examples // 2] == alone
        before = alone


def test_a_frozen_balanced_order_needs_no_signs_once_frozen():
    init, place = orders.made_of(orders.balanced(), lambda index: index < 1)
    state = init(4, (0,))
    with pytest.raises(ValueError, match="without signs"):
        place(state, state.order, None)
    state = place(state, state.order, np.array([1, -1, -1, 1]))
    np.testing.assert_array_equal(place(state, state.order, None).order, state.order)


def test_what_is_refused_leaves_the_state_as_it_was():
    init, place = orders.balanced()
    state = place(init(6, (0,)), np.array([4, 2]), np.array([1, -1]))
    kept = copy.deepcopy(state)
    for examples, signs in (([0, 1], [1]), ([0, 1, 3, 5, 2], [1] * 5), ([0, 1], None)):
        with pytest.raises(ValueError, match=r"signs|examples"):
            place(state, np.array(examples), signs if signs is None else np.array(signs))
        for field, other in zip(state, kept, strict=True):
            np.testing.assert_array_equal(field, other)
