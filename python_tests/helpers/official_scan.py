"""Checkpoints as SCAN's official code writes them, and the scores of that code in float64, in plain loops.

This file does not use the package: it defines independently what an official checkpoint means.

Inside: `random_model`, `options`, `write_checkpoint`, `write_vocabulary`, `official_scores`, `FORMS`; and parts that
other official code shares with SCAN: `gru_weights`, `caption_states`, `l2norm`, `pairwise`.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import torch

WORDS = ["<pad>", "<start>", "<end>", "<unk>", *[f"word{index}" for index in range(12)]]


def options(**changes: object) -> argparse.Namespace:
    """Return the parsed options of the official command line, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "./data/", "data_name": "f30k_precomp", "vocab_path": "./vocab/", "margin": 0.2, "num_epochs": 30,
        "batch_size": 128, "word_dim": 5, "embed_size": 8, "grad_clip": 2.0, "num_layers": 1, "learning_rate": 0.0002,
        "lr_update": 15, "workers": 10, "log_step": 10, "val_step": 500, "logger_name": "runs/log",
        "model_name": "runs/checkpoint", "resume": "", "max_violation": True, "img_dim": 6, "no_imgnorm": False,
        "no_txtnorm": False, "raw_feature_norm": "clipped_l2norm", "agg_func": "Mean", "cross_attn": "t2i",
        "precomp_enc_type": "basic", "bi_gru": True, "lambda_lse": 6.0, "lambda_softmax": 9.0,
        "vocab_size": len(WORDS),
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def random_model(opt: argparse.Namespace, seed: int = 0) -> list[OrderedDict[str, torch.Tensor]]:
    """Return the two state dicts of an official model with random weights, image encoder first."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.5

    size = opt.embed_size
    image: OrderedDict[str, torch.Tensor] = OrderedDict()
    if getattr(opt, "precomp_enc_type", "basic") == "weight_norm":
        image["fc.bias"] = tensor(size)
        image["fc.weight_g"] = tensor(1).reshape(()) + 3
        image["fc.weight_v"] = tensor(size, opt.img_dim)
    else:
        image["fc.weight"] = tensor(size, opt.img_dim)
        image["fc.bias"] = tensor(size)
    text = OrderedDict({"embed.weight": tensor(len(WORDS), opt.word_dim)})
    text.update(gru_weights("rnn", opt, opt.bi_gru, tensor))
    return [image, text]


def gru_weights(
    name: str, opt: argparse.Namespace, both: bool, tensor: Callable[..., torch.Tensor]
) -> OrderedDict[str, torch.Tensor]:
    """Return the weights of a GRU called `name`, bidirectional or forward only, with the names of torch."""
    weights, size = OrderedDict(), opt.embed_size
    for layer in range(opt.num_layers):
        directions = ("", "_reverse") if both else ("",)
        for suffix in directions:
            width = opt.word_dim if layer == 0 else len(directions) * size
            weights[f"{name}.weight_ih_l{layer}{suffix}"] = tensor(3 * size, width)
            weights[f"{name}.weight_hh_l{layer}{suffix}"] = tensor(3 * size, size)
            weights[f"{name}.bias_ih_l{layer}{suffix}"] = tensor(3 * size)
            weights[f"{name}.bias_hh_l{layer}{suffix}"] = tensor(3 * size)
    return weights


# The zip format since torch 1.6, the earlier pickle stream, and that stream as Python 2 and torch 0.3 wrote it.
FORMS = ("zip", "legacy", "python2")


def write_checkpoint(path: Path, model: object, opt: object, form: str = "zip") -> Path:
    """Write a checkpoint as the official script saves it, in one of `FORMS`."""
    content = {"epoch": 11, "model": model, "best_rsum": 421.25, "opt": opt, "Eiters": 4711}
    module = _python2_pickle() if form == "python2" else pickle
    torch.save(content, path, pickle_module=module, _use_new_zipfile_serialization=form == "zip")
    return path


def write_vocabulary(path: Path, words: list[str] = WORDS) -> Path:
    """Write the vocabulary JSON as the official script does."""
    ids = {word: index for index, word in enumerate(words)}
    path.write_text(json.dumps({"word2idx": ids, "idx2word": dict(enumerate(words)), "idx": len(words)}))
    return path


class _Python2Pickler(pickle._Pickler):
    """Write strings as bytes without an encoding, and tensors with the rebuild function of torch 0.3."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def save_str(self, text: str) -> None:
        content = text.encode("ascii")
        self.write(pickle.SHORT_BINSTRING + struct.pack("<B", len(content)) + content)
        self.memoize(text)

    dispatch[str] = save_str

    def reducer_override(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        _, arguments = value.__reduce_ex__(2)
        return torch._utils._rebuild_tensor, arguments[:4]


def _python2_pickle() -> ModuleType:
    module = ModuleType("pickle")
    module.Pickler = _Python2Pickler
    module.dump = lambda value, file, protocol: _Python2Pickler(file, protocol).dump(value)
    return module


# The official scores. Arrays are float64; a caption is a list of token ids.


def official_scores(
    model: list[OrderedDict[str, torch.Tensor]],
    opt: argparse.Namespace,
    features: np.ndarray,
    captions: list[list[int]],
) -> np.ndarray:
    """Compute the scores (n_images, n_captions) image by image and caption by caption.

    As in the official loader, captions are sorted by decreasing length, encoded, and returned to their order.
    """
    image, text = ({key: value.double().numpy() for key, value in part.items()} for part in model)
    regions = [_regions(image, opt, picture) for picture in features.astype(np.float64)]
    words = caption_states(text, opt, captions, "rnn", opt.bi_gru)
    return pairwise(lambda picture, caption: _score(picture, caption, opt), regions, words)


def caption_states(
    weights: dict[str, np.ndarray], opt: argparse.Namespace, captions: list[list[int]], rnn: str, both: bool
) -> list[np.ndarray]:
    """Encode the captions in the order of the official loader; return the word embeddings (n_words, d) of each."""
    order = sorted(range(len(captions)), key=lambda index: len(captions[index]), reverse=True)
    words: list[np.ndarray] = [np.empty(0)] * len(captions)
    for index, encoded in zip(order, [_words(weights, opt, captions[i], rnn, both) for i in order], strict=True):
        words[index] = encoded
    return words


def pairwise(
    score: Callable[[np.ndarray, np.ndarray], float], regions: list[np.ndarray], words: list[np.ndarray]
) -> np.ndarray:
    """Compute the scores (n_images, n_captions) pair by pair."""
    return np.array([[score(picture, caption) for caption in words] for picture in regions])


def l2norm(rows: np.ndarray) -> np.ndarray:
    return rows / (np.sqrt((rows**2).sum(axis=-1, keepdims=True)) + 1e-8)


def _regions(weights: dict[str, np.ndarray], opt: argparse.Namespace, picture: np.ndarray) -> np.ndarray:
    if "fc.weight_v" in weights:
        weight = weights["fc.weight_v"] * weights["fc.weight_g"] / np.sqrt((weights["fc.weight_v"] ** 2).sum())
    else:
        weight = weights["fc.weight"]
    embedded = picture @ weight.T + weights["fc.bias"]
    return embedded if opt.no_imgnorm else l2norm(embedded)


def _words(
    weights: dict[str, np.ndarray], opt: argparse.Namespace, caption: list[int], rnn: str, both: bool
) -> np.ndarray:
    states = weights["embed.weight"][caption]
    for layer in range(opt.num_layers):
        forward = gru(weights, rnn, f"l{layer}", states)
        if not both:
            states = forward
            continue
        # The backward direction starts at the caption's last word, not at padding.
        backward = gru(weights, rnn, f"l{layer}_reverse", states[::-1])[::-1]
        states = np.concatenate([forward, backward], axis=1)
    if both:
        states = (states[:, : opt.embed_size] + states[:, opt.embed_size :]) / 2
    return states if opt.no_txtnorm else l2norm(states)


def gru(weights: dict[str, np.ndarray], rnn: str, name: str, inputs: np.ndarray) -> np.ndarray:
    """Run the GRU of Cho et al. 2014, with the gates in the order of cuDNN: reset, update, new."""

    def sigmoid(values: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-values))

    w_ih, w_hh = weights[f"{rnn}.weight_ih_{name}"], weights[f"{rnn}.weight_hh_{name}"]
    b_ih, b_hh = weights[f"{rnn}.bias_ih_{name}"], weights[f"{rnn}.bias_hh_{name}"]
    state, states = np.zeros(w_hh.shape[1]), []
    for word in inputs:
        from_input, from_state = np.split(w_ih @ word + b_ih, 3), np.split(w_hh @ state + b_hh, 3)
        reset, update = sigmoid(from_input[0] + from_state[0]), sigmoid(from_input[1] + from_state[1])
        new = np.tanh(from_input[2] + reset * from_state[2])
        state = (1 - update) * new + update * state
        states.append(state)
    return np.stack(states)


