"""The official RCAR code: random checkpoints, and its scores in float64, pair by pair.

The module does not import the package. Inside: `options`, `random_model`, `official_scores`; shared with
`official_sgraf`: `attended`, `linear`, `batch_norm`, `batch_norm_weights`, `softmax`, `sigmoid`.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np
import torch

from python_tests.helpers.official_scan import WORDS, caption_states, gru_weights, l2norm, pairwise

Weights = Mapping[str, np.ndarray]
MASK = "<mask>"  # The official script appends it to the words of the vocabulary file.


def options(**changes: object) -> argparse.Namespace:
    """Return the parsed options of the official command line, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "./data/f30k", "data_name": "f30k_precomp", "vocab_path": "./data/vocab", "gpuid": "0",
        "margin": 0.2, "num_epochs": 40, "batch_size": 128, "word_dim": 5, "sim_dim": 6, "img_dim": 6,
        "embed_size": 8, "num_layers": 1, "grad_clip": 2.0, "learning_rate": 0.0005, "lr_update": 30, "workers": 10,
        "log_step": 200, "logger_name": "runs/log", "model_name": "runs/test", "resume": "", "no_imgnorm": False,
        "no_txtnorm": False, "vse_mean_warmup_epochs": 3, "reset_start_epoch": False, "use_bi_gru": True,
        "max_violation": False, "attn_type": "t2i", "t2i_smooth": 10.0, "i2t_smooth": 3.0,
        "self_regulator": "coop_rcar", "rcar_step": 2, "rcr_step": 0, "rar_step": 0, "vocab_size": len(WORDS) + 1,
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def steps_of(opt: argparse.Namespace) -> tuple[int, int, int]:
    """Return the numbers of RAR, RCR and alignment modules."""
    if opt.self_regulator == "only_rar":
        return opt.rar_step, 0, 1
    if opt.self_regulator == "only_rcr":
        return 0, opt.rcr_step, opt.rcr_step
    return opt.rcar_step, opt.rcar_step - 1, opt.rcar_step


def batch_norm_weights(size: int, tensor: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "weight": tensor(size) + 1, "bias": tensor(size), "running_mean": tensor(size),
        "running_var": tensor(size).abs() + 0.5, "num_batches_tracked": torch.tensor(9000),
    }  # fmt: skip


