"""Experiments on pictures: the vision models that a tool writes, and results that belong to one vision model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.experiments import __main__ as experiments
from itm_fast import evaluation, models
from itm_fast.data import Vocabulary, open_split
from itm_fast.models.vision_folder import load_picture_encoder
from python_tests.helpers.pixels import write_pixels
from python_tests.helpers.processes import ROOT


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folders of a ViT and a Swin for pictures of 72 pixels."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import small_vision_models

    return small_vision_models.write_models(tmp_path)


def test_the_tool_writes_the_same_models_again(folders: list[Path], tmp_path: Path) -> None:
    import small_vision_models

    for folder in folders:
        encoder = load_picture_encoder(folder)
        assert (encoder.regions, encoder.width, encoder.preprocessing.side) == (36, 64, 72)
        tokens = encoder(torch.randint(256, (2, 72, 72, 3), dtype=torch.uint8))
        assert float((tokens[0] - tokens[1]).abs().mean()) > 0.01
    for again in small_vision_models.write_models(tmp_path / "again"):
        for path in again.iterdir():
            assert path.read_bytes() == (tmp_path / again.name / path.name).read_bytes(), path


def test_a_result_belongs_to_one_vision_model(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_pixels(tmp_path / "pixels", size=72)
    vit = folders[0]
    train = {"model": "laps", "image_backbone": str(vit), "model_options": {"embed_dim": 8, "word_dim": 6}}
    content = {"title": "tiny", "data": str(store), "split": "dev", "rows": [{"name": "LAPS"}],
               "train": {**train, "epochs": 1, "batch_size": 32}}  # fmt: skip
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(yaml.safe_dump(content))
    places = [str(experiment), "--results", str(tmp_path / "results")]
    assert experiments.main(["run", *places, "--out", str(tmp_path / "runs"), "--threads", "1"]) == 0
    run, path = tmp_path / "runs" / "laps-seed0", tmp_path / "results" / "laps-seed0.json"
    result = json.loads(path.read_text())
    dataset = open_split(store, "dev", Vocabulary.from_file(run / "vocab.json"))
    assert result["test"] == evaluation.evaluate(models.load(run), dataset)
    assert set(result["identity"]["fingerprints"]["vision model"]) == {
        "config.json", "model.safetensors", "preprocessor_config.json"
    }  # fmt: skip

    weights = bytearray((vit / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (vit / "model.safetensors").write_bytes(weights)
    capsys.readouterr()
    assert experiments.main(["table", *places]) == 1
    assert capsys.readouterr().err == (
        f"experiments: error: {path}: was measured with other content of model.safetensors; move it away to measure "
        "again, or undo the change\n"
    )
    shutil.rmtree(vit)
    assert experiments.main(["table", *places]) == 0, "without the folder, its content is not compared"