def _score(regions: np.ndarray, words: np.ndarray, opt: argparse.Namespace) -> float:
    query, context = (words, regions) if opt.cross_attn == "t2i" else (regions, words)
    raw = context @ query.T  # (contexts, queries): normalise the raw scores over the queries
    if opt.raw_feature_norm.startswith("clipped"):
        raw = np.where(raw > 0, raw, 0.1 * raw)
    if opt.raw_feature_norm.endswith("l2norm"):
        raw = l2norm(raw)
    elif opt.raw_feature_norm.endswith("l1norm"):
        raw = raw / (np.abs(raw).sum(axis=1, keepdims=True) + 1e-8)
    elif opt.raw_feature_norm == "softmax":
        raw = np.exp(raw) / np.exp(raw).sum(axis=1, keepdims=True)
    weights = np.exp(raw.T * opt.lambda_softmax)
    attended = weights / weights.sum(axis=1, keepdims=True) @ context
    norms = np.sqrt((query**2).sum(axis=1)) * np.sqrt((attended**2).sum(axis=1))
    cosines = (query * attended).sum(axis=1) / np.maximum(norms, 1e-8)
    if opt.agg_func == "LogSumExp":
        return math.log(np.exp(opt.lambda_lse * cosines).sum()) / opt.lambda_lse
    return float({"Mean": np.mean, "Max": np.max, "Sum": np.sum}[opt.agg_func](cosines))
