"""Vocabularies: the published JSON, the builder, and the search for the vocabulary of a data directory."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from itm_fast.data import CaptionDataset, Vocabulary, find_vocabulary, load_vocabulary

SPECIAL = ["<pad>", "<start>", "<end>", "<unk>"]


def write(path, word2idx, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"word2idx": word2idx, **more}), encoding="utf-8")
    return path


def numbered(words):
    return {word: index for index, word in enumerate(words)}


def test_build_counts_words_and_orders_them_by_frequency_then_alphabet():
    captions = ["A dog."] * 4 + ["a cat"] * 3 + ["a bird"] * 4
    vocabulary = Vocabulary.build(captions)
    assert vocabulary.words == [*SPECIAL, "<mask>", "a", ".", "bird", "dog"]
    assert (vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unk, vocabulary.mask) == (0, 1, 2, 3, 4)
    assert Vocabulary.build(captions, min_count=5).words == [*SPECIAL, "<mask>", "a"]
    assert Vocabulary.build(captions, min_count=3).words[-1] == "cat"


def test_words_and_captions_with_a_lone_surrogate_are_refused():
    with pytest.raises(ValueError, match=r"^vocabulary: expected Unicode characters, found the lone surrogate"):
        Vocabulary.build(["a \ud800"], min_count=1)
    captions = ["a dog", "a \udcff"]
    with pytest.raises(ValueError, match=r"^captions: row 1: expected Unicode characters, found the lone surr"):
        CaptionDataset(np.ones((1, 2, 3)), captions, [0, 0], Vocabulary(SPECIAL))


def test_encode_wraps_the_caption_and_marks_unknown_words():
    vocabulary = Vocabulary([*SPECIAL, "a", "dog", "."])
    assert vocabulary.encode("A red dog.") == [1, 4, 3, 5, 6, 2]
    assert vocabulary.decode([1, 4, 3, 5, 6, 2, 0, 0]) == ["a", "<unk>", "dog", "."]


def test_special_words_in_a_caption_are_plain_text():
    vocabulary = Vocabulary([*SPECIAL, "<mask>"])
    assert vocabulary.encode("<mask> <pad>") == [1, *[3] * 6, 2]


def test_published_json_with_ids_in_another_order_and_without_mask(tmp_path):
    words = {"dog": 5, "<pad>": 1, "<start>": 0, "<end>": 3, "<unk>": 2, "a": 4}
    inverse = {str(index): word for word, index in words.items()}
    vocabulary = Vocabulary.from_file(write(tmp_path / "v.json", words, idx2word=inverse, idx=6))
    assert vocabulary.words == ["<start>", "<pad>", "<unk>", "<end>", "a", "dog"]
    assert (vocabulary.pad, vocabulary.start, vocabulary.unk, vocabulary.end, vocabulary.mask) == (1, 0, 2, 3, None)
    assert vocabulary.encode("a dog") == [0, 4, 5, 3]


@given(st.sets(st.text(min_size=1, max_size=5).filter(lambda word: word not in [*SPECIAL, "<mask>"]), max_size=20))
def test_a_saved_vocabulary_reads_back_the_same(tmp_path_factory, words):
    path = tmp_path_factory.mktemp("vocabulary") / "v.json"
    vocabulary = Vocabulary([*SPECIAL, *sorted(words)])
    vocabulary.save(path)
    assert Vocabulary.from_file(path) == vocabulary
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["idx"] == len(vocabulary)
    assert content["idx2word"] == {str(index): word for word, index in content["word2idx"].items()}


WITHOUT_UNK = numbered(["<pad>", "<start>", "<end>", "a"])
GAP = {**numbered(SPECIAL), "a": 5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"word2idx": WITHOUT_UNK}), "expected the words <pad> <start> <end> <unk>, found no <unk>"),
        (json.dumps({"word2idx": GAP}), "expected the ids 0 to 4, no word has id 4"),
        (json.dumps({"word2idx": {**numbered(SPECIAL), "a": 3}}), "expected the ids 0 to 4, no word has id"),
        (json.dumps({"word2idx": {**numbered(SPECIAL), "a": "4"}}), "expected an integer id for the word 'a', got '4'"),
        (
            json.dumps({"word2idx": {**numbered(SPECIAL), "a": True}}),
            "expected an integer id for the word 'a', got True",
        ),
        (json.dumps({"word2idx": numbered(SPECIAL), "idx": 5}), "'idx' is 5, but 'word2idx' has 4 words"),
        (json.dumps({"word2idx": numbered(SPECIAL), "idx2word": {}}), "'idx2word' is not the inverse of 'word2idx'"),
        (json.dumps({"words": []}), "expected a JSON object with an object 'word2idx'"),
        (json.dumps([1]), "expected a JSON object with an object 'word2idx'"),
        ("{", "expected a vocabulary as UTF-8 JSON: Expecting property name"),
        (b"\xff\xfe", "expected text in UTF-8 (byte 0: invalid start byte)"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, content, message):
    path = tmp_path / "v.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:  # noqa: PT011 the message is compared below
        Vocabulary.from_file(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_repeated_words_and_bad_counts_are_refused():
    with pytest.raises(ValueError, match="the word 'a' occurs more than once"):
        Vocabulary([*SPECIAL, "a", "a"])
    with pytest.raises(ValueError, match="min_count: expected at least 1, got 0"):
        Vocabulary.build(["a"], min_count=0)


@pytest.fixture
def places(tmp_path):
    """All names of vocabularies, in the order of the search."""
    directory = tmp_path / "root" / "data" / "f30k_precomp"
    directory.mkdir(parents=True)
    (directory / "train_caps.txt").write_text("only training words\n" * 4, encoding="utf-8")
    (directory / "test_caps.txt").write_text("words of the test\n" * 4, encoding="utf-8")
    name = "f30k_precomp_vocab.json"
    return directory, [
        tmp_path / "named.json",
        directory / "vocab.json",
        directory.parent / "vocab" / name,
        directory.parent.parent / "vocab" / name,
    ]


def test_vocabularies_are_found_in_the_documented_order(places):
    directory, candidates = places
    for index, path in enumerate(candidates):
        write(path, numbered([*SPECIAL, f"word{index}"]))
    assert "word0" in load_vocabulary(directory, candidates[0])
    for index, path in enumerate(candidates[1:], 1):
        assert find_vocabulary(directory) == path
        assert f"word{index}" in load_vocabulary(directory)
        path.unlink()
    assert find_vocabulary(directory) is None
    assert load_vocabulary(directory).words == [*SPECIAL, "<mask>", "only", "training", "words"]


def test_the_vocabulary_of_a_nested_data_directory_is_found(tmp_path):
    directory = tmp_path / "data" / "coco" / "precomp"
    directory.mkdir(parents=True)
    path = write(tmp_path / "vocab" / "coco_precomp_vocab.json", numbered(SPECIAL))
    assert find_vocabulary(directory) == path


def test_a_relative_data_directory_is_resolved(tmp_path, monkeypatch):
    directory = tmp_path / "data" / "f30k_precomp"
    directory.mkdir(parents=True)
    path = write(tmp_path / "vocab" / "f30k_precomp_vocab.json", numbered(SPECIAL))
    monkeypatch.chdir(directory)
    assert find_vocabulary(".") == path


def test_a_folder_that_a_path_only_passes_is_not_searched(tmp_path, monkeypatch):
    (tmp_path / "data" / "f30k_precomp").mkdir(parents=True)
    write(tmp_path / "project" / "vocab" / "f30k_precomp_vocab.json", numbered(SPECIAL))
    monkeypatch.chdir(tmp_path / "project")
    assert find_vocabulary("../data/f30k_precomp") is None


def test_a_vocabulary_beside_a_link_to_the_data_is_found(tmp_path):
    target, data = tmp_path / "disk" / "features", tmp_path / "project" / "data"
    target.mkdir(parents=True)
    data.mkdir(parents=True)
    (data / "f30k_precomp").symlink_to(target)
    path = write(tmp_path / "project" / "vocab" / "f30k_precomp_vocab.json", numbered(SPECIAL))
    assert find_vocabulary(data / "f30k_precomp") == path
    path.unlink()
    # Or beside the data themselves.
    path = write(tmp_path / "disk" / "vocab" / "features_vocab.json", numbered(SPECIAL))
    assert find_vocabulary(data / "f30k_precomp") == path


def test_a_missing_vocabulary_lists_the_searched_names(tmp_path):
    with pytest.raises(ValueError, match=r"found no vocabulary .*and no train_caps.txt .*--vocab FILE"):
        load_vocabulary(tmp_path)
    with pytest.raises(ValueError, match=r"other.json: no such vocabulary file"):
        load_vocabulary(tmp_path, tmp_path / "other.json")
