"""Text as arrays: words by number, chunks of a stream, and features of single sentences.

Everything here takes words that are split already. It is plain NumPy, but for the features by
singular values, which need SciPy's sparse matrices. Messages name the place of a mistake.
"""

import collections
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

PADDING = -1  # stands for no word, behind the last word of a chunk or a sentence
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[^\sa-z0-9]")
_SPARE = 10  # more directions than are asked for, which make the last of these exact
_MOST = 2**31 - 1  # an i32
_PASSES = 3  # iterations over the matrix, each of which makes the directions more exact


def vocabulary(words: Iterable[str], size: int = 0) -> dict[str, int]:
    """The most frequent words, numbered from 0 in that order; of equal ones the first comes first.

    Args:
      words: a text.
      size: how many words are kept; 0: all.

    Raises:
      ValueError: `size` is negative.

    Example:
      >>> vocabulary("to be or not to be".split(), 3)
      {'to': 0, 'be': 1, 'or': 2}
    """
    if size < 0:
        raise ValueError(f"a vocabulary of {size} words; give how many are kept, or 0 for all")
    counted = collections.Counter(words).most_common(size or None)
    return {word: number for number, (word, _) in enumerate(counted)}


def numbers(
    words: Sequence[str], known: Mapping[str, int], *, unknown: str | None = None, name: str = ""
) -> np.ndarray:
    """The number of each word, `i32[len(words)]`.

    Args:
      words: a text.
      known: the vocabulary.
      unknown: the word that stands for those outside the vocabulary; None: no word does.
      name: what to call the text in errors.

    Raises:
      ValueError: a word is outside the vocabulary and nothing stands for it. The message names the
        first.

    Example:
      >>> numbers(["b", "x"], {"a": 0, "b": 1}, unknown="a").tolist()
      [1, 0]
    """
    other = PADDING if unknown is None else known.get(unknown, PADDING)
    stands = "or say by unknown= which word stands for such ones"
    if unknown is not None and unknown not in known:
        stands = f"with {unknown!r} in it, too, which is to stand for such ones (data.vocabulary)"
    found = np.fromiter((known.get(word, other) for word in words), np.int32, len(words))
    outside = np.flatnonzero(found == PADDING)
    if outside.size:
        at = int(outside[0])
        raise ValueError(
            f"token {at} of {name or 'the text'} is {words[at]!r}, which is outside the vocabulary "
            f"of {len(known):,} words; make the vocabulary of a text that has it, {stands}"
        )
    return found


