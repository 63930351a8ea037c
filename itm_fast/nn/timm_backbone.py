"""Vision models of timm, built from their settings alone.

Inside: `TIMM`, `TimmModel`, `TokenLayout`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from itm_fast.files.messages import shortened, shown

__all__ = ["TIMM", "TimmModel", "TokenLayout"]

TIMM = "timm"  # As `model_type`.
_MAX_SIDE = 4096
# For pictures of another size than the model was made for: for most models, and for Swin in older versions of timm.
_ANY_SIZE: tuple[dict[str, bool], ...] = ({"dynamic_img_size": True}, {"strict_img_size": False}, {})
# Arguments that change what the model returns, beside those that read files.
_REFUSED = ("features_only", "out_indices", "pretrained_strict", "pretrained_filter_fn")


class TokenLayout(NamedTuple):
    """How a vision model turns a picture into tokens.

    Attributes:
        step: pixels per side that one patch token stands for.
        special: tokens before those of the patches.
        class_token: whether the first of them is a class token.
        width: width of the tokens.
    """

    step: int
    special: int
    class_token: bool
    width: int


class TimmModel(nn.Module):
    """A model of timm that is called as the models of transformers are.

    Parts that the tokens do not depend on, such as the classifier, are replaced by identities. Batch normalisation
    keeps its statistics in training, so that a picture's tokens do not depend on the batch.

    Args:
        settings: "architecture", a name of timm; "model_args", arguments for it; "image_size", pixels per side that
            the model was made for.

    Attributes:
        settings: the argument, with "model_type".
        layout: of the tokens.
        model: the model of timm.

    Raises:
        ValueError: the settings are not those of such a model, its output is no square grid of tokens, or the package
            timm is not installed or does not fit torch.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        name, arguments, side = (settings.get(key) for key in ("architecture", "model_args", "image_size"))
        timm = _package()
        # Other names than those of its list make timm download.
        if not isinstance(name, str) or not timm.is_model(name):
            version = f"timm {timm.__version__}"
            raise ValueError(f"image_backbone: architecture: expected a model of {version}, got {shown(name)}")
        if type(side) is not int or not 1 <= side <= _MAX_SIDE:
            raise ValueError(
                f"image_backbone: image_size: expected a whole number from 1 to {_MAX_SIDE}, got {shown(side)}"
            )
        arguments = _checked({} if arguments is None else arguments, timm.create_model)
        self.settings = {"model_type": TIMM, "architecture": name, "model_args": arguments, "image_size": side}
        try:
            self.model = _created(timm.create_model, name, arguments).eval()
            with torch.enable_grad():
                tokens, grid = self._tokens(torch.zeros(1, 3, side, side))
                tokens.sum().backward()
        except Exception as error:
            # Each class of timm has its own exceptions for settings that do not fit.
            reason = shortened(" ".join(str(error).split()), 300)
            raise ValueError(f"image_backbone: the settings are not those of a {name} model ({reason})") from None
        special = tokens.shape[1] - grid**2
        if side % grid or special != getattr(self.model, "num_prefix_tokens", 0):
            raise ValueError(f"image_backbone: {name}: expected a square grid of tokens, got {tokens.shape[1]} tokens")
        has_class = special > 0 and getattr(self.model, "cls_token", None) is not None
        self.layout = TokenLayout(side // grid, special, has_class, tokens.shape[2])
        _drop_unused(self.model)
        self.zero_grad()

    def forward(
        self, pixel_values: Tensor, *, output_hidden_states: bool = False, interpolate_pos_encoding: bool = True
    ) -> Any:
        """Encode pixels (n, 3, s, s); `last_hidden_state` of the result are the tokens (n, t, width).

        Raises:
            ValueError: other hidden states than the last are wanted.
        """
        if output_hidden_states:
            raise ValueError("layer: expected -1, as only the last layer of a model of timm can be read")
        return SimpleNamespace(last_hidden_state=self._tokens(pixel_values)[0])

    def train(self, mode: bool = True) -> TimmModel:
        """Set the mode of all parts except batch normalisation."""
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()
        return self

    def gradient_checkpointing_enable(self, _options: Mapping[str, Any]) -> None:
        """Let the layers be computed again in the backward pass; ValueError if the model cannot."""
        model: Any = self.model
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError):
            name = self.settings["architecture"]
            raise ValueError(f"image_checkpointing: a {name} model of timm does not support it") from None

    def _tokens(self, pixels: Tensor) -> tuple[Tensor, int]:
        """Return the tokens (n, t, width), special ones first, and the number of patches per side."""
        model: Any = self.model
        states: Tensor = model.forward_features(pixels)
        if states.ndim == 4:
            # Convolutional networks have the channels first, and so have some transformers.
            rows_first = getattr(model, "output_fmt", "NCHW") == "NHWC"
            states = (states if rows_first else states.permute(0, 2, 3, 1)).flatten(1, 2)
        return states, math.isqrt(states.shape[1] - getattr(model, "num_prefix_tokens", 0))


def _package() -> Any:
    try:
        import timm
    except ImportError:
        raise ValueError(
            "image_backbone: the package timm is not installed; install it with pip install 'itm_fast[timm]'"
        ) from None
    except (RuntimeError, OSError) as error:
        # timm imports torchvision, whose operators are compiled for one version and build of torch.
        reason = shortened(" ".join(str(error).split()))
        raise ValueError(
            f"image_backbone: timm cannot be imported beside torch {torch.__version__} ({reason}); install the "
            "torchvision that was built for it"
        ) from None
    return timm


def _checked(arguments: Any, create: Any) -> dict[str, Any]:
    """Return arguments for the architecture if they are plain, without those of the classifier."""
    if not isinstance(arguments, Mapping):
        raise ValueError(f"image_backbone: model_args: expected names and values, got {shown(arguments)}")
    if arguments.get("in_chans", 3) != 3:
        raise ValueError(f"image_backbone: model_args: in_chans: expected 3, got {shown(arguments['in_chans'])}")
    refused = {*_REFUSED, *inspect.signature(create).parameters} - {"kwargs"}
    kept = {name: value for name, value in arguments.items() if name != "num_classes"}
    for name, value in kept.items():
        if name in refused:
            raise ValueError(f"image_backbone: model_args: {shown(name)} is not supported")
        if not all(isinstance(one, bool | int | float | str | None) for one in _leaves(value)):
            raise ValueError(f"image_backbone: model_args: {shown(name)}: expected plain values, got {shown(value)}")
        if any(type(one) is int and one > 2**16 for one in _leaves(value)):
            raise ValueError(f"image_backbone: model_args: {shown(name)}: expected at most 65536, got {shown(value)}")
    return kept


def _leaves(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, list | tuple) else [value]


def _created(create: Any, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a model with random weights that takes pictures of any size, if there is such an argument."""
    for number, more in enumerate(_ANY_SIZE, start=1):
        try:
            model: nn.Module = create(name, pretrained=False, num_classes=0, **{**more, **arguments})
            return model
        except TypeError:
            if number == len(_ANY_SIZE):
                raise
    raise AssertionError


def _drop_unused(part: nn.Module) -> None:
    """Replace the parts whose weights have no gradient."""
    for name, child in part.named_children():
        weights = list(child.parameters())
        if weights and all(weight.grad is None for weight in weights):
            setattr(part, name, nn.Identity())
        else:
            _drop_unused(child)
