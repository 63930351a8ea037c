"""Words of a caption as the published code bases see them: `nltk.word_tokenize(caption.lower())` without its download.

Inside: `split_sentences`, `tokenize`.

`nltk.word_tokenize` cuts a text into sentences with the Punkt model, which has to be downloaded, and each sentence
into words with `NLTKWordTokenizer`, which needs no data. Here the second part is NLTK's own and the first is a rule
for lower-case text. Captions of one sentence, nearly all of Flickr30K and COCO, come out the same. What differs:

- an abbreviation that is not in `ABBREVIATIONS` ends a sentence when a period and a blank follow it, so its period
  becomes a token of its own; Punkt knows more abbreviations and some fixed pairs of words;
- Punkt may end a sentence at an abbreviation, an initial or "..." where it has learnt that the next word usually starts
  one, or where a quote, a bracket or a cluster of marks follows; here none of them ends a sentence then.

With the same abbreviations and nothing learnt, on words and single marks, the two agree.
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

# In text of these characters alone NLTKWordTokenizer splits at blanks, before commas and before the last period, unless
# a double dash, a comma within a word or one of its contractions occurs. Most captions are so: a fraction of the cost.
_PLAIN = re.compile(r"[a-z0-9 ,-]*[a-z0-9](?: ?\.)?\s*")
_NOT_PLAIN = re.compile(r"--|,[^ ]|\b(?:cannot|gimme|gonna|gotta|lemme|wanna)\b")


def split_sentences(text: str) -> list[str]:
    """Cuts lower-case `text` after `.`, `?` or `!` (and closing quotes or brackets) where a blank follows.

    No cut after "...", after an abbreviation of `ABBREVIATIONS`, or after an initial or a number before a letter or a
    mark ("j. smith", "no. 5. it").
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
    # Imported on first use: it takes longer than the rest of this package together.
    from nltk.tokenize.destructive import NLTKWordTokenizer

    return NLTKWordTokenizer()


def tokenize(caption: str, sentences: bool = True) -> list[str]:
    """Lower-cases `caption` and returns its tokens; `sentences=False` leaves the sentence rule out.

    Source: `nltk.word_tokenize(caption.lower())`, or with `preserve_line=True` for `sentences=False`.
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
