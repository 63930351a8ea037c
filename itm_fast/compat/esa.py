"""Convert checkpoints of ESA's official code (Zhu et al., IEEE TCSVT 2023): region features, BiGRU or BERT.

The official code extends that of VSE-infinity.

Inside: `read`.
"""

from __future__ import annotations

from itm_fast.compat.checkpoint import OfficialCheckpoint
from itm_fast.compat.vse_infty import TRAINING, read_pooled
from itm_fast.models import MatchingModel

__all__ = ["read"]

_TRAINING = (*TRAINING, "hardnum")


def read(checkpoint: OfficialCheckpoint, vocab_size: int, bert_heads: int | None = None) -> MatchingModel:
    """Build the model of a checkpoint with state dicts of the image encoder and the text encoder.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of words in the vocabulary of the model, with `<mask>`.
        bert_heads: as in `vse_infty.read`.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    return read_pooled(checkpoint, vocab_size, bert_heads, "esa", _TRAINING, pooling=("linear1.", "linear."))
