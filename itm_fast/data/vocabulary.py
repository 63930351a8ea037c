"""Vocabularies: read the published JSON, or build one from training captions.

Inside: `Vocabulary`, `find_vocabulary`, `load_vocabulary`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from itm_fast.data import layout
from itm_fast.data.tokenization import tokenize
from itm_fast.files import atomic, documents, regular
from itm_fast.files.messages import shown

# The largest published vocabulary has 0.4 MB.
MAX_BYTES = 64 * 2**20

# The default minimum of occurrences of a word in a vocabulary that is built.
MIN_COUNT = 4
# Largest share of unknown words without a warning: in the captions that a vocabulary was built from, and in others.
MAX_RARE_SHARE, MAX_UNKNOWN_SHARE = 0.05, 0.5

_UNKNOWN = " (unknown)"
PAD, START, END, UNK, MASK = "<pad>", "<start>", "<end>", "<unk>", "<mask>"


class Vocabulary:
    """A one-to-one map from words to the ids 0 to len - 1.

    Attributes:
        words: list of str, by id.
        pad, start, end, unk: ids.
        mask: id; None if the vocabulary has no `<mask>`, like those published with SCAN.
    """

    special: ClassVar[tuple[str, ...]] = (PAD, START, END, UNK)
    mask_word: ClassVar[str] = MASK
    kinds: ClassVar[dict[str, type[Vocabulary]]] = {}  # Classes for other kinds of JSON, by `kind`.
    saveable: ClassVar[bool] = True  # as a file; otherwise another package keeps it.
    marks: tuple[int, int] = (1, 1)  # Tokens that are added before and after the words of a caption.

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(words)
        try:
            documents.check_characters("\n".join(self.words))
        except ValueError as error:
            raise ValueError(f"vocabulary: {error}") from None
        self._ids = {word: index for index, word in enumerate(self.words)}
        if len(self._ids) != len(self.words):
            repeated = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ValueError(f"vocabulary: the word {shown(repeated)} occurs more than once")
        missing = [word for word in self.special if word not in self._ids]
        if missing:
            raise ValueError(f"vocabulary: expected the words {' '.join(self.special)}, found no {' '.join(missing)}")
        self.pad, self.start, self.end, self.unk = (self._ids[word] for word in self.special)
        self.mask: int | None = self._ids.get(self.mask_word)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self._ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and type(self) is type(other) and self.words == other.words

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} words)"

    @classmethod
    def build(cls, captions: Iterable[str], min_count: int = MIN_COUNT) -> Vocabulary:
        """Build a vocabulary of the words that occur at least `min_count` times, the most frequent first.

        Only use captions of the training split: words of other splits must become `<unk>`.
        """
        if min_count < 1:
            raise ValueError(f"min_count: expected at least 1, got {min_count}")
        counts = Counter(word for caption in captions for word in tokenize(caption))
        frequent = [word for word, count in counts.items() if count >= min_count]
        words = sorted(frequent, key=lambda word: (-counts[word], word))
        return cls([PAD, START, END, UNK, MASK, *words])

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read the published JSON: `word2idx`, and `idx2word` and `idx` if present.

        A `.txt` file, the `tokenizer.json` of a BERT model, or JSON of the kind "bert" gives a `BertVocabulary`; JSON
        of the kind "tokenizer" gives a `TokenizerVocabulary`.

        Raises:
            ValueError: the file is not such JSON, its ids are not 0 to n - 1, its parts disagree, or one of `<pad>`,
                `<start>`, `<end>` and `<unk>` is missing. The message names the file.
            FileNotFoundError: the file does not exist.
        """
        if Path(path).suffix == ".txt":
            return cls.kinds["bert"].from_text(path)
        content = documents.read_json(path, MAX_BYTES, "a vocabulary as UTF-8 JSON")
        try:
            if isinstance(content, dict) and "word2idx" not in content and "model" in content:
                return cls.kinds["bert"]._from_tokenizer(content)
            kind = content.get("kind") if isinstance(content, dict) else None
            if kind is None:
                return cls(words_by_id(content))
            if not isinstance(kind, str) or kind not in cls.kinds:
                raise ValueError(f"vocabulary: expected the kind {' or '.join(cls.kinds)}, got {shown(kind)}")
            return cls.kinds[kind]._from_content(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_text(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a list of word pieces; raise ValueError, as only a `BertVocabulary` can be read from one."""
        raise ValueError(f"{path}: expected a vocabulary as UTF-8 JSON")

    @classmethod
    def _from_tokenizer(cls, content: dict[str, Any]) -> Vocabulary:
        """Read `tokenizer.json`; raise ValueError, as only a `BertVocabulary` can be read from it."""
        raise ValueError("vocabulary: expected a JSON object with an object 'word2idx'")

    @classmethod
    def _from_content(cls, content: Any) -> Vocabulary:
        return cls(words_by_id(content))

    @property
    def continuations(self) -> list[int]:
        """The ids of pieces that continue the previous word; none, as every id is a whole word."""
        return []

    @property
    def inner(self) -> slice:
        """Return the place of the words among the tokens of a caption."""
        before, after = self.marks
        return slice(before, -after or None)

    def with_mask(self) -> Vocabulary:
        """Return this vocabulary, with `<mask>` appended if it has none. Other ids do not change."""
        return self if self.mask is not None else Vocabulary([*self.words, self.mask_word])

    def to_json(self) -> str:
        """Return the published JSON."""
        content = {"word2idx": self._ids, "idx2word": dict(enumerate(self.words)), "idx": len(self.words)}
        return json.dumps(content, ensure_ascii=False, indent=0) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the published JSON atomically."""
        atomic.write_text(path, self.to_json())

    def encode(self, caption: str) -> list[int]:
        """Return the ids of `<start>`, the words of `caption` (unknown words as `<unk>`), and `<end>`."""
        return [self.start, *(self._ids.get(word, self.unk) for word in tokenize(caption)), self.end]

    def pieces(self, caption: str) -> list[str]:
        """Return what each token of `encode(caption)` stands for; words outside the vocabulary end in " (unknown)"."""
        words = (word if word in self else word + _UNKNOWN for word in tokenize(caption))
        return [START, *words, END]

    def unknown(self, caption: str) -> list[str]:
        """Return what each `unk` in `encode(caption)` stands for."""
        tokens = zip(self.encode(caption), self.pieces(caption), strict=True)
        return [piece.removesuffix(_UNKNOWN) for token, piece in tokens if token == self.unk]

    def decode(self, token_ids: Iterable[int]) -> list[str]:
        """Return the words of `token_ids`, without `<pad>`, `<start>` and `<end>`."""
        dropped = {self.pad, self.start, self.end}
        return [self.words[index] for index in map(int, token_ids) if index not in dropped]


def words_by_id(content: Any, name: str = "word2idx") -> list[str]:
    """Return the words of a vocabulary's JSON, by id.

    Args:
        content: the JSON.
        name: the object of ids, for messages.

    Raises:
        ValueError: the ids are not 0 to n - 1, or the parts disagree.
    """
    if not isinstance(content, dict) or not isinstance(content.get("word2idx"), dict):
        raise ValueError(f"vocabulary: expected a JSON object with an object '{name}'")
    ids: dict[str, Any] = content["word2idx"]
    for word, index in ids.items():
        if type(index) is not int:
            raise ValueError(f"vocabulary: expected an integer id for the word {shown(word)}, got {shown(index)}")
    by_id = {index: word for word, index in ids.items()}
    for expected in range(len(ids)):
        if expected not in by_id:
            raise ValueError(f"vocabulary: expected the ids 0 to {len(ids) - 1}, no word has id {expected}")
    words = [by_id[index] for index in range(len(ids))]
    if content.get("idx", len(words)) != len(words):
        raise ValueError(f"vocabulary: 'idx' is {shown(content['idx'])}, but 'word2idx' has {len(words)} words")
    back = content.get("idx2word")
    if back is not None and back != {str(index): word for index, word in enumerate(words)}:
        raise ValueError("vocabulary: 'idx2word' is not the inverse of 'word2idx'")
    return words


def find_vocabulary(directory: str | os.PathLike[str]) -> Path | None:
    """Return the vocabulary file of a data directory, or None.

    This is `vocab.json` in the directory, or else `vocab/f30k_precomp_vocab.json` in one of the three folders above
    `data/f30k_precomp` or `data/f30k/precomp`, as in published data.

    Raises:
        ValueError: one of these names exists but is not a readable file.
    """
    directory = Path(directory)
    own = directory / "vocab.json"
    if regular.is_present(own):
        return own
    # A link to the data may lie beside the vocabulary, which its target does not.
    for place in (Path(os.path.normpath(directory.absolute())), directory.resolve()):
        names = [place.name, f"{place.parent.name}_{place.name}"]
        for folder in list(place.parents)[:3]:
            for name in names:
                candidate = folder / "vocab" / f"{name}_vocab.json"
                if regular.is_present(candidate):
                    return candidate
    return None


def check_min_count(min_count: int, path: Path | None) -> None:
    """Raise ValueError if a given minimum of occurrences has no effect, because `path` contains a vocabulary."""
    if path is not None:
        raise ValueError(
            f"min_count: {min_count} is for a vocabulary that is built from the training captions, but {path} contains "
            "one already"
        )


def load_vocabulary(
    directory: str | os.PathLike[str],
    vocabulary_file: str | os.PathLike[str] | None = None,
    *,
    min_count: int = MIN_COUNT,
) -> Vocabulary:
    """Read `vocabulary_file`, or else the file that `find_vocabulary` finds, or else build one from `train_caps.txt`.

    Raises:
        ValueError: no vocabulary and no training captions are found, or a file is damaged.
    """
    path = Path(vocabulary_file) if vocabulary_file is not None else find_vocabulary(directory)
    if path is not None:
        if not regular.is_file(path):
            raise ValueError(f"{path}: no such vocabulary file")
        return Vocabulary.from_file(path)
    captions = Path(directory) / "train_caps.txt"
    if not regular.is_present(captions):
        raise ValueError(
            f"{directory}: found no vocabulary (vocab.json, or ../vocab/{Path(directory).resolve().name}_vocab.json) "
            "and no train_caps.txt to build one from; name one with --vocab FILE"
        )
    return Vocabulary.build(layout.read_captions(captions), min_count)
