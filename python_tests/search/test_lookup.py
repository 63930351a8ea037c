"""Items are found by their texts as in a dictionary."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast.search import Item
from itm_fast.search.lookup import Lookup
from itm_fast.search.segments import Segment, packed, write_segment

NAMES = ["", "a", "aa", "ab", "b", "ba", "ä", "\udcff", "a\udcffb", "漢字", "x" * 300, *map(str, range(150))]


def segment_of(directory: Path, ids: list[str], owners: list[str]) -> Segment:
    items = [Item(name, "captions", image=owner) for name, owner in zip(ids, owners, strict=True)]
    stored = packed(items, [b""] * len(items), [torch.zeros(len(items), 2)], torch.zeros(len(items), 2), "bf16")
    return Segment(directory, write_segment(directory, "captions", stored), 1)


@pytest.mark.parametrize("collide", [False, True])
def test_a_text_finds_the_items_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collide: bool) -> None:
    chosen = random.Random(0)
    ids = chosen.sample(NAMES, len(NAMES))
    owners = [chosen.choice(NAMES[:40]) for _ in ids]
    segments = [segment_of(tmp_path, ids[a:b], owners[a:b]) for a, b in ((0, 1), (1, 60), (60, len(ids)))]
    live = torch.rand(len(ids), generator=torch.Generator().manual_seed(0)) < 0.7
    monkeypatch.setattr("itm_fast.search.lookup._PART", 37)
    if collide:
        monkeypatch.setattr(Lookup, "_terms", staticmethod(lambda content, weights: np.zeros(len(content), np.uint64)))
    for column, texts in (("ids", ids), ("owners", owners)):
        lookup = Lookup(segments, column, live)
        for text in [*NAMES, "no such text", "y" * 301, "\ud800"]:
            expected = [place for place, one in enumerate(texts) if one == text and live[place]]
            assert lookup.positions(text) == expected
            assert (text in lookup) == bool(expected)
        alive = [text for place, text in enumerate(texts) if live[place]]
        found = lookup.repeated()
        assert found is None if len(set(alive)) == len(alive) else alive.count(found) > 1


def test_damaged_ends_are_named(tmp_path: Path) -> None:
    segment = segment_of(tmp_path, ["a", "b", "c"], ["", "", ""])
    segment.stored["ids.ends"] = torch.tensor([0, 2, 1, 3])
    message = f"{segment.record.file}: damaged: ids.ends"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Lookup([segment], "ids", segment.live)
    assert Lookup([], "ids", torch.zeros(0, dtype=torch.bool)).positions("a") == []
