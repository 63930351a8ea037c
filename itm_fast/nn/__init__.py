"""Building blocks as modules: encoders, normalisation, attention."""

from itm_fast.nn.attention import CrossAttentionScores
from itm_fast.nn.image_encoder import ImageEncoder
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.patch_encoder import PatchEncoder
from itm_fast.nn.text_encoder import TextEncoder

__all__ = ["CrossAttentionScores", "ImageEncoder", "PatchEncoder", "TextEncoder", "l2norm"]
