"""WikiText-2, GLUE and M4 from their files: what comes out, and what damaged files say."""

import zlib

import numpy as np
import pytest

from hetjax.zoo import datasets
from hetjax.zoo.builders import files, glue, m4_weekly, wikitext2
from tests.zoo import array_sets

NAMES = list(datasets.ARRAY_SETS)


@pytest.mark.parametrize("name", NAMES)
def test_missing_files_say_what_to_put_where(name, tmp_path):
    with pytest.raises(ValueError, match=f"the data set {name} is missing: put ") as error:
        datasets.load(name, tmp_path)
    for spec in datasets.ARRAY_SETS[name].files:
        assert spec.name in str(error.value)
    assert f"into {tmp_path / name} (see https://" in str(error.value)
    assert str(error.value).endswith("hetjax does not download it")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_size_or_a_damaged_one_is_named(name, tmp_path, monkeypatch):
    array_sets.write(tmp_path, name, monkeypatch)
    spec = datasets.ARRAY_SETS[name].files[0]
    path = tmp_path / spec.name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"{path.name} has .* bytes, expected .*get it again"):
        datasets.load(name, tmp_path)
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    with pytest.raises(ValueError, match=f"{path.name} has SHA-256 .*get it again"):
        datasets.load(name, tmp_path)


def test_text_that_is_no_utf8_is_told(tmp_path, monkeypatch):
    spec = datasets.ARRAY_SETS["rte"].files[0]
    array_sets.write(tmp_path, "rte", monkeypatch, {spec.name: b"good\xff\n"})
    with pytest.raises(ValueError, match=r"is not text in UTF-8 \(byte 4\)"):
        datasets.load("rte", tmp_path)


def test_lines_of_text_end_with_their_own_word_and_chunks_follow_the_stream(tmp_path, monkeypatch):
    changes = {
        "wiki.train.tokens": b" \n a b a \n c a b d\n",
        "wiki.valid.tokens": b"a <unk>\n",
        "wiki.test.tokens": b"b b\n",
    }
    array_sets.write(tmp_path, "wikitext2", monkeypatch, changes)
    with pytest.raises(ValueError, match=r"token 1 of wiki.valid.tokens is '<unk>', which is outs"):
        datasets.load("wikitext2", tmp_path, length=4)
    changes["wiki.train.tokens"] += b"<unk>\n"
    array_sets.write(tmp_path, "wikitext2", monkeypatch, changes)
    opened = datasets.load("wikitext2", tmp_path, length=4, vocabulary=0)
    words = ["<eos>", "a", "b", "a", "<eos>", "c", "a", "b", "d", "<eos>", "<unk>", "<eos>"]
    known = {"<eos>": 0, "a": 1, "b": 2, "c": 3, "d": 4, "<unk>": 5}
    assert opened.num_classes == 6
    numbers = [known[word] for word in words]
    rows = opened.train.arrays["tokens"]
    assert rows.tolist() == [numbers[:5], numbers[4:9], [*numbers[8:], -1]]
    assert opened.evals["val"].arrays["tokens"].tolist() == [[1, 5, 0, -1, -1]]


def test_rare_words_are_unknown_and_their_share_is_told(tmp_path, monkeypatch):
    changes = {
        "wiki.train.tokens": b"a a a\n<unk> <unk> b\n",
        "wiki.valid.tokens": b"b c a\n",
        "wiki.test.tokens": b"a a a\n",
    }
    array_sets.write(tmp_path, "wikitext2", monkeypatch, changes)
    opened = datasets.load("wikitext2", tmp_path, length=9, vocabulary=3)
    assert opened.num_classes == 3  # a, <eos> and <unk>
    assert opened.evals["val"].arrays["tokens"][0, :4].tolist() == [2, 2, 0, 1]
    notes = " ".join(opened.notes)
    assert "37.5 % (train), 50.0 % (val), 0.0 % (test) are <unk>" in notes
    assert "begins with a zero state" in notes
    assert opened.train.notes == opened.notes


