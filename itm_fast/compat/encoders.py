"""What the official scripts of the field share: a GRU over word vectors, and options that say how wide all of it is.

Inside: `encoder_config`.
"""

from __future__ import annotations

from typing import Any

from itm_fast.compat.checkpoint import OfficialCheckpoint, StateDict

__all__ = ["encoder_config"]


def encoder_config(
    checkpoint: OfficialCheckpoint, part: StateDict, embedding: str, vocab_size: int, *, masked: bool = False
) -> dict[str, Any]:
    """The settings of both encoders by the options, but for the number of the GRU's directions.

    Args:
        checkpoint: the checkpoint.
        part: the state dict that holds the word vectors.
        embedding: their key in it.
        vocab_size: number of words of the vocabulary that the model is to be used with.
        masked: `<mask>` is among them, whether its file has it or not.

    Raises:
        ValueError: an option is of the wrong type, or the word vectors are not as many as the vocabulary's words.
    """
    options = checkpoint.options
    words = part.weights[embedding].tensor.shape[:1] if embedding in part.weights else ()
    known = f"{vocab_size} with <mask>" if masked else str(vocab_size)
    if words and words[0] != vocab_size:
        raise ValueError(
            f"{checkpoint.path}: {part.weights[embedding].key}: {words[0]} words, but the vocabulary has {known}; "
            "name the one that the model was trained with"
        )
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
