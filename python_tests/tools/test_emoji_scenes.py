"""The sentences of emoji scenes are true, twins are near misses, and held-out pairs stay out of the training."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import emoji_scenes
import numpy as np
import pytest

from itm_fast.data import PrecomputedDataset, Vocabulary, emoji

ARTICLE = r"(?:a|an) "
WORDS = {word: name for name, word in emoji_scenes.OBJECTS.items()}
NOUN = ARTICLE + "(" + "|".join(sorted(WORDS, key=len, reverse=True)) + ")"
RELATION = re.compile(NOUN + r" is (above|below)?(?: and )?(?:to the (left|right) of)? " + NOUN)
PLACE = re.compile(NOUN + r"(?: is)? (?:(?:at|on) the (top|bottom)? ?(left|right)?|in the middle)(?= and |$)")
ROOT = Path(__file__).resolve().parents[2]
TINY = {"train": 40, "dev": 20, "test": 30}


@pytest.fixture(scope="module")
def splits() -> dict[str, tuple[list[emoji_scenes.Scene], list[str]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emoji_scenes, "SCENES", TINY)
        return {split: (scenes, captions) for split, scenes, captions in emoji_scenes.all_scenes(seed=1)}


def test_sentences_are_true(splits: dict[str, tuple[list, list[str]]]) -> None:
    relations = places = 0
    for scenes, captions in splits.values():
        assert len(captions) == 5 * len(scenes)
        for number, caption in enumerate(captions):
            where = {name: (row, column) for name, row, column in scenes[number // 5]}
            for first, vertical, horizontal, second in RELATION.findall(caption):
                (row, column), (other_row, other_column) = where[WORDS[first]], where[WORDS[second]]
                down, right = row - other_row, column - other_column
                assert (vertical == "below") == (down > 0 and abs(down) >= abs(right))
                assert (vertical == "above") == (down < 0 and abs(down) >= abs(right))
                assert (horizontal == "right") == (right > 0 and abs(right) >= abs(down))
                assert (horizontal == "left") == (right < 0 and abs(right) >= abs(down))
                relations += 1
            for word, vertical, horizontal in PLACE.findall(caption):
                row, column = where[WORDS[word]]
                assert vertical == ("top" if row < 2 else "bottom" if row > 2 else "")
                assert horizontal == ("left" if column < 2 else "right" if column > 2 else "")
                places += 1
    assert relations > 4 * sum(TINY.values())
    assert places > 2 * sum(TINY.values())


def test_the_page_says_what_knowing_the_truth_is_worth() -> None:
    """A sentence is true of all scenes that contain what it says; equal scores are in random order."""
    things = re.compile(NOUN)
    (scenes, captions) = next(found for split, *found in emoji_scenes.all_scenes(seed=1) if split == "test")

    def says(caption: str) -> set[tuple[str, ...]]:
        found = set(RELATION.findall(caption)) | set(PLACE.findall(caption))
        return found | {(word,) for word in things.findall(caption)}

    facts = [set() for _ in scenes]
    for number, scene in enumerate(scenes):
        for one in scene:
            noun = f"a {emoji_scenes.OBJECTS[one.name]}"
            facts[number] |= says(f"{noun} {emoji_scenes.place(one)}")
            for other in (other for other in scene if other is not one):
                relation = emoji_scenes.relation(one, other)
                facts[number] |= says(f"{noun} is {relation} a {emoji_scenes.OBJECTS[other.name]}")
    told = [says(caption) for caption in captions]
    true = np.array([[needed <= known for known in facts] for needed in told])
    assert true[np.arange(len(captions)), np.arange(len(captions)) // 5].all()
    of_captions, of_scenes = true.sum(1), true.sum(0)
    rsum = 0.0
    for k in (1, 5, 10):
        missed = [math.comb(m - 5, k) / math.comb(m, k) if m >= k else 0.0 for m in of_scenes]
        rsum += 100 * (np.minimum(k / of_captions, 1).mean() + 1 - np.mean(missed))
    page = (ROOT / "docs" / "performance" / "results" / "rcar.md").read_text(encoding="utf-8")
    assert f"{(of_captions == 1).mean():.0%}".replace("%", " %") + " of the sentences of test are true of one" in page
    assert of_captions.max() == 4
    assert f"would reach {rsum:.0f}." in page


def test_twins_are_near_misses_of_other_words(splits: dict[str, tuple[list, list[str]]]) -> None:
    for scenes, captions in splits.values():
        for number in range(0, len(scenes), 2):
            one, twin = scenes[number : number + 2]
            assert {thing.name for thing in one} == {thing.name for thing in twin}
            assert {thing[1:] for thing in one} == {thing[1:] for thing in twin}
            assert one[2:] == twin[2:]
            assert captions[5 * number] != captions[5 * number + 5]


def test_held_out_pairs_occur_in_one_split(splits: dict[str, tuple[list, list[str]]]) -> None:
    pairs = {
        split: {frozenset(pair) for scene in scenes for pair in itertools.combinations([t.name for t in scene], 2)}
        for split, (scenes, _) in splits.items()
    }
    firsts = {split: {frozenset(t.name for t in scene[:2]) for scene in splits[split][0]} for split in ("dev", "test")}
    assert not firsts["test"] & (pairs["train"] | pairs["dev"])
    assert not firsts["dev"] & (pairs["train"] | pairs["test"])


def test_the_files_are_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emoji_scenes, "SCENES", {"train": 40, "dev": 4, "test": 4})
    for name in ("one", "two"):
        assert emoji_scenes.main(["--out", str(tmp_path / name), "--pictures"]) == 0
    data = PrecomputedDataset(tmp_path / "one", "test", Vocabulary.from_file(tmp_path / "one" / "vocab.json"))
    assert (data.n_images, len(data.caption_image)) == (4, 20)
    picture = emoji.pictures_of(np.load(tmp_path / "one" / "test_ims.npy")[:1])[0]
    covered = (picture != 255).any(axis=2)
    assert 0.02 < covered.mean() < 0.5
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert len(files) == 48 + 4 * 3 + 2
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)
