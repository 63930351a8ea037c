"""Object tags of images: read, batched, packed into stores, checked, and refused."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import cli
from itm_fast.data import BertVocabulary, CaptionDataset, PrecomputedDataset, StoreDataset, TaggedImages, pack
from itm_fast.data.check import check_folder
from itm_fast.training.fingerprint import fingerprints
from python_tests.helpers.bert import PIECES
from python_tests.helpers.commands import error
from python_tests.helpers.precomputed import features_of, write_split

TAGS = ["red boat", "", "sun fish cup"]
SEP = 3
IDS = [[PIECES.index(piece) for piece in ("red", "bo", "##at")] + [SEP], [],
       [PIECES.index(piece) for piece in ("sun", "[UNK]", "cup")] + [SEP]]  # fmt: skip
VOCABULARY = BertVocabulary(PIECES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    write_split(directory, "train", features_of(3), 15)
    (directory / "train_tags.txt").write_text("".join(f"{line}\n" for line in TAGS))
    VOCABULARY.save(directory / "vocab.json")
    return directory


def ids_of(images: TaggedImages) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(images.tag_ids, images.tag_lengths, strict=True)]


def tag_problems(folder: Path) -> list[str]:
    return [one.what for one in check_folder(folder).problems if one.file == "train_tags.txt"]


def test_batches_have_the_tags_of_their_images(folder: Path) -> None:
    data = PrecomputedDataset(folder, "train", VOCABULARY)
    assert data.tags == TAGS
    assert isinstance(data.image_batch([1, 2]), torch.Tensor), "a model that reads no tags gets none"
    before = fingerprints(data)
    data.read_tags()
    images = data.image_batch([2, 1, 0, 2])
    assert ids_of(images) == [IDS[2], IDS[1], IDS[0], IDS[2]]
    assert torch.equal(images.regions, torch.from_numpy(features_of(3))[[2, 1, 0, 2]])
    batch = data.batch([11, 0]).to("cpu")
    assert (len(batch.features), ids_of(batch.features)) == (2, [IDS[2], IDS[0]])
    assert len(data.image_batch([])) == 0
    assert ids_of(pickle.loads(pickle.dumps(data)).image_batch([0])) == [IDS[0]]
    few = PrecomputedDataset(folder, "train", VOCABULARY, max_images=2)
    assert few.tags == TAGS[:2]
    (folder / "train_tags.txt").write_text("red\n\nsun\n")
    other = PrecomputedDataset(folder, "train", VOCABULARY)
    other.read_tags()
    changed = {name for name, digest in fingerprints(other).items() if fingerprints(data)[name] != digest}
    assert (changed, before.keys() ^ fingerprints(data).keys()) == ({"train_tags.txt"}, {"train_tags.txt"})


@pytest.mark.parametrize("lines", [3, 15])
def test_images_that_are_stored_five_times(folder: Path, lines: int) -> None:
    np.save(folder / "train_ims.npy", features_of(3).repeat(5, axis=0))
    repeated = [tags for tags in TAGS for _ in range(lines // 3)]
    (folder / "train_tags.txt").write_text("".join(f"{line}\n" for line in repeated))
    assert PrecomputedDataset(folder, "train", VOCABULARY).tags == TAGS
    assert tag_problems(folder) == []


def test_stores_contain_the_tags(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "store", dtype="fp32")
    store = StoreDataset(tmp_path / "store", "train", VOCABULARY)
    assert store.tags == TAGS
    store.read_tags()
    plain = PrecomputedDataset(folder, "train", VOCABULARY)
    plain.read_tags()
    assert ids_of(store.image_batch([0, 2])) == ids_of(plain.image_batch([0, 2])) == [IDS[0], IDS[2]]
    assert ids_of(pickle.loads(pickle.dumps(store)).image_batch([0])) == [IDS[0]]
    assert fingerprints(store) == fingerprints(plain)
    assert StoreDataset(tmp_path / "store", "train", VOCABULARY, max_images=1).tags == TAGS[:1]
    assert cli.run(["data", "check", str(tmp_path / "store")]) == 0
    (folder / "train_tags.txt").unlink()
    pack(folder, tmp_path / "without", dtype="fp32")
    message = (
        "without/train-00000.safetensors: the model reads object tags, but there are none; write train_tags.txt, one "
        "line per image, into the data folder, and pack it again"
    )
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        StoreDataset(tmp_path / "without", "train", VOCABULARY).read_tags()
    assert str(refused.value) == f"{tmp_path}/{message}"


@pytest.mark.parametrize(
    ("content", "message", "problem"),
    [
        (b"red\nsun\n", "expected one line per image (3), got 2 lines", "expected one line per image (3), got 2 lines"),
        (b"red\n\xff\nsun\n", "line 2: not UTF-8 (byte 0: invalid start byte)", "not UTF-8"),
        (b"red\n" + 100_001 * b"a" + b"\n\n",
         "line 2: expected tags of at most 100,000 characters, got 100,001",
         "expected tags of at most 100,000 characters"),
    ],
)  # fmt: skip
def test_damaged_tags(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str, problem: str
) -> None:
    path = folder / "train_tags.txt"
    path.write_bytes(content)
    assert tag_problems(folder) == [problem]
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    assert error(capsys, "data", "pack", "--data", folder, "--out", tmp_path / "store") == (1, f"{path}: {message}")


def test_own_arrays() -> None:
    data = CaptionDataset(features_of(2), ["red", "sun"], [0, 1], VOCABULARY, tags=["cup", ""])
    data.read_tags()
    assert ids_of(data.image_batch([0, 1])) == [[PIECES.index("cup"), SEP], []]
    with pytest.raises(ValueError, match=r"^tags: expected one text per image \(2\), got 1$"):
        CaptionDataset(features_of(2), ["red"], [0], VOCABULARY, tags=["cup"])
    with pytest.raises(
        ValueError, match=r"^features: the model reads object tags, but there are none; pass them as tags$"
    ):
        CaptionDataset(features_of(2), ["red"], [0], VOCABULARY).read_tags()
