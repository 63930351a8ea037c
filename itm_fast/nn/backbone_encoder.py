"""Pictures to region embeddings through a vision model of transformers or timm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import linear_layer
from itm_fast.nn.no_rows import connected
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.patch_encoder import CHANNELS, as_pictures, patch_side
from itm_fast.nn.published_names import keep_published_names
from itm_fast.nn.timm_backbone import TIMM
from itm_fast.nn.vision_backbone import build_backbone, layout_of

__all__ = ["BackboneEncoder"]


class BackboneEncoder(nn.Module):
    """Encode pictures by a vision model, a linear layer and l2 normalisation per patch token.

    The input is a picture that is cut into square patches of raw pixels, with values from -1 to 1. The picture is
    joined again, so these patches need not be those of the model. If it has another size than the model was made for,
    the position embeddings are interpolated. The weights start random; `itm_fast.models.vision_folder` reads
    pretrained ones.

    Args:
        feature_dim: values per stored patch, rows x columns x 3 colours.
        embed_dim: width d of the embeddings.
        settings: "config": the architecture, as `vision_backbone.backbone_settings` returns it; "mean" and "std" of
            the three colours, for pixels from 0 to 1.
        class_token: keep the class token as the first region.
        no_imgnorm: leave the l2 normalisation out.

    Attributes:
        kind: `model_type` of the vision model.
        width: width of the tokens.
        embed_dim: the argument.
        special: number of tokens before those of the patches.

    Raises:
        ValueError: the settings are not those of a vision model, the model has no class token to keep, or its package
            (transformers or timm) is not installed.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        feature_dim: int,
        embed_dim: int,
        settings: Mapping[str, Any],
        *,
        class_token: bool = False,
        no_imgnorm: bool = False,
    ) -> None:
        super().__init__()
        self.side, self.embed_dim, self.no_imgnorm = patch_side(feature_dim), embed_dim, no_imgnorm
        config = settings.get("config")
        if not isinstance(config, Mapping):
            raise ValueError(
                "image_backbone: expected the settings of a vision model (itm-fast train --image-backbone DIR reads "
                f"them from its folder), got {shown(settings)}"
            )
        backbone: Any = build_backbone(config)
        self.kind: str = config["model_type"]
        self._step, self.special, has_class, self.width = layout_of(self.kind, backbone)
        if class_token and not has_class:
            raise ValueError(f"image_class_token: a {self.kind} model has no class token to keep")
        self.class_token = class_token
        # First, because the gradient of an encoder's first weight is logged.
        self.fc: nn.Module = linear_layer(self.width, embed_dim)
        self.backbone = backbone
        if self.kind != TIMM:
            keep_published_names(self, self.kind)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(_colours(settings, name)).view(CHANNELS, 1, 1), persistent=False)

    def regions(self, side: int) -> int:
        """Return the number of regions of a picture of `side` x `side` pixels.

        Raises:
            ValueError: the model does not take pictures of this size.
        """
        if side % self._step:
            size = max(side // self._step, 1) * self._step
            raise ValueError(
                f"image_backbone: expected pictures with a multiple of {self._step} pixels per side, as this "
                f"{self.kind} model takes them, got {side}; import them with --size {size}"
            )
        return (side // self._step) ** 2 + self.class_token

    def forward(self, features: Tensor | Fragments) -> Fragments:
        """Encode (n, k, f), or Fragments with the same number of patches per picture, as Fragments of rows (n * t, d).

        The k patches of a picture are a square grid, row by row, and so are the t regions, after the class token if it
        is kept.

        Raises:
            ValueError: the patches are no square grid, or the model does not take pictures of their size.
        """
        states = self.states(features)
        embedded = self.fc(states.values)
        return states.with_values(embedded if self.no_imgnorm else l2norm(embedded))

    def states(self, features: Tensor | Fragments) -> Fragments:
        """Return the tokens of the vision model: rows (n * t, `width`). Arguments and errors as in `forward`."""
        pictures = as_pictures(features, self.side)
        count = self.regions(pictures.shape[-1])
        if not len(pictures):
            empty = pictures.new_zeros(0, count, self.width)
            return Fragments.from_padded(connected(empty, self.backbone.parameters()))
        pixels = ((pictures + 1) / 2 - self.mean) / self.std
        # DINOv2 interpolates without being asked.
        more = {} if self.kind.startswith("dinov2") else {"interpolate_pos_encoding": True}
        tokens: Tensor = self.backbone(pixel_values=pixels, **more).last_hidden_state
        patches = tokens[:, self.special :]
        return Fragments.from_padded(torch.cat([tokens[:, :1], patches], 1) if self.class_token else patches)


def _colours(settings: Mapping[str, Any], name: str) -> list[float]:
    """Return the mean or the standard deviation of the three colours."""
    value: Any = settings.get(name)
    fits = isinstance(value, list) and len(value) == CHANNELS and all(type(one) in (int, float) for one in value)
    if not fits or not all(map(math.isfinite, value)) or (name == "std" and min(value) <= 0):
        kind = "positive numbers" if name == "std" else "numbers"
        raise ValueError(f"image_backbone: {name}: expected three {kind}, got {shown(value)}")
    return [float(one) for one in value]
