"""The tokenizer of a pretrained text tower, as a vocabulary of captions.

Inside: `TokenizerVocabulary`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from itm_fast.data.vocabulary import MAX_BYTES, Vocabulary, words_by_id
from itm_fast.files import documents, regular
from itm_fast.files.messages import shortened, shown

__all__ = ["TOKENIZER_FILE", "TokenizerVocabulary"]

TOKENIZER_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"


class TokenizerVocabulary(Vocabulary):
    """The tokens of a `tokenizer.json`, such as the byte pairs of a CLIP or the sentence pieces of a SigLIP.

    Captions become what the package tokenizers, which comes with transformers, makes of them, including the tokens that
    it adds at the start and at the end. They are neither cut nor padded. There is no `<mask>`, so captions cannot be
    augmented.

    Args:
        content: the parsed `tokenizer.json`.
        pad: the token that fills up captions; None: the one at their end.

    Raises:
        ValueError: the content is not that of a tokenizer, no token ends a caption, or `pad` is unknown.
    """

    kind = "tokenizer"

    def __init__(self, content: dict[str, Any], pad: str | None = None) -> None:
        self._content, self._tokenizer = content, _tokenizer(content)
        self._ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.words = words_by_id({"word2idx": self._ids})
        frame = self._tokenizer.encode("").ids
        if not frame:
            raise ValueError("tokenizer: post_processor: expected one that ends a caption with a token")
        self.start, self.end = frame[0], frame[-1]
        # A SigLIP has a token at the end only.
        self.marks = (len(frame) - 1, 1)
        if pad is not None and pad not in self._ids:
            raise ValueError(f"tokenizer: pad_token: expected a token of the vocabulary, got {shown(pad)}")
        self.pad = self.end if pad is None else self._ids[pad]
        model = content["model"]
        unknown = model.get("unk_id", self._ids.get(model.get("unk_token") or ""))
        # A CLIP has no unknown words, and names the token at the end.
        self.unk = -1 if unknown is None or unknown in (self.start, self.end, self.pad) else unknown
        self.mask = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenizerVocabulary) and (self.pad, self._content) == (other.pad, other._content)

    __hash__ = None

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> TokenizerVocabulary:
        """Read `tokenizer.json` of a model folder, and the padding token in `tokenizer_config.json`.

        Raises:
            ValueError: a file is missing or damaged. The message names it.
        """
        path, beside = Path(folder) / TOKENIZER_FILE, Path(folder) / _SETTINGS
        try:
            content = documents.read_json(path, MAX_BYTES)
        except FileNotFoundError:
            raise ValueError(
                f"{path}: no such file; expected the tokenizer of the model as the package tokenizers saves it "
                "(save_pretrained of a fast tokenizer in transformers writes it)"
            ) from None
        settings = documents.read_json(beside, MAX_BYTES) if regular.is_present(beside) else {}
        if not isinstance(settings, dict):
            raise ValueError(f"{beside}: expected a JSON object, got {shown(settings)}")
        pad = settings.get("pad_token")
        if isinstance(pad, dict):
            pad = pad.get("content")
        if pad is not None and not isinstance(pad, str):
            raise ValueError(f"{beside}: pad_token: expected a token, got {shown(pad)}")
        try:
            return cls._of_json(content, pad)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def _of_json(cls, content: Any, pad: Any) -> TokenizerVocabulary:
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ValueError("tokenizer: expected a JSON object with an object 'model'")
        if pad is not None and not isinstance(pad, str):
            raise ValueError(f"tokenizer: pad: expected a token, got {shown(pad)}")
        return cls(content, pad)

    @classmethod
    def _from_content(cls, content: Any) -> TokenizerVocabulary:
        return cls._of_json(content.get("tokenizer"), content.get("pad"))

    def with_mask(self) -> TokenizerVocabulary:
        """Return this vocabulary, as the text tower knows no further token."""
        return self

    def to_json(self) -> str:
        """Return the JSON that `Vocabulary.from_file` reads."""
        content = {"kind": self.kind, "pad": self.words[self.pad], "tokenizer": self._content}
        return json.dumps(content, ensure_ascii=False) + "\n"

    def encode(self, caption: str) -> list[int]:
        """Return the ids of the tokens of `caption`, including those at the start and at the end."""
        return list(self._tokenizer.encode(caption).ids)

    def pieces(self, caption: str) -> list[str]:
        """Return the text of each token of `caption`, and the names of tokens without one."""
        found = self._tokenizer.encode(caption)
        texts = (caption[start:end].strip() for start, end in found.offsets)
        return [text or token for text, token in zip(texts, found.tokens, strict=True)]


def _tokenizer(content: dict[str, Any]) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            "tokenizer: the package transformers is not installed; install it with pip install 'itm_fast[vision]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:
        # The package raises plain exceptions.
        reason = shortened(" ".join(str(error).split()), 300)
        raise ValueError(f"tokenizer: not one that the package tokenizers reads ({reason})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


Vocabulary.kinds[TokenizerVocabulary.kind] = TokenizerVocabulary
