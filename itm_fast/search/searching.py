"""Search in stages: nearest pooled vectors are a shortlist, MaxSim chooses the candidates, and the model scores these.

Inside: `search`, `exact_hits`, `shortlist_places`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.evaluation.ordering import best_first
from itm_fast.fragments import Fragments
from itm_fast.search.members import Members
from itm_fast.search.queries import Queries, unknown_words
from itm_fast.search.results import Hit, Results
from itm_fast.search.snapshot import Side, Snapshot

__all__ = ["CANDIDATES", "SHORTLIST", "exact_hits", "search", "shortlist_places"]

CANDIDATES = 500
_RESULTS = 10
# Length of the shortlist per candidate.
SHORTLIST = 8
# Items that are scored at a time.
_TILE = 512


def search(
    snapshot: Snapshot,
    members: Members,
    queries: Queries,
    side: str,
    k: int | None,
    candidates: int | None,
    *,
    exact: bool,
) -> list[Results]:
    """Return the best `k` items of a side for each query. Arguments as in `Index.search`."""
    own = snapshot.sides[side]
    like = [position if queries.side == side else -1 for position in queries.positions]
    most = own.count - any(position >= 0 for position in like)
    if not most:
        raise ValueError(f"of: the index holds no {'other ' if own.count else ''}{side}")
    k = min(_RESULTS, most) if k is None else k
    if type(k) is not int or not 1 <= k <= most:
        raise ValueError(f"k: expected 1 to {most:,}, the number of {side}, got {k}")
    candidates = snapshot.manifest.candidates if candidates is None else candidates
    if type(candidates) is not int or candidates < 1:
        raise ValueError(f"candidates: expected at least 1, got {candidates}")
    if exact:
        ranked = exact_hits(own, members, queries, side, k + 1)
        scored = own.count
    else:
        scored = min(max(candidates, k) + any(position >= 0 for position in like), own.count)
        by_product, by_rows = _blend(snapshot, queries)
        length = min(scored * SHORTLIST, own.count) if by_rows else scored
        nearest = own.nearest(snapshot.pooling(queries.side, queries.encodings), length)
        ranked = []
        for number, (products, positions) in enumerate(nearest):
            query = queries.one(number)
            if length > scored:
                fits = own.best_rows(query, positions, reverse=_reverse(queries, side))
                best = (by_product * products + by_rows * fits).topk(scored, sorted=False).indices
                positions = positions[best.sort().values]
            scores = members.scores(query, queries.side, own.encodings(positions), side)
            order = best_first(scores)[0, : k + 1]
            ranked.append((scores[0, order], positions[order]))
    is_text = queries.side == "captions"
    return [
        Results(name, _hits(own, *found, k, position), scored, unknown_words(members, name) if is_text else ())
        for name, found, position in zip(queries.names, ranked, like, strict=True)
    ]


def shortlist_places(snapshot: Snapshot, query: Queries, side: str, wanted: Tensor) -> Tensor:
    """Return for items at positions (n,) int64 a number of candidates less one that is enough to find them: (n,) int64.

    Args:
        snapshot: the index.
        query: one query.
        side: the side of the items.
        wanted: their positions.
    """
    own, (by_product, by_rows) = snapshot.sides[side], _blend(snapshot, query)
    ((products, positions),) = own.nearest(snapshot.pooling(query.side, query.encodings), own.count)
    places = torch.searchsorted(positions, wanted)
    # Equal products may be ordered either way.
    nearer = (products[None] >= products[places, None]).sum(1) - 1
    if not by_rows:
        return nearer
    blended = by_product * products + by_rows * own.best_rows(query.one(0), positions, reverse=_reverse(query, side))
    # Fewer are before an item in the shortlist than among all items.
    before = (blended[None] >= blended[places, None]).sum(1) - 1
    return torch.maximum(nearer // SHORTLIST, before)


def _blend(snapshot: Snapshot, queries: Queries) -> tuple[float, float]:
    """Return the weights of inner products and of MaxSim in the order of the shortlist."""
    rows = [isinstance(one, Fragments) for one in queries.encodings]
    if not any(rows):
        return 1.0, 0.0
    return snapshot.pooling.blend or (0.0 if all(rows) else 1.0, 1.0)


def _reverse(queries: Queries, side: str) -> bool:
    """Return whether rows of items look for the best row of the query: words of captions look for regions."""
    return queries.side == "images" and side == "captions"


def exact_hits(own: Side, members: Members, queries: Queries, side: str, k: int) -> list[tuple[Tensor, Tensor]]:
    """Return the scores (k,) and positions (k,) of the best items of each query, all of which are scored."""
    scores = torch.empty(len(queries), 0)
    places = torch.empty(len(queries), 0, dtype=torch.int64)
    for positions in own.positions().split(_TILE):
        tile = members.scores(queries.encodings, queries.side, own.encodings(positions), side)
        scores = torch.cat([scores, tile], 1)
        places = torch.cat([places, positions.expand(len(queries), -1)], 1)
        order = best_first(scores)[:, :k]
        scores, places = scores.gather(1, order), places.gather(1, order)
    return list(zip(scores, places, strict=True))


def _hits(own: Side, scores: Tensor, positions: Tensor, k: int, left_out: int) -> tuple[Hit, ...]:
    found = [
        (score, place) for score, place in zip(scores.tolist(), positions.tolist(), strict=True) if place != left_out
    ]
    return tuple(Hit(rank, score, own.item(place)) for rank, (score, place) in enumerate(found[:k], 1))
