"""Convert checkpoints of CHAN's official code (Pan et al., CVPR 2023): BiGRU or BERT, hard assignment of regions.

Inside: `read`.
"""

from __future__ import annotations

from typing import Any

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.encoders import encoder_config
from itm_fast.compat.vse_infty import BERT_NAMES, PIECES, TRAINING, bert_sizes
from itm_fast.compat.weights import Names, build_model
from itm_fast.models import MatchingModel

__all__ = ["read"]

_AGGREGATIONS = {"LSEPooling": "logsumexp", "MeanPooling": "mean", "MaxPooling": "max", "SumPooling": "sum"}
# `alpha` belongs to soft assignment; `word2idx` and `wemb_type` to the initial word vectors.
_TRAINING = (
    *TRAINING, "alpha", "word2idx", "wemb_type", "text_enc_type", "obj_drop_rate", "criterion", "temperature", "seed",
)  # fmt: skip
# The GRU encoder has a linear layer that it does not use.
_GRU_NAMES: Names = {"fc.": None, "": "text_encoder."}
_IMAGE_NAMES: Names = {"feedforward.": "region_attention.", "": "image_encoder."}


def read(checkpoint: OfficialCheckpoint, vocab_size: int, bert_heads: int | None = None) -> MatchingModel:
    """Build the model of a checkpoint with state dicts of image encoder, text encoder, similarity and loss.

    The official log-sum-exp has no division by its temperature t: the converted model's scores are the official ones,
    divided by t.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words in the vocabulary of the model, with `<mask>`.
        bert_heads: as in `vse_infty.read`.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    image, text, similarity, loss = checkpoint.modules("image encoder", "text encoder", "similarity", "loss")
    options = checkpoint.options
    with_bert = PIECES in text.weights
    embedding = PIECES if with_bert else "embed.weight"
    config: dict[str, Any] = encoder_config(checkpoint, text, embedding, vocab_size, masked=not with_bert)
    for name in ("no_imgnorm", "no_txtnorm"):
        if config[name]:
            raise options.error(name, "expected false, as the similarity is a cosine here and an inner product there")
    kinds = {name: name for name in ("basic", "selfattention")}
    attends = options.choice("precomp_enc_type", "basic", kinds) == "selfattention"
    options.choice("coding_type", "VHACoding", {"VHACoding": "hard"})
    aggregation = options.choice("pooling_type", "LSEPooling", _AGGREGATIONS)
    inverse = options.get("belta", 0.1)
    if aggregation == "logsumexp":
        if not inverse > 0:
            raise options.error("belta", "expected a number above 0")
        config["logsumexp_temperature"] = 1 / inverse
    config["region_attention"], config["aggregation"] = attends, aggregation
    options.mark_known(_TRAINING)
    if with_bert:
        config |= bert_sizes(text, bert_heads)
    elif bert_heads is not None:
        raise ValueError(f"{checkpoint.path}: bert_heads: got {bert_heads}, but the text encoder is a GRU")
    parts = [(image, _IMAGE_NAMES), (text, BERT_NAMES if with_bert else _GRU_NAMES), (similarity, {}), (loss, {})]
    return build_model("chan", config, parts, checkpoint.path)
