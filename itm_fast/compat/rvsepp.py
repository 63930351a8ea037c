"""Checkpoints of RVSE++'s official code (Li et al., "Selectively Hard Negative Mining", 2023), built on VSE-infinity's.

Inside: `read`.
"""

from __future__ import annotations

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.vse_infty import TRAINING, read_pooled
from itm_fast.models import MatchingModel

__all__ = ["read"]

# The official encoders hold the names in `model` and `img_encoder` and do the same whatever they are.
_TRAINING = (*TRAINING, "model", "img_encoder", "loss", "epsilon")


def read(checkpoint: OfficialCheckpoint, vocab_size: int, bert_heads: int | None = None) -> MatchingModel:
    """The model of an official checkpoint: state dicts of the image encoder and the text encoder.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words of the vocabulary that the model is to be used with, `<mask>` among them.
        bert_heads: as `vse_infty.read`.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit; one line names the file and the key.
    """
    return read_pooled(checkpoint, vocab_size, bert_heads, "rvsepp", _TRAINING)
