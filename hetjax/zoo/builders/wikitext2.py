"""WikiText-2: two million words of Wikipedia articles, as chunks of a stream of numbers.

Each line of a file ends with the word `<eos>`. The vocabulary comes from the training file.

References:
  S. Merity, C. Xiong, J. Bradbury, R. Socher, Pointer sentinel mixture models, 2017,
    arXiv 1609.07843.
"""

from collections.abc import Sequence

import numpy as np

from hetjax.zoo import text
from hetjax.zoo.builders import files

END, UNKNOWN = "<eos>", "<unk>"
FILES = {"train": "wiki.train.tokens", "val": "wiki.valid.tokens", "test": "wiki.test.tokens"}


def parse(content: bytes, name: str) -> list[str]:
    """The words of a file, each line's followed by `<eos>`.

    Raises:
      ValueError: the file is not text in UTF-8, or has no words.
    """
    words = [word for line in files.lines(content, name) for word in (*line.split(), END) if word]
    if all(word == END for word in words):
        raise ValueError(f"{name} has no words")
    return words


def open_wikitext2(
    read_file: files.ReadFile, *, vocabulary: int = 10_000, length: int = 35
) -> files.Arrays:
    """Chunks of the three files.

    Args:
      read_file: gives the contents of a file.
      vocabulary: how many of the most frequent words of the training file are kept; the others
        become `<unk>`. 0: all.
      length: tokens of a chunk.
    """
    words = {split: parse(read_file(name), name) for split, name in FILES.items()}
    known = text.vocabulary(words["train"], vocabulary)
    if UNKNOWN not in known and UNKNOWN in words["train"]:
        raise ValueError(
            f"data.vocabulary: got {vocabulary}, but {UNKNOWN}, which stands for all other words, "
            f"is not among the {vocabulary} most frequent ones; set it higher, or to 0 for all"
        )
    tokens = {
        split: text.numbers(found, known, unknown=UNKNOWN, name=FILES[split])
        for split, found in words.items()
    }
    cut = {
        split: {"tokens": text.chunks(found, length, vocabulary_size=len(known))}
        for split, found in tokens.items()
    }
    return files.Arrays(
        train=cut.pop("train"),
        evals=cut,
        kind="tokens",
        example_shape=(length + 1,),
        num_classes=len(known),
        notes=(
            f"An example is a chunk of {length} words. Every chunk begins with a zero state, in "
            "training and in evaluation; its first word is the last one of the chunk before.",
            f"The vocabulary has {len(known):,} words of the training file. Of all words "
            f"{_shares(tokens, known)} are <unk>, which counts as a word like any other in the "
            "perplexity.",
        ),
    )


def _shares(tokens: dict[str, np.ndarray], known: dict[str, int]) -> str:
    """The share of unknown words of each file."""
    unknown = known.get(UNKNOWN, text.PADDING)
    shares: Sequence[str] = [
        f"{100 * np.mean(found == unknown):.1f} % ({split})" for split, found in tokens.items()
    ]
    return ", ".join(shares)


WIKITEXT2 = files.ArraySet(
    name="wikitext2",
    title="WikiText-2: 2,088,628 words of Wikipedia, 217,646 to validate, 245,569 to test",
    homepage="https://arxiv.org/abs/1609.07843, whose authors' archive is wikitext-2-v1.zip",
    citation=(
        "@inproceedings{merity2017pointer, title = {Pointer Sentinel Mixture Models}, author = "
        "{Merity, Stephen and Xiong, Caiming and Bradbury, James and Socher, Richard}, booktitle "
        "= {ICLR}, year = {2017}}"
    ),
    files=tuple(
        files.FileSpec(name, size_bytes, sha256)
        for name, size_bytes, sha256 in zip(
            FILES.values(),
            (10_797_148, 1_121_681, 1_256_449),
            (
                "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
                "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
                "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            ),
            strict=True,
        )
    ),
    open=open_wikitext2,
)
