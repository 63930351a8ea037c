"""Graphs of the encoders in ONNX Runtime give the embeddings and scores of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import models
from itm_fast.adapters import onnx
from itm_fast.data import Vocabulary
from itm_fast.models.clip_folder import read_clip_folder
from python_tests.helpers.clip import write_clip

SIZES = {"vocab_size": 20, "feature_dim": 8, "embed_dim": 16}
BERT = {"text_encoder": "bert", "bert_dim": 24, "bert_layers": 2, "bert_heads": 3, "bert_hidden_dim": 32}


def compared(model: models.MatchingModel, folder: Path, features: torch.Tensor, **options: object) -> onnx.OnnxModel:
    """Export a model, and compare scores of captions of several lengths in several paddings."""
    onnx.export_onnx(model, folder, **options)
    exported = onnx.OnnxModel(folder)
    random = torch.Generator().manual_seed(5)
    lengths = torch.tensor([4, 1, 6, 3])
    ids = torch.randint(0, model.encoder_config.vocab_size, (4, 9), generator=random)
    wanted = model.score(model.encode_images(features), model.encode_captions(ids, lengths))
    captions, counts = exported.encode_captions(ids.numpy(), lengths.numpy())
    images = exported.encode_images(features.numpy())
    np.testing.assert_allclose(exported.score(images, captions, counts), wanted.detach(), rtol=1e-4, atol=2e-6)
    for one in range(4):  # A caption alone, without padding.
        alone, count = exported.encode_captions(ids[one : one + 1, : lengths[one]].numpy(), lengths[one : one + 1])
        np.testing.assert_allclose(
            exported.score(images, alone, count), wanted[:, one : one + 1].detach(), rtol=1e-4, atol=2e-6
        )
    return exported


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scan", {"num_layers": 2}),
        ("camp", {}),
        ("chan", {"image_encoder": "residual"}),
        ("vsepp", {}),
        ("vsepp", {"text_pooling": "mean", "bidirectional": True}),
        ("scan", BERT),
        ("vsepp", {**BERT, "text_pooling": "mean"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "default",
)
def test_exported_models_score_alike(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = models.create(name, **SIZES, **options).eval()
    compared(model, tmp_path / "onnx", torch.randn(5, 6, 8))


@pytest.mark.parametrize(("kind", "interaction"), [("clip", "global"), ("clip", "maxsim"), ("siglip", "global")])
def test_exported_clip_scores_alike(tmp_path: Path, kind: str, interaction: str) -> None:
    write_clip(tmp_path / kind, kind)
    folder = read_clip_folder(tmp_path / kind)
    side = folder.vision.settings()["config"]["image_size"]
    settings = {**folder.settings(), "feature_dim": side * side * 3, "interaction": interaction}
    model = models.create("clip", **settings).eval()
    folder.copy_weights(model)
    features = torch.rand(3, 1, side * side * 3, generator=torch.Generator().manual_seed(1)) * 2 - 1
    compared(model, tmp_path / "onnx", features, regions=1)


def test_strings_and_bad_input(tmp_path: Path) -> None:
    model = models.create("scan", **SIZES)
    with pytest.raises(ValueError, match=r"expected evaluation mode, .*; call model\.eval\(\)"):
        onnx.export_onnx(model, tmp_path / "onnx")
    model.eval()
    words = ["<pad>", "<start>", "<end>", "<unk>", "red", "ball", *map(str, range(14))]
    model.tokenizer = Vocabulary(words)
    onnx.export_onnx(model, tmp_path / "onnx")
    exported = onnx.OnnxModel(tmp_path / "onnx")
    captions, lengths = exported.encode_captions(["a red ball", "ball"])
    assert captions.shape == (2, 5, 16)
    assert lengths.tolist() == [5, 3]
    features = np.random.default_rng(0).standard_normal((2, 3, 8))
    scores = exported.score(exported.encode_images(features), captions, lengths)
    images = model.encode_images(features.astype(np.float32))
    wanted = model.score(images, model.encode_captions(["a red ball", "ball"]))
    np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=2e-6)
    with pytest.raises(ValueError, match="lengths: expected 1 to 2 tokens, got 0 to 2"):
        exported.encode_captions([[1, 2], [1, 2]], [0, 2])
    for name in ("vse_infty", "saem"):
        with pytest.raises(ValueError, match=r"cannot be exported|gives other embeddings"):
            onnx.export_onnx(models.create(name, **SIZES).eval(), tmp_path / name)
        assert not (tmp_path / name).exists()
    (tmp_path / "onnx" / "text_encoder.onnx").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"text_encoder\.onnx: not a graph that ONNX Runtime reads"):
        onnx.OnnxModel(tmp_path / "onnx")
    (tmp_path / "onnx" / "image_encoder.onnx").unlink()
    with pytest.raises(ValueError, match=r"image_encoder\.onnx: no such file"):
        onnx.OnnxModel(tmp_path / "onnx")
