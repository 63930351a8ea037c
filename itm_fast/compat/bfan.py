"""Convert checkpoints of BFAN's official code (Liu et al., ACM MM 2019): focal attention "equal" or "prob".

Inside: `read`.
"""

from __future__ import annotations

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.scan import TRAINING
from itm_fast.compat.weights import build_model, without_weight_norm
from itm_fast.models import MatchingModel

__all__ = ["read"]


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
    config = encoder_config(checkpoint, text, "embed.weight", vocab_size)
    if options.choice("precomp_enc_type", "basic", {"basic": "basic", "weight_norm": "weight_norm"}) == "weight_norm":
        image = without_weight_norm(image, "fc.weight", checkpoint.path)
    config["temperature"] = options.get("lambda_softmax", 20.0)
    config["focal"] = options.choice("focal_type", "equal", {"equal": "equal", "prob": "prob"})
    options.mark_known(TRAINING)
    parts = [(image, {"": "image_encoder."}), (text, {"": "text_encoder."})]
    return build_model("bfan", config, parts, checkpoint.path)
