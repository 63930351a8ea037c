"""CLIP and SigLIP: scores of transformers, token by token scores as plain loops, and rejected folders."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from itm_fast import models
from itm_fast.data import TokenizerVocabulary
from itm_fast.data.picture_shards import as_patches
from itm_fast.models.base import planned_shapes, shapes_of
from itm_fast.models.clip_folder import read_clip_folder
from python_tests.helpers.clip import LONGEST, WIDTH, write_clip
from python_tests.helpers.pictures import write_encoder

KINDS = ("clip", "siglip")
CAPTIONS = ["Red map of sun", "a man with flowers", "face", "small dark hand button and heart and hair"]
FEATURES = {"feature_dim": 16 * 16 * 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clip")
    for kind in KINDS:
        write_clip(root / kind, kind)
    return root


def pictures(side: int = 32, count: int = 3) -> np.ndarray:
    """Return pictures of 4 x 4 colours."""
    colours = np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return colours.repeat(side // 4, 1).repeat(side // 4, 2)


read = functools.cache(read_clip_folder)


def loaded(folder: Path, **options: Any) -> models.CLIP:
    """Build the model of a folder from plain data, in float64."""
    found = read(folder)
    model = models.create("clip", **json.loads(json.dumps(found.settings())), **FEATURES, **options)
    found.copy_weights(model)
    model.tokenizer = found.vocabulary
    return model.double().eval()


def scores_of(model: models.CLIP, side: int = 32) -> torch.Tensor:
    stored = as_patches(pictures(side), side // 16).double()
    return model.score(model.encode_images(stored), model.encode_captions(CAPTIONS))


@functools.cache
def theirs(folder: Path, side: int = 32) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model of transformers in float64, and its inputs: captions padded as published."""
    import transformers

    cls = {"clip": transformers.CLIPModel, "siglip": transformers.SiglipModel}[folder.name]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    filled = {"padding": "max_length", "max_length": LONGEST} if folder.name == "siglip" else {"padding": True}
    words = tokenizer(CAPTIONS, return_tensors="pt", **filled)
    # The published processor of SigLIP gives no mask.
    names = ("input_ids", "attention_mask") if folder.name == "clip" else ("input_ids",)
    preprocessing = read(folder).vision.preprocessing
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (preprocessing.mean, preprocessing.std))
    pixels = (torch.from_numpy(pictures(side)).double() / 255 - mean) / std
    inputs = {"pixel_values": pixels.permute(0, 3, 1, 2), **{name: words[name] for name in names}}
    return cls.from_pretrained(folder).double().eval(), inputs


@pytest.mark.parametrize("side", [32, 48])
@pytest.mark.parametrize("kind", KINDS)
def test_global_scores_are_those_of_transformers(folders: Path, kind: str, side: int) -> None:
    """In float64, at the size of the model and at a larger one, from stored patches of another size."""
    whole, inputs = theirs(folders / kind, side)
    with torch.no_grad():
        logits = whole(**inputs, interpolate_pos_encoding=True).logits_per_image
        expected = (logits - (whole.logit_bias if kind == "siglip" else 0)) / whole.logit_scale.exp()
    assert expected.std() > 0.01, "scores that tell pairs apart"
    model = loaded(folders / kind)
    # Stored patches are float32.
    torch.testing.assert_close(scores_of(model, side), expected, rtol=0, atol=1e-6)
    scale, bias = model.pretrained_scale
    assert scale == pytest.approx(math.exp(3), rel=1e-6)
    assert bias == (-7.0 if kind == "siglip" else None)
    assert (model.max_caption_length, model.yields_fragments, model.scores_within_one) == (LONGEST, False, True)
    assert not hasattr(model, "pair_steps")
    assert not hasattr(model, "word_attention")


