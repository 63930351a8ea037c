"""Convert checkpoints of RCAR's official code (Diao et al., IEEE TIP 2023): SCAN with RAR, RCR, or both.

Inside: `read`.
"""

from __future__ import annotations

from typing import Any

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.weights import Names, build_model
from itm_fast.models import MatchingModel

__all__ = ["read"]

# Options of the official script that do not change the scores of a trained model.
_TRAINING = (
    "data_path", "data_name", "vocab_path", "gpuid", "margin", "num_epochs", "batch_size", "grad_clip",
    "learning_rate", "lr_update", "workers", "log_step", "logger_name", "model_name", "resume",
    "vse_mean_warmup_epochs", "reset_start_epoch", "max_violation",
)  # fmt: skip

# Our regulator for each value of `self_regulator`, and the option with its number of steps.
_REGULATORS = {
    "only_rar": ("rar", "rar_step"),
    "only_rcr": ("rcr", "rcr_step"),
    "coop_rcar": ("rcar", "rcar_step"),
}
_STEPS = ("rar_step", "rcr_step", "rcar_step")
_ENCODER_NAMES: Names = {
    "img_enc.fc.": "image_encoder.fc.",
    "img_enc.mlp.layers.0.": "image_encoder.mlp.0.",
    "img_enc.mlp.bns.0.": "image_encoder.mlp.1.",
    "img_enc.mlp.layers.1.": "image_encoder.mlp.3.",
    "img_enc.mlp.bns.1.": None,  # not used: the last layer has no normalisation
    "txt_enc.": "text_encoder.",
}


def read(checkpoint: OfficialCheckpoint, vocab_size: int) -> MatchingModel:
    """Build the model of a checkpoint with one state dict of encoders and similarity.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words in the vocabulary of the model, with `<mask>`.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    (weights,) = checkpoint.modules("the whole model")
    options = checkpoint.options
    encoders = encoder_config(checkpoint, weights, "txt_enc.embed.weight", vocab_size, masked=True)
    direction = options.choice("attn_type", "t2i", {"t2i": "t2i", "i2t": "i2t"})
    temperatures = {"t2i": options.get("t2i_smooth", 10.0), "i2t": options.get("i2t_smooth", 3.0)}
    official = options.choice("self_regulator", "coop_rcar", {name: name for name in _REGULATORS})
    regulator, counted = _REGULATORS[official]
    steps = {name: options.get(name, 0) for name in _STEPS}[counted]
    # RCR with zero steps is SCAN, the baseline of the paper. RAR and RCAR need at least one step for their score.
    least = 0 if regulator == "rcr" else 1
    if not least <= steps <= 64:
        raise options.error(counted, f"expected a whole number from {least} to 64 with {official}, got {steps}")
    config: dict[str, Any] = {
        **encoders,
        "bidirectional": options.get("use_bi_gru", True),
        "word_dropout": 0.4,
        "image_encoder": "residual",
        "direction": direction,
        f"{direction}_temperature": temperatures[direction],
    }
    width = options.get("sim_dim", 256)
    if steps:
        config.update(regulator=regulator, steps=steps, alignment_dim=width)
    options.mark_known(_TRAINING)
    similarity = {"t2i": "text_to_image", "i2t": "image_to_text"}[direction]
    names = {**_ENCODER_NAMES, **_similarity_names(similarity, steps, scored=regulator != "rcr")}
    return build_model("scan", config, [(weights, names)], checkpoint.path)


def _similarity_names(similarity: str, steps: int, *, scored: bool) -> Names:
    """Return the names of the regulators' weights. RCR scores by cosine and does not use the official score layer."""
    names: dict[str, str | None] = {"sim_enc.sim_eval_w.": f"{similarity}.score." if scored else None}
    for step in range(steps):
        official, own = f"sim_enc.rar_modules.{step}", f"{similarity}.aggregation"
        names[f"sim_enc.alv_modules.{step}.sim_transform_w."] = f"{similarity}.alignments.{step}."
        names[f"sim_enc.rcr_modules.{step}.rcr_matrix_w."] = f"{similarity}.correspondence.channels.{step}."
        names[f"sim_enc.rcr_modules.{step}.rcr_smooth_w."] = f"{similarity}.correspondence.temperature.{step}."
        names[f"{official}.rar_q_w.0."] = f"{own}.guidance.{step}."
        names[f"{official}.rar_k_w.0."] = f"{own}.local.{step}."
        names[f"{official}.rar_v_w.0."] = f"{own}.weight.{step}."
    return names
