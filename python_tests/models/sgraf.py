"""SGRAF by its published equations, caption by caption, in numpy and float64.

The module does not import the package. Inside: `sgraf_scores`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]
EPS = 1e-5  # Batch normalisation.
MOMENTUM = 0.1


def _unit(x: np.ndarray) -> np.ndarray:
    return x / (np.sqrt((x**2).sum(-1, keepdims=True)) + 1e-8)


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _norm(w: dict[str, np.ndarray], name: str, x: np.ndarray, axis: int, training: bool) -> np.ndarray:
    """Apply batch normalisation to the channels on `axis`; in training, update the running statistics in `w`."""
    others = tuple(i for i in range(x.ndim) if i != axis)
    shape = [1] * x.ndim
    shape[axis] = -1
    if training:
        mean, var = x.mean(others), x.var(others)
        count = x.size // x.shape[axis]
        for key, new in (("running_mean", mean), ("running_var", var * count / (count - 1))):
            w[f"{name}.{key}"] = (1 - MOMENTUM) * w[f"{name}.{key}"] + MOMENTUM * new
    else:
        mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    scaled = (x - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + EPS)
    return scaled * w[f"{name}.weight"].reshape(shape) + w[f"{name}.bias"].reshape(shape)


def _attend(words: np.ndarray, regions: np.ndarray, channels: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    raw = (words * channels) @ regions.T
    raw = np.where(raw > 0, raw, 0.1 * raw)
    raw = raw / (np.sqrt((raw**2).sum(0)) + 1e-8)
    return _unit(_softmax(raw * temperature) @ regions)


def _local(w: Weights, words: np.ndarray, regions: np.ndarray, temperature: float, steps: int) -> np.ndarray:
    channels, factor = np.ones_like(words), np.full((len(words), 1), temperature)
    for step in range(steps):
        seen = _unit(_linear(w, f"alignments.{step}", (words - _attend(words, regions, channels, factor)) ** 2))
        hidden = np.tanh(_linear(w, f"correspondence.channels.{step}.0", seen))
        channels = np.clip(np.tanh(_linear(w, f"correspondence.channels.{step}.2", hidden)) + channels, -1, 1)
        hidden = np.tanh(_linear(w, f"correspondence.temperature.{step}.0", seen))
        factor = np.maximum(_linear(w, f"correspondence.temperature.{step}.2", hidden) + factor, 0)
    return _unit(_linear(w, f"alignments.{steps}", (words - _attend(words, regions, channels, factor)) ** 2))


def _part(w: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}


def sgraf_scores(
    w: dict[str, np.ndarray],
    images: np.ndarray,
    captions: list[np.ndarray],
    *,
    module: str,
    temperature: float = 9.0,
    steps: int = 0,
    training: bool = False,
) -> np.ndarray:
    """Return scores (n_images, n_captions) of regions (n_images, k, d) and words, without dropout.

    Args:
        w: weights by their names in the model; in training, its running statistics are updated.
        module: "sgr" or "saf".
        steps: number of RCR steps.
    """
    local = _part(w, "similarity.local_alignments.")
    hidden = np.tanh(_norm(w, "region_pool.local.1", _linear(w, "region_pool.local.0", images), 1, training))
    of_mean = np.tanh(_norm(w, "region_pool.mean.1", _linear(w, "region_pool.mean.0", images.mean(1)), 1, training))
    shares = _softmax(_linear(w, "region_pool.common", hidden * of_mean[:, None])[..., 0])
    image_vectors = _unit((shares[..., None] * images).sum(1))

    columns = []
    for words in captions:
        hidden = np.tanh(_linear(w, "word_pool.local.0", words))
        of_mean = np.tanh(_linear(w, "word_pool.mean.0", words.mean(0)))
        shares = _softmax(_linear(w, "word_pool.common", hidden * of_mean)[:, 0])
        caption_vector = _unit(shares @ words)
        whole = _unit(_linear(w, "similarity.global_alignment", (image_vectors - caption_vector) ** 2))
        parts = np.stack([_local(local, words, regions, temperature, steps) for regions in images])
        nodes = np.concatenate([whole[:, None], parts], axis=1)  # (n_images, n_words + 1, m)
        if module == "sgr":
            step = 0
            while f"similarity.heads.sgr.query.{step}.weight" in w:
                queries, keys = (_linear(w, f"similarity.heads.sgr.{name}.{step}", nodes) for name in ("query", "key"))
                messages = _softmax(queries @ keys.transpose(0, 2, 1)) @ nodes
                nodes = np.maximum(_linear(w, f"similarity.heads.sgr.graph.{step}", messages), 0)
                step += 1
            vector = nodes[:, 0]
        else:
            logits = _linear(w, "similarity.heads.saf.gate", nodes).transpose(0, 2, 1)
            gates = 1 / (1 + np.exp(-_norm(w, "similarity.heads.saf.norm", logits, 1, training)))
            gates = gates / (gates.sum(-1, keepdims=True) + 1e-8)
            vector = _unit((gates @ nodes)[:, 0])
        columns.append(1 / (1 + np.exp(-_linear(w, f"similarity.evaluations.{module}", vector)[:, 0])))
    return np.stack(columns, axis=1)
