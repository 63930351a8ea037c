"""Split captions into words like published code: `nltk.word_tokenize(caption.lower())`, without its download.

Inside: `split_sentences`, `tokenize`.

`nltk.word_tokenize` splits a text into sentences with the Punkt model, which must be downloaded, and each sentence into
words with `NLTKWordTokenizer`, which needs no data. This module uses NLTK's word tokenizer and a rule for the sentences
of lower-case text. Captions of one sentence, nearly all of Flickr30K and COCO, give the same tokens. Differences:

- An abbreviation that is not in `ABBREVIATIONS` ends a sentence if a period and a blank follow, so its period becomes a
  separate token. Punkt knows more abbreviations and some fixed pairs of words.
- Punkt may end a sentence at an abbreviation, an initial or "..." if it has learnt that the next word usually starts
  one, or if a quote, a bracket or several marks follow. This rule does not.

With the same abbreviations and no learnt words, both give the same sentences for words and single marks.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

# Lower-case, without the last period. Titles, times and places that occur in captions.
_TITLES = ("mr", "mrs", "ms", "dr", "st", "jr", "sr", "prof", "gen", "col", "sgt", "lt", "capt", "ph.d")
_PLACES = ("ave", "u.s", "u.k", "u.s.a", "d.c", "n.y", "l.a")
ABBREVIATIONS = frozenset((*_TITLES, *_PLACES, "vs", "v", "inc", "corp", "co", "ltd", "a.m", "p.m", "e.g", "i.e"))

_CLOSING = "\"')]}\u201d\u2019\u00bb"
_OPENING = "\"'([{\u201c\u2018\u00ab"
_INITIAL_OR_NUMBER = re.compile(r"[^\W\d_]|[-+]?[\d.,]*\d")

# A fast path for most captions. In text of only these characters, NLTKWordTokenizer splits at blanks, before commas and
# before the last period, unless the text has a double dash, a comma within a word, or a contraction.
_PLAIN = re.compile(r"[a-z0-9 ,-]*[a-z0-9](?: ?\.)?\s*")
_NOT_PLAIN = re.compile(r"--|,[^ ]|\b(?:cannot|gimme|gonna|gotta|lemme|wanna)\b")


def split_sentences(text: str) -> list[str]:
    """Split lower-case `text` after `.`, `?` or `!` (and closing quotes or brackets) if a blank follows.

    "...", an abbreviation in `ABBREVIATIONS`, and an initial or a number before a letter or a mark ("j. smith",
    "no. 5. it") do not end a sentence. The time is linear in the length of the text.
    """
    sentences, start = [], 0
    for match, following in itertools.pairwise(re.finditer(r"\S+", text)):
        if _ends_sentence(match.group(), text[following.start()]):
            sentences.append(text[start : match.end()].strip())
            start = following.start()
    tail = text[start:].strip()
    return [*sentences, tail] if tail else sentences


def _ends_sentence(token: str, following: str) -> bool:
    body = token.rstrip(_CLOSING)
    word = body.rstrip(".?!")
    marks = body[len(word) :]
    if not marks or marks.startswith(".."):
        return False
    if marks != "." or body != token:
        return True
    word = word.lstrip(_OPENING)
    if following.islower() or following in ";:,.!?":
        return word not in ABBREVIATIONS and not _INITIAL_OR_NUMBER.fullmatch(word)
    return word not in ABBREVIATIONS


@functools.lru_cache(maxsize=1)
def _word_tokenizer() -> Any:
    # Imported on first use: the import takes longer than importing the rest of this package.
    from nltk.tokenize.destructive import NLTKWordTokenizer

    return NLTKWordTokenizer()


def tokenize(caption: str, sentences: bool = True) -> list[str]:
    """Return the tokens of a caption in lower case.

    Args:
        caption: any text. The time is linear in its length.
        sentences: split the caption into sentences first; False treats it as one sentence.

    Source: `nltk.word_tokenize(caption.lower(), preserve_line=not sentences)`.
    """
    text = caption.lower()
    if _PLAIN.fullmatch(text) and not _NOT_PLAIN.search(text):
        words = text.replace(",", " ,").split()
        if words[-1] != "." and words[-1].endswith("."):
            words[-1:] = [words[-1][:-1], "."]
        return words
    tokenizer = _word_tokenizer()
    parts = split_sentences(text) if sentences else [text]
    return [word for part in parts for word in tokenizer.tokenize(part)]
