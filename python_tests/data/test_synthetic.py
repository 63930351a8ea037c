"""Random data with COCO's counts, caption lengths and vocabulary size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from itm_fast import cli
from itm_fast.data import PrecomputedDataset, Vocabulary, load_vocabulary
from itm_fast.data.check import check_folder
from itm_fast.data.synthetic import COCO_IMAGES, write_synthetic
from python_tests.helpers.commands import error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("data"), scale=0.01, regions=3, width=8)


def test_counts_lengths_and_words_match_coco(folder: Path) -> None:
    report = check_folder(folder)
    assert report.problems == []
    assert {split.split: split.images for split in report.splits} == {
        "train": 1133,
        "dev": 50,
        "testall": 50,
        "test": 10,
    }
    vocabulary = load_vocabulary(folder)
    assert (len(vocabulary), vocabulary.mask) == (11_755, 4)
    train = PrecomputedDataset(folder, "train", vocabulary)
    lengths = train.caption_lengths.numpy()
    assert (lengths.min(), lengths.max()) == (8, 24)
    # The mean of 5,665 gamma draws of shape 5: five standard errors are 0.15.
    assert abs(lengths.mean() - 13) < 0.15
    assert train.unknown_share == 0
    counts = np.sort(np.bincount(train.token_ids.numpy()[train.token_ids.numpy() > 4]))[::-1]
    # A word of rank r is drawn with a share of 1 / (r + 2.7) of their sum.
    ranks = 1 / (np.arange(11_750) + 2.7)
    assert counts[:50].sum() / counts.sum() == pytest.approx(ranks[:50].sum() / ranks.sum(), abs=0.01)


def test_features_are_not_negative_and_differ(folder: Path) -> None:
    features = np.load(folder / "train_ims.npy")
    assert features.shape == (1133, 3, 8)
    assert features.dtype == np.float32
    assert features.min() >= 0
    # The mean of |x| for a normal x is sqrt(2 / pi).
    assert abs(features.mean() - np.sqrt(2 / np.pi)) < 0.02
    assert len(np.unique(features)) > 0.99 * features.size


def test_images_of_test_are_the_first_of_testall(folder: Path) -> None:
    few, all_of_them = (np.load(folder / f"{split}_ims.npy") for split in ("test", "testall"))
    np.testing.assert_array_equal(few, all_of_them[:10])
    lines = [(folder / f"{split}_caps.txt").read_text().splitlines() for split in ("test", "testall")]
    assert lines[0] == lines[1][:50]


def test_files_depend_only_on_the_arguments(folder: Path, tmp_path: Path) -> None:
    again = write_synthetic(tmp_path / "again", scale=0.01, regions=3, width=8)
    other = write_synthetic(tmp_path / "other", scale=0.01, regions=3, width=8, seed=1)
    for file in sorted(folder.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes()
        assert ((other / file.name).read_bytes() == file.read_bytes()) == (file.name == "vocab.json")


def test_a_sparse_file_takes_one_page_per_image(tmp_path: Path) -> None:
    write_synthetic(tmp_path, scale=0.002, sparse=True)
    path = tmp_path / "train_ims.npy"
    images = round(COCO_IMAGES["train"] * 0.002)
    state = path.stat()
    assert state.st_size == 128 + images * 36 * 2048 * 4
    assert state.st_blocks * 512 <= (images + 16) * 4096
    features = np.load(path, mmap_mode="r")
    assert (features[:, 0, :992] > 0).mean() > 0.999
    assert not features[::50, 1:].any()


def test_the_command_writes_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "data"
    arguments = ["data", "synthesize", "--out", str(out), "--scale", "0.001", "--regions", "2", "--width", "4"]
    assert cli.run(arguments) == 0
    assert f"{out}: images: train 113, dev 5, testall 5, test 1; five captions each" in capsys.readouterr().out
    assert isinstance(load_vocabulary(out), Vocabulary)
    assert error(capsys, *arguments) == (1, f"{out}: expected a new or empty folder; --overwrite replaces its files")
    # What says more of the data that are written over goes with them; other splits stay.
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for name in ("train_cap2im.txt", "test_ids.txt", "dev_regions.txt", "val_ids.txt"):
        (out / name).write_text("of other data\n")
    assert cli.run([*arguments, "--overwrite"]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {**before, "val_ids.txt": b"of other data\n"}
    store = tmp_path / "store"
    assert cli.run(["data", "pack", "--data", str(out), "--out", str(store), "--split", "dev"]) == 0
    for command in (["synthesize", "--scale", "0.001"], ["emoji"]):
        refused = error(capsys, "data", *command, "--out", store, "--overwrite")
        assert refused == (1, f"{store}: a feature store; choose another folder")
    assert cli.run(["data", "check", str(store)]) == 0
    expected = "scale: expected a number above 0 and at most 100, got 0.0"
    assert error(capsys, *arguments[:4], "--scale", "0", "--overwrite") == (1, expected)
