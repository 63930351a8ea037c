"""The WordPiece vocabulary of a BERT model, as a vocabulary of captions.

Inside: `BertVocabulary`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from itm_fast.data.vocabulary import MAX_BYTES, Vocabulary, words_by_id
from itm_fast.files import documents, regular
from itm_fast.files.messages import shown

_CONTINUATION = "##"
# Values in the `tokenizer.json` of every BERT model, which this package implements.
_FIXED = (
    ("model", "type", "WordPiece"),
    ("model", "unk_token", "[UNK]"),
    ("model", "continuing_subword_prefix", _CONTINUATION),
    ("model", "max_input_chars_per_word", 100),
    ("normalizer", "type", "BertNormalizer"),
    ("normalizer", "clean_text", True),
    ("normalizer", "handle_chinese_chars", True),
    ("pre_tokenizer", "type", "BertPreTokenizer"),
)


class BertVocabulary(Vocabulary):
    """Word pieces and their ids. A piece that starts with `##` continues the previous piece.

    Captions become `[CLS]`, pieces, `[SEP]`. Splitting them needs the package tokenizers, which comes with
    transformers. Source: Devlin et al., "BERT" (NAACL 2019).

    Args:
        words: the pieces by id, including `[PAD]`, `[CLS]`, `[SEP]`, `[UNK]` and `[MASK]`.
        lowercase: lower-case captions and remove accents first, as for BERT's uncased models.

    Raises:
        ValueError: a piece is missing or occurs twice.
    """

    kind = "bert"
    special = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
    mask_word = "[MASK]"

    def __init__(self, words: Iterable[str], *, lowercase: bool = True) -> None:
        super().__init__(words)
        if self.mask is None:
            raise ValueError("vocabulary: expected the piece [MASK], found none")
        self.lowercase = lowercase

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and isinstance(other, BertVocabulary) and self.lowercase == other.lowercase

    __hash__ = None

    @classmethod
    def from_text(cls, path: str | os.PathLike[str]) -> BertVocabulary:
        """Read a BERT model's `vocab.txt` (one piece per line) and its `tokenizer_config.json` (`do_lower_case`).

        Raises:
            ValueError: a file is damaged or is not part of a BERT model. The message names it.
            FileNotFoundError: `vocab.txt` does not exist.
        """
        beside = Path(path).with_name("tokenizer_config.json")
        settings = documents.read_json(beside, MAX_BYTES) if regular.is_present(beside) else {}
        lowercase = settings.get("do_lower_case", True) if isinstance(settings, dict) else None
        if not isinstance(lowercase, bool):
            raise ValueError(f"{beside}: expected a JSON object whose do_lower_case is true or false")
        for name, known in (("strip_accents", (None, lowercase)), ("tokenize_chinese_chars", (None, True))):
            if settings.get(name) not in known:
                raise ValueError(f"{beside}: {name}: expected {shown(known[1])}, got {shown(settings[name])}")
        lines = documents.read_text(path, MAX_BYTES, "utf-8-sig").replace("\r\n", "\n").split("\n")
        try:
            return cls(lines[:-1] if lines[-1] == "" else lines, lowercase=lowercase)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def _from_content(cls, content: Any) -> BertVocabulary:
        words = words_by_id(content)
        lowercase = content.get("lowercase")
        if not isinstance(lowercase, bool):
            raise ValueError("vocabulary: expected lowercase to be true or false")
        return cls(words, lowercase=lowercase)

    @classmethod
    def _from_tokenizer(cls, content: dict[str, Any]) -> BertVocabulary:
        """Read the content of `tokenizer.json`, which transformers 5 writes instead of `vocab.txt`."""
        for part, name, expected in _FIXED:
            section = content.get(part)
            if not isinstance(section, dict) or section.get(name) != expected:
                found = shown(section.get(name)) if isinstance(section, dict) else shown(section)
                raise ValueError(f"tokenizer: {part}.{name}: expected {shown(expected)} as BERT has it, got {found}")
        model, normalizer = content["model"], content["normalizer"]
        lowercase = normalizer.get("lowercase")
        if not isinstance(lowercase, bool):
            raise ValueError(f"tokenizer: normalizer.lowercase: expected true or false, got {shown(lowercase)}")
        if normalizer.get("strip_accents") not in (None, lowercase):
            found = shown(normalizer["strip_accents"])
            raise ValueError(f"tokenizer: normalizer.strip_accents: expected {lowercase} as lowercase, got {found}")
        vocabulary = cls(words_by_id({"word2idx": model.get("vocab")}, "model.vocab"), lowercase=lowercase)
        added = content.get("added_tokens", [])
        if not isinstance(added, list):
            raise ValueError(f"tokenizer: added_tokens: expected a list, got {shown(added)}")
        for token in added:
            piece = token.get("content") if isinstance(token, dict) else token
            if not isinstance(piece, str) or piece not in vocabulary:
                raise ValueError(f"tokenizer: added_tokens: expected only pieces of model.vocab, got {shown(piece)}")
        return vocabulary

    @property
    def continuations(self) -> list[int]:
        """The ids of pieces that continue the previous piece."""
        return [index for index, word in enumerate(self.words) if word.startswith(_CONTINUATION)]

    def to_json(self) -> str:
        """Return the JSON that `Vocabulary.from_file` reads."""
        content = {"kind": self.kind, "lowercase": self.lowercase, "word2idx": self._ids, "idx": len(self.words)}
        return json.dumps(content, ensure_ascii=False, indent=0) + "\n"

    def encode(self, caption: str) -> list[int]:
        """Return the ids of `[CLS]`, the pieces of `caption` (`[UNK]` for unknown words), and `[SEP]`."""
        return list(self._tokenizer.encode(caption).ids)

    def pieces(self, caption: str) -> list[str]:
        """Return the pieces of `encode(caption)`."""
        return [self.words[index] for index in self.encode(caption)]

    def unknown(self, caption: str) -> list[str]:
        """Return the word that each `[UNK]` in `encode(caption)` stands for."""
        found = self._tokenizer.encode(caption)
        places = (place for token, place in zip(found.ids, found.offsets, strict=True) if token == self.unk)
        return [caption[start:end] for start, end in places]

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import BertWordPieceTokenizer
        except ImportError:
            raise ValueError(
                "bert: the package transformers is not installed; install it with pip install 'itm_fast[bert]'"
            ) from None
        return BertWordPieceTokenizer(vocab=self._ids, lowercase=self.lowercase)


Vocabulary.kinds[BertVocabulary.kind] = BertVocabulary
