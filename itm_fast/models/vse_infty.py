"""Models with one vector per item and generalized pooling: VSE-infinity, and those of the SelHN paper.

VSE-infinity is Chen et al., "Learning the Best Pooling Strategy for Visual Semantic Embedding" (CVPR 2021); RVSE++,
with VSE (FC), VSE (MLP) and RVSE (MLP), is Li et al., "Selectively Hard Negative Mining for Alleviating Gradient
Vanishing in Image-Text Matching" (2023). They differ from VSE++ and from each other only in their settings.
"""

from __future__ import annotations

import attrs

from itm_fast.config import other_default
from itm_fast.models.base import register
from itm_fast.models.vsepp import VSEPP, VSEPPConfig

__all__ = ["RVSEPP", "RVSEPPConfig", "VSEInfty", "VSEInftyConfig"]


@attrs.frozen(kw_only=True)
class VSEInftyConfig(VSEPPConfig):
    """Settings of VSE-infinity; the defaults are the published ones."""

    image_encoder: str = other_default(VSEPPConfig, "image_encoder", "residual")
    bidirectional: bool = other_default(VSEPPConfig, "bidirectional", True)
    image_pooling: str = other_default(VSEPPConfig, "image_pooling", "gpo")
    text_pooling: str = other_default(VSEPPConfig, "text_pooling", "gpo")


@attrs.frozen(kw_only=True)
class RVSEPPConfig(VSEInftyConfig):
    """Settings of RVSE++, which are those of RVSE (MLP); `image_encoder` linear is VSE (FC), mlp is VSE (MLP)."""

    image_encoder: str = other_default(VSEInftyConfig, "image_encoder", "projected_residual")


@register
class VSEInfty(VSEPP):
    """VSE-infinity: a residual image encoder and a bidirectional GRU, each with generalized pooling."""

    name = "vse_infty"
    summary = "VSE-infinity: one vector per item, generalized pooling (Chen et al., CVPR 2021)."
    Config = VSEInftyConfig


@register
class RVSEPP(VSEPP):
    """RVSE++: VSE-infinity with a perceptron on the projected features."""

    name = "rvsepp"
    summary = "RVSE++: VSE-infinity with a projected residual image encoder, for SelHN (Li et al., 2023)."
    Config = RVSEPPConfig
