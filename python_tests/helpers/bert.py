"""A tiny BERT with random weights: its model folder in the layout of transformers, and its hidden states in float64.

Inside: `PIECES`, `SIZES`, `random_bert`, `write_bert`, `bert_states`; `BertLoop`, which computes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from python_tests.helpers.concepts import WORDS

# Most words of the data set are one word piece; "boat" is two pieces, "dog" three, and "fish" is unknown.
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bo", "##at", ",", "d", "##o", "##g",
          *(word for word in WORDS if word not in ("boat", "dog", "fish"))]  # fmt: skip
SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 20,
    "max_position_embeddings": 16,
}  # fmt: skip


def random_bert(seed: int = 0, pieces: int = len(PIECES)) -> dict[str, torch.Tensor]:
    """Return the state dict of a `BertModel` of `SIZES`, with weights far from the usual initialisation."""
    random = torch.Generator().manual_seed(seed)
    dim, hidden = SIZES["hidden_size"], SIZES["intermediate_size"]
    weights: dict[str, torch.Tensor] = {}

    def tensor(*shape: int) -> torch.Tensor:
        return 0.4 * torch.randn(*shape, generator=random)

    def layer(name: str, inputs: int, outputs: int) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = tensor(outputs, inputs), tensor(outputs)

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + tensor(dim), tensor(dim)

    rows = {"word": pieces, "position": SIZES["max_position_embeddings"], "token_type": 2}
    for name, count in rows.items():
        weights[f"embeddings.{name}_embeddings.weight"] = tensor(count, dim)
    norm("embeddings.LayerNorm")
    for index in range(SIZES["num_hidden_layers"]):
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            layer(f"encoder.layer.{index}.{name}", dim, dim)
        norm(f"encoder.layer.{index}.attention.output.LayerNorm")
        layer(f"encoder.layer.{index}.intermediate.dense", dim, hidden)
        layer(f"encoder.layer.{index}.output.dense", hidden, dim)
        norm(f"encoder.layer.{index}.output.LayerNorm")
    return weights


def write_bert(folder: Path, weights: Mapping[str, torch.Tensor] | None = None, **config: object) -> Path:
    """Write the model folder as BERT is published: with the pretraining heads and the old names of the layer norms."""
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    content = {"model_type": "bert", "hidden_act": "gelu", "vocab_size": len(PIECES), **SIZES, **config}
    (folder / "config.json").write_text(json.dumps(content))
    named = {f"bert.{name}": value for name, value in (random_bert() if weights is None else weights).items()}
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        named = {name.replace(new, old): value for name, value in named.items()}
    heads = {"bert.pooler.dense.weight": torch.zeros(24, 24), "cls.predictions.bias": torch.zeros(len(PIECES))}
    save_file({**named, **heads}, folder / "model.safetensors")
    return folder


def bert_states(
    weights: Mapping[str, torch.Tensor], ids: list[int], heads: int = SIZES["num_attention_heads"]
) -> np.ndarray:
    """Compute the last hidden states (L, 24) of one sequence in float64."""
    bert = BertLoop(weights, heads)
    return bert.layers(bert.embedded(ids))


class BertLoop:
    """BERT for one sequence without padding, in float64.

    Sources: Vaswani et al. 2017, section 3; Devlin et al. 2019.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], heads: int = SIZES["num_attention_heads"]) -> None:
        self.weights = {name: value.detach().double().numpy() for name, value in weights.items()}
        self.heads = heads

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def embedded(self, ids: list[int], kind: int = 0, first: int = 0) -> np.ndarray:
        """Embed pieces of a token type at the positions from `first` on."""
        words, places, kinds = (
            self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        return self.norm("embeddings.LayerNorm", words[ids] + places[first : first + len(ids)] + kinds[kind])

    def layers(self, x: np.ndarray) -> np.ndarray:
        def split(rows: np.ndarray) -> np.ndarray:
            return rows.reshape(len(x), self.heads, -1).transpose(1, 0, 2)

        for index in range(SIZES["num_hidden_layers"]):
            name = f"encoder.layer.{index}"
            query, key, value = (
                split(self.linear(f"{name}.attention.self.{one}", x)) for one in ("query", "key", "value")
            )
            powers = np.exp(query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1]))
            context = powers / powers.sum(axis=-1, keepdims=True) @ value
            attended = self.linear(f"{name}.attention.output.dense", context.transpose(1, 0, 2).reshape(len(x), -1))
            x = self.norm(f"{name}.attention.output.LayerNorm", x + attended)
            hidden = self.linear(f"{name}.intermediate.dense", x)
            hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
            x = self.norm(f"{name}.output.LayerNorm", x + self.linear(f"{name}.output.dense", hidden))
        return x
