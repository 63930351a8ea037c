"""Convert checkpoints of SCAN's official code (Lee et al., ECCV 2018).

Inside: `read`; `TRAINING`, which `bfan` and `pfan` also use.
"""

from __future__ import annotations

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.weights import build_model, without_weight_norm
from itm_fast.models import MatchingModel
from itm_fast.models.scan import NORMALIZATIONS

__all__ = ["TRAINING", "read"]

_AGGREGATIONS = {"LogSumExp": "logsumexp", "Mean": "mean", "Max": "max", "Sum": "sum"}

# Options of the official script that do not change the scores of a trained model.
TRAINING = (
    "data_path", "data_name", "vocab_path", "margin", "num_epochs", "batch_size", "grad_clip", "learning_rate",
    "lr_update", "workers", "log_step", "val_step", "logger_name", "model_name", "resume", "max_violation",
)  # fmt: skip


def read(checkpoint: OfficialCheckpoint, vocab_size: int) -> MatchingModel:
    """Build the model of a checkpoint with state dicts of the image encoder and the text encoder.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words in the vocabulary of the model.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    image, text = checkpoint.modules("image encoder", "text encoder")
    options = checkpoint.options
    encoders = encoder_config(checkpoint, text, "embed.weight", vocab_size)
    encoder = options.choice("precomp_enc_type", "basic", {"basic": "basic", "weight_norm": "weight_norm"})
    if encoder == "weight_norm":
        image = without_weight_norm(image, "fc.weight", checkpoint.path)
    direction = options.choice("cross_attn", "t2i", {"t2i": "t2i", "i2t": "i2t"})
    aggregation = options.choice("agg_func", "LogSumExp", _AGGREGATIONS)
    logsumexp_temperature = options.get("lambda_lse", 6.0)
    config = {
        **encoders,
        "bidirectional": options.get("bi_gru", False),
        "direction": direction,
        "normalization": options.choice("raw_feature_norm", "clipped_l2norm", {name: name for name in NORMALIZATIONS}),
        f"{direction}_temperature": options.get("lambda_softmax", 9.0),
        "aggregation": aggregation,
    }
    if aggregation == "logsumexp":
        config[f"{direction}_logsumexp_temperature"] = logsumexp_temperature
    options.mark_known(TRAINING)
    parts = [(image, {"": "image_encoder."}), (text, {"": "text_encoder."})]
    return build_model("scan", config, parts, checkpoint.path)
