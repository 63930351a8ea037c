"""Official checkpoints of ESA, BiGRU and BERT, give the official scores."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import compat, models
from python_tests.compat.official_rcar import batch_norm, linear
from python_tests.helpers import official_vse_infty
from python_tests.helpers.bert import PIECES, bert_states, random_bert
from python_tests.helpers.conversions import CAPTIONS, assert_warned, changed, converted, refused, token_ids
from python_tests.helpers.official_scan import WORDS, caption_states, l2norm, write_checkpoint, write_vocabulary

IDS = [token_ids(caption) for caption in CAPTIONS]


def options(**changes: object) -> argparse.Namespace:
    """Return the parsed options of ESA's command line with a GRU, with small sizes; None removes an option."""
    absent = ("precomp_enc_type", "backbone_path", "backbone_source", "backbone_warmup_epochs",
              "embedding_warmup_epochs", "backbone_lr_factor", "input_scale_factor", "drop")  # fmt: skip
    return official_vse_infty.options(**{**dict.fromkeys(absent), "hardnum": 2, **changes})


def random_model(opt: argparse.Namespace) -> list[OrderedDict[str, torch.Tensor]]:
    """Return the two state dicts of an official model with random weights, image encoder first."""
    parts = official_vse_infty.random_model(opt)
    random = torch.Generator().manual_seed(7)
    size = opt.embed_size
    return [
        OrderedDict({
            **{name: weight for name, weight in part.items() if not name.startswith("gpool.")},
            "linear1.weight": torch.randn(size, size, generator=random),
            "linear1.bias": torch.randn(size, generator=random),
        })
        for part in parts
    ]  # fmt: skip


def features() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 7, 6)).astype(np.float32)


def pooled(w: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Sum each channel with the softmax over the rows of its own logits."""
    powers = np.exp(rows @ w["linear1.weight"].T + w["linear1.bias"])
    return (powers / powers.sum(axis=0) * rows).sum(axis=0)


def official_scores(
    model: list[OrderedDict[str, torch.Tensor]], opt: argparse.Namespace, states: list[np.ndarray] | None = None
) -> np.ndarray:
    """Compute the scores (n_images, n_captions) of evaluation in float64; `states` are those of BERT."""
    image, text = ({name: weight.double().numpy() for name, weight in part.items()} for part in model)
    vectors = []
    for rows in features().astype(np.float64):
        hidden = np.maximum(batch_norm(image, "mlp.bns.0", linear(image, "mlp.layers.0", rows)), 0)
        vectors.append(pooled(image, linear(image, "fc", rows) + linear(image, "mlp.layers.1", hidden)))
    if states is None:
        words = caption_states(text, argparse.Namespace(**{**vars(opt), "no_txtnorm": True}), IDS, "rnn", True)
    else:
        words = [linear(text, "linear", one) for one in states]
    captions = [pooled(text, one) for one in words]
    vectors = vectors if opt.no_imgnorm else [l2norm(one) for one in vectors]
    captions = captions if opt.no_txtnorm else [l2norm(one) for one in captions]
    return np.array([[picture @ caption for caption in captions] for picture in vectors])


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "f30k_precomp_vocab.json")


@pytest.mark.parametrize("changes", [{}, {"num_layers": 2, "no_imgnorm": True}, {"no_txtnorm": True}], ids=str)
def test_converted_models_give_the_official_scores(tmp_path: Path, vocab: Path, changes: dict[str, object]) -> None:
    opt = options(**changes)
    model = random_model(opt)
    compat.convert("esa", write_checkpoint(tmp_path / "model_best.pth", model, opt), vocab, tmp_path / "run")
    expected = official_scores(model, opt)
    assert expected.std() > 0.05
    scale = max(1, np.abs(expected).max())
    np.testing.assert_allclose(converted(tmp_path / "run", features()), expected, rtol=0, atol=1e-5 * scale)


def test_a_checkpoint_with_bert_gives_the_official_scores(tmp_path: Path) -> None:
    opt = options(vocab_size=len(PIECES), precomp_enc_type="basic")
    image, text = random_model(opt)
    bert = random_bert()
    random = torch.Generator().manual_seed(9)
    text = OrderedDict({
        **{f"bert.{name}": weight for name, weight in bert.items()},
        "linear.weight": torch.randn(8, 24, generator=random), "linear.bias": torch.randn(8, generator=random),
        **{name: weight for name, weight in text.items() if name.startswith("linear1.")},
    })  # fmt: skip
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    compat.convert(
        "esa", write_checkpoint(tmp_path / "c.pth", [image, text], opt), path, tmp_path / "run", bert_heads=12
    )
    captions = ["red boat", "dog , boat", "red"]
    model = models.load(tmp_path / "run")
    states = [bert_states(bert, model.tokenizer.encode(caption)) for caption in captions]
    expected = official_scores([image, text], opt, states)
    np.testing.assert_allclose(converted(tmp_path / "run", features(), captions), expected, rtol=0, atol=2e-5)


def test_what_does_not_fit(tmp_path: Path, vocab: Path) -> None:
    image, text = random_model(options())
    gone = changed(image, linear1__bias=None)
    assert refused(tmp_path, "esa", [gone, text], options(), vocab) == (
        "model[0]['linear1.bias']: this weight is missing"
    )
    other = official_vse_infty.random_model(options())
    assert refused(tmp_path, "esa", other, options(), vocab) == (
        "model[0]['gpool.gru.weight_ih_l0']: this weight is unknown to esa"
    )
    assert refused(tmp_path, "vse_infty", [image, text], options(hardnum=None), vocab) == (
        "model[0]['linear1.weight']: this weight is unknown to vse_infty"
    )


def test_unknown_options_are_warned_of(tmp_path: Path, vocab: Path) -> None:
    assert_warned(tmp_path, "esa", random_model(options()), options(extra=1), vocab, "extra")


def test_published_defaults_stand_for_absent_options(tmp_path: Path, vocab: Path) -> None:
    full = options(word_dim=300, embed_size=1024, img_dim=2048)
    path = write_checkpoint(tmp_path / "c.pth", random_model(full), argparse.Namespace())
    compat.convert("esa", path, vocab, tmp_path / "run")
    assert models.load(tmp_path / "run").config == models.config_class("esa")(vocab_size=len(WORDS) + 1)
