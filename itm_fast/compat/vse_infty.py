"""Convert checkpoints of VSE-infinity's official code (Chen et al., CVPR 2021): region features, BiGRU or BERT.

Inside: `read`; `TRAINING` and `read_pooled`, which `rvsepp` also uses; `bert_sizes`, which `oscar` also uses;
`BERT_NAMES` and `PIECES`, which `chan` also uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from itm_fast.compat.checkpoint import OfficialCheckpoint, StateDict
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.weights import Names, build_model
from itm_fast.models import MatchingModel

__all__ = ["BERT_NAMES", "PIECES", "TRAINING", "bert_sizes", "read", "read_pooled"]

# Options of the official script that do not change the scores of a trained model.
TRAINING = (
    "data_path", "data_name", "vocab_path", "margin", "num_epochs", "batch_size", "grad_clip", "learning_rate",
    "lr_update", "optim", "workers", "log_step", "val_step", "logger_name", "model_name", "resume", "max_violation",
    "vse_mean_warmup_epochs", "reset_start_epoch", "drop", "backbone_path", "backbone_source",
    "backbone_warmup_epochs", "embedding_warmup_epochs", "backbone_lr_factor", "input_scale_factor",
)  # fmt: skip

_IMAGE_NAMES: Names = {
    "fc.": "image_encoder.fc.",
    "mlp.layers.0.": "image_encoder.mlp.0.",
    "mlp.bns.0.": "image_encoder.mlp.1.",
    "mlp.layers.1.": "image_encoder.mlp.3.",
    "mlp.bns.1.": None,  # not used: the last layer has no normalisation
}
_GRU_NAMES: Names = {"embed.": "text_encoder.embed.", "rnn.": "text_encoder.rnn."}
BERT_NAMES: Names = {
    "bert.pooler.": None,
    "bert.embeddings.position_ids": None,
    "bert.": "text_encoder.bert.",
    "linear.": "text_encoder.fc.",
}
PIECES = "bert.embeddings.word_embeddings.weight"


def read(checkpoint: OfficialCheckpoint, vocab_size: int, bert_heads: int | None = None) -> MatchingModel:
    """Build the model of a checkpoint with state dicts of the image encoder and the text encoder.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words in the vocabulary of the model, with `<mask>`.
        bert_heads: number of BERT's attention heads, which a checkpoint does not contain. None: one per 64 channels, as
            in all published BERT models.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    return read_pooled(checkpoint, vocab_size, bert_heads, "vse_infty", TRAINING)


def read_pooled(
    checkpoint: OfficialCheckpoint,
    vocab_size: int,
    bert_heads: int | None,
    model: str,
    training: Iterable[str],
    pooling: tuple[str, str] = ("gpool.", ""),
) -> MatchingModel:
    """Build a model like `read`.

    Args:
        checkpoint: as in `read`.
        vocab_size: as in `read`.
        bert_heads: as in `read`.
        model: name of our model.
        training: options that do not change the scores of a trained model.
        pooling: prefixes of the weights of the pooling in the official model, and in ours.
    """
    image, text = checkpoint.modules("image encoder", "text encoder")
    options = checkpoint.options
    with_bert = PIECES in text.weights
    config = encoder_config(checkpoint, text, PIECES if with_bert else "embed.weight", vocab_size, masked=not with_bert)
    # "backbone" is not supported: its features are from a convolutional network that was trained with the model.
    options.choice("precomp_enc_type", "basic", {"basic": "basic"})
    options.mark_known(training)
    if with_bert:
        config.update(bert_sizes(text, bert_heads))
    elif bert_heads is not None:
        raise ValueError(f"{checkpoint.path}: bert_heads: got {bert_heads}, but the text encoder is a GRU")
    official, own = pooling
    of_text = BERT_NAMES if with_bert else _GRU_NAMES
    parts: list[tuple[StateDict, Names]] = [
        (image, {**_IMAGE_NAMES, official: f"image_pool.{own}"}),
        (text, {**of_text, official: f"text_pool.{own}"}),
    ]
    return build_model(model, config, parts, checkpoint.path)


def bert_sizes(part: StateDict, heads: int | None) -> dict[str, Any]:
    """Return the settings of BERT from the shapes of its weights, which do not depend on the number of heads.

    A missing weight counts as size 1 here; `build_model` reports it.
    """

    def size(name: str, dim: int) -> int:
        shape = part.weights[f"bert.{name}"].tensor.shape if f"bert.{name}" in part.weights else ()
        return shape[dim] if len(shape) == 2 else 1

    layers = [re.match(r"bert\.encoder\.layer\.(\d{1,3})\.", name) for name in part.weights]
    dim = size("embeddings.word_embeddings.weight", 1)
    return {
        "text_encoder": "bert",
        "bert_dim": dim,
        "bert_heads": max(dim // 64, 1) if heads is None else heads,
        "bert_layers": max((int(match[1]) + 1 for match in layers if match), default=1),
        "bert_hidden_dim": size("encoder.layer.0.intermediate.dense.weight", 0),
        "bert_max_length": size("embeddings.position_embeddings.weight", 0),
    }
