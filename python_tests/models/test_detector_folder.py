"""Folders of detectors that cannot be loaded are one line, also without torchvision."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from itm_fast.models.detector_folder import BUILDERS, is_detector_folder, load_detector

KEYS = "builder, batch_norm_eps, min_size, max_size"


def refused(folder: Path, message: str) -> None:
    assert is_detector_folder(folder)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_detector(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fasterrcnn_resnet50_fpn_v2-1.pth").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected a JSON object, got []"),
        ("{", "expected JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{}", f"builder: expected {', '.join(BUILDERS)}, got None"),
        ('{"builder": "retinanet"}', f"builder: expected {', '.join(BUILDERS)}, got 'retinanet'"),
        ('{"layers": 3}', f"layers: expected one of {KEYS}"),
        ('{"min_size": 5000}', "min_size: expected 1 to 4096 pixels, got 5000"),
        ('{"max_size": true}', "max_size: expected 1 to 4096 pixels, got True"),
        ('{"batch_norm_eps": -1}', "batch_norm_eps: expected a number from 0 to 1, got -1"),
        ('{"batch_norm_eps": "0"}', "batch_norm_eps: expected a number from 0 to 1, got '0'"),
    ],
)  # fmt: skip
def test_settings_are_checked(folder: Path, content: str, message: str) -> None:
    (folder / "detector.json").write_text(content)
    refused(folder, f"{folder}/detector.json: {message}")


def test_weights_without_a_known_name_need_settings(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"")
    refused(
        tmp_path,
        f"{tmp_path}/detector.json: no such file; it names the builder of torchvision, as the name of weights.pt does "
        'not begin with it: {"builder": "fasterrcnn_resnet50_fpn"}',
    )
    (tmp_path / "config.json").write_text("{}")
    assert not is_detector_folder(tmp_path)
    assert not is_detector_folder(tmp_path / "none")


def test_one_file_of_weights_is_expected(tmp_path: Path) -> None:
    (tmp_path / "detector.json").write_text('{"builder": "fasterrcnn_resnet50_fpn"}')
    expected = f"{tmp_path}: expected one file of weights (.pth, .pt, .safetensors), found "
    refused(tmp_path, f"{expected}none")
    for name in ("b.pth", "a.safetensors"):
        (tmp_path / name).write_bytes(b"")
    refused(tmp_path, f"{expected}a.safetensors, b.pth")


def test_a_missing_torchvision_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    message = "the package torchvision is not installed; install it with pip install 'itm_fast[detector]'"
    refused(folder, f"encoder: {message}")


def test_a_torchvision_of_another_torch_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    refused(
        folder,
        f"encoder: torchvision cannot be imported beside torch {torch.__version__} (operator torchvision::nms does not "
        "exist); install the torchvision that was built for it",
    )
