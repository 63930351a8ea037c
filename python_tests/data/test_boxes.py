"""Boxes of regions: those of a data folder are checked, packed into a store, and read with the regions."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import cli
from itm_fast.data import PrecomputedDataset, check_split, open_split, pack
from itm_fast.data.boxes import RULE, are_boxes
from itm_fast.data.check import Problem, check_folder
from itm_fast.data.check_store import check_store
from itm_fast.data.dataset import CaptionDataset
from itm_fast.fragments import Fragments
from python_tests.data.test_store_index import rewrite
from python_tests.helpers.commands import error
from python_tests.helpers.precomputed import VOCABULARY, features_of, write_split


def boxes_of(n_rows: int, regions: int = 3) -> np.ndarray:
    """Make valid boxes (n_rows, regions, 4) with distinct values."""
    corners = np.random.default_rng(0).uniform(size=(n_rows, regions, 2, 2))
    return np.sort(corners, axis=2).reshape(n_rows, regions, 4).astype(np.float32)


def write_boxes(folder: Path, split: str, boxes: np.ndarray) -> np.ndarray:
    np.save(folder / f"{split}_boxes.npy", boxes)
    return boxes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write train (seven images of up to three regions) and dev (two images, each stored five times), with boxes."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_split(folder, "train", features_of(7), 35)
    (folder / "train_regions.txt").write_text("3\n1\n3\n2\n3\n1\n3\n")
    boxes = boxes_of(7)
    boxes[1, 1:] = 7  # Padding is not checked.
    write_boxes(folder, "train", boxes)
    write_split(folder, "dev", np.repeat(features_of(2) + 100, 5, axis=0), 10)
    write_boxes(folder, "dev", np.repeat(boxes_of(2).astype(np.float64), 5, axis=0))
    VOCABULARY.save(folder / "vocab.json")
    return folder


def test_boxes_are_read_with_the_regions(data: Path, tmp_path: Path) -> None:
    pack(data, tmp_path / "store", dtype="fp32", shard_bytes=100)
    train = np.load(data / "train_boxes.npy")
    dev = np.load(data / "dev_boxes.npy")[::5].astype(np.float32)
    for folder in (data, tmp_path / "store"):
        split = open_split(folder, "train", VOCABULARY)
        for dataset in (split, pickle.loads(pickle.dumps(split))):
            found, features = dataset.boxes([3, 0, 1]), dataset.image_batch([3, 0, 1])
            assert isinstance(found, Fragments)
            assert found.lengths.tolist() == features.lengths.tolist() == [2, 3, 1]
            expected = np.concatenate([train[3, :2], train[0], train[1, :1]])
            np.testing.assert_array_equal(found.values.numpy(), expected)
        few = open_split(folder, "train", VOCABULARY, max_images=2)
        np.testing.assert_array_equal(few.boxes([1, 0]).values.numpy(), np.concatenate([train[1, :1], train[0]]))
        with pytest.raises(ValueError, match="image_indices: expected values from 0 to 1, got 2 to 2"):
            few.boxes([2])
        found = open_split(folder, "dev", VOCABULARY).boxes(torch.tensor([1, 0, 1]))
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), dev[[1, 0, 1]])
        np.testing.assert_array_equal(open_split(folder, "dev", VOCABULARY, max_images=1).boxes([0]), dev[:1])


def test_data_without_boxes_say_so(data: Path, tmp_path: Path) -> None:
    (data / "train_boxes.npy").unlink()
    pack(data, tmp_path / "store")
    for folder, file in ((data, "train_ims.npy"), (tmp_path / "store", "train-00000.safetensors")):
        split = open_split(folder, "train", VOCABULARY)
        assert split.box_source is None
        message = f"^{re.escape(str(folder / file))}: these data contain no boxes of the regions$"
        with pytest.raises(ValueError, match=message):
            split.boxes([0])


def test_boxes_of_arrays() -> None:
    boxes = boxes_of(2).reshape(-1, 4)
    dataset = CaptionDataset(features_of(2), ["Caption 1 ."], [1], VOCABULARY, boxes=boxes)
    assert torch.equal(dataset.boxes([1]), torch.from_numpy(boxes[None, 3:]))
    with pytest.raises(ValueError, match=r"^boxes: expected float32 of shape \(6, 4\), got float32 \(5, 4\)$"):
        CaptionDataset(features_of(2), ["Caption 1 ."], [1], VOCABULARY, boxes=boxes[1:])


@pytest.mark.parametrize(
    ("box", "valid"),
    [
        ((0, 0, 1, 1), True),
        ((0.5, 0.25, 0.5, 0.25), True),
        ((0.5, 0, 0.25, 1), False),
        ((0, 0.5, 1, 0.25), False),
        ((-0.01, 0, 1, 1), False),
        ((0, -0.01, 1, 1), False),
        ((0, 0, 1.01, 1), False),
        ((0, 0, 1, 1.01), False),
        ((0, 0, 1, np.nan), False),
        ((np.nan, 0, 1, 1), False),
        ((0, 0, np.inf, 1), False),
    ],
)
def test_which_boxes_are_valid(data: Path, tmp_path: Path, box: tuple[float, ...], valid: bool) -> None:
    assert are_boxes(np.float32(box)) == valid
    boxes = boxes_of(7)
    boxes[3, 1] = box
    path = data / "train_boxes.npy"
    np.save(path, boxes)
    if valid:
        pack(data, tmp_path / "store")
        return
    shown = ", ".join(f"{value:g}" for value in np.float32(box))
    message = (
        f"{path}: row 3: region 1: expected (x0, y0, x1, y1) with {RULE}, got ({shown}); divide pixels by the width "
        "and height of the picture"
    )
    for read in (lambda: open_split(data, "train", VOCABULARY), lambda: pack(data, tmp_path / "store")):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            read()
    assert check_folder(data).problems == [
        Problem("train_boxes.npy", f"boxes (x0, y0, x1, y1) that break {RULE}", 1, ("row 3, region 1",))
    ]


def test_all_wrong_boxes_are_counted(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["data", "check", str(data)]) == 0
    assert "\nwith boxes of the regions: dev, train\n" in capsys.readouterr().out
    monkeypatch.setattr(check_split, "BLOCK_BYTES", 200)
    write_boxes(data, "train", boxes_of(7) + 300)
    (problem,) = check_folder(data).problems
    assert (problem.file, problem.count) == ("train_boxes.npy", 16)
    assert problem.places[:3] == ("row 0, region 0", "row 0, region 1", "row 0, region 2")
    assert problem.places[9:] == ("row 4, region 0",)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (boxes_of(6), "expected shape (7, 3, 4), a box for each region of the features, got (6, 3, 4)"),
        (boxes_of(7, 4), "expected shape (7, 3, 4), a box for each region of the features, got (7, 4, 4)"),
        (boxes_of(7).reshape(7, 12), "expected shape (7, 3, 4), a box for each region of the features, got (7, 12)"),
        (np.zeros((7, 3, 4), dtype=np.int64), "expected float16, float32 or float64 numbers, got int64"),
    ],
)
def test_boxes_that_do_not_fit_the_features_are_one_line(
    data: Path, capsys: pytest.CaptureFixture[str], boxes: np.ndarray, message: str
) -> None:
    path = data / "train_boxes.npy"
    np.save(path, boxes)
    assert error(capsys, "data", "pack", "--data", data, "--out", data.parent / "store") == (1, f"{path}: {message}")
    assert check_folder(data).problems == [Problem(path.name, message)]


def test_a_store_with_boxes_is_checked(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    pack(data, store, splits=["train"])
    assert check_store(store).boxes == ["train"]
    assert cli.run(["data", "check", str(store), "--json", str(tmp_path / "report.json")]) == 0
    assert "\nwith boxes of the regions: train\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["boxes"] == ["train"]

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(str(store / 'train-index.safetensors'))}: {message}$"):
            open_split(store, "train", VOCABULARY)
        (problem,) = check_store(store).problems
        assert re.fullmatch(message, problem.what)

    whole = open_split(store, "train", VOCABULARY).box_source.values.numpy().copy()
    rewrite(store, lambda arrays: arrays.update(boxes=whole[:-1]))
    refused(r"boxes: expected float32 of shape \(16, 4\), got float32 \(15, 4\)")
    rewrite(store, lambda arrays: arrays.update(boxes=whole.astype(np.float64)))
    refused(r"boxes: expected float32 of shape \(16, 4\), got float64 \(16, 4\)")
    turned = whole.copy()
    turned[5] = [0.5, 0.0, 0.25, 1.0]
    rewrite(store, lambda arrays: arrays.update(boxes=turned))
    refused(rf"boxes: row 5: expected \(x0, y0, x1, y1\) with {RULE}, got \(0.5, 0, 0.25, 1\)")


def test_other_boxes_need_another_store(data: Path, tmp_path: Path) -> None:
    pack(data, tmp_path / "store")
    write_boxes(data, "train", boxes_of(7)[::-1])
    with pytest.raises(ValueError, match="contains a feature store of other data or settings; choose another --out"):
        pack(data, tmp_path / "store")
    # Batches do not depend on boxes, so a run may be resumed after adding them.
    digests = [PrecomputedDataset(data, "train", VOCABULARY).features_digest()]
    (data / "train_boxes.npy").unlink()
    digests.append(PrecomputedDataset(data, "train", VOCABULARY).features_digest())
    assert digests[0] == digests[1]
