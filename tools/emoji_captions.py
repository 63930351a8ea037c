"""Make five captions from an emoji's English name and keywords. Used by `render_emoji.py`.

Inside: `captions`, `name_words`, `ranked`.

A name of Unicode CLDR has a base and, after a colon, modifiers: "man cook: dark skin tone". The captions are

1. the name as a phrase: "man cook with dark skin tone";
2. the phrase, then the keywords that bring new words: "man cook with dark skin tone chef";
3. such keywords, then the phrase: "chef man cook with dark skin tone";
4. the modifiers first, the base, at most two such keywords: "dark skin tone man cook chef";
5. all keywords, then what the name has beyond them: "chef cook man dark skin tone".

So every caption holds every word of the name. The order of keywords differs from caption to caption. If a caption
would repeat an earlier one of the same picture, or is also a caption of another picture ("video camera" from the
keywords of the camera), the phrase gets a frame instead: "picture of elephant". All choices are ranks of SHA-256 hashes
of the picture's id, so they do not depend on a random number generator.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable

# A right quotation mark, an en dash, a minus sign, an ampersand.
_ASCII = {0x2019: "'", 0x2013: "-", 0x2212: "-", ord("&"): " and "}

FRAMES = ("picture of {}", "emoji of {}", "small picture of {}", "drawing of {}", "{} emoji", "{} picture")


def ranked(items: Iterable[str], *seed: object) -> list[str]:
    """Return the items in a pseudo-random order that depends only on the items and `seed`."""

    def key(item: str) -> bytes:
        return hashlib.sha256("\x1f".join([*map(str, seed), item]).encode()).digest()

    return sorted(items, key=key)


def plain(text: str) -> str:
    """Return lower-case words separated by single spaces, without quotes, commas and symbols."""
    text = text.lower().translate(_ASCII)
    return " ".join(re.sub(r"[^\w\s'.#*+-]", " ", text).split())


def name_words(name: str) -> frozenset[str]:
    """Return the words of a name."""
    return frozenset(plain(name).split())


def captions(picture_id: str, name: str, keywords: Iterable[str], shared: Collection[str] = ()) -> list[str]:
    """Return five distinct captions, of which only the first may be in `shared`; see the rule above."""
    head, _, tail = name.partition(": ")
    base, modifiers = plain(head), [plain(modifier) for modifier in tail.split(", ")] if tail else []
    phrase, in_name = _phrase(base, modifiers), name_words(name)
    # Keywords in other scripts have no Latin letter left; skin tones are already modifiers.
    usable = [word for word in map(plain, keywords) if re.search("[a-z0-9]", word) and not word.endswith("skin tone")]
    bringing = [keyword for keyword in usable if not set(keyword.split()) <= in_name]
    partial = [keyword for keyword in usable if set(keyword.split()) < in_name and keyword not in (base, *modifiers)]

    all_keywords = " ".join(ranked(bringing + partial, picture_id, 5)).split()
    missing = [word for word in base.split() if word not in all_keywords]
    some = ranked(bringing, picture_id, 4)[:2]
    candidates = [
        [phrase],
        [phrase, *ranked(bringing, picture_id, 2)],
        [*ranked(bringing, picture_id, 3), phrase],
        [*modifiers, base, *some] if modifiers else [*some, base],
        [*all_keywords, *missing, *modifiers],
    ]
    framed = [frame.format(phrase) for frame in ranked(FRAMES, picture_id, "frame")]
    result: list[str] = []
    for candidate in map(" ".join, candidates):
        refused = candidate in result or (candidate in shared and result)
        result.append(next(caption for caption in framed if caption not in result) if refused else candidate)
    return result


def _phrase(base: str, modifiers: list[str]) -> str:
    if base == "flag":
        return "flag of " + " ".join(modifiers)
    if base == "keycap":
        return "keycap " + " ".join(modifiers)
    if "bald" in modifiers:
        base = "bald " + base
    looks = [word for word in modifiers if word.endswith((" tone", " hair")) or word == "beard"]
    people = [word for word in modifiers if word not in looks and word != "bald"]
    if base == "couple with heart" and people:
        base = " and ".join(people) + " " + base
    elif people:
        base += " of " + " and ".join(people)
    if looks:
        base += (" and " if " with " in base else " with ") + " and ".join(looks)
    return base
