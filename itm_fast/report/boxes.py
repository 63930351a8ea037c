"""Draw boxes and the attention on them over a picture.

Inside: `heat_of_boxes`, `numbered`, `pixels_of`.
"""

from __future__ import annotations

import colorsys

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from itm_fast.report.heat import lit, shares_of

__all__ = ["heat_of_boxes", "numbered", "pixels_of"]

_OUTLINE = (255, 196, 0)
# Below this share of the largest weight, a box is not outlined.
_LEAST_OUTLINED = 0.1
# The longer side of the picture with all boxes, so that their numbers are legible.
_NUMBERED_SIDE = 800


def pixels_of(boxes: np.ndarray, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the pixels of boxes, as slices (n, 4): left, top, right and bottom end. Each has at least one pixel.

    Args:
        boxes: (n, 4), left, top, right and bottom edge as shares of the sides.
        shape: height and width of the picture.
    """
    sides = np.array([shape[1], shape[0]])
    starts = np.clip(np.floor(boxes[:, :2] * sides), 0, sides - 1)
    ends = np.clip(np.ceil(boxes[:, 2:] * sides), starts + 1, sides)
    return np.concatenate([starts, ends], axis=1).astype(np.int64)


def heat_of_boxes(
    picture: np.ndarray, boxes: np.ndarray, weights: np.ndarray, *, largest: float | None = None, power: float = 0.5
) -> npt.NDArray[np.uint8]:
    """Light each box by its attention weight, and outline the strong ones.

    A pixel has the brightness of the strongest of its boxes, `(weight / largest) ** power`. Boxes with a tenth of the
    largest weight or more are outlined, the stronger the more visible.

    Args:
        picture: pixels, uint8 `(height, width, 3)`.
        boxes: `(n, 4)`, left, top, right and bottom edge as shares of the sides.
        weights: weight of each box, at least 0, `(n,)`.
        largest, power: as in `heat`.

    Returns:
        Pixels, uint8 `(height, width, 3)`.
    """
    places, shares = pixels_of(boxes, picture.shape), shares_of(weights, largest, power)
    light = np.zeros(picture.shape[:2])
    order = np.argsort(weights, kind="stable").tolist()
    for number in order:
        left, top, right, bottom = places[number]
        light[top:bottom, left:right] = shares[number]
    image = Image.fromarray(lit(picture, light))
    draw = ImageDraw.Draw(image, "RGBA")
    thick = max(max(picture.shape) // 100, 1)
    for number in order:
        relative = shares_of(weights, largest, 1.0)[number]
        if relative >= _LEAST_OUTLINED:
            left, top, right, bottom = places[number].tolist()
            width = thick if number == order[-1] else max(thick // 2, 1)
            draw.rectangle((left, top, right - 1, bottom - 1), outline=(*_OUTLINE, round(255 * relative)), width=width)
    return np.asarray(image)


def numbered(picture: np.ndarray, boxes: np.ndarray) -> npt.NDArray[np.uint8]:
    """Draw all boxes and their numbers, from 1, over an enlarged picture."""
    height, width = picture.shape[:2]
    factor = _NUMBERED_SIDE / max(height, width)
    image = Image.fromarray(picture).resize((max(round(width * factor), 1), max(round(height * factor), 1)))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(15)
    places = pixels_of(boxes, (image.height, image.width)).tolist()
    # Small boxes last, so that large ones do not hide their numbers.
    for number in sorted(range(len(places)), key=lambda one: -_area(places[one])):
        left, top, right, bottom = places[number]
        # Colours of neighbouring numbers differ.
        colour = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(number * 0.381966 % 1, 0.65, 1.0))
        draw.rectangle((left, top, right - 1, bottom - 1), outline=colour, width=2)
        text = str(number + 1)
        x0, y0, x1, y1 = draw.textbbox((0, 0), text, font=font)
        tag = (left, top, left + x1 - x0 + 6, top + y1 - y0 + 6)
        draw.rectangle(tag, fill=colour)
        draw.text((left + 3 - x0, top + 3 - y0), text, fill="black", font=font)
    return np.asarray(image)


def _area(place: list[int]) -> int:
    left, top, right, bottom = place
    return (right - left) * (bottom - top)