def chunks(tokens: np.ndarray, length: int, *, vocabulary_size: int, name: str = "") -> np.ndarray:
    """Cuts a stream of tokens into chunks that each begin anew.

    A chunk has `length` tokens and the one after them, which it shares with the next chunk. So
    every token but the first is predicted once. The last chunk is filled up with `PADDING`.

    Args:
      tokens: `i32[n]`, each in 0..vocabulary_size-1.
      length: tokens of a chunk that are predicted.
      vocabulary_size: how many words there are.
      name: what to call the stream in errors.

    Returns:
      `i32[ceil((n - 1) / length), length + 1]`.

    Raises:
      ValueError: a token is no whole number or outside the vocabulary; the message names the
        first. Or there are fewer than two tokens.

    Example:
      >>> chunks(np.arange(6), 3, vocabulary_size=6).tolist()
      [[0, 1, 2, 3], [3, 4, 5, -1]]
    """
    given, tokens = tokens, np.asarray(tokens)
    if not isinstance(length, int | np.integer) or length < 1 or tokens.ndim != 1:
        raise ValueError(
            f"{name or 'the stream'}: tokens of the shape {list(tokens.shape)} in chunks of "
            f"{length}; give one row of tokens, and a length of at least 1"
        )
    if len(tokens) < 2:
        raise ValueError(
            f"{name or 'the stream'} has {len(tokens)} tokens; a chunk needs at least 2, one to "
            "begin with and one to predict"
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        whole = [isinstance(token, int | np.integer) for token in given]
        at = whole.index(False) if False in whole else 0
        raise ValueError(
            f"token {at} of {name or 'the stream'} is {given[at]!r}; give whole numbers, such as "
            "those of hetjax.zoo.text.numbers"
        )
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary_size))
    if outside.size:
        raise ValueError(
            f"token {outside[0]} of {name or 'the stream'} is {tokens[outside[0]]}, which is "
            f"outside the vocabulary of {vocabulary_size:,} words, 0..{vocabulary_size - 1}"
        )
    count = -(-(len(tokens) - 1) // length)
    filled = np.full(count * length + 1, PADDING, np.int32)
    filled[: len(tokens)] = tokens
    return filled[np.arange(count)[:, None] * length + np.arange(length + 1)]


def split_sentence(sentence: str) -> list[str]:
    """Words in lower case, each sign a word of its own.

    Example:
      >>> split_sentence("It's good.")
      ["it's", 'good', '.']
    """
    return _WORD.findall(sentence.lower())


def check_sentences(sentences: Sequence[Sequence[str]], name: str = "") -> None:
    """Checks that every sentence has words.

    Raises:
      ValueError: a sentence has no words, is not split or has something that is no word; the
        message names the first. Or there are no sentences.
    """
    if not len(sentences):
        raise ValueError(f"{name or 'the set'} has no sentences")
    for index, sentence in enumerate(sentences):
        if isinstance(sentence, str):
            raise ValueError(
                f"sentence {index} of {name or 'the set'} is a text; give a list of words, such as "
                "hetjax.zoo.text.split_sentence(sentence)"
            )
        words = list(sentence) if isinstance(sentence, Iterable) else [sentence]
        if not words:
            raise ValueError(
                f"sentence {index} of {name or 'the set'} has no words; leave it out, or give it "
                "a word that stands for nothing"
            )
        wrong = next((word for word in words if not isinstance(word, str)), None)
        if wrong is not None or None in words:
            raise ValueError(
                f"sentence {index} of {name or 'the set'} has {wrong!r}, which is no word; give a "
                "list of words"
            )


def hashed(sentences: Sequence[Sequence[str]], size: int, *, name: str = "") -> np.ndarray:
    """The different words of each sentence, each as a number below `size` by its CRC-32.

    Args:
      sentences: each a list of words.
      size: how many numbers there are; different words may get the same one.
      name: what to call the set in errors.

    Returns:
      `i32[len(sentences), most different words]`, in ascending order, then `PADDING`.

    Raises:
      ValueError: a sentence has no words (the message names it), or `size` is no number of an
        `i32`.

    Example:
      >>> hashed([["a", "b", "a"], ["b"]], 100).tolist()
      [[7, 81], [81, -1]]
    """
    check_sentences(sentences, name)
    if not 1 <= size <= _MOST:
        raise ValueError(f"words as one of {size} numbers; give 1 to {_MOST}")
    hashes = [sorted({zlib.crc32(word.encode()) % size for word in words}) for words in sentences]
    out = np.full((len(hashes), max(map(len, hashes))), PADDING, np.int32)
    for sentence, found in zip(out, hashes, strict=True):
        sentence[: len(found)] = found
    return out


class SingularFeatures:
    """Features of sentences by a truncated singular value decomposition of their words' weights.

    A sentence is the vector of its words' counts, each times log(n / sentences that have the word),
    scaled to length 1. The features are its coordinates along the leading right singular vectors of
    the training sentences' matrix. Each is divided by its root mean square over these sentences.
    Subspace iteration from a fixed start finds the vectors (Halko, Martinsson, Tropp, "Finding
    structure with randomness", 2011, arXiv 0909.4061).

    Args:
      sentences: those of training, each a list of words; the features depend on no others.
      size: how many features there are.

    Raises:
      ValueError: a sentence has no words, or there are fewer sentences or words than features.
    """

    def __init__(self, sentences: Sequence[Sequence[str]], size: int) -> None:
        check_sentences(sentences)
        # A set would have another order in each process, and so would the features.
        self._known = vocabulary(word for one in sentences for word in dict.fromkeys(one))
        if not 1 <= size <= min(len(sentences), len(self._known)):
            raise ValueError(
                f"{len(sentences)} sentences of {len(self._known)} words have at most "
                f"{min(len(sentences), len(self._known))} features by singular values; got {size}"
            )
        self._weights = np.ones(len(self._known))
        held = np.bincount(self._counts(sentences).indices, minlength=len(self._known))
        self._weights = np.log(len(sentences) / held)
        matrix = self._matrix(sentences)
        rng = np.random.default_rng(0)
        width = min(size + _SPARE, *matrix.shape)
        basis = rng.normal(size=(matrix.shape[1], width)).astype(np.float32)
        for _ in range(_PASSES):
            basis = np.linalg.qr(matrix.T @ (matrix @ basis))[0]
        projected = matrix @ basis
        squares, turns = np.linalg.eigh(projected.T @ projected)  # ascending
        leading = np.argsort(squares)[::-1][:size]
        root_mean_squares = np.sqrt(np.maximum(squares[leading], 1e-12) / len(sentences))
        self._directions = basis @ (turns[:, leading] / root_mean_squares)

    def __call__(self, sentences: Sequence[Sequence[str]], *, name: str = "") -> np.ndarray:
        """`f32[len(sentences), size]`; words that no training sentence has are left out.

        Raises:
          ValueError: a sentence has no words. The message names it.
        """
        check_sentences(sentences, name)
        return np.asarray(self._matrix(sentences) @ self._directions, np.float32)

    def _counts(self, sentences: Sequence[Sequence[str]]):
        """Sparse f32[sentences, words]: how often a sentence has a word, times its weight."""
        from scipy import sparse

        rows, columns, values = [], [], []
        for row, sentence in enumerate(sentences):
            found = collections.Counter(w for w in sentence if w in self._known)
            rows += [row] * len(found)
            columns += [self._known[word] for word in found]
            values += list(found.values())
        weighted = np.asarray(values, np.float32) * self._weights[columns]
        shape = (len(sentences), len(self._known))
        return sparse.csr_matrix((weighted.astype(np.float32), (rows, columns)), shape)

    def _matrix(self, sentences: Sequence[Sequence[str]]):
        """`_counts` with each sentence's vector of length 1; a vector of zeros stays so."""
        from scipy import sparse

        counts = self._counts(sentences)
        lengths = np.sqrt(np.asarray(counts.multiply(counts).sum(axis=1))).ravel()
        scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        return (sparse.diags(scale.astype(np.float32)) @ counts).astype(np.float32)
