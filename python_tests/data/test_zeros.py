"""Regions of zeros are reported by `data check` and with the first batch of a training, with file and row."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import cli
from itm_fast.data import open_split, pack
from itm_fast.data.check import Problem, check_folder
from itm_fast.data.zeros import count_zeros, warn_of_zeros
from itm_fast.fragments import Fragments
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.precomputed import VOCABULARY, features_of, write_split
from python_tests.helpers.runs import config, make_trainer, run

ADVICE = "if the zeros are padding, write the number of true regions of each row to train_regions.txt"


def padded(n_images: int = 6) -> np.ndarray:
    """Features of three regions: rows 1 and 4 end with one and two regions of zeros, row 5 has one in the middle."""
    images = features_of(n_images) + 1
    images[1, 2:], images[4, 1:], images[5, 1] = 0, -0.0, 0
    return images


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write_split(folder, "train", padded(), 30)
    VOCABULARY.save(folder / "vocab.json")
    return folder


def test_regions_of_zeros_are_counted() -> None:
    images = torch.from_numpy(padded())
    images[0, 0, 0], images[2, 0, :3] = 0, 0
    images[3, 0] = torch.nan
    assert count_zeros(images).tolist() == [0, 1, 0, 0, 2, 1]
    assert count_zeros(images.to(torch.bfloat16)).tolist() == [0, 1, 0, 0, 2, 1]
    rows = torch.cat([images[4], images[0, :2], images[1, 2:]])
    fragments = Fragments(rows, torch.tensor([0, 3, 5, 6]), max_length=3)
    assert count_zeros(fragments).tolist() == [2, 0, 1]


def test_the_check_warns_of_padding(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check_folder(data)
    assert report.problems == []
    places = ("row 1 (1 of 3 regions)", "row 4 (2 of 3 regions)", "row 5 (1 of 3 regions)")
    assert report.warnings == [Problem("train_ims.npy", f"regions of zeros; {ADVICE}", 3, places)]
    file = tmp_path / "report.json"
    assert cli.run(["data", "check", str(data), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "row 4 (2" in printed
    assert printed.endswith(f"{data}: no problems found\n")
    assert json.loads(file.read_text())["warnings"][0]["places"] == list(places)


def test_the_check_looks_at_the_regions_that_are_declared(data: Path) -> None:
    (data / "train_regions.txt").write_text("3\n2\n3\n3\n2\n1\n")
    (warning,) = check_folder(data).warnings
    assert (warning.count, warning.places) == (1, ("row 4 (1 of 2 regions)",))
    (data / "train_regions.txt").write_text("3\n2\n3\n3\n1\n1\n")
    assert check_folder(data).warnings == []


def test_padding_in_each_row_of_a_repeated_image_is_named(data: Path) -> None:
    write_split(data, "train", np.repeat(padded(), 5, axis=0), 30)
    (warning,) = check_folder(data).warnings
    assert warning.count == 15
    assert warning.places[4:6] == ("row 9 (1 of 3 regions)", "row 20 (2 of 3 regions)")


def warnings_of(data: Path, captions: list[int]) -> list[str]:
    dataset = open_split(data, "train", VOCABULARY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_zeros(dataset, dataset.batch(captions))
    return [str(one.message) for one in caught]


def test_a_batch_with_padding_is_reported(data: Path, tmp_path: Path) -> None:
    path = data / "train_ims.npy"
    message = "{}: 2 of 3 regions are zeros, as are regions of 2 of the 3 images in the first batch; {}"
    assert warnings_of(data, [0, 27, 20, 22, 1]) == [message.format(f"{path}: row 4", ADVICE)]
    assert warnings_of(data, [0, 12, 2]) == []
    pack(data, tmp_path / "store", dtype="fp32", shard_bytes=150)
    shard = tmp_path / "store" / "train-00001.safetensors"
    again = f"{ADVICE} of the data folder, and pack it again"
    expected = message.format(f"{shard}: row 1 (image 4)", again)
    assert warnings_of(tmp_path / "store", [0, 27, 20, 22, 1]) == [expected]
    (data / "train_regions.txt").write_text("3\n2\n3\n3\n1\n1\n")
    assert warnings_of(data, [0, 27, 20, 22, 1]) == []


def test_a_training_reports_padding_once(tmp_path: Path) -> None:
    data = write_concepts(tmp_path / "data")
    images = np.load(data / "train_ims.npy")
    images[:, 3] = 0
    np.save(data / "train_ims.npy", images)
    with pytest.warns(UserWarning, match="1 of 4 regions are zeros, as are regions of") as caught:
        run(config(data, tmp_path / "run"))
    assert sum("are zeros" in str(one.message) for one in caught) == 1
    trainer = make_trainer(config(write_concepts(tmp_path / "full"), tmp_path / "other"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(trainer._batches(0))
