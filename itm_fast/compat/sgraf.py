"""Convert checkpoints of SGRAF's official code (Diao et al., AAAI 2021): models of SGR or SAF.

Inside: `read`.
"""

from __future__ import annotations

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.weights import build_model
from itm_fast.models import MatchingModel

__all__ = ["read"]

# Options of the official script that do not change the scores of a trained model.
_TRAINING = (
    "data_path", "data_name", "vocab_path", "model_name", "logger_name", "batch_size", "num_epochs", "lr_update",
    "learning_rate", "workers", "log_step", "val_step", "grad_clip", "margin", "max_violation",
)  # fmt: skip

_TEXT_NAMES = {"embed.": "text_encoder.embed.", "cap_rnn.": "text_encoder.rnn."}
_REGIONS = "v_global_w.embedding_local.1.weight"  # batch normalisation with one channel per region


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
    encoders = encoder_config(checkpoint, text, "embed.weight", vocab_size)
    module = options.choice("module_name", "SGR", {"SGR": "sgr", "SAF": "saf"})
    steps = options.get("sgr_step", 3)
    regions = similarity.weights[_REGIONS].tensor.shape if _REGIONS in similarity.weights else ()
    config = {
        **encoders,
        "bidirectional": options.get("bi_gru", True),
        "word_dropout": 0.4,
        "n_regions": regions[0] if len(regions) == 1 else 36,
        "module": module,
        "alignment_dim": options.get("sim_dim", 256),
        **({"graph_steps": steps} if module == "sgr" else {}),
        "temperature": 9.0,
        "negative_slope": 0.1,
    }
    options.mark_known(_TRAINING)
    names = _similarity_names(module, steps)
    parts = [(image, {"": "image_encoder."}), (text, _TEXT_NAMES), (similarity, names)]
    return build_model("sgraf", config, parts, checkpoint.path)


def _similarity_names(module: str, steps: int) -> dict[str, str]:
    names = {
        "v_global_w.embedding_local.": "region_pool.local.",
        "v_global_w.embedding_global.": "region_pool.mean.",
        "v_global_w.embedding_common.0.": "region_pool.common.",
        "t_global_w.embedding_local.": "word_pool.local.",
        "t_global_w.embedding_global.": "word_pool.mean.",
        "t_global_w.embedding_common.0.": "word_pool.common.",
        "sim_tranloc_w.": "similarity.local_alignments.alignments.0.",
        "sim_tranglo_w.": "similarity.global_alignment.",
        "sim_eval_w.": f"similarity.evaluations.{module}.",
    }
    if module == "saf":
        return {
            **names,
            "SAF_module.attn_sim_w.": "similarity.heads.saf.gate.",
            "SAF_module.bn.": "similarity.heads.saf.norm.",
        }
    for step in range(min(steps, 64)):
        for official, own in (("graph_query_w", "query"), ("graph_key_w", "key"), ("sim_graph_w", "graph")):
            names[f"SGR_module.{step}.{official}."] = f"similarity.heads.sgr.{own}.{step}."
    return names
