"""Convert checkpoints of CAMP's official code (Wang et al., ICCV 2019): gated fusion, or cross-attention alone.

Inside: `read`.
"""

from __future__ import annotations

from typing import Any

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.scan import TRAINING
from itm_fast.compat.weights import Names, build_model
from itm_fast.models import MatchingModel

__all__ = ["read"]

# The `measure` "cross_attention_new" is left out: its score averages over the padding of a caption, too.
_MEASURES: dict[str, dict[str, Any]] = {
    "gate_fusion_new": {"head": "sigmoid", "message_attention": True},
    "gate_fusion": {"head": "sigmoid", "message_attention": False},
    "cross_attention": {"head": "cosine", "message_attention": False},
}
# The official code never reads `use_abs`, and concatenates whatever `fusion_func` says.
_TRAINING = (
    *TRAINING, "use_restval", "crop_size", "val_epoc", "cnn_type", "cross_model", "loss_func", "fusion_func",
    "word_embed", "embed_mask", "use_abs", "finetune", "finetune_gate", "lr_scheduler", "optimizer", "distributed",
)  # fmt: skip
# Messages go from words to the regions, so that their weights belong to the regions' direction.
_SIMILARITY: Names = {
    "img_key_fc.": "similarity.image_key.",
    "txt_key_fc.": "similarity.text_key.",
    "img_query_fc.": "similarity.image_query.",
    "txt_query_fc.": "similarity.text_query.",
    "weighted_txt_query_fc.": "similarity.to_regions.message_query.",
    "weighted_txt_key_fc.": "similarity.to_regions.message_key.",
    "weighted_img_query_fc.": "similarity.to_words.message_query.",
    "weighted_img_key_fc.": "similarity.to_words.message_key.",
    "fc_1.0.": "similarity.to_regions.fuse.",
    "fc_2.0.": "similarity.to_words.fuse.",
    "fc_out.0.": "similarity.evaluation.0.",
    "fc_out.3.": "similarity.evaluation.2.",
}


def read(checkpoint: OfficialCheckpoint, vocab_size: int) -> MatchingModel:
    """Build the model of a checkpoint with state dicts of the image encoder, the text encoder and the similarity.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words in the vocabulary of the model.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    image, text, similarity = checkpoint.modules("image encoder", "text encoder", "similarity")
    options = checkpoint.options
    config = encoder_config(checkpoint, text, "embed.weight", vocab_size)
    for name in ("no_imgnorm", "no_txtnorm"):
        config[name] = options.get(name, True)
    # Without both directions, or with this attention, an encoder returns one vector.
    for name, expected in (("bi_gru", True), ("self_attention", False)):
        if options.get(name, expected) is not expected:
            raise options.error(name, f"expected {str(expected).lower()}, as the similarity needs regions and words")
    config |= _MEASURES[options.choice("measure", "gate_fusion_new", {name: name for name in _MEASURES})]
    options.mark_known(_TRAINING)
    pool = "final_reduce" if config["head"] == "sigmoid" and config["message_attention"] else "reduce_layer"
    weights: Names = {
        **_SIMILARITY,
        f"{pool}_1.linear.": "similarity.to_regions.pool.",
        f"{pool}_2.linear.": "similarity.to_words.pool.",
    }
    parts = [(image, {"": "image_encoder."}), (text, {"": "text_encoder."}), (similarity, weights)]
    return build_model("camp", config, parts, checkpoint.path)
