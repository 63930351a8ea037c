"""Convert checkpoints of PFAN's official code (Wang et al., IJCAI 2019), which extends that of SCAN.

Inside: `read`.
"""

from __future__ import annotations

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.scan import TRAINING
from itm_fast.compat.weights import build_model
from itm_fast.models import MatchingModel

__all__ = ["read"]


def read(checkpoint: OfficialCheckpoint, vocab_size: int) -> MatchingModel:
    """Build the model of a checkpoint with state dicts of the image encoder and the text encoder.

    The official code has 16 x 16 blocks and vectors of 200 values; the shapes of its weights tell them here.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words in the vocabulary of the model.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    image, text = checkpoint.modules("image encoder", "text encoder")
    options = checkpoint.options
    config = encoder_config(checkpoint, text, "embed.weight", vocab_size)
    options.choice("precomp_enc_type", "basic", {"basic": "basic"})
    direction = options.choice("cross_attn", "t2i", {"t2i": "t2i", "i2t": "i2t"})
    blocks = image.weights.get("position_embedding.weight")
    if blocks is not None and blocks.tensor.dim() == 2:
        count, width = blocks.tensor.shape
        config |= {"position_grid": max(int(max(count - 1, 1) ** 0.5), 1), "position_dim": max(width, 1)}
    config |= {
        "bidirectional": options.get("bi_gru", False),
        "direction": direction,
        # What the code adds to the mean cosine is aggregated and normalised in this way alone.
        "normalization": options.choice("raw_feature_norm", "clipped_l2norm", {"clipped_l2norm": "clipped_l2norm"}),
        "aggregation": options.choice("agg_func", "LogSumExp", {"Mean": "mean"}),
        f"{direction}_temperature": options.get("lambda_softmax", 9.0),
    }
    options.mark_known((*TRAINING, "lambda_lse"))
    names = {
        "fc_att.": "image_encoder.query.",
        "position_embedding.": "image_encoder.positions.",
        "": "image_encoder.",
    }
    return build_model("pfan", config, [(image, names), (text, {"": "text_encoder."})], checkpoint.path)
