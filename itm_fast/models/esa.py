"""ESA: external space attention aggregation (Zhu et al., IEEE TCSVT 2023).

"ESA: External Space Attention Aggregation for Image-Text Retrieval": the encoders of VSE-infinity with another pooling.
Its self-expanding loss is `--loss self_expanding`. The published code drops regions behind the image encoder, so that
its batch normalisation sees each region once; here the encoder sees both copies. The published dropout on the word
embeddings behind BERT is left out.
"""

from __future__ import annotations

import attrs

from itm_fast.config import other_default
from itm_fast.models.base import register
from itm_fast.models.vsepp import VSEPP, VSEPPConfig

__all__ = ["ESA", "ESAConfig"]


@attrs.frozen(kw_only=True)
class ESAConfig(VSEPPConfig):
    """Settings of ESA; the defaults are those of the authors' code."""

    image_encoder: str = other_default(VSEPPConfig, "image_encoder", "residual")
    bidirectional: bool = other_default(VSEPPConfig, "bidirectional", True)
    word_dropout: float = other_default(VSEPPConfig, "word_dropout", 0.1)
    image_pooling: str = other_default(VSEPPConfig, "image_pooling", "esa")
    text_pooling: str = other_default(VSEPPConfig, "text_pooling", "esa")


@register
class ESA(VSEPP):
    """ESA: a residual image encoder and a bidirectional GRU, pooled with an attention of its own in each channel."""

    name = "esa"
    summary = "ESA: one vector per item, elementwise attention over regions and words (Zhu et al., IEEE TCSVT 2023)."
    Config = ESAConfig
