"""Read the local folder of a BERT model: `config.json`, the weights and the vocabulary.

Inside: `bert_options`, `bert_vocabulary_file`, `load_bert`. Nothing is downloaded, and nothing in the folder is
executed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from itm_fast.files import regular
from itm_fast.files.documents import MAX_SETTINGS_BYTES, read_json
from itm_fast.files.messages import shown
from itm_fast.files.torch_files import load_plain
from itm_fast.models.base import check_shapes, load_weights, shapes_of
from itm_fast.models.weights_file import read_shapes, read_weights

__all__ = ["bert_options", "bert_vocabulary_file", "load_bert"]

# Settings of a model by the names that `config.json` has for them.
_SIZES = {
    "hidden_size": "bert_dim",
    "num_hidden_layers": "bert_layers",
    "num_attention_heads": "bert_heads",
    "intermediate_size": "bert_hidden_dim",
    "max_position_embeddings": "bert_max_length",
}
# What is the same in every BERT model, and the value that an absent one has.
_FIXED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_OLD_WEIGHTS = "pytorch_model.bin"


def bert_vocabulary_file(folder: str | os.PathLike[str]) -> Path:
    """The file in `folder` with BERT's pieces: `vocab.txt`, or `tokenizer.json` where that stands alone.

    Raises:
        ValueError: there is no such folder, and the message says how to make one; or its model is not a BERT.
    """
    if not Path(folder).is_dir():
        what = "expected a folder, found a file" if Path(folder).exists() else "no such folder"
        raise ValueError(
            f"{folder}: {what}; --bert needs a local folder of a BERT model, as nothing is downloaded: write one with "
            "save_pretrained of a BertModel and its tokenizer in transformers"
        )
    text, tokenizer = Path(folder) / "vocab.txt", Path(folder) / "tokenizer.json"
    if regular.is_present(Path(folder) / _CONFIG) or not (regular.is_present(text) or regular.is_present(tokenizer)):
        # Says that the model is another one, rather than that its vocabulary is missing or of another kind.
        _settings(folder)
    return tokenizer if not regular.is_present(text) and regular.is_present(tokenizer) else text


def bert_options(folder: str | os.PathLike[str], vocab_size: int) -> dict[str, Any]:
    """Return the settings of a model that encodes captions with the BERT in `folder`.

    Raises:
        ValueError: `config.json` is missing or damaged, is not that of a BERT model, or has another vocabulary size.
    """
    path, content = Path(folder) / _CONFIG, _settings(folder)
    if content.get("vocab_size", vocab_size) != vocab_size:
        raise ValueError(
            f"{path}: vocab_size: expected {vocab_size} as in the vocabulary, got {shown(content['vocab_size'])}"
        )
    for name in _SIZES:
        if name not in content:
            raise ValueError(f"{path}: {name} is missing")
    return {"text_encoder": "bert", **{own: content[name] for name, own in _SIZES.items()}}


def _settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(folder) / _CONFIG
    try:
        content = read_json(path, MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected the folder of a BERT model") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {shown(content)}")
    for name, value in _FIXED.items():
        if content.get(name, value) != value:
            raise ValueError(f"{path}: {name}: expected {value}, got {shown(content[name])}")
    return content


def load_bert(
    bert: nn.Module, folder: str | os.PathLike[str], parts: Mapping[str, nn.Module] = MappingProxyType({})
) -> None:
    """Copy the weights in `folder` (`model.safetensors`, else `pytorch_model.bin`) into a BERT of the same sizes.

    Weights of other parts, such as pretraining heads, are ignored.

    Args:
        bert: the model.
        folder: the folder.
        parts: further modules by their names in the file, such as "pooler.dense". The weights of those that the file
            contains are copied, too.

    Raises:
        ValueError: the file is missing or damaged, or its weights do not fit; one line names the file and the weight.
    """
    path = Path(folder) / _WEIGHTS
    old = Path(folder) / _OLD_WEIGHTS
    if not regular.is_present(path) and regular.is_present(old):
        path = old
    if not regular.is_file(path):
        raise ValueError(
            f"{path}: no such file; expected the weights of a BERT model (save_pretrained of transformers writes them)"
        )
    found = _read_old(path) if path == old else None
    shapes = read_shapes(path) if found is None else {name: tuple(one.shape) for name, one in found.items()}
    own = {name: _own_name(name) for name in shapes}
    taken = []
    for prefix, module in {"": bert, **parts}.items():
        known = shapes_of(module)
        names = {name: plain for name, plain in _below(prefix, own).items() if plain in known}
        if prefix and len(names) < len(known):
            continue
        if len(set(names.values())) != len(names):
            raise ValueError(f"{path}: a weight of BERT appears twice, with and without 'bert.'")
        source = f"{path}: {prefix}" if prefix else str(path)
        check_shapes(known, {plain: shapes[name] for name, plain in names.items()}, source)
        taken.append((module, names, source))
    weights = read_weights(path) if found is None else found
    for module, names, source in taken:
        load_weights(module, {plain: weights[name] for name, plain in names.items()}, source)


def _below(prefix: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the names in the file of the weights of a part, with their names in it."""
    start = f"{prefix}." if prefix else ""
    return {name: plain.removeprefix(start) for name, plain in own.items() if plain.startswith(start)}


def _read_old(path: Path) -> dict[str, Tensor]:
    """Read a file of `torch.save`, in which nothing is executed."""
    try:
        content = load_plain(path)
    except ValueError as error:
        raise ValueError(f"{path}: not readable weights: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a state dict, got {type(content).__name__}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{path}: expected tensors by name, got {shown(name)}: {type(tensor).__name__}")
    return content


def _own_name(name: str) -> str:
    """Return the name in `BertModel`: models with heads add the prefix `bert`, old files use other names."""
    plain = name.removeprefix("bert.")
    return plain.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
