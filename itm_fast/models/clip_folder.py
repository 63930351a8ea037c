"""Read the local folder of a CLIP or SigLIP: both towers, its tokenizer and how it takes pictures.

Inside: `ClipFolder`, `read_clip_folder`. Nothing is downloaded, and nothing in the folder is executed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from itm_fast.data.preprocessing import read_preprocessing
from itm_fast.data.tokenizer_vocabulary import TOKENIZER_FILE, TokenizerVocabulary
from itm_fast.models.base import load_weights, shapes_of
from itm_fast.models.pretrained_folder import check_folder, load_pretrained, read_config, weight_files
from itm_fast.models.vision_folder import VisionFolder
from itm_fast.nn.clip_encoders import tower_of
from itm_fast.nn.vision_backbone import backbone_settings, class_named

__all__ = ["ClipFolder", "read_clip_folder", "read_clip_tokenizer"]

_CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
_WHAT, _PARTS = "a CLIP or SigLIP", "image processor and tokenizer"


@attrs.frozen(eq=False)
class ClipFolder:
    """A CLIP or SigLIP from a local folder.

    Attributes:
        kind: its `model_type`, "clip" or "siglip".
        model: the model of transformers in float32 and evaluation mode.
        vision: its picture tower.
        vocabulary: its tokenizer.
    """

    kind: str
    model: Any
    vision: VisionFolder
    vocabulary: TokenizerVocabulary

    def settings(self) -> dict[str, Any]:
        """Return what `itm_fast.models.CLIP` takes as settings, except `feature_dim`: plain data."""
        is_clip, config = self.kind == "clip", self.model.config
        return {
            "vocab_size": len(self.vocabulary),
            "embed_dim": config.projection_dim if is_clip else config.vision_config.hidden_size,
            "image_backbone": self.vision.settings(),
            "text_backbone": {"config": backbone_settings(self.kind, config.text_config), "pad": self.vocabulary.pad},
            "pretrained_scale": float(self.model.logit_scale.detach().exp()),
            "pretrained_bias": None if is_clip else float(self.model.logit_bias.detach()),
        }

    def copy_weights(self, model: Any) -> None:
        """Copy the weights into a `itm_fast.models.CLIP` with these settings.

        Raises:
            ValueError: a weight has another shape or is not finite.
        """
        image, text, whole = model.image_encoder, model.text_encoder, self.model
        vision, words = tower_of(whole.vision_model), tower_of(whole.text_model)
        parts: list[tuple[nn.Module, nn.Module]]
        parts = [(tower_of(image.backbone), vision), (tower_of(text.backbone), words)]
        if self.kind == "clip":
            parts += [(image.fc.norm, vision.post_layernorm), (image.fc.projection, whole.visual_projection)]
            parts += [(text.fc, whole.text_projection)]
        else:
            parts += [(image.fc, vision.head), (text.fc, words.head)]
        for own, pretrained in parts:
            weights = pretrained.state_dict()
            source = str(self.vision.files[0])
            load_weights(own, {name: weights[name] for name in shapes_of(own) if name in weights}, source)


def read_clip_folder(folder: str | os.PathLike[str]) -> ClipFolder:
    """Read a CLIP or SigLIP that `save_pretrained` of transformers wrote, with its image processor and tokenizer.

    Args:
        folder: contains `config.json`, `tokenizer.json`, the settings of the image processor (as in
            `itm_fast.data.preprocessing.read_preprocessing`) and safetensors weights.

    Raises:
        ValueError: a file is missing or damaged, the model is of another kind, weights are missing or do not fit, or
            the package transformers is not installed. The message names the file.
    """
    folder = Path(folder)
    vocabulary = read_clip_tokenizer(folder)
    content, kind = read_config(folder / "config.json", _CLASSES, _WHAT)
    preprocessing, files = read_preprocessing(folder), weight_files(folder)
    if content.get("vision_config", {}).get("vision_use_head", True) is not True:
        raise ValueError(f"{folder / 'config.json'}: vision_use_head: expected true, as the head pools the patches")
    model = load_pretrained(class_named(_CLASSES[kind]), content, folder, files, kind)
    known = model.config.text_config.vocab_size
    if len(vocabulary) > known:
        raise ValueError(
            f"{folder / TOKENIZER_FILE}: expected at most {known} tokens, as many as the text tower knows, got "
            f"{len(vocabulary)}"
        )
    return ClipFolder(kind, model, VisionFolder(folder, kind, model.vision_model, preprocessing, files), vocabulary)


def read_clip_tokenizer(folder: str | os.PathLike[str]) -> TokenizerVocabulary:
    """Read the tokenizer of such a folder.

    Raises:
        ValueError: there is no such folder, its model is of another kind, or its tokenizer is missing or damaged.
    """
    check_folder(Path(folder), _WHAT, _PARTS)
    read_config(Path(folder) / "config.json", _CLASSES, _WHAT)
    return TokenizerVocabulary.from_folder(folder)