def test_sentences_have_their_words_and_labels(tmp_path, monkeypatch):
    for name, folder in (("sst2", "SST-2"), ("cola", "CoLA"), ("rte", "RTE")):
        array_sets.write(tmp_path, name, monkeypatch)
        opened = datasets.load(name, tmp_path, num_features=5_000)
        columns = glue.COLUMNS[folder]
        raw = array_sets.contents(name)[f"glue/{folder}/train.tsv"].decode().splitlines()
        raw = [line.split("\t") for line in raw[columns.header :]]
        arrays = opened.train.arrays
        assert arrays["label"].tolist() == [columns.labels[row[columns.label]] for row in raw]
        for found, row in zip(arrays["words"], raw, strict=True):
            words = {w for w in row[columns.sentences[0]].split() if w != "<unk>"}
            words |= {"<", "unk", ">"} if "<unk>" in row[columns.sentences[0]] else set()
            if name == "rte":
                words |= {f"1:{word}" for word in row[2].split()}
            expected = {zlib.crc32(word.encode()) % 5_000 for word in words}
            assert set(found[found >= 0].tolist()) == expected
        assert list(opened.evals) == ["val"]
        assert "no pretrained encoder is used" in " ".join(opened.notes)
        assert ("at chance" in " ".join(opened.notes)) == (name == "rte")


def test_features_by_singular_values_are_fitted_to_the_training_file(tmp_path, monkeypatch):
    array_sets.write(tmp_path, "sst2", monkeypatch)
    opened = datasets.load("sst2", tmp_path, features="svd", num_features=4)
    assert (opened.kind, opened.example_shape) == ("features", (4,))
    features = opened.train.arrays["features"]
    np.testing.assert_allclose(np.sqrt((features**2).mean(0)), 1, rtol=1e-4)
    other = array_sets.contents("sst2") | {"glue/SST-2/dev.tsv": b"sentence\tlabel\ngood\t1\n"}
    array_sets.write(tmp_path, "sst2", monkeypatch, other)
    again = datasets.load("sst2", tmp_path, features="svd", num_features=4)
    np.testing.assert_array_equal(again.train.arrays["features"], features)


SENTENCES, SERIES = "sentence\tlabel\nfine\t1\n", '"V1","V2","V3","V4"\n"W1","1","2","3"\n'


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (f"{SENTENCES}good\tyes\n", r"example 1 of x has the label 'yes', expected one of 0, 1"),
        (f"{SENTENCES}good\n", r"example 1 of x has 1 columns, expected 2"),
        (f'{SERIES}"W2","3","x"\n', r"point 1 of series 1 \('W2'\) of x is 'x', expected a finite"),
        (f'{SERIES}"W1","3"\n', r"series 1 \('W1'\) of x is there twice"),
    ],
)
def test_a_wrong_example_or_point_is_named_by_its_place(rows, message):
    columns = {} if rows.startswith(SERIES) else {"columns": glue.COLUMNS["SST-2"]}
    with pytest.raises(ValueError, match=message):
        (glue if columns else m4_weekly).parse(rows.encode(), "x", **columns)


def test_options_are_those_of_the_set(tmp_path):
    assert datasets.options_of("wikitext2") == ("vocabulary", "length")
    assert datasets.options_of("m4_weekly") == ("past", "future")
    assert datasets.options_of("cifar10") == ()
    with pytest.raises(ValueError, match="sst2: there is no option length; it has features, num_f"):
        datasets.load("sst2", tmp_path, length=3)
    with pytest.raises(ValueError, match=r"data.features: got 'x', must be one of hashed, svd"):
        glue.open_task(lambda name: b"", features="x", task="RTE")


COUNTS = {"wikitext2": [2_088_628, 217_646, 245_569], "m4_weekly": [359, 359]}
COUNTS |= {"sst2": [67_349, 872], "cola": [8_551, 1_043], "rte": [2_490, 277]}


@pytest.mark.parametrize("name", NAMES)
def test_the_real_files_match_their_checksums_and_have_the_known_counts(name, test_data):
    original, counts = datasets.ARRAY_SETS[name], []
    for spec in original.files:
        if not any((folder / spec.name).is_file() for folder in (test_data / name, test_data)):
            pytest.skip(f"HETJAX_TEST_DATA has no {spec.name}")
    read = files.reader(original, test_data, download=False)
    for spec in original.files:
        if name in ("wikitext2", "m4_weekly"):
            parse = {"wikitext2": wikitext2.parse, "m4_weekly": m4_weekly.parse}[name]
            counts.append(len(parse(read(spec.name), spec.name)))
        else:
            columns = glue.COLUMNS[spec.name.split("/")[1]]
            counts.append(len(glue.parse(read(spec.name), spec.name, columns)[1]))
    assert counts == COUNTS[name]
