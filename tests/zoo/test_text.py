"""Words as numbers: chunks of a stream, hashed words, features by singular values."""

import zlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from hetjax.zoo import text
from tests.launcher import launches

GOOD, BAD = "the film is good, a good good actor", "the film is bad, a bad plot and a bad end"
SENTENCES = [line.split() for line in f"{GOOD}, {BAD}, plot and film, good end".split(", ")]


@hypothesis.given(num_tokens=strategies.integers(2, 60), length=strategies.integers(1, 20))
@hypothesis.settings(deadline=None)
def test_every_token_but_the_first_is_predicted_once(num_tokens, length):
    tokens = np.arange(num_tokens)
    found = text.chunks(tokens, length, vocabulary_size=num_tokens)
    assert found.shape[1] == length + 1
    told = found[:, 1:].ravel()
    assert told[told != text.PADDING].tolist() == tokens[1:].tolist()
    before = found[:, :-1].ravel()[told != text.PADDING]
    assert before.tolist() == tokens[:-1].tolist()


def test_words_outside_the_vocabulary_are_the_unknown_one_or_refused():
    known = text.vocabulary(["b", "a", "b", "<unk>"])
    assert known == {"b": 0, "a": 1, "<unk>": 2}
    assert text.numbers(["a", "x", "b"], known, unknown="<unk>").tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match="token 1 of the text is 'x', which is outside the voc"):
        text.numbers(["a", "x", "b"], known)
    del known["<unk>"]  # nothing stands for others then either
    with pytest.raises(ValueError, match="token 1 of train is 'x'"):
        text.numbers(["a", "x", "b"], known, unknown="<unk>", name="train")


def test_hashed_words_are_the_different_ones_of_each_sentence():
    found = text.hashed(SENTENCES, 97)
    for row, words in zip(found, SENTENCES, strict=True):
        expected = {zlib.crc32(word.encode()) % 97 for word in words}
        assert set(row[row != text.PADDING].tolist()) == expected
        assert (row != text.PADDING).sum() == len(expected)


def test_sentences_are_split_into_words_and_signs():
    assert text.split_sentence("Don't -- it's 3.5!") == [*("don't", "-", "-", "it's"), *"3.5!"]
    assert text.split_sentence(" \t") == []


def test_features_by_singular_values_equal_those_of_the_whole_decomposition():
    size = 3
    made = text.SingularFeatures(SENTENCES, size)
    words = sorted({word for sentence in SENTENCES for word in sentence})
    counts = np.array([[s.count(word) for word in words] for s in SENTENCES], float)
    weighted = counts * np.log(len(SENTENCES) / (counts > 0).sum(0))
    weighted /= np.linalg.norm(weighted, axis=1, keepdims=True)
    left, values, _ = np.linalg.svd(weighted)
    expected = left[:, :size] * np.sqrt(len(SENTENCES))
    found = made(SENTENCES)
    signs = np.sign((found * expected).sum(0))
    np.testing.assert_allclose(found * signs, expected, rtol=2e-3, atol=2e-3)
    assert values[size - 1] > values[size]  # or there would be no leading ones


def test_features_are_made_of_the_training_sentences_alone():
    made = text.SingularFeatures(SENTENCES, 3)
    alone = made([["good", "end"]])
    np.testing.assert_array_equal(made([["good", "unheard", "end"]]), alone)
    np.testing.assert_array_equal(made([["unheard"]]), np.zeros((1, 3), np.float32))
    np.testing.assert_allclose(np.sqrt((made(SENTENCES) ** 2).mean(0)), 1, rtol=1e-4)


def test_features_are_the_same_in_every_process():
    """Words that are equally frequent are numbered as they come, not as a set has them."""
    program = (
        "import numpy as np; from hetjax.zoo import text; "
        f"found = text.SingularFeatures({SENTENCES}, 3)({SENTENCES}); "
        "print(np.round(found, 4).tolist())"
    )
    found = [launches.python(program, PYTHONHASHSEED=seed) for seed in "012"]
    assert [each.stdout for each in found] == [found[0].stdout] * 3
    assert found[0].stdout


def chunks(tokens):
    return text.chunks(tokens, 2, vocabulary_size=5, name="x")


OUTSIDE = r"token 3 of x is %d, which is outside the vocabulary of 5 words, 0\.\.4"
NO_WORDS = ([["a"], ["b"], [], []], 1)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (text.hashed, (["abc def"], 9), "sentence 0 of the set is a text; give a list of"),
        (text.hashed, ([["a"], ["b", 3]], 9), "sentence 1 of the set has 3, which is no word"),
        (text.hashed, ([["a"]], -7), "one of -7 numbers; give 1 to"),
        (text.hashed, NO_WORDS, "sentence 2 of .* has no words"),
        (text.SingularFeatures, NO_WORDS, "sentence 2 of .* has no words"),
        (chunks, ([0, 1.5, 1],), "token 1 of x is 1.5; give"),
        *((chunks, ([0, 4, 3, wrong, 1, wrong],), OUTSIDE % wrong) for wrong in (-1, 5, 7)),
    ],
)
def test_what_is_no_text_is_told(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(*given)
    assert chunks([0, 1]).tolist() == [[0, 1, -1]]
