"""Parts of speech of the words of captions, from a file or from NLTK's tagger.

Inside: `read_speech_tags`, `nltk_speech_tags`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from itm_fast.data.dataset import CaptionDataset
from itm_fast.files.documents import read_text

__all__ = ["nltk_speech_tags", "read_speech_tags"]

_MAX_BYTES = 1 << 30
# Tags of the Penn Treebank by their first letters; all others are "other".
_PENN = {
    "NN": "noun", "VB": "verb", "JJ": "adjective", "RB": "adverb", "IN": "preposition", "TO": "preposition",
    "DT": "determiner", "PRP": "pronoun", "CD": "number", "CC": "conjunction", "RP": "particle",
}  # fmt: skip
_UNKNOWN = " (unknown)"


def read_speech_tags(path: str | os.PathLike[str], dataset: CaptionDataset) -> list[list[str]]:
    """Read the tags of all captions of a split: a line for each caption, with a tag for each word.

    Words are those of the vocabulary, without `<start>` and `<end>`. Tags are any text without spaces.

    Raises:
        ValueError: the file has another number of lines than the split has captions, or a line another number of tags
            than the caption has words. The message names the line.
    """
    text = read_text(path, _MAX_BYTES, "utf-8-sig")
    # Only "\n" and "\r\n" end a line: str.splitlines() also splits at other separators.
    lines = [line.split() for line in text.removesuffix("\n").split("\n")] if text else []
    if len(lines) != len(dataset):
        raise ValueError(f"{path}: expected a line for each of {len(dataset)} captions, got {len(lines)}")
    for number, (tags, length) in enumerate(zip(lines, dataset.caption_lengths.tolist(), strict=True), start=1):
        expected = length - sum(dataset.vocabulary.marks)
        if len(tags) != expected:
            raise ValueError(f"{path}: line {number}: expected {expected} tags, got {len(tags)}")
    return lines


def nltk_speech_tags(dataset: CaptionDataset, captions: Sequence[int]) -> list[list[str]]:
    """Return the parts of speech of some captions by NLTK's tagger: "noun", "verb", "adjective" and so on.

    The tagger's data must be installed. Nothing is downloaded.

    Raises:
        ValueError: NLTK is older than 3.9, whose tagger reads a pickle, or has no data.
    """
    import nltk
    from nltk.tag import PerceptronTagger

    if not hasattr(PerceptronTagger, "load_from_json"):
        raise ValueError(f"tagger: expected nltk 3.9 or newer, got {nltk.__version__}")
    words = [dataset.vocabulary.pieces(dataset.captions[caption])[dataset.vocabulary.inner] for caption in captions]
    plain = [[word.removesuffix(_UNKNOWN) for word in caption] for caption in words]
    try:
        tagged = nltk.pos_tag_sents(plain)
    except LookupError:
        raise ValueError(
            "tagger: nltk has no data; install them once (python -m nltk.downloader averaged_perceptron_tagger_eng), "
            "or give the tags in a file (--tags FILE)"
        ) from None
    return [[_part(tag) for _, tag in caption] for caption in tagged]


def _part(tag: str) -> str:
    return next((name for prefix, name in _PENN.items() if tag.startswith(prefix)), "other")
