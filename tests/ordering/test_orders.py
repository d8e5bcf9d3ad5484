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
    "frozen": lambda: orders.frozen(orders.balanced(), freeze_after=2),
}
NUM_PASSES = 4

all_methods = pytest.mark.parametrize("name", METHODS)
sizes = st.integers(1, 23)
seeds = st.tuples(st.integers(0, 9), st.integers(0, 9))


@st.composite
def passes(draw, any_signs=True):
    """(num_examples, for each pass (signs, the rounds' sizes))."""
    num_examples = draw(sizes)
    each = []
    for _ in range(NUM_PASSES):
        if any_signs:
            signs = draw(
                st.lists(st.sampled_from([1, -1, 0]), min_size=num_examples, max_size=num_examples)
            )
        else:
            signs = draw(pair_signs(num_examples))
        cuts = draw(st.lists(st.integers(0, num_examples), max_size=6))
        bounds = [0, *sorted(cuts), num_examples]
        rounds = [stop - start for start, stop in itertools.pairwise(bounds)]  # some are empty
        each.append((np.array(signs, np.int8), rounds))
    return num_examples, each


@st.composite
def pair_signs(draw, num_examples):
    """Signs of pairs in a row, and 0 for the one without a partner."""
    firsts = draw(
        st.lists(st.sampled_from([1, -1]), min_size=num_examples // 2, max_size=num_examples)
    )
    signs = [sign for first in firsts[: num_examples // 2] for sign in (first, -first)]
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


def copy_of(state):
    return type(state)(*(x.copy() if isinstance(x, np.ndarray) else x for x in state))


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
    init, place = METHODS[name]()
    state, whole = init(num_examples, seed), init(num_examples, seed)
    for pass_index, (signs, rounds) in enumerate(each):
        assert sorted(state.order.tolist()) == list(range(num_examples))
        assert state.order.dtype == np.int32
        assert (state.pass_index, state.num_placed) == (pass_index, 0)
        expected = order_slowly(
            name, num_examples, seed, state.order.tolist(), pass_index + 1, signs.tolist()
        )
        state = work_through(place, state, signs, rounds)
        assert state.order.tolist() == expected
        whole = checked(place)(whole, whole.order, signs)
        for field, other in zip(state, whole, strict=True):
            np.testing.assert_array_equal(field, other)


@given(problem=passes())
def test_place_signed_equals_filling_from_both_ends(problem):
    num_examples, each = problem
    examples = np.random.default_rng(num_examples).permutation(num_examples)
    for signs, _ in each:
        assert orders.place_signed(examples, signs).tolist() == place_slowly(examples, signs)


def test_four_units_by_hand():
    """D-GraB: s = +1 puts a left and b right, s = -1 the other way round."""
    init, place = orders.balanced()
    state = place(init(4, (0,)), np.array([2, 0]), np.array([1, -1]))  # s = +1
    assert state.num_placed == 2
    state = place(state, np.array([3, 1]), np.array([-1, 1]))  # s = -1
    assert state.order.tolist() == [2, 1, 3, 0]


@all_methods
def test_all_methods_but_the_synchronised_begin_with_the_same_order(name):
    first = METHODS[name]().init(50, (3, 1)).order
    reshuffled = orders.random_reshuffling().init(50, (3, 1)).order
    assert (name != "synchronised_reshuffling") == np.array_equal(first, reshuffled)


@given(num_examples=sizes, seed=seeds)
def test_the_fixed_map_is_balanced_placement_by_alternating_signs(num_examples, seed):
    fixed, balanced = orders.fixed_map(), orders.balanced()
    signs = np.array([1, -1] * num_examples)[:num_examples]
    if num_examples % 2:
        signs[-1] = 0  # the last one alone takes the middle place either way
    state, other = fixed.init(num_examples, seed), balanced.init(num_examples, seed)
    for _ in range(NUM_PASSES):
        state = fixed.place(state, state.order, None)
        other = balanced.place(other, other.order, signs)
        np.testing.assert_array_equal(state.order, other.order)


@given(problem=passes(), seed=seeds, block_size=st.integers(0, 30))
def test_blocks_stay_together_and_every_second_pass_is_the_one_before_backwards(
    problem, seed, block_size
):
    """By what was realised, which need not be what was planned, as where a gate closes."""
    num_examples, each = problem
    init, place = orders.block_reshuffling(block_size=block_size)
    state = init(num_examples, seed)
    size = block_size or max(1, round(num_examples**0.5))
    blocks = {tuple(state.order[i : i + size].tolist()) for i in range(0, num_examples, size)}
    sequences = []
    for pass_index, (_, rounds) in enumerate(each):
        order = state.order.tolist()
        realised = order[:]
        if pass_index % 2 == 0:
            at, found = 0, []
            while at < num_examples:
                (block,) = [b for b in blocks if b[0] == order[at]]
                assert tuple(order[at : at + len(block)]) == block
                at, found = at + len(block), [*found, block]
            assert set(found) == blocks
            sequences.append(found)
            cut = num_examples // 3
            realised = order[cut:] + order[:cut]  # the first third went back and came last
        start = 0
        for count in rounds:
            state = place(state, np.array(realised[start : start + count], np.int32), None)
            start += count
        if pass_index % 2 == 0:
            assert state.order.tolist() == realised[::-1]


def test_the_sequence_of_blocks_is_drawn_afresh():
    init, place = orders.block_reshuffling(block_size=10)
    state, seen = init(300, (0,)), []
    for _ in range(6):
        seen.append(tuple(state.order.tolist()))
        state = place(state, state.order, None)
    assert len(set(seen)) == 6
    assert seen[1::2] == [order[::-1] for order in seen[::2]]


def test_a_negative_block_size_is_refused():
    with pytest.raises(ValueError, match=r"block_size is -1; give the examples of a block, or 0"):
        orders.block_reshuffling(block_size=-1)


@given(one=sizes, other=sizes, seed=seeds, pass_index=st.integers(0, 3))
def test_synchronised_shards_agree_on_the_positions_that_both_have(one, other, seed, pass_index):
    init, place = orders.synchronised_reshuffling()
    states = [init(one, seed), init(other, (seed[0], seed[1] + 1))]
    for _ in range(pass_index):
        states = [place(state, state.order, None) for state in states]
    common = [state.order[state.order < min(one, other)].tolist() for state in states]
    assert common[0] == common[1]


def test_synchronised_passes_differ():
    init, place = orders.synchronised_reshuffling()
    state = init(50, (0, 1))
    first = state.order.copy()
    assert not np.array_equal(first, place(state, first, None).order)


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


@pytest.mark.parametrize("freeze_after", [0, 1, 3])
def test_a_frozen_order_follows_its_inner_one_and_then_stays(freeze_after):
    inner = orders.random_reshuffling()
    frozen = orders.frozen(inner, freeze_after=freeze_after)
    state, other = frozen.init(30, (0,)), inner.init(30, (0,))
    for pass_index in range(6):
        assert state.pass_index == pass_index
        np.testing.assert_array_equal(state.order, other.order)
        state = frozen.place(state, state.order[:7], None)
        state = frozen.place(state, state.order[7:], None)
        if pass_index < freeze_after:
            other = inner.place(other, other.order, None)


def test_a_frozen_balanced_order_needs_no_signs_once_frozen():
    init, place = orders.frozen(orders.balanced(), freeze_after=1)
    state = init(4, (0,))
    with pytest.raises(ValueError, match="without signs"):
        place(state, state.order, None)
    state = place(state, state.order, np.array([1, -1, -1, 1]))
    np.testing.assert_array_equal(place(state, state.order, None).order, state.order)


@all_methods
@settings(max_examples=30, deadline=None)
@given(problem=passes(any_signs=False), seed=seeds, stop=st.integers(0, 40))
def test_a_state_that_was_saved_in_mid_pass_goes_on_to_the_same_orders(name, problem, seed, stop):
    def saved_and_restored(state):
        plain = {}
        for field, value in state._asdict().items():
            assert type(value) in (np.ndarray, int, tuple), field
            plain[field] = value.tolist() if isinstance(value, np.ndarray) else value
        fields = {
            field: np.array(plain[field], value.dtype) if isinstance(value, np.ndarray) else value
            for field, value in state._asdict().items()
        }
        return type(state)(**fields)

    num_examples, each = problem
    init, place = METHODS[name]()
    state, restored = init(num_examples, seed), init(num_examples, seed)
    _, placed_again = METHODS[name]()
    num_rounds = 0
    for signs, rounds in each:
        order, start = state.order.copy(), 0
        for size in rounds:
            if num_rounds == stop:
                restored = saved_and_restored(state)
            part = slice(start, start + size)
            examples, example_signs = order[part], signs[part]
            state = place(state, examples, example_signs)
            restored = placed_again(restored, examples, example_signs)
            start, num_rounds = start + size, num_rounds + 1
        np.testing.assert_array_equal(restored.order, state.order)
        assert restored.num_placed == state.num_placed == 0


@all_methods
def test_within_a_pass_no_array_is_made_anew(name):
    init, place = METHODS[name]()
    first = state = init(100, (0,))
    for start in (0, 30, 60):
        part = slice(start, start + 30)
        state = place(state, state.order[part], np.tile([1, -1], 15))
        assert all(new is old for new, old in zip(state, first, strict=True) if np.ndim(old))


def test_two_branches_go_on_from_copies_of_a_state():
    init, place = orders.balanced()
    middle = place(init(4, (0,)), np.array([0, 1]), np.array([1, -1]))
    one = place(copy_of(middle), np.array([2, 3]), np.array([1, -1]))
    other = place(middle, np.array([3, 2]), np.array([1, -1]))
    assert one.order.tolist() == [0, 2, 3, 1]
    assert other.order.tolist() == [0, 3, 2, 1]


def test_what_is_refused_leaves_the_state_as_it_was():
    init, place = orders.balanced()
    state = place(init(6, (0,)), np.array([4, 2]), np.array([1, -1]))
    kept = copy_of(state)
    for examples, signs in (([0, 1], [1]), ([0, 1, 3, 5, 2], [1] * 5), ([0, 1], None)):
        with pytest.raises(ValueError, match=r"signs|examples"):
            place(state, np.array(examples), signs if signs is None else np.array(signs))
        for field, other in zip(state, kept, strict=True):
            np.testing.assert_array_equal(field, other)


@all_methods
def test_more_units_than_the_pass_has_left_are_refused(name):
    init, place = METHODS[name]()
    state = init(6, (0,))
    state = place(state, state.order[:4], np.array([1, -1, 1, -1]))
    with pytest.raises(ValueError, match="3 examples were committed to a pass that has 2 of its 6"):
        place(state, np.arange(3), np.array([1, -1, 1]))


def test_signs_of_another_number_are_refused():
    init, place = orders.balanced()
    with pytest.raises(ValueError, match="2 signs for 4 examples"):
        place(init(4, (0,)), np.arange(4), np.array([1, -1]))


def test_a_negative_freeze_after_is_refused():
    with pytest.raises(ValueError, match="freeze_after is -1"):
        orders.frozen(orders.balanced(), freeze_after=-1)
