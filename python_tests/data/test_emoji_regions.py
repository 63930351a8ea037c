"""Region features of the bundled data, from a network that was trained on other pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from itm_fast import models
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"image_encoder": "patches", "embed_dim": 12, "word_dim": 6, "direction": "t2i"}
SMALL = {"epochs": 1, "batch_size": 16, "threads": 1, "model_options": OPTIONS, "validation_images": 8}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool with the first 16 pictures of each split."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import emoji_regions

    whole = emoji_regions.bundled_split

    def cut(split: str, train_images: int, *, rest: bool = False) -> tuple[np.ndarray, list[str]]:
        pictures, captions = whole(split, train_images, rest=rest)
        return pictures[:16], captions[:80]

    monkeypatch.setattr(emoji_regions, "bundled_split", cut)
    return emoji_regions


def test_the_tool_trains_on_pictures_outside_the_data(tool: ModuleType) -> None:
    from benchmarks.experiments.data import bundled_split

    kept, captions = bundled_split("train", 840)
    rest, other_captions = bundled_split("train", 840, rest=True)
    assert (len(kept), len(rest), len(captions), len(other_captions)) == (840, 1981, 4200, 9905)
    found = {picture.tobytes(): caption for picture, caption in zip(kept, captions[::5], strict=True)}
    found |= {picture.tobytes(): caption for picture, caption in zip(rest, other_captions[::5], strict=True)}
    every = {picture.tobytes() for picture in emoji.pictures("train")}
    assert set(found) == every
    assert sorted([*captions, *other_captions]) == sorted(emoji.captions("train"))


def test_regions_are_outputs_of_the_trained_network(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.write_regions(tmp_path, **SMALL)
    network = models.load(tmp_path / "detector" / "run").get_submodule("image_encoder")
    vocabulary = Vocabulary.from_file(tmp_path / "vocab.json")
    assert vocabulary == emoji.vocabulary()
    for split in emoji.SPLITS:
        pictures, captions = tool.bundled_split(split, 840)
        dataset = PrecomputedDataset(tmp_path, split, vocabulary)
        assert dataset.captions == captions
        with torch.no_grad():
            expected = network.eval()(torch.from_numpy(emoji.patches(pictures))).values
        assert dataset.features.shape == (16, 36, 12)
        np.testing.assert_allclose(np.asarray(dataset.features).reshape(-1, 12), expected.numpy(), atol=1e-6)
    # The network learned from other pictures.
    trained = np.load(tmp_path / "detector" / "data" / "train_ims.npy")
    assert np.array_equal(trained, emoji.patches(tool.bundled_split("train", 840, rest=True)[0]))

    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    assert len(before) == 7
    assert tool.write_regions(tmp_path, **SMALL)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == before
    # A run with other settings cannot be continued.
    with pytest.raises(ValueError, match="holds a run with lr = 0"):
        tool.write_regions(tmp_path, **{**SMALL, "lr": 3e-3})


def test_the_command_starts_from_the_root_of_the_repository() -> None:
    command = [sys.executable, "-m", "tools.emoji_regions", "--help"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "region features" in answer.stdout
