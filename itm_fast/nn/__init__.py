"""Building blocks as modules: encoders, normalisation, pooling, attention and its regulators."""

from itm_fast.nn.angular_loss import AngularLoss
from itm_fast.nn.attention import AttentionScores, CrossAttentionScores
from itm_fast.nn.attention_peak import AttentionPeak
from itm_fast.nn.backbone_encoder import BackboneEncoder
from itm_fast.nn.bert_text_encoder import BertTextEncoder
from itm_fast.nn.caption_decoder import CaptionDecoder
from itm_fast.nn.clip_encoders import ClipImageEncoder, ClipTextEncoder
from itm_fast.nn.external_attention import ExternalSpacePooling
from itm_fast.nn.feature_diversification import FeatureConversions, FeatureDiversification, FeatureReweighting
from itm_fast.nn.generalized_pooling import GeneralizedPooling
from itm_fast.nn.gradient_sparse import GradientSparseScores
from itm_fast.nn.image_encoder import ImageEncoder
from itm_fast.nn.maxsim import MaxsimScores
from itm_fast.nn.message_passing import MessagePassing
from itm_fast.nn.negative_attention import NegativeAwareSimilarity
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.pair_transformer import PairScores, PairTransformer
from itm_fast.nn.patch_encoder import PatchEncoder
from itm_fast.nn.patch_slimming import PatchSlimming
from itm_fast.nn.phrase_pooling import PhrasePooling
from itm_fast.nn.pooling import final_states, mean_pool
from itm_fast.nn.position_encoder import PositionEncoder
from itm_fast.nn.region_attention import RegionAttention
from itm_fast.nn.region_reasoning import RegionReader, RegionReasoning
from itm_fast.nn.regulated_similarity import RegulatedSimilarity
from itm_fast.nn.regulators import (
    CrossAttentionAlignments,
    RecurrentAggregationRegulator,
    RecurrentCorrespondenceRegulator,
)
from itm_fast.nn.residual_image_encoder import ResidualImageEncoder
from itm_fast.nn.self_attention import SelfAttentionLayer
from itm_fast.nn.similarity import inner_products
from itm_fast.nn.text_encoder import TextEncoder

__all__ = [
    "AngularLoss",
    "AttentionPeak",
    "AttentionScores",
    "BackboneEncoder",
    "BertTextEncoder",
    "CaptionDecoder",
    "ClipImageEncoder",
    "ClipTextEncoder",
    "CrossAttentionAlignments",
    "CrossAttentionScores",
    "ExternalSpacePooling",
    "FeatureConversions",
    "FeatureDiversification",
    "FeatureReweighting",
    "GeneralizedPooling",
    "GradientSparseScores",
    "ImageEncoder",
    "MaxsimScores",
    "MessagePassing",
    "NegativeAwareSimilarity",
    "PairScores",
    "PairTransformer",
    "PatchEncoder",
    "PatchSlimming",
    "PhrasePooling",
    "PositionEncoder",
    "RecurrentAggregationRegulator",
    "RecurrentCorrespondenceRegulator",
    "RegionAttention",
    "RegionReader",
    "RegionReasoning",
    "RegulatedSimilarity",
    "ResidualImageEncoder",
    "SelfAttentionLayer",
    "TextEncoder",
    "final_states",
    "inner_products",
    "l2norm",
    "mean_pool",
]
