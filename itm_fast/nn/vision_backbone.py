"""Vision models of transformers and timm, built from their settings alone.

Inside: `KINDS`, `build_backbone`, `backbone_settings`, `class_of`, `layout_of`; `built`, `check_layers`, `class_named`
and `quiet`, for other models of transformers, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from itm_fast.files.messages import shortened, shown
from itm_fast.nn.timm_backbone import TIMM, TimmModel, TokenLayout

__all__ = [
    "KINDS",
    "backbone_settings",
    "build_backbone",
    "built",
    "check_layers",
    "class_named",
    "class_of",
    "layout_of",
    "quiet",
]

# For each `model_type`: the class in transformers, and the tokens before those of the patches, registers excluded.
KINDS = {
    "vit": ("ViTModel", 1),
    "deit": ("DeiTModel", 2),
    "swin": ("SwinModel", 0),
    "swinv2": ("Swinv2Model", 0),
    "dinov2": ("Dinov2Model", 1),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", 1),
    "clip": ("CLIPVisionModel", 1),
    "clip_vision_model": ("CLIPVisionModel", 1),
    "siglip": ("SiglipVisionModel", 0),
    "siglip_vision_model": ("SiglipVisionModel", 0),
}
_POOLED = ("vit", "deit", "swin", "swinv2")
_MAX_LAYERS = 256
_MAX_SIDE = 4096


def class_of(kind: str) -> Any:
    """Return the class of transformers for a kind of model; ValueError as `class_named`."""
    return class_named(KINDS[kind][0])


def class_named(name: str) -> Any:
    """Return a class of transformers.

    Raises:
        ValueError: the package transformers is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "encoder: the package transformers is not installed; install it with pip install 'itm_fast[vision]'"
        ) from None
    return getattr(transformers, name)


def layout_of(kind: str, model: Any) -> TokenLayout:
    """Return how a vision model of a kind turns pictures into tokens."""
    if isinstance(model, TimmModel):
        return model.layout
    config, first = model.config, KINDS[kind][1]
    # A Swin merges four patches after each stage.
    step = config.patch_size * 2 ** (len(config.depths) - 1 if hasattr(config, "depths") else 0)
    special = first + (config.num_register_tokens if kind == "dinov2_with_registers" else 0)
    width = model.num_features if hasattr(model, "num_features") else config.hidden_size
    return TokenLayout(step, special, first > 0, int(width))


def backbone_settings(kind: str, config: Any) -> dict[str, Any]:
    """Return the settings of a configuration of transformers that define the architecture, as plain data."""
    from transformers import PretrainedConfig

    general = PretrainedConfig().to_dict()
    own = {name: value for name, value in config.to_dict().items() if name not in general and name[0] != "_"}
    return {**own, "model_type": kind}


def build_backbone(settings: Mapping[str, Any]) -> nn.Module:
    """Build a vision model with random weights, without the parts that its patch tokens do not depend on.

    Args:
        settings: as `backbone_settings` returns them, or those of a `TimmModel`.

    Raises:
        ValueError: the settings are not those of a model of `KINDS` or timm, or its package is not installed.
    """
    kind = settings.get("model_type")
    if kind == TIMM:
        return TimmModel(settings)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"image_backbone: model_type: expected one of {', '.join((*KINDS, TIMM))}, got {shown(kind)}")
    _check_sizes(settings)
    more = {"vision_use_head": False} if kind.startswith("siglip") else {}
    options = {"add_pooling_layer": False} if kind in _POOLED else {}
    model = built(class_of(kind), {**settings, **more}, "image_backbone", **options)
    part: Any
    for part in list(model.modules()):
        if kind.startswith("clip") and hasattr(part, "post_layernorm"):
            part.post_layernorm = nn.Identity()
        if getattr(part, "mask_token", None) is not None:
            part.mask_token = None
    return model


def built(cls: Any, settings: Mapping[str, Any], what: str, **options: Any) -> nn.Module:
    """Build a model of a class of transformers with random weights.

    Args:
        cls: the class.
        settings: of its configuration, as `backbone_settings` returns them.
        what: the setting that contains them, for the message.
        options: further arguments of the class.

    Raises:
        ValueError: the settings are not those of such a model.
    """
    try:
        with quiet():
            # The model types of a whole CLIP or SigLIP are not those of their towers.
            plain = {name: value for name, value in settings.items() if name != "model_type"}
            config = cls.config_class.from_dict(plain)
            config._attn_implementation = "sdpa" if cls._supports_sdpa else "eager"
            model: nn.Module = cls(config, **options)
            return model
    except Exception as error:
        # Each class of transformers has its own exceptions for settings that do not fit.
        reason = shortened(" ".join(str(error).split()), 300)
        kind = settings.get("model_type")
        raise ValueError(f"{what}: the settings are not those of a {kind} model ({reason})") from None


def check_layers(depths: Any, what: str) -> None:
    """Raise ValueError unless the numbers of layers fit, as they decide how long building takes."""
    if not isinstance(depths, list) or not all(type(one) is int and one > 0 for one in depths):
        raise ValueError(f"{what}: depths: expected positive whole numbers, got {shown(depths)}")
    if sum(depths) > _MAX_LAYERS:
        raise ValueError(f"{what}: expected at most {_MAX_LAYERS} layers, got {sum(depths)}")


def _check_sizes(settings: Mapping[str, Any]) -> None:
    """Check the numbers that decide how long building takes, and those that the encoder reads."""
    check_layers(settings.get("depths", [settings.get("num_hidden_layers", 1)]), "image_backbone")
    for name in ("patch_size", "image_size"):
        if type(settings.get(name)) is not int or not 1 <= settings[name] <= _MAX_SIDE:
            raise ValueError(
                f"image_backbone: {name}: expected a whole number from 1 to {_MAX_SIDE}, got "
                f"{shown(settings.get(name))}"
            )
    if settings.get("num_channels", 3) != 3:
        raise ValueError(f"image_backbone: num_channels: expected 3, got {shown(settings['num_channels'])}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing progress bars and tables of weights that are not used."""
    from transformers.utils import logging as logs

    logging: Any = logs
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
