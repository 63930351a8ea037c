"""Official checkpoints of VSE-infinity and RVSE++, and the scores of their official code in float64, item by item.

This file does not use the package. Inside: `options`, `rvsepp_options`, `random_model`, `official_scores`.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from python_tests.compat.official_rcar import batch_norm, batch_norm_weights, linear, softmax
from python_tests.helpers.official_scan import WORDS, caption_states, gru, gru_weights, l2norm

Weights = Mapping[str, np.ndarray]
POOL = argparse.Namespace(word_dim=32, embed_size=32, num_layers=1)  # As in the official code.


def options(**changes: object) -> argparse.Namespace:
    """Return the parsed options of VSE-infinity's command line, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "/tmp/data/f30k", "data_name": "f30k", "vocab_path": "./vocab/", "margin": 0.2, "num_epochs": 25,
        "batch_size": 128, "word_dim": 5, "embed_size": 8, "num_layers": 1, "grad_clip": 2.0,
        "learning_rate": 0.0005, "lr_update": 15, "optim": "adam", "workers": 10, "log_step": 200, "val_step": 500,
        "logger_name": "runs/log", "model_name": "runs/checkpoint", "resume": "", "max_violation": True, "img_dim": 6,
        "no_imgnorm": False, "no_txtnorm": False, "precomp_enc_type": "basic", "backbone_path": "",
        "backbone_source": "detector", "vse_mean_warmup_epochs": 1, "reset_start_epoch": False,
        "backbone_warmup_epochs": 5, "embedding_warmup_epochs": 2, "backbone_lr_factor": 0.01,
        "input_scale_factor": 1, "drop": True, "vocab_size": len(WORDS) + 1,
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def rvsepp_options(**changes: object) -> argparse.Namespace:
    """Return the parsed options of RVSE++'s command line, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "butd/", "data_name": "f30k_precomp", "model": "RVSE", "margin": 0.2, "epsilon": 0.01,
        "num_epochs": 30, "lr_update": 15, "logger_name": "log", "model_name": "runs", "vocab_path": "vocab",
        "batch_size": 128, "img_dim": 6, "word_dim": 5, "embed_size": 8, "optim": "adam", "learning_rate": 0.0005,
        "grad_clip": 2.0, "workers": 10, "log_step": 100, "vocab_size": len(WORDS) + 1,
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def random_model(opt: argparse.Namespace, seed: int = 0) -> list[OrderedDict[str, torch.Tensor]]:
    """Return the two state dicts of an official model with random weights, image encoder first."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.5

    image: OrderedDict[str, torch.Tensor] = OrderedDict()
    size, hidden = opt.embed_size, opt.embed_size // 2
    seen = size if hasattr(opt, "epsilon") else opt.img_dim
    for name, inputs, outputs in (
        ("fc", opt.img_dim, size), ("mlp.layers.0", seen, hidden), ("mlp.layers.1", hidden, size)
    ):  # fmt: skip
        image[f"{name}.weight"], image[f"{name}.bias"] = tensor(outputs, inputs), tensor(outputs)
    for index, channels in enumerate((hidden, size)):
        for name, value in batch_norm_weights(channels, tensor).items():
            image[f"mlp.bns.{index}.{name}"] = value
    text = OrderedDict({"embed.weight": tensor(opt.vocab_size, opt.word_dim)})
    text.update(gru_weights("rnn", argparse.Namespace(**{"num_layers": 1, **vars(opt)}), True, tensor))
    for part in (image, text):
        part.update((name, 0.4 * weight) for name, weight in gru_weights("gpool.gru", POOL, True, tensor).items())
        part["gpool.linear.weight"] = 0.5 * tensor(1, 32)
    return [image, text]


def official_scores(
    model: list[OrderedDict[str, torch.Tensor]],
    opt: argparse.Namespace,
    features: np.ndarray,
    captions: Sequence[list[int]] = (),
    states: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Compute the scores (n_images, n_captions) in evaluation mode.

    There is no dropout, and batch normalisation uses the running statistics. Captions are token ids for the GRU, or the
    hidden states of BERT.
    """
    image, text = ({key: value.double().numpy() for key, value in part.items()} for part in model)
    pictures = [_pooled(image, _regions(image, opt, rows)) for rows in features.astype(np.float64)]
    # Words are not normalised; the pooled caption is.
    plain = argparse.Namespace(**{"num_layers": 1, **vars(opt), "no_txtnorm": True})
    if states is None:
        words = caption_states(text, plain, captions, "rnn", True)
    else:
        words = [linear(text, "linear", one) for one in states]
    sentences = [_pooled(text, one) for one in words]
    pictures = pictures if getattr(opt, "no_imgnorm", False) else [l2norm(one) for one in pictures]
    sentences = sentences if getattr(opt, "no_txtnorm", False) else [l2norm(one) for one in sentences]
    return np.array([[picture @ sentence for sentence in sentences] for picture in pictures])


def _regions(w: Weights, opt: argparse.Namespace, rows: np.ndarray) -> np.ndarray:
    projected = linear(w, "fc", rows)
    hidden = linear(w, "mlp.layers.0", projected if hasattr(opt, "epsilon") else rows)
    return projected + linear(w, "mlp.layers.1", np.maximum(batch_norm(w, "mlp.bns.0", hidden), 0))


def _pooled(w: Weights, rows: np.ndarray) -> np.ndarray:
    """Sum the values of each channel from largest to smallest, weighted by position from 0."""
    angles = np.arange(len(rows))[:, None] * np.exp(np.arange(0, 32, 2) * -(np.log(10000.0) / 32))
    places = np.empty((len(rows), 32))
    places[:, 0::2], places[:, 1::2] = np.sin(angles), np.cos(angles)
    forward = gru(w, "gpool.gru", "l0", places)
    backward = gru(w, "gpool.gru", "l0_reverse", places[::-1])[::-1]
    weights = softmax((forward + backward) / 2 @ w["gpool.linear.weight"][0] / 0.1)
    return weights @ -np.sort(-rows, axis=0)
