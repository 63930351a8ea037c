"""Convert checkpoints of the official code of Deep Boosting Learning (Diao et al., IEEE TIP 2024).

All its training scenarios save the same baseline model, including the branches of OSS and the targets of OAS and MSS.

Inside: `read`, `has_mask`.
"""

from __future__ import annotations

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.weights import Names, build_model
from itm_fast.models import MatchingModel

__all__ = ["has_mask", "read"]

# Options of the official scripts that do not change the scores of a trained model.
_TRAINING = (
    "data_path", "data_name", "vocab_path", "save_path", "resume", "gpuid", "batch_size", "num_epochs", "lr_update",
    "loss_name", "boost_name", "alpha", "beta", "if_boost", "num_branch", "if_boost_manner", "momentum_teacher",
    "learning_rate", "workers", "log_step", "val_step", "grad_clip", "margin", "max_violation",
)  # fmt: skip

_EMBEDDING = "txt_enc.embed.weight"
_NAMES: Names = {
    "img_enc.": "image_encoder.",
    "txt_enc.embed.": "text_encoder.embed.",
    "txt_enc.cap_rnn.": "text_encoder.rnn.",
    "sim_enc.sim_tran_w.": "similarity.alignments.0.",
    "sim_enc.sim_eval_w.": "similarity.score.",
}


def has_mask(checkpoint: OfficialCheckpoint) -> bool:
    """Return whether the vocabulary has `<mask>`: the official script of OAS appends it to the vocabulary file."""
    return checkpoint.options.has("if_boost")


def read(checkpoint: OfficialCheckpoint, vocab_size: int) -> MatchingModel:
    """Build the model of a checkpoint with one state dict of encoders and similarity.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words in the vocabulary of the model.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    (weights,) = checkpoint.modules("the whole model")
    options = checkpoint.options
    encoders = encoder_config(checkpoint, weights, _EMBEDDING, vocab_size, masked=has_mask(checkpoint))
    config = {
        **encoders,
        "bidirectional": options.get("bi_gru", True),
        "word_dropout": 0.4,
        "alignment_dim": options.get("sim_dim", 256),
        "temperature": 9.0,
        "negative_slope": 0.1,
        "normalize_mean": not options.get("no_simnorm", False),
    }
    options.mark_known(_TRAINING)
    return build_model("dbl", config, [(weights, _NAMES)], checkpoint.path)