@functools.cache
def tokens_of(folder: Path, *, class_token: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the unit rows of each picture and caption: each token through the head, from transformers' states."""
    whole, inputs = theirs(folder)
    with torch.no_grad():
        vision = whole.vision_model(pixel_values=inputs["pixel_values"]).last_hidden_state
        words = {name: value for name, value in inputs.items() if name != "pixel_values"}
        text = whole.text_model(**words).last_hidden_state
        if folder.name == "clip":
            rows = whole.visual_projection(whole.vision_model.post_layernorm(vision))[:, 0 if class_token else 1 :]
            tokens = whole.text_projection(text)
        else:
            head = whole.vision_model.head
            width = vision.shape[2]
            weight, bias = head.attention.in_proj_weight[2 * width :], head.attention.in_proj_bias[2 * width :]
            # The attention over a single token gives its value.
            alone = (vision @ weight.T + bias) @ head.attention.out_proj.weight.T + head.attention.out_proj.bias
            rows = alone + head.mlp(head.layernorm(alone))
            tokens = whole.text_model.head(text)
    vocabulary = TokenizerVocabulary.from_folder(folder)
    lengths = [len(vocabulary.encode(caption)) for caption in CAPTIONS]
    unit = [[one / one.norm(dim=1, keepdim=True) for one in side] for side in (rows, tokens)]
    return unit[0], [caption[:length] for caption, length in zip(unit[1], lengths, strict=True)]


def best_partners(left: torch.Tensor, right: torch.Tensor) -> float:
    """FILIP, Eqs 4 and 5: the mean over the rows of `left` of the best inner product with a row of `right`."""
    total = 0.0
    for row in left.tolist():
        total += max(sum(a * b for a, b in zip(row, other, strict=True)) for other in right.tolist())
    return total / len(left)


def attended(queries: torch.Tensor, contexts: torch.Tensor, temperature: float) -> float:
    """SCAN: the mean cosine of the queries with what they attend to."""
    raw = queries @ contexts.T
    raw = torch.where(raw > 0, raw, 0.1 * raw)
    raw = raw / (raw.norm(dim=0) + 1e-8)
    found = torch.softmax(temperature * raw, 1) @ contexts
    return float(torch.nn.functional.cosine_similarity(queries, found).mean())


@pytest.mark.parametrize("direction", ["t2i", "i2t", "mean"])
@pytest.mark.parametrize("interaction", ["maxsim", "attention"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_compared_as_in_the_papers(folders: Path, kind: str, interaction: str, direction: str) -> None:
    images, captions = tokens_of(folders / kind, class_token=False)
    expected = torch.zeros(len(images), len(captions), dtype=torch.float64)
    for i, regions in enumerate(images):
        for j, words in enumerate(captions):
            if interaction == "maxsim":
                parts = {"t2i": best_partners(words, regions), "i2t": best_partners(regions, words)}
            else:
                parts = {"t2i": attended(words, regions, 9.0), "i2t": attended(regions, words, 4.0)}
            chosen = [value for name, value in parts.items() if direction in (name, "mean")]
            expected[i, j] = sum(chosen) / len(chosen)
    assert expected.std() > 0.01
    model = loaded(folders / kind, interaction=interaction, direction=direction)
    torch.testing.assert_close(scores_of(model), expected, rtol=0, atol=1e-6)
    scoring = model.attention_scores
    assert (scoring is None) is (interaction == "maxsim")
    if scoring is not None:
        assert scoring.mean is (direction == "mean")
        used = [name for name in ("t2i", "i2t") if getattr(scoring, name) is not None]
        assert used == [name for name in ("t2i", "i2t") if direction in (name, "mean")]
    steps = model.pair_steps(
        model.encode_images(as_patches(pictures(count=1), 2).double()), model.encode_captions(CAPTIONS[:1])
    )
    assert list(steps) == [name for name in ("t2i", "i2t") if direction in (name, "mean")]
    mean = sum(float(part.score.detach()) for part in steps.values()) / len(steps)
    assert mean == pytest.approx(float(expected[0, 0]), abs=1e-6)
    if interaction == "maxsim":
        for name, part in steps.items():
            queries, contexts = (captions[0], images[0]) if name == "t2i" else (images[0], captions[0])
            wanted = torch.eye(len(contexts))[(queries @ contexts.T).argmax(1)]
            torch.testing.assert_close(part.attention[0], wanted)
    assert hasattr(model, "word_attention") == (direction != "i2t")


def test_the_class_token_is_the_first_region(folders: Path) -> None:
    images, _ = tokens_of(folders / "clip", class_token=True)
    model = loaded(folders / "clip", interaction="maxsim", image_class_token=True)
    found = model.encode_images(as_patches(pictures(), 2).double())
    torch.testing.assert_close(found.values, torch.cat(images), rtol=0, atol=1e-6)
    pooled = loaded(folders / "clip").encode_images(as_patches(pictures(), 2).double())
    torch.testing.assert_close(found.values[::17], pooled, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"^image_class_token: a siglip model has no class token to keep$"):
        loaded(folders / "siglip", interaction="maxsim", image_class_token=True)
    with pytest.raises(ValueError, match=r"^image_class_token: expected only with interaction maxsim or attention, "):
        loaded(folders / "clip", image_class_token=True)


@pytest.mark.parametrize("interaction", ["global", "maxsim"])
@pytest.mark.parametrize("kind", KINDS)
def test_settings_rebuild_the_model_and_all_weights_learn(
    folders: Path, tmp_path: Path, kind: str, interaction: str
) -> None:
    model = loaded(folders / kind, interaction=interaction).float()
    options = {**json.loads(json.dumps(read(folders / kind).settings())), **FEATURES}
    assert planned_shapes("clip", {**options, "interaction": interaction}) == shapes_of(model)
    model.save(tmp_path / "saved")
    again = models.load(tmp_path / "saved")
    assert again.tokenizer == model.tokenizer
    stored = as_patches(pictures(), 2)
    first, second = (one.score(one.encode_images(stored), one.encode_captions(CAPTIONS)) for one in (model, again))
    assert torch.equal(first, second)
    again.train()(stored, *again.tokenize(CAPTIONS)).square().sum().backward()
    assert [name for name, weight in again.named_parameters() if weight.grad is None] == []
    assert float(again.first_image_weight().grad.norm()) > 0


@pytest.mark.parametrize("interaction", ["global", "attention"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_empty_captions(folders: Path, kind: str, interaction: str) -> None:
    model = loaded(folders / kind, interaction=interaction)
    ids, lengths = model.tokenize([*CAPTIONS, ""])
    lengths[-1] = 0
    found = model.encode_captions(ids, lengths)
    wide = torch.cat([ids, torch.full((5, 60), 9)], 1)
    wide[torch.arange(wide.shape[1]) >= lengths[:, None]] = 7
    again = model.encode_captions(wide, lengths)
    one = [model.encode_captions(ids[i : i + 1], lengths[i : i + 1]) for i in range(5)]
    if interaction == "global":
        assert found.shape == (5, WIDTH)
        assert found[-1].tolist() == [0.0] * WIDTH
        torch.testing.assert_close(again, found, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat(one), found, rtol=0, atol=1e-12)
    else:
        assert found.lengths.tolist() == lengths.tolist()
        torch.testing.assert_close(again.values, found.values, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat([part.values for part in one]), found.values, rtol=0, atol=1e-12)
    assert len(model.encode_captions([])) == 0
    assert len(model.encode_images(torch.zeros(0, 4, 768, dtype=torch.float64))) == 0
    with pytest.raises(ValueError, match=rf"^token_ids: expected at most {LONGEST} tokens in a caption, got 41$"):
        model.encode_captions(torch.zeros(1, 41, dtype=torch.int64), torch.tensor([41]))
    with pytest.raises(ValueError, match=rf"^captions: the model reads {LONGEST} tokens, got \d\d: 'map map"):
        model.encode_captions(["map " * 45])


def test_settings_that_do_not_fit(folders: Path) -> None:
    options = {**read(folders / "clip").settings(), **FEATURES}
    other = read(folders / "siglip").settings()
    image, text = options["image_backbone"], options["text_backbone"]
    for changes, message in (
        ({"text_backbone": other["text_backbone"]}, "text_backbone: model_type: expected clip as the picture tower"),
        ({"text_backbone": {}, "image_backbone": {}}, "image_backbone: expected the settings of a vision model"),
        ({"text_backbone": {**text, "pad": "x"}}, "text_backbone: expected the settings of a text tower"),
        ({"text_backbone": {**text, "pad": 9999}}, "text_backbone: pad: expected an id below 597, got 9999"),
        ({"text_backbone": {**text, "config": {**text["config"], "num_hidden_layers": 10**9}}},
         "text_backbone: expected at most 256 layers, got 1000000000"),
        ({"text_backbone": {**text, "config": {**text["config"], "hidden_size": "wide"}}},
         r"text_backbone: the settings are not those of a clip model \("),
        ({"vocab_size": 598}, "vocab_size: expected at most 597, the tokens of the text tower, got 598"),
        ({**other, "embed_dim": 8}, "embed_dim: expected 16, the width of the picture tower, got 8"),
        ({"interaction": "local"}, "interaction: expected one of global, maxsim, attention, got 'local'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{message}"):
            models.create("clip", **{**options, **changes})
    vit = {"config": {**image["config"], "model_type": "vit"}}
    with pytest.raises(ValueError, match=r"^image_backbone: model_type: expected one of clip, siglip, got vit$"):
        models.create(
            "clip", **{**options, "image_backbone": {**image, **vit}, "text_backbone": {**text, **vit, "pad": 1}}
        )


# Folders


def change(path: Path, part: str | None = None, **values: object) -> None:
    content = json.loads(path.read_text())
    inner = content if part is None else content[part]
    inner.update(values)
    path.write_text(json.dumps(content))


def refused(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as raised:
        read_clip_folder(folder)
    return str(raised.value)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_one_line(folders: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(folders / "clip", tmp_path / "clip")
    (folder / name).unlink()
    assert refused(folder).startswith(f"{folder / name}: no such file; ")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_do_not_fit_are_one_line(folders: Path, tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(folders / kind, tmp_path / kind)
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "text_projection.weight" if kind == "clip" else "text_model.head.weight"
    save_file({**weights, name: torch.zeros(WIDTH, 21)}, path, metadata={"format": "pt"})
    assert refused(folder) == f"{path}: {name}: expected shape (16, 20), got (16, 21) (1 such weights in all)"
    save_file({one: weight for one, weight in weights.items() if one != name}, path, metadata={"format": "pt"})
    assert refused(folder) == f"{path}: the weight {name} is missing (1 weights in all)"
    weights["vision_model.encoder.layers.1.mlp.fc1.bias"][3] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    found = read_clip_folder(folder)
    with pytest.raises(ValueError, match=rf"^{path}: .*encoder.layers.1.mlp.fc1.bias: row 3 holds values that are not"):
        found.copy_weights(models.create("clip", **found.settings(), **FEATURES))


def test_folders_of_other_models_are_one_line(folders: Path, tmp_path: Path) -> None:
    write_encoder(tmp_path / "vit")
    assert refused(tmp_path / "vit") == f"{tmp_path}/vit/config.json: model_type: expected clip, siglip, got 'vit'"
    (tmp_path / "vit" / "config.json").write_text('{"architecture": "vit_base_patch16_clip_224"}')
    assert refused(tmp_path / "vit") == (
        f"{tmp_path}/vit/config.json: a model of timm; expected the folder of a CLIP or SigLIP of transformers"
    )
    assert refused(tmp_path / "none").startswith(
        f"{tmp_path}/none: no such folder; expected a local folder of a CLIP or SigLIP, as nothing is downloaded"
    )
    folder = shutil.copytree(folders / "clip", tmp_path / "clip")
    shutil.copy(folders / "siglip" / "config.json", folder)
    assert re.match(rf"{folder}/model.safetensors: (\S+: expected shape|the weight \S+ is missing)", refused(folder))
    folder = shutil.copytree(folders / "siglip", tmp_path / "siglip")
    change(folder / "config.json", "text_config", vocab_size=60)
    assert refused(folder).endswith("(1 such weights in all)")
    shutil.copy(folders / "siglip" / "config.json", folder)
    shutil.copy(folders / "clip" / "tokenizer.json", folder)
    shutil.copy(folders / "clip" / "tokenizer_config.json", folder)
    assert refused(folder) == (
        f"{folder}/tokenizer.json: expected at most 65 tokens, as many as the text tower knows, got 597"
    )
    folder = shutil.copytree(folders / "siglip", tmp_path / "headless")
    change(folder / "config.json", "vision_config", vision_use_head=False)
    assert refused(folder) == (f"{folder}/config.json: vision_use_head: expected true, as the head pools the patches")
    change(folder / "config.json", vision_config=3)
    assert refused(folder) == f"{folder}/config.json: vision_config: expected a JSON object, got 3"
