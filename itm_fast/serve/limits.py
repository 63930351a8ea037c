"""What a request may cost.

Inside: `Limits`.
"""

from __future__ import annotations

import math

import attrs

from itm_fast.files.messages import shown

__all__ = ["Limits"]


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds of the service. ValueError names a bound that is not above 0.

    Attributes:
        k: results per query.
        candidates: items that the model scores per query; more results than these are scored, too.
        concurrency: requests at a time that compute; more are refused with status 429.
        batch: queries that are computed together.
        seconds: time of a request, its upload included; a longer one ends with status 503.
        body: bytes of an uploaded picture.
        pixels: pixels of an uploaded picture.
    """

    k: int = 200
    candidates: int = 5000
    concurrency: int = 64
    batch: int = 16
    seconds: float = 10.0
    body: int = 10 * 2**20
    pixels: int = 30_000_000

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            kinds = (int, float) if name == "seconds" else (int,)
            if type(value) not in kinds or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}: expected a number above 0, got {shown(value)}")
