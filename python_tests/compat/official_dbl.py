"""The official Deep Boosting Learning code: random checkpoints, and its scores in float64, pair by pair.

The module does not import the package. Inside: `options`, `random_model`, `official_scores`.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch

from python_tests.compat.official_rcar import attended, linear
from python_tests.helpers.official_scan import WORDS, caption_states, gru_weights, l2norm, pairwise

# Options that exist in the script of one scenario only.
OF_SCENARIO: Mapping[str, dict[str, object]] = {
    "oas": {"resume": "", "if_boost": True, "val_step": 1000},
    "oss": {"num_branch": 2, "if_boost_manner": False},
    "mss": {"resume": "", "momentum_teacher": 0.99995, "val_step": 1000},
}


def options(scenario: str = "mss", **changes: object) -> argparse.Namespace:
    """Return the parsed options of a scenario's official command line, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "./data", "data_name": "f30k_precomp", "vocab_path": "./vocab/", "save_path": "./runs/test",
        "gpuid": "0", "batch_size": 128, "num_epochs": 40, "lr_update": 30, "loss_name": "birank",
        "boost_name": "boostabs", "alpha": 1.0, "beta": 1.0, "learning_rate": 0.0002, "workers": 10, "log_step": 10,
        "grad_clip": 2.0, "margin": 0.2, "max_violation": True, "img_dim": 6, "word_dim": 5, "embed_size": 8,
        "sim_dim": 6, "num_layers": 1, "bi_gru": True, "no_imgnorm": False, "no_txtnorm": False, "no_simnorm": False,
        "vocab_size": len(WORDS) + (scenario == "oas"), **OF_SCENARIO[scenario],
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def random_model(opt: argparse.Namespace, seed: int = 0) -> OrderedDict[str, torch.Tensor]:
    """Return the state dict of an official model with random weights and the key names of its DataParallel."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.5

    model: OrderedDict[str, torch.Tensor] = OrderedDict()

    def layer(name: str, inputs: int, outputs: int, scale: float = 1.0) -> None:
        model[f"{name}.weight"], model[f"{name}.bias"] = scale * tensor(outputs, inputs), tensor(outputs)

    layer("img_enc.fc", opt.img_dim, opt.embed_size)
    model["txt_enc.embed.weight"] = tensor(opt.vocab_size, opt.word_dim)
    for name, value in gru_weights("cap_rnn", opt, opt.bi_gru, tensor).items():
        model[f"txt_enc.{name}"] = value
    layer("sim_enc.sim_tran_w", opt.embed_size, opt.sim_dim, 3.0)
    layer("sim_enc.sim_eval_w", opt.sim_dim, 1, 2.0)
    return OrderedDict((f"module.{name}", value) for name, value in model.items())


def official_scores(
    model: Mapping[str, torch.Tensor],
    opt: argparse.Namespace,
    features: np.ndarray,
    captions: list[list[int]],
) -> np.ndarray:
    """Return scores (n_images, n_captions) in evaluation mode: no dropout."""
    w = {name.removeprefix("module."): value.double().numpy() for name, value in model.items()}
    regions = []
    for picture in features.astype(np.float64):
        embedded = linear(w, "img_enc.fc", picture)
        regions.append(embedded if opt.no_imgnorm else l2norm(embedded))
    text = {name.removeprefix("txt_enc."): value for name, value in w.items() if name.startswith("txt_enc.")}
    words = caption_states(text, opt, captions, "cap_rnn", opt.bi_gru)
    return pairwise(lambda picture, caption: _score(w, opt, picture, caption), regions, words)


def _score(w: Mapping[str, np.ndarray], opt: argparse.Namespace, picture: np.ndarray, caption: np.ndarray) -> float:
    difference = (attended(caption, picture, 1.0, 9.0) - caption) ** 2
    mean = l2norm(linear(w, "sim_enc.sim_tran_w", difference)).mean(axis=0)
    return float(np.tanh(linear(w, "sim_enc.sim_eval_w", mean if opt.no_simnorm else l2norm(mean)))[0])
