"""Turn results and explanations into JSON.

Inside: `facts`, `found`, `explained`.
"""

from __future__ import annotations

import math
import re
from typing import Any

from itm_fast.evaluation import Explanation
from itm_fast.models import MatchingModel
from itm_fast.nn import BackboneEncoder
from itm_fast.search import Index, Item, Results
from itm_fast.search.encoders import is_encoder_kind, is_loadable
from itm_fast.search.pictures import grid_of
from itm_fast.serve.limits import Limits
from itm_fast.version import __version__

__all__ = ["explained", "facts", "found"]

_DIGITS = 5
# Items that the page shows before the first query.
_SAMPLES = 24


def facts(index: Index, limits: Limits) -> dict[str, Any]:
    """Return what the index holds and which requests it can answer, without paths of the server."""
    manifest, images = index.manifest, index.snapshot.sides["images"]
    positions = images.positions()
    spread = positions[:: max(-(-len(positions) // _SAMPLES), 1)].tolist()
    return {
        "images": index.size("images"),
        "captions": index.size("captions"),
        "generation": manifest.generation,
        "revision": index.snapshot.revision,
        "models": [model.name for model in index.members.models],
        "fingerprints": list(manifest.models),
        "accepts_pictures": bool(manifest.pictures)
        and (not is_encoder_kind(manifest.pictures) or is_loadable(manifest.pictures)),
        "explains": any(hasattr(model, "pair_steps") for model in index.members.models),
        "candidates": min(manifest.candidates, limits.candidates),
        "limits": {"k": limits.k, "candidates": limits.candidates, "body": limits.body, "pixels": limits.pixels},
        "samples": [_item(index, images.item(position)) for position in spread],
        "version": __version__,
    }


def found(index: Index, results: Results, limits: Limits) -> dict[str, Any]:
    """Return the results of a query; a query without `k` may have found more than the limit."""
    return {
        "query": _text(results.query),
        "unknown": [_text(word) for word in results.unknown],
        "scored": results.scored,
        "generation": index.manifest.generation,
        "revision": index.snapshot.revision,
        "hits": [
            {"rank": hit.rank, "score": round(hit.score, _DIGITS), **_item(index, hit.item)}
            for hit in results.hits[: limits.k]
        ],
    }


def _item(index: Index, item: Item) -> dict[str, Any]:
    """Return an item without the path of its picture, which concerns the server alone."""
    image = item.id if item.side == "images" else item.image
    images = index.snapshot.sides["images"]
    found = images.ids.positions(image) if _has_address(image) else []
    has_picture = bool(found and images.thumbnail(found[0]))
    return {
        "id": _text(item.id),
        "side": item.side,
        "captions": [_text(caption) for caption in item.captions],
        "image": _text(image) if image else None,
        "picture": has_picture,
    }


def _has_address(image: str) -> bool:
    """Return whether /pictures/ can name an image: paths hold UTF-8, and routes match one line."""
    return bool(image) and _text(image) == image and "\n" not in image


def _text(text: str) -> str:
    """Return a text that JSON in UTF-8 can hold: names of files may contain lone surrogates."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def explained(index: Index, explanation: Explanation, model: MatchingModel, text: str, image: Item) -> dict[str, Any]:
    """Return the attention between the words of a text and the regions of an image.

    `directions` has "t2i", one row of weights over the regions per word, or "i2t", one row of weights over the words
    per region, or both; of several steps, all. `grid` has the rows and columns of the regions on the picture, and
    `before` the number of regions before the first one of them; both are null if the index does not know the places.
    """
    steps = next(iter(explanation.directions.values()))
    assert model.tokenizer is not None  # It has made the words of the explanation.
    vocabulary, numbers = model.tokenizer, range(len(explanation.words))
    inner = numbers[vocabulary.inner]
    # The index has split the text with single blanks.
    plain = " ".join(text.split())
    known = [token != vocabulary.unk for token in vocabulary.encode(plain)]
    unknown = iter(vocabulary.unknown(plain))
    shape = steps.attention[0].shape
    regions = int(shape[1] if "t2i" in explanation.directions else shape[0])
    side = _grid_side(index.manifest.pictures, model)
    before = None if side is None else regions - side * side
    if before is None or before not in (0, 1):
        side = before = None
    return {
        "query": text,
        "item": _item(index, image),
        "score": round(explanation.score, _DIGITS),
        "words": [word if is_known else next(unknown) for word, is_known in zip(explanation.words, known, strict=True)],
        "known": known,
        "special": [number not in inner for number in numbers],
        "regions": regions,
        "grid": None if side is None else [side, side],
        "before": before,
        "directions": {
            name: [[[round(weight, _DIGITS) for weight in row] for row in step.tolist()] for step in part.attention]
            for name, part in explanation.directions.items()
        },
    }


def _grid_side(kind: str, model: MatchingModel) -> int | None:
    """Return the regions per side of a picture, or None if the index holds features of unknown places."""
    side = grid_of(kind)
    encoder = getattr(model, "image_encoder", None)
    if side is None or not isinstance(encoder, BackboneEncoder):
        return side
    return math.isqrt(encoder.regions(encoder.side * side))
