"""The tokenizer of a text tower as a vocabulary: ids as in transformers, files, and rejected input."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

from itm_fast.data import PrecomputedDataset, TextAugmentation, TokenizerVocabulary, Vocabulary, open_split, pack
from itm_fast.data.check_store import check_store
from itm_fast.data.cider import CiderD
from python_tests.helpers.clip import LONGEST, write_clip

CAPTIONS = ["Red map of sun", "a man,  with flowers!", "", "MAP map", "été ☂", "sun " * 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    for kind in ("clip", "siglip"):
        write_clip(root / kind, kind)
    return root


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_captions_become_the_ids_of_transformers(folder: Path, kind: str) -> None:
    import transformers

    vocabulary = TokenizerVocabulary.from_folder(folder / kind)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder / kind)
    # Captions are not cut, although the folder says how many tokens the model reads.
    for caption in CAPTIONS:
        assert vocabulary.encode(caption) == theirs(caption).input_ids, caption
    assert len(vocabulary.encode(CAPTIONS[-1])) > LONGEST
    assert (len(vocabulary), vocabulary.pad) == (len(theirs), theirs.pad_token_id)
    assert vocabulary.words[vocabulary.end] == theirs.eos_token
    if kind == "clip":
        ids = [vocabulary.words.index(f"{word}</w>") for word in ("red", "map", "of", "sun")]
        assert vocabulary.encode("Red map of sun") == [vocabulary.start, *ids, vocabulary.end]
        assert (vocabulary.unk, vocabulary.words[vocabulary.start]) == (-1, "<|startoftext|>")
        pieces = ["<|startoftext|>", "a", "map", ",", "Sun", "!", "<|endoftext|>"]
        assert vocabulary.pieces("a map,  Sun!") == pieces
        assert vocabulary.decode(vocabulary.encode("red map")) == ["red</w>", "map</w>"]
    else:
        assert vocabulary.decode(vocabulary.encode("Red map!")) == ["▁red", "▁map"]
        assert vocabulary.words[vocabulary.unk] == "<unk>"
        assert vocabulary.pieces("Red map!") == ["Red", "map", "</s>"]


@pytest.mark.parametrize(("kind", "marks"), [("clip", (1, 1)), ("siglip", (0, 1))])
def test_marks_are_the_tokens_around_the_words(folder: Path, data: Path, kind: str, marks: tuple[int, int]) -> None:
    """A SigLIP has none at the start: the first word of a caption counts."""
    vocabulary = TokenizerVocabulary.from_folder(folder / kind)
    assert vocabulary.marks == marks
    assert vocabulary.pieces("Red map")[vocabulary.inner] == ["Red", "map"]
    assert list(range(4)[Vocabulary(Vocabulary.special).inner]) == [1, 2]
    captions = PrecomputedDataset(data, "train", vocabulary)
    words = [len(vocabulary.pieces(caption)[vocabulary.inner]) for caption in captions.captions]
    unknown = int((captions.token_ids == vocabulary.unk).sum())
    assert captions.unknown_share == unknown / sum(words)
    # Captions that differ in their first word only.
    ids = [vocabulary.encode(caption) for caption in ("red map of sun", "map map of sun")]
    lengths = torch.tensor([len(one) for one in ids])
    rows = torch.tensor([token for one in ids for token in one], dtype=torch.int32)
    measure = CiderD(rows, lengths, torch.tensor([0, 1]), vocabulary.marks)
    own, other = measure.scores(torch.tensor([0, 0]), torch.tensor([0, 1])).tolist()
    assert own > other


@pytest.mark.parametrize("kind", ["words", "clip", "siglip"])
def test_a_store_contains_captions_with_the_marks_of_the_vocabulary(
    folder: Path, data: Path, tmp_path: Path, kind: str
) -> None:
    """Also captions without words."""
    own = shutil.copytree(data, tmp_path / "data")
    captions = (own / "train_caps.txt").read_text().splitlines()
    (own / "train_caps.txt").write_text("\n".join(["!!!", *captions[1:], ""]))
    vocabulary = Vocabulary.build(captions, 1) if kind == "words" else TokenizerVocabulary.from_folder(folder / kind)
    vocabulary.save(tmp_path / "vocab.json")
    store = tmp_path / "store"
    pack(own, store, vocabulary_file=tmp_path / "vocab.json")
    assert check_store(store).problems == []
    opened, plain = (open_split(place, "train", vocabulary) for place in (store, own))
    assert torch.equal(opened.token_ids, plain.token_ids)
    assert opened.caption_lengths[0] == len(vocabulary.encode("!!!"))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_saved_vocabulary_is_the_same(folder: Path, tmp_path: Path, kind: str) -> None:
    vocabulary = TokenizerVocabulary.from_folder(folder / kind)
    vocabulary.save(tmp_path / "vocab.json")
    again = Vocabulary.from_file(tmp_path / "vocab.json")
    assert again == vocabulary
    assert again == vocabulary.with_mask()
    assert pickle.loads(pickle.dumps(again)).encode("a red map") == vocabulary.encode("a red map")
    other = TokenizerVocabulary.from_folder(folder / ("siglip" if kind == "clip" else "clip"))
    assert again != other
    assert Vocabulary(["<pad>", "<start>", "<end>", "<unk>"]) != again
    with pytest.raises(ValueError, match="text augmentation needs the word <mask>, which it does not have"):
        TextAugmentation(again)


def test_the_padding_of_the_file_and_its_longest_caption_are_not_used(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "clip" / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                          "pad_type_id": 0, "pad_token": "!"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = TokenizerVocabulary.from_folder(tmp_path)
    assert vocabulary.encode("red map of sun") == TokenizerVocabulary.from_folder(folder / "clip").encode(
        "red map of sun"
    )
    assert vocabulary.pad == vocabulary.end, "the default where no tokenizer_config.json names another token"
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": {"content": "!"}}')
    assert TokenizerVocabulary.from_folder(tmp_path).pad == vocabulary.words.index("!")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tokenizer.json", None, "no such file; expected the tokenizer of the model as the package tokenizers saves "
         "it (save_pretrained of a fast tokenizer in transformers writes it)"),
        ("tokenizer.json", {"model": 3}, "tokenizer: expected a JSON object with an object 'model'"),
        ("tokenizer.json", {"post_processor": None},
         "tokenizer: post_processor: expected one that ends a caption with a token"),
        ("tokenizer_config.json", {"pad_token": 3}, "pad_token: expected a token, got 3"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(
    folder: Path, tmp_path: Path, name: str, changes: dict[str, object] | None, message: str
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((folder / "clip" / file).read_text())
        if file != name or changes is not None:
            (tmp_path / file).write_text(json.dumps({**content, **(changes or {} if file == name else {})}))
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        TokenizerVocabulary.from_folder(tmp_path)
    assert str(error.value) == f"{tmp_path / name}: {message}"


def test_contents_that_do_not_fit(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((folder / "clip" / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match=r"^tokenizer: pad_token: expected a token of the vocabulary, got 'other'$"):
        TokenizerVocabulary(content, "other")
    with pytest.raises(ValueError, match=r"^tokenizer: not one that the package tokenizers reads \(.*\)$"):
        TokenizerVocabulary({**content, "model": {"type": "Other"}})
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"kind": "tokenizer", "pad": 7, "tokenizer": content}))
    with pytest.raises(ValueError, match=r"vocab\.json: tokenizer: pad: expected a token, got 7$"):
        Vocabulary.from_file(path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"^tokenizer: the package transformers is not installed; install it with"):
        TokenizerVocabulary(content)
