"""The picture of a demo's searches."""

from __future__ import annotations

from pathlib import Path

import demo_picture
import numpy as np
from PIL import Image, ImageColor

from itm_fast.report import Hit, TextQuery


def test_cards_show_the_pictures_in_order_and_frame_the_right_one(tmp_path: Path) -> None:
    """One query finds its picture second; in the other it is added after the five best ones."""
    colours = [(200, 0, 0), (0, 0, 200), (250, 200, 0)]
    pictures = {number: np.full((72, 72, 3), colour, np.uint8) for number, colour in enumerate(colours)}
    queries = [
        TextQuery("blue", [Hit(0, 1, False), Hit(1, 2, True)]),
        TextQuery("yellow " * 20, [*(Hit(rank % 2, rank, False) for rank in range(1, 6)), Hit(2, 6, True)]),
    ]
    demo_picture.draw(tmp_path / "demo.png", queries, pictures)
    drawn = np.asarray(Image.open(tmp_path / "demo.png").convert("RGB")).astype(int)
    assert drawn.shape == (140 + 2 * 16, 2 * (16 + 466) + 14, 3)
    assert tuple(drawn[2, 2]) == ImageColor.getrgb(demo_picture.PAPER)
    green = ImageColor.getrgb(demo_picture.GREEN)
    for column, query in enumerate(queries):
        for place, hit in enumerate(query.hits):
            left = 16 + column * 480 + 16 + place * 71 + (10 if hit.rank == 6 else 0)
            assert tuple(drawn[16 + 42 + 32, left + 32]) == colours[hit.item]
            frame = drawn[16 + 42 + 20 : 16 + 42 + 40, left - 2 : left + 3]
            assert bool((abs(frame - green).sum(-1) < 30).any()) == hit.right
