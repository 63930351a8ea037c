"""Convert checkpoints of NAAF's official code (Zhang et al., CVPR 2022): a GRU over learned or GloVe word vectors.

Inside: `read`.
"""

from __future__ import annotations

import torch

from itm_fast.compat.checkpoint import OfficialCheckpoint, StateDict, Weight
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.weights import Names, build_model, without_weight_norm
from itm_fast.models import MatchingModel

__all__ = ["read"]

# Options of the official script that do not change the scores of a trained model. `alpha` and the statistics only serve
# to learn the thresholds. The official code always relates the words of a caption when it evaluates.
_TRAINING = (
    "data_path", "data_name", "vocab_path", "margin", "num_epochs", "batch_size", "grad_clip", "learning_rate",
    "lr_update", "workers", "log_step", "val_step", "logger_name", "logg_path", "model_name", "resume", "alpha",
    "mean_neg", "stnd_neg", "mean_pos", "stnd_pos", "using_intra_info",
)  # fmt: skip
_GLOVE = "embed.glove.weight"
# The official model keeps its thresholds among the options.
_THRESHOLDS: Names = {"thres_safe": "similarity.safe_threshold", "thres": "similarity.threshold"}


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
    embedding = _GLOVE if _GLOVE in text.weights else "embed.weight"
    config = encoder_config(checkpoint, text, embedding, vocab_size)
    if options.choice("precomp_enc_text_type", "GloVe", {"basic": "basic", "GloVe": "GloVe"}) == "GloVe":
        config["no_txtnorm"] = False  # as the official code builds it
    if options.choice("precomp_enc_type", "basic", {"basic": "basic", "weight_norm": "weight_norm"}) == "weight_norm":
        image = without_weight_norm(image, "fc.weight", checkpoint.path)
    config["temperature"] = options.get("lambda_softmax", 20.0)
    thresholds = {}
    for name in _THRESHOLDS:
        if not options.has(name):
            raise options.error(name, "missing; without its threshold the model gives other scores")
        thresholds[name] = Weight(f"opt.{name}", torch.tensor(options.get(name, 0.0)))
    options.mark_known(_TRAINING)
    parts = [
        (image, {"": "image_encoder."}),
        (text, {"embed.glove.": "text_encoder.embed.", "": "text_encoder."}),
        (StateDict("opt", thresholds), _THRESHOLDS),
    ]
    return build_model("naaf", config, parts, checkpoint.path)
