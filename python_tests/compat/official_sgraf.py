"""The official SGRAF code: random checkpoints, and its scores in float64, pair by pair.

The module does not import the package. Inside: `options`, `random_model`, `official_scores`.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch

from python_tests.compat.official_rcar import attended, batch_norm, batch_norm_weights, linear, sigmoid, softmax
from python_tests.helpers.official_scan import WORDS, caption_states, gru_weights, l2norm, pairwise

Weights = Mapping[str, np.ndarray]
REGIONS = 36  # fixed in the official code


def options(**changes: object) -> argparse.Namespace:
    """Return the parsed options of the official command line, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "./data", "data_name": "f30k_precomp", "vocab_path": "./vocab/", "model_name": "runs/checkpoint",
        "logger_name": "runs/log", "batch_size": 128, "num_epochs": 40, "lr_update": 30, "learning_rate": 0.0002,
        "workers": 10, "log_step": 10, "val_step": 1000, "grad_clip": 2.0, "margin": 0.2, "max_violation": True,
        "img_dim": 6, "word_dim": 5, "embed_size": 8, "sim_dim": 6, "num_layers": 1, "bi_gru": True,
        "no_imgnorm": False, "no_txtnorm": False, "module_name": "SGR", "sgr_step": 3, "vocab_size": len(WORDS),
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def random_model(opt: argparse.Namespace, seed: int = 0) -> list[OrderedDict[str, torch.Tensor]]:
    """Return the three state dicts of an official model with random weights: images, text, similarity."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.5

    similarity: OrderedDict[str, torch.Tensor] = OrderedDict()

    def layer(name: str, inputs: int, outputs: int, scale: float = 1.0) -> None:
        similarity[f"{name}.weight"], similarity[f"{name}.bias"] = scale * tensor(outputs, inputs), tensor(outputs)

    def norm(name: str, channels: int) -> None:
        for key, value in batch_norm_weights(channels, tensor).items():
            similarity[f"{name}.{key}"] = value

    size, width = opt.embed_size, opt.sim_dim
    image = OrderedDict([("fc.weight", tensor(size, opt.img_dim)), ("fc.bias", tensor(size))])
    text = OrderedDict({"embed.weight": tensor(len(WORDS), opt.word_dim)})
    text.update(gru_weights("cap_rnn", opt, opt.bi_gru, tensor))
    for side in ("v", "t"):
        layer(f"{side}_global_w.embedding_local.0", size, size, 2.0)
        layer(f"{side}_global_w.embedding_global.0", size, size, 2.0)
        layer(f"{side}_global_w.embedding_common.0", size, 1, 4.0)
    norm("v_global_w.embedding_local.1", REGIONS)
    norm("v_global_w.embedding_global.1", size)
    layer("sim_tranloc_w", size, width, 3.0)
    layer("sim_tranglo_w", size, width, 3.0)
    layer("sim_eval_w", width, 1, 3.0)
    if opt.module_name == "SAF":
        layer("SAF_module.attn_sim_w", width, 1, 3.0)
        norm("SAF_module.bn", 1)
    else:
        for step in range(opt.sgr_step):
            layer(f"SGR_module.{step}.graph_query_w", width, width, 2.0)
            layer(f"SGR_module.{step}.graph_key_w", width, width, 2.0)
            layer(f"SGR_module.{step}.sim_graph_w", width, width, 2.0)
    return [image, text, similarity]


def official_scores(
    model: list[OrderedDict[str, torch.Tensor]],
    opt: argparse.Namespace,
    features: np.ndarray,
    captions: list[list[int]],
) -> np.ndarray:
    """Return scores (n_images, n_captions) in evaluation mode: no dropout, running statistics in the norms."""
    image, text, w = ({key: value.double().numpy() for key, value in part.items()} for part in model)
    regions = [linear(image, "fc", picture) for picture in features.astype(np.float64)]
    regions = regions if opt.no_imgnorm else [l2norm(picture) for picture in regions]
    words = caption_states(text, opt, captions, "cap_rnn", opt.bi_gru)
    return pairwise(lambda picture, caption: _score(w, opt, picture, caption), regions, words)


def _whole(w: Weights, side: str, rows: np.ndarray) -> np.ndarray:
    """Return one vector (d,) for a picture ("v") or a caption ("t"); only pictures use batch normalisation."""
    local = linear(w, f"{side}_global_w.embedding_local.0", rows)
    mean = linear(w, f"{side}_global_w.embedding_global.0", rows.mean(axis=0))
    if side == "v":
        local = batch_norm(w, f"{side}_global_w.embedding_local.1", local.T).T  # one channel per region
        mean = batch_norm(w, f"{side}_global_w.embedding_global.1", mean)
    shares = softmax(linear(w, f"{side}_global_w.embedding_common.0", np.tanh(local) * np.tanh(mean))[:, 0])
    return l2norm(shares @ rows)


def _score(w: Weights, opt: argparse.Namespace, picture: np.ndarray, caption: np.ndarray) -> float:
    local = l2norm(linear(w, "sim_tranloc_w", (attended(caption, picture, 1.0, 9.0) - caption) ** 2))
    whole = l2norm(linear(w, "sim_tranglo_w", (_whole(w, "v", picture) - _whole(w, "t", caption)) ** 2))
    nodes = np.concatenate([whole[None], local])
    if opt.module_name == "SAF":
        gates = sigmoid(batch_norm(w, "SAF_module.bn", linear(w, "SAF_module.attn_sim_w", nodes)))[:, 0]
        vector = l2norm(gates / (np.abs(gates).sum() + 1e-8) @ nodes)
    else:
        for step in range(opt.sgr_step):
            query, key = (linear(w, f"SGR_module.{step}.graph_{name}_w", nodes) for name in ("query", "key"))
            nodes = np.maximum(linear(w, f"SGR_module.{step}.sim_graph_w", softmax(query @ key.T) @ nodes), 0)
        vector = nodes[0]
    return float(sigmoid(linear(w, "sim_eval_w", vector))[0])
