"""Indices of feature stores with matching digests and wrong content are refused in one line when they are opened."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from itm_fast.data import PrecomputedDataset, Vocabulary, open_split, pack
from itm_fast.data.check import Problem
from itm_fast.data.check_store import check_store
from python_tests.helpers.precomputed import SPECIAL, VOCABULARY, features_of, write_split

Arrays = dict[str, np.ndarray]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of one split: seven images of up to three regions in four shards, 35 captions, and names."""
    write_split(tmp_path, "train", features_of(7), 35, ids=["ä", *"bcdefg"])
    (tmp_path / "train_regions.txt").write_text("3\n1\n3\n3\n3\n1\n3\n")
    VOCABULARY.save(tmp_path / "vocab.json")
    pack(tmp_path, tmp_path / "store", dtype="fp32", shard_bytes=100)
    return tmp_path / "store"


def rewrite(store: Path, change: Callable[[Arrays], object], **record: object) -> Path:
    """Change the arrays of the index and the split's record, and give the manifest the new digest."""
    path = store / "train-index.safetensors"
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)
    content = path.read_bytes()
    manifest = json.loads((store / "store.json").read_text())
    manifest["splits"][0] |= {
        "index_bytes": len(content), "index_sha256": hashlib.sha256(content).hexdigest(), **record
    }  # fmt: skip
    (store / "store.json").write_text(json.dumps(manifest))
    return path


def put(name: str, position: int, value: int) -> Callable[[Arrays], None]:
    return lambda arrays: arrays[name].__setitem__(position, value)


def cast(name: str, dtype: object) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name].astype(dtype)})


def add(name: str, *changes: tuple[int, int]) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        for position, value in changes:
            arrays[name][position] += value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("token_ids"), "token_ids: expected int32 of one dimension, got none"),
        (lambda arrays: arrays.pop("ids_lengths"), "ids_lengths: expected int64 of shape (7,), got none"),
        (cast("caption_image", np.float64), "caption_image: expected int64 of shape (35,), got float64 of shape (35,)"),
        (cast("caption_image", bool), "caption_image: expected int64 of shape (35,), got bool of shape (35,)"),
        (cast("token_ids", np.int64), "token_ids: expected int32 of one dimension, got int64 of shape (226,)"),
        (
            lambda arrays: arrays.update(caption_lengths=arrays["caption_lengths"][:-1]),
            "caption_lengths: expected int64 of shape (35,), got int64 of shape (34,)",
        ),
        (
            lambda arrays: arrays.update(text_lengths=arrays["text_lengths"][None]),
            "text_lengths: expected int64 of shape (35,), got int64 of shape (1, 35)",
        ),
        (put("caption_image", 3, 7), "caption_image: expected values from 0 to 6, got 0 to 7"),
        (put("caption_image", 3, -1), "caption_image: expected values from 0 to 6, got -1 to 6"),
        (put("token_ids", 3, -1), "token_ids: expected values from 0 to 2147483647, got -1 to 16"),
        (
            add("caption_lengths", (0, 800_000_000), (1, -800_000_000)),
            "caption_lengths: expected values from 1 to 226, got -799999994 to 800000005",
        ),
        (put("caption_lengths", 0, 0), "caption_lengths: expected values from 1 to 226, got 0 to 8"),
        (put("caption_lengths", 0, 6), "caption_lengths: expected a sum of 226, the length of token_ids, got 227"),
        (
            add("caption_lengths", (0, 1), (1, -1)),
            "caption_lengths: caption 0 does not begin with <start> and end with <end>",
        ),
        (put("token_ids", 1, 17), "token_ids: expected values from 0 to 16, got 17"),
        (put("text_lengths", 0, 13), "text_lengths: expected a sum of 793, the length of text, got 795"),
        (put("text", 4, 0xFF), "text: not UTF-8 (byte 4: invalid start byte)"),
        (add("ids_lengths", (0, -1), (1, 1)), "ids_lengths: they cut the character at byte 1 of ids"),
        (put("region_counts", 0, 4), "region_counts: expected values from 1 to 3, got 1 to 4"),
        (put("region_counts", 0, 0), "region_counts: expected values from 1 to 3, got 0 to 3"),
        (put("region_counts", 0, 2), "region_counts: train-00000.safetensors holds 4 regions, its counts 3"),
        (lambda arrays: arrays.pop("region_counts"), "region_counts: expected int64 of shape (7,), got none"),
    ],
)
def test_a_wrong_index_is_refused(store: Path, change: Callable[[Arrays], object], message: str) -> None:
    path = rewrite(store, change)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {re.escape(message)}$"):
        open_split(store, "train", VOCABULARY)
    assert check_store(store).problems == [Problem(path.name, message)]


def test_a_manifest_with_another_count_is_refused(store: Path) -> None:
    path = rewrite(store, dict, captions=34)
    message = "caption_lengths: expected int64 of shape (34,), got int64 of shape (35,)"
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        open_split(store, "train", VOCABULARY)
    assert check_store(store).problems == [Problem(path.name, message)]
    rewrite(store, dict, captions=0)
    with pytest.raises(
        ValueError, match=r"store\.json: not a readable manifest of a feature store \(.*its width, captions"
    ):
        check_store(store)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"regions": 10**9}, "its width, captions or regions per image"),
        ({"name": "../train"}, "its name, names of files or digests"),
        ({"name": "a\0b"}, "its name, names of files or digests"),
    ],
)
def test_a_split_that_nothing_limits_is_refused(store: Path, changed: dict[str, object], message: str) -> None:
    """Models may have a weight for each of the regions; names of splits are parts of file names."""
    rewrite(store, dict, **changed)
    with pytest.raises(ValueError, match=rf"store\.json: not a readable manifest of a feature store \(.*{message}"):
        check_store(store)


def test_token_ids_of_other_captions_are_found(store: Path) -> None:
    """They are valid, so that only the text of the captions reveals them."""
    path = rewrite(store, put("token_ids", 1, VOCABULARY.unk))
    (problem,) = check_store(store).problems
    assert problem.what.startswith("token_ids: those of caption 0 are not those of its text, ")
    assert problem.file == path.name


def test_counts_of_images_that_all_have_as_many_regions_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path, "train", features_of(7), 35)
    VOCABULARY.save(tmp_path / "vocab.json")
    pack(tmp_path, tmp_path / "store")
    path = rewrite(tmp_path / "store", lambda arrays: arrays.update(region_counts=np.full(7, 3)))
    message = re.escape(f"{path}: region_counts: expected no such array, as each image has 3 regions")
    with pytest.raises(ValueError, match=f"^{message}$"):
        open_split(tmp_path / "store", "train", VOCABULARY)


def test_an_unchanged_index_is_read(store: Path) -> None:
    rewrite(store, dict)
    expected = PrecomputedDataset(store.parent, "train", VOCABULARY)
    other = Vocabulary([*SPECIAL, "caption"])
    for vocabulary in (VOCABULARY, other):
        found = open_split(store, "train", vocabulary)
        assert (found.captions, found.image_ids) == (expected.captions, expected.image_ids)
    assert check_store(store).problems == []
