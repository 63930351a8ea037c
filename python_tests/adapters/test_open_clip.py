"""A model of open_clip from a local folder, as a host: its own embeddings, tokens, training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

from itm_fast.adapters.open_clip import OpenClipHost, OpenClipVocabulary
from itm_fast.data import open_split
from itm_fast.evaluation import evaluate
from itm_fast.training import TrainConfig, train
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.concepts import WORDS

SETTINGS = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
COLOURS = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}
CAPTIONS = ["a red ball", "dog", "the unpronounceable tree and a boat, and a sun and a cup and a hat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model as open_clip saves one."""
    folder = tmp_path_factory.mktemp("open_clip")
    torch.manual_seed(0)
    model = open_clip.CLIP(**SETTINGS)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    save_file({name: one.contiguous() for name, one in model.state_dict().items()},
              folder / "open_clip_model.safetensors")  # fmt: skip
    config = {"model_cfg": SETTINGS, "preprocess_cfg": COLOURS}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> tuple[Any, Any]:
    name = f"local-dir:{folder}"
    return open_clip.create_model(name).eval(), open_clip.get_tokenizer(name)


def pixels(n: int) -> torch.Tensor:
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def patches(pictures: torch.Tensor) -> torch.Tensor:
    """Cut pictures (n, 3, 16, 16) of values from 0 to 1 into four patches of values from -1 to 1."""
    rows = [pictures[:, :, top : top + 8, left : left + 8] for top in (0, 8) for left in (0, 8)]
    return torch.stack([2 * one.permute(0, 2, 3, 1).flatten(1) - 1 for one in rows], 1)


def normalized(pictures: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(COLOURS[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (pictures - mean) / std


def tokens(vocabulary: OpenClipVocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [torch.tensor(vocabulary.encode(caption)) for caption in CAPTIONS]
    lengths = torch.tensor([len(one) for one in ids])
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=7), lengths


def test_global_scores_are_those_of_open_clip(folder: Path) -> None:
    model, tokenizer = read(folder)
    host = OpenClipHost(model)
    wanted_images = model.encode_image(normalized(pixels(4)), normalize=True)
    wanted_captions = model.encode_text(tokenizer(CAPTIONS), normalize=True)
    images, captions = (
        host.encode_images(patches(pixels(4))),
        host.encode_captions(*tokens(OpenClipVocabulary(tokenizer))),
    )
    torch.testing.assert_close(images, wanted_images, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(captions, wanted_captions, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(host.score(images, captions), wanted_images @ wanted_captions.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["t2i", "i2t", "mean"])
def test_tokens_are_compared_through_the_projections(folder: Path, direction: str) -> None:
    model, tokenizer = read(folder)
    host = OpenClipHost(model, interaction="maxsim", direction=direction)
    ids, lengths = tokens(OpenClipVocabulary(tokenizer))
    images, captions = host.encode_images(patches(pixels(4))), host.encode_captions(ids, lengths)

    # The states before pooling, seen as they pass the last layer norms.
    seen: dict[str, torch.Tensor] = {}
    model.ln_final.register_forward_hook(lambda _module, _inputs, output: seen.update(text=output))
    model.visual.transformer.register_forward_hook(lambda _module, _inputs, output: seen.update(image=output))
    model.encode_image(normalized(pixels(4)))
    model.encode_text(tokenizer(CAPTIONS))
    regions = model.visual.ln_post(seen["image"])[:, 1:] @ model.visual.proj
    words = seen["text"] @ model.text_projection
    wanted = torch.zeros(4, 3)
    for image in range(4):
        for caption, length in enumerate(lengths.tolist()):
            one = torch.nn.functional.normalize(regions[image], dim=1)
            other = torch.nn.functional.normalize(words[caption, :length], dim=1)
            cosines = other @ one.T
            both = {"t2i": cosines.amax(1).mean(), "i2t": cosines.amax(0).mean()}
            wanted[image, caption] = both.get(direction, (both["t2i"] + both["i2t"]) / 2)
    torch.testing.assert_close(host.score(images, captions), wanted, rtol=1e-5, atol=1e-6)


def test_a_host_trains_on_a_data_folder(folder: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pictures = random.uniform(-1, 1, (len(WORDS), 4, 192))
    for split, n_images in (("train", 24), ("dev", 12)):
        shown = np.arange(n_images) % len(WORDS)
        noise = 0.1 * random.standard_normal((n_images, 4, 192))
        np.save(tmp_path / f"{split}_ims.npy", (pictures[shown] + noise).astype(np.float32))
        captions = [f"a {WORDS[number]}" for number in shown for _ in range(5)]
        (tmp_path / f"{split}_caps.txt").write_text("\n".join(captions) + "\n")
    model, tokenizer = read(folder)
    vocabulary = OpenClipVocabulary(tokenizer)
    data = [open_split(tmp_path, split, vocabulary) for split in ("train", "dev")]
    run = tmp_path / "run"
    config = TrainConfig(out=str(run), epochs=4, batch_size=12, lr=2e-3, loss="infonce", mining="all", log_every=1)
    host = OpenClipHost(model)
    before = evaluate(host.eval(), data[1])["rsum"]
    result = train(config, model=host, train_data=data[0], validation_data=data[1], progress=False)
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert result.best["rsum"] > before + 50
    again = OpenClipHost(read(folder)[0])
    again.load_state_dict(load_file(run / "model.safetensors"))
    assert evaluate(again.eval(), data[1])["rsum"] == pytest.approx(result.best["rsum"])


def test_other_models_are_refused(folder: Path) -> None:
    model, _ = read(folder)
    with pytest.raises(TypeError, match="expected a CLIP of open_clip, got <Linear"):
        OpenClipHost(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="expected a SimpleTokenizer of open_clip, got 'clip'"):
        OpenClipVocabulary("clip")
    with pytest.raises(ValueError, match="interaction: expected global or maxsim, got 'attention'"):
        OpenClipHost(model, interaction="attention")
    with pytest.raises(ValueError, match="expected at most 12 tokens in a caption, got 13"):
        OpenClipHost(model).encode_captions(torch.zeros(1, 13, dtype=torch.int64), torch.tensor([13]))
    del model.visual.proj
    with pytest.raises(ValueError, match="maxsim needs towers of open_clip with a projection"):
        OpenClipHost(model, interaction="maxsim")
