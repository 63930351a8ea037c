"""Checkpoints of SCAN's official code (Lee et al., ECCV 2018).

Inside: `read`.
"""

from __future__ import annotations

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.weights import build_model, without_weight_norm
from itm_fast.models import MatchingModel
from itm_fast.models.scan import NORMALIZATIONS

__all__ = ["read"]

_AGGREGATIONS = {"LogSumExp": "logsumexp", "Mean": "mean", "Max": "max", "Sum": "sum"}

# Options of the official script that do not change the scores of a trained model.
_TRAINING = (
    "data_path", "data_name", "vocab_path", "margin", "num_epochs", "batch_size", "grad_clip", "learning_rate",
    "lr_update", "workers", "log_step", "val_step", "logger_name", "model_name", "resume", "max_violation",
)  # fmt: skip


def read(checkpoint: OfficialCheckpoint, vocab_size: int) -> MatchingModel:
    """The model of an official checkpoint: state dicts of the image encoder and the text encoder.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words of the vocabulary that the model is to be used with.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit; one line names the file and the key.
    """
    image, text = checkpoint.modules("image encoder", "text encoder")
    options = checkpoint.options
    words = text["embed.weight"].tensor.shape[:1] if "embed.weight" in text else ()
    if words and words[0] != vocab_size:
        raise ValueError(
            f"{checkpoint.path}: {text['embed.weight'].key}: {words[0]} words, but the vocabulary has {vocab_size}; "
            "name the one that the model was trained with"
        )
    if options.get("vocab_size", vocab_size) != vocab_size:
        raise options.error("vocab_size", f"expected {vocab_size} as in the vocabulary")
    encoder = options.choice("precomp_enc_type", "basic", {"basic": "basic", "weight_norm": "weight_norm"})
    if encoder == "weight_norm":
        image = without_weight_norm(image, "fc.weight", checkpoint.path)
    direction = options.choice("cross_attn", "t2i", {"t2i": "t2i", "i2t": "i2t"})
    aggregation = options.choice("agg_func", "LogSumExp", _AGGREGATIONS)
    logsumexp_temperature = options.get("lambda_lse", 6.0)
    config = {
        "vocab_size": vocab_size,
        "feature_dim": options.get("img_dim", 2048),
        "embed_dim": options.get("embed_size", 1024),
        "word_dim": options.get("word_dim", 300),
        "num_layers": options.get("num_layers", 1),
        "bidirectional": options.get("bi_gru", False),
        "no_imgnorm": options.get("no_imgnorm", False),
        "no_txtnorm": options.get("no_txtnorm", False),
        "direction": direction,
        "normalization": options.choice("raw_feature_norm", "clipped_l2norm", {name: name for name in NORMALIZATIONS}),
        f"{direction}_temperature": options.get("lambda_softmax", 9.0),
        "aggregation": aggregation,
    }
    if aggregation == "logsumexp":
        config[f"{direction}_logsumexp_temperature"] = logsumexp_temperature
    options.check_known(_TRAINING)
    return build_model("scan", config, {"image_encoder.": image, "text_encoder.": text}, checkpoint.path)