def random_model(opt: argparse.Namespace, seed: int = 0) -> OrderedDict[str, torch.Tensor]:
    """Return the state dict of an official model with random weights and the key names of its DataParallel."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.5

    model: OrderedDict[str, torch.Tensor] = OrderedDict()

    def layer(name: str, inputs: int, outputs: int, scale: float = 1.0) -> None:
        model[f"{name}.weight"], model[f"{name}.bias"] = scale * tensor(outputs, inputs), tensor(outputs)

    size, hidden, width = opt.embed_size, opt.embed_size // 2, opt.sim_dim
    layer("img_enc.fc", opt.img_dim, size)
    layer("img_enc.mlp.layers.0", opt.img_dim, hidden)
    layer("img_enc.mlp.layers.1", hidden, size)
    for index, channels in enumerate((hidden, size)):
        for name, value in batch_norm_weights(channels, tensor).items():
            model[f"img_enc.mlp.bns.{index}.{name}"] = value
    model["txt_enc.embed.weight"] = tensor(opt.vocab_size, opt.word_dim)
    for name, value in gru_weights("rnn", opt, opt.use_bi_gru, tensor).items():
        model[f"txt_enc.{name}"] = value
    layer("sim_enc.sim_eval_w", width, 1, 3.0)
    rar_steps, rcr_steps, alignments = steps_of(opt)
    for step in range(rar_steps):
        layer(f"sim_enc.rar_modules.{step}.rar_q_w.0", width, width, 2.0)
        layer(f"sim_enc.rar_modules.{step}.rar_k_w.0", width, width, 2.0)
        layer(f"sim_enc.rar_modules.{step}.rar_v_w.0", width, 1, 4.0)
    for step in range(rcr_steps):
        layer(f"sim_enc.rcr_modules.{step}.rcr_smooth_w.0", width, width // 2, 2.0)
        layer(f"sim_enc.rcr_modules.{step}.rcr_smooth_w.2", width // 2, 1, 6.0)
        layer(f"sim_enc.rcr_modules.{step}.rcr_matrix_w.0", width, 2 * width)
        layer(f"sim_enc.rcr_modules.{step}.rcr_matrix_w.2", 2 * width, size)
    for step in range(alignments):
        layer(f"sim_enc.alv_modules.{step}.sim_transform_w", size, width, 3.0)
    return OrderedDict((f"module.{name}", value) for name, value in model.items())


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def batch_norm(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Apply batch normalisation in evaluation mode; channels are the last dimension."""
    scaled = (x - w[f"{name}.running_mean"]) / np.sqrt(w[f"{name}.running_var"] + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def attended(
    query: np.ndarray, context: np.ndarray, matrix: np.ndarray | float, smooth: np.ndarray | float
) -> np.ndarray:
    """Return the attended context of each query (n, d), normalised; `matrix` (n, d) and `smooth` (n, 1) or numbers."""
    raw = context @ (query * matrix).T  # (contexts, queries)
    raw = l2norm(np.where(raw > 0, raw, 0.1 * raw))
    return l2norm(softmax(raw.T * smooth) @ context)


def official_scores(
    model: Mapping[str, torch.Tensor],
    opt: argparse.Namespace,
    features: np.ndarray,
    captions: list[list[int]],
) -> np.ndarray:
    """Return scores (n_images, n_captions) in evaluation mode: no dropout, running statistics in the norms."""
    w = {name.removeprefix("module."): value.double().numpy() for name, value in model.items()}
    regions = []
    for picture in features.astype(np.float64):
        hidden = np.maximum(batch_norm(w, "img_enc.mlp.bns.0", linear(w, "img_enc.mlp.layers.0", picture)), 0)
        embedded = linear(w, "img_enc.mlp.layers.1", hidden) + linear(w, "img_enc.fc", picture)
        regions.append(embedded if opt.no_imgnorm else l2norm(embedded))
    text = {name.removeprefix("txt_enc."): value for name, value in w.items() if name.startswith("txt_enc.")}
    words = caption_states(text, opt, captions, "rnn", opt.use_bi_gru)
    similarity = {name.removeprefix("sim_enc."): value for name, value in w.items() if name.startswith("sim_enc.")}
    return pairwise(lambda picture, caption: _score(similarity, opt, picture, caption), regions, words)


def _score(w: Weights, opt: argparse.Namespace, picture: np.ndarray, caption: np.ndarray) -> float:
    query, context = (caption, picture) if opt.attn_type == "t2i" else (picture, caption)
    matrix: np.ndarray | float = 1.0
    smooth: np.ndarray | float = opt.t2i_smooth if opt.attn_type == "t2i" else opt.i2t_smooth
    rar_steps, rcr_steps, alignments = steps_of(opt)
    aligned = result = np.empty(0)
    for step in range(max(rar_steps, rcr_steps)):
        if step < alignments:
            difference = (query - attended(query, context, matrix, smooth)) ** 2
            aligned = l2norm(linear(w, f"alv_modules.{step}.sim_transform_w", difference))
        if step == 0:
            result = aligned.mean(axis=0)
        if step < rcr_steps:
            name = f"rcr_modules.{step}.rcr"
            change = np.tanh(_perceptron(w, f"{name}_matrix_w", aligned))
            shift = _perceptron(w, f"{name}_smooth_w", aligned)
            matrix, smooth = np.clip(change + matrix, -1, 1), np.maximum(shift + smooth, 0)
        if step < rar_steps:
            name = f"rar_modules.{step}.rar"
            common = np.tanh(linear(w, f"{name}_k_w.0", aligned)) * np.tanh(linear(w, f"{name}_q_w.0", result))
            result = l2norm(softmax(linear(w, f"{name}_v_w.0", common)[:, 0]) @ aligned)
    if opt.self_regulator == "only_rcr":
        found = attended(query, context, matrix, smooth)
        norms = np.linalg.norm(query, axis=1) * np.linalg.norm(found, axis=1)
        return float(np.mean((query * found).sum(axis=1) / np.maximum(norms, 1e-8)))
    return float(sigmoid(linear(w, "sim_eval_w", result))[0])


def _perceptron(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return linear(w, f"{name}.2", np.tanh(linear(w, f"{name}.0", x)))
