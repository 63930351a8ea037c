"""Encoder settings that the official scripts share: a GRU over word vectors, and options for sizes.

Inside: `encoder_config`, `check_words`.
"""

from __future__ import annotations

from typing import Any

from itm_fast.compat.checkpoint import OfficialCheckpoint, StateDict

__all__ = ["check_words", "encoder_config"]


def check_words(
    checkpoint: OfficialCheckpoint, part: StateDict, embedding: str, vocab_size: int, *, masked: bool = False
) -> None:
    """Raise ValueError if there are more or fewer word vectors than words. Arguments as in `encoder_config`."""
    words = part.weights[embedding].tensor.shape[:1] if embedding in part.weights else ()
    known = f"{vocab_size} with <mask>" if masked else str(vocab_size)
    if words and words[0] != vocab_size:
        raise ValueError(
            f"{checkpoint.path}: {part.weights[embedding].key}: {words[0]} words, but the vocabulary has {known}; "
            "pass the vocabulary that the model was trained with"
        )


def encoder_config(
    checkpoint: OfficialCheckpoint, part: StateDict, embedding: str, vocab_size: int, *, masked: bool = False
) -> dict[str, Any]:
    """Return the settings of both encoders from the options, except the number of GRU directions.

    Args:
        checkpoint: the checkpoint.
        part: the state dict with the word vectors.
        embedding: key of the word vectors in `part`.
        vocab_size: number of words in the vocabulary of the model.
        masked: the official code added `<mask>` to the vocabulary; `vocab_size` includes it.

    Raises:
        ValueError: an option has the wrong type, or there are more or fewer word vectors than words.
    """
    options = checkpoint.options
    check_words(checkpoint, part, embedding, vocab_size, masked=masked)
    if options.get("vocab_size", vocab_size) != vocab_size:
        raise options.error(
            "vocab_size", f"expected {vocab_size} as in the vocabulary{' with <mask>' if masked else ''}"
        )
    return {
        "vocab_size": vocab_size,
        "feature_dim": options.get("img_dim", 2048),
        "embed_dim": options.get("embed_size", 1024),
        "word_dim": options.get("word_dim", 300),
        "num_layers": options.get("num_layers", 1),
        "no_imgnorm": options.get("no_imgnorm", False),
        "no_txtnorm": options.get("no_txtnorm", False),
    }
