"""Check and encode queries: texts, pictures, features, or items of the index.

Inside: `Queries`, `of_any`, `of_texts`, `of_features`, `unknown_words`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from itm_fast.data import tokenize
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.search.encoders import moved
from itm_fast.search.members import Encodings, Members
from itm_fast.search.pictures import Picture, features_of
from itm_fast.search.snapshot import Snapshot

__all__ = [
    "MAX_CHARACTERS",
    "Queries",
    "check_characters",
    "check_text",
    "of_any",
    "of_features",
    "of_texts",
    "unknown_words",
]

MAX_CHARACTERS = 2000


@attrs.frozen(eq=False)
class Queries:
    """Encoded queries of one side, and the position of each that is an item of the index (else -1)."""

    names: list[str]
    side: str
    encodings: Encodings
    positions: list[int]

    def __len__(self) -> int:
        return len(self.names)

    def one(self, number: int) -> Encodings:
        """Return the embeddings of one query."""
        return [_row(one, number) for one in self.encodings]


def _row(embeddings: Any, number: int) -> Any:
    if isinstance(embeddings, Tensor):
        return embeddings[number : number + 1]
    return Fragments.from_list([embeddings[number]])


def check_characters(text: object) -> str:
    """Return a query.

    Raises:
        TypeError: the query is no text.
        ValueError: the query has too many characters, or lone surrogates, which stand for bytes that are not UTF-8.
    """
    if not isinstance(text, str):
        raise TypeError(f"query: expected a text, got {shown(text)}")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"query: expected at most {MAX_CHARACTERS:,} characters, got {len(text):,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"query: expected valid UTF-8, got {shown(text)}") from None
    return text


def check_text(members: Members, text: object) -> str:
    """Return a query with single blanks.

    Raises:
        TypeError: the query is no text.
        ValueError: as `check_characters`; or the query is empty or has more tokens than a model reads, or a model knows
            none of its words.
    """
    text = " ".join(check_characters(text).split())
    if not tokenize(text):
        raise ValueError("query: expected words, got an empty text")
    for model in members.models:
        vocabulary = model.tokenizer
        if vocabulary is None:
            continue
        unknown = {vocabulary.start, vocabulary.end, vocabulary.pad, vocabulary.unk}
        tokens = vocabulary.encode(text)
        if set(tokens) <= unknown:
            raise ValueError(f"query: the model knows none of the words of {shown(text)}")
        longest = model.max_caption_length
        if longest is not None and len(tokens) > longest:
            raise ValueError(f"query: the model reads at most {longest} tokens, got {len(tokens)}: {shown(text)}")
    return text


def unknown_words(members: Members, text: str) -> tuple[str, ...]:
    """Return the words of a checked query that the first model does not know, each once."""
    vocabulary = members.main.tokenizer
    return () if vocabulary is None else tuple(dict.fromkeys(vocabulary.unknown(text)))


def _check_some(queries: Sized) -> None:
    if not len(queries):
        raise ValueError("query: expected at least one")


def of_texts(members: Members, texts: str | Sequence[str]) -> Queries:
    """Encode texts. Raises as `check_text`, and ValueError if there is no text."""
    other: object = texts
    if isinstance(other, bytes) or not isinstance(other, Iterable):
        raise TypeError(f"query: expected a text, or several, got {shown(other)}; pass a picture as pictures=")
    given = [texts] if isinstance(texts, str) else list(texts)
    checked = [check_text(members, text) for text in given]
    _check_some(checked)
    return Queries(checked, "captions", members.encode_captions(checked), [-1] * len(checked))


def of_features(members: Members, features: Tensor | Fragments, names: Sequence[str]) -> Queries:
    """Encode features (n, k, f) or Fragments as images.

    Raises:
        ValueError: there are none, or a value is not finite.
    """
    values = features.values if isinstance(features, Fragments) else features
    _check_some(features)
    if not bool(values.isfinite().all()):
        raise ValueError("features: expected finite values")
    return Queries(list(names), "images", members.encode_images(features), [-1] * len(names))


def of_any(
    members: Members,
    snapshot: Snapshot,
    texts: str | Sequence[str] | None,
    pictures: Picture | Sequence[Picture] | None,
    features: Tensor | np.ndarray | Fragments | None,
    items: str | Sequence[str] | None,
    encoder: str | os.PathLike[str] | None = None,
) -> Queries:
    """Encode the one kind of query that was passed. Arguments and errors as in `Index.search`."""
    if sum(one is not None for one in (texts, pictures, features, items)) != 1:
        raise ValueError("query: expected one of texts, pictures, features and items")
    if texts is not None:
        return of_texts(members, texts)
    if pictures is not None:
        kind = snapshot.manifest.pictures
        chosen = _listed(pictures)
        _check_some(chosen)
        rows = features_of(chosen, kind if encoder is None else moved(kind, encoder), members.device)
        return of_features(members, rows, [_name_of(one) for one in chosen])
    if items is not None:
        own = snapshot.sides["images"]
        several = isinstance(items, Iterable) and not isinstance(items, str | bytes)
        names: list[Any] = list(items) if several else [items]
        _check_some(names)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"items: expected the id of an image, or several, got {shown(name)}")
        positions = [own.find(name) for name in names]
        parts = [own.encodings(torch.tensor([position])) for position in positions]
        return Queries(names, "images", _joined(parts), positions)
    # torch warns of arrays that cannot be written, such as memory-mapped files.
    writable = np.require(features, requirements="W") if isinstance(features, np.ndarray) else features
    found = torch.from_numpy(writable) if isinstance(writable, np.ndarray) else writable
    assert found is not None
    return of_features(members, found, [f"features {number}" for number in range(len(found))])


def _listed(pictures: Any) -> list[Picture]:
    """Return one or several pictures as a list. What is neither is taken for one, which `features_of` refuses."""
    several = isinstance(pictures, Iterable) and not isinstance(pictures, str | bytes)
    if isinstance(pictures, np.ndarray):
        # Pixels of several pictures, or paths.
        several = pictures.ndim == 4 or pictures.dtype.kind in "OU"
    return list(pictures) if several else [pictures]


def _name_of(picture: Picture) -> str:
    return str(picture) if isinstance(picture, str | os.PathLike) else "picture"


def _joined(parts: Sequence[Encodings]) -> Encodings:
    """Concatenate embeddings of several queries."""
    return [
        Fragments.cat(column) if isinstance(column[0], Fragments) else torch.cat(column)
        for column in zip(*parts, strict=True)
    ]
