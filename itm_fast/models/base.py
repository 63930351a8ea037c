"""What every model shares: encode, score, save and load.

Inside: `MatchingModel`, `register`, `create`, `load`, `names`, `config_class`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import safetensors
import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn

from itm_fast import config as settings
from itm_fast import files
from itm_fast.fragments import Fragments

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

Embeddings = Fragments | Tensor


class MatchingModel(nn.Module):
    """An image-text matching model: two encoders and a score.

    Encoders give `Fragments`, or a tensor (n, d) for a model of one vector per item, so that a gallery is encoded once.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    config: Any

    def encode_images(self, features: Tensor | Fragments) -> Embeddings:
        """Region features (n, k, f), or Fragments, to the embeddings of n images."""
        raise NotImplementedError

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Embeddings:
        """Padded token ids (n, L) int64 and lengths (n,) to the embeddings of n captions."""
        raise NotImplementedError

    def score(self, images: Any, captions: Any) -> Tensor:
        """Embeddings of images and captions to scores (n_images, n_captions) float32."""
        raise NotImplementedError

    def forward(self, features: Tensor | Fragments, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Scores (n_images, n_captions) of all images with all captions."""
        return self.score(self.encode_images(features), self.encode_captions(token_ids, lengths))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, each atomically; the folder is created where missing."""
        content = {"format_version": FORMAT_VERSION, "model": self.name, "config": settings.to_dict(self.config)}
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        # Bytes, not save_file, whose exceptions do not say in a readable way that a disk is full.
        files.write_bytes(Path(directory) / WEIGHTS_FILE, serialize(weights))
        files.write_text(Path(directory) / CONFIG_FILE, json.dumps(content, indent=2) + "\n")


_MODELS: dict[str, type[MatchingModel]] = {}
Model = TypeVar("Model", bound=type[MatchingModel])


def register(model: Model) -> Model:
    """Class decorator: makes a model known to `create` and `load` by its `name`."""
    _MODELS[model.name] = model
    return model


def names() -> list[str]:
    """The names that `create` takes."""
    return sorted(_MODELS)


def config_class(name: str) -> type:
    """The configuration class of a model; ValueError for an unknown name."""
    if name not in _MODELS:
        raise ValueError(settings.unknown_name("model", name, names()))
    return _MODELS[name].Config


def create(name: str, /, **config: Any) -> MatchingModel:
    """Builds a model by name with fresh weights from torch's random state.

    Raises:
        ValueError: the model or a setting is unknown, a required one is missing, or a value is out of bounds.
    """
    cls = config_class(name)
    return _MODELS[name](settings.build(cls, config, f"{name} setting"))


def load(directory: str | os.PathLike[str], device: torch.device | str = "cpu") -> MatchingModel:
    """Reads what `model.save` wrote, in evaluation mode.

    Raises:
        ValueError: a file is missing or damaged, the format is newer than this package, the weights do not fit the
            configuration, or a weight is not finite; the message names the file.
    """
    if Path(directory).is_file():
        raise ValueError(f"{directory}: expected the folder of a saved model, found a file")
    config_path, weights_path = Path(directory) / CONFIG_FILE, Path(directory) / WEIGHTS_FILE
    model = _from_config(config_path)
    try:
        weights = load_file(weights_path)
    except FileNotFoundError:
        raise ValueError(f"{weights_path}: no such file; {directory} is not a saved model") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{weights_path}: not a readable safetensors file ({error})") from None
    load_weights(model, weights, str(weights_path))
    return model.to(device).eval()


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Copies `weights` into `model` after checking names, shapes and values; errors name `source`."""
    own = model.state_dict()
    for name in weights:
        if name not in own:
            raise ValueError(f"{source}: the weight {name} is unknown to the model")
    for name, expected in own.items():
        if name not in weights:
            raise ValueError(f"{source}: the weight {name} is missing")
        tensor = weights[name]
        if tensor.shape != expected.shape:
            raise ValueError(f"{source}: {name}: expected shape {tuple(expected.shape)}, got {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{source}: {name} holds values that are not finite")
    model.load_state_dict(weights)


def _from_config(path: Path) -> MatchingModel:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {path.parent} is not a saved model") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(content, dict) or not {"format_version", "model", "config"} <= content.keys():
        raise ValueError(f"{path}: expected a JSON object with format_version, model and config")
    version = content["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version is {version!r}; this version of itm_fast reads {FORMAT_VERSION}")
    try:
        return create(content["model"], **content["config"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
