"""Building blocks as modules: encoders, normalisation, pooling, attention."""

from itm_fast.nn.attention import CrossAttentionScores
from itm_fast.nn.image_encoder import ImageEncoder
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.patch_encoder import PatchEncoder
from itm_fast.nn.pooling import final_states, mean_pool
from itm_fast.nn.residual_image_encoder import ResidualImageEncoder
from itm_fast.nn.similarity import inner_products
from itm_fast.nn.text_encoder import TextEncoder

__all__ = [
    "CrossAttentionScores",
    "ImageEncoder",
    "PatchEncoder",
    "ResidualImageEncoder",
    "TextEncoder",
    "final_states",
    "inner_products",
    "l2norm",
    "mean_pool",
]
