"""The page of `itm-fast score --report`.

Inside: `write_page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from itm_fast.cli.models import find_picture

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from itm_fast.data import PrecomputedDataset
    from itm_fast.evaluation import Scored, ScoreSource
    from itm_fast.report import Hit, ImageQuery, MeasureTable, TextQuery

__all__ = ["write_page"]

# Hits shown for each query.
_SHOWN = 5
_TEXT_QUERIES, _IMAGE_QUERIES = 12, 8


def write_page(
    path: Path,
    content: Mapping[str, Any],
    result: Scored,
    source: ScoreSource,
    owners: Tensor,
    dataset: PrecomputedDataset | None,
) -> None:
    """Write measures, warnings and the queries with the worst ranks.

    Args:
        path: page to write.
        content: the JSON of the command.
        result: a protocol with rankings.
        source: the scores.
        owners: index of the image of each caption, int64 `(n_captions,)`.
        dataset: texts and pictures; None: captions and images are shown by number.
    """
    from itm_fast.report import ScoreReport, write_scores

    text_queries = _worst_captions(result, source, owners, _texts(dataset, source.n_captions), content["ties"])
    image_queries = _worst_images(result, source, owners, content["ties"])
    shown = {hit.item for query in text_queries for hit in query.hits} | {query.picture for query in image_queries}
    pictures, names, credits = _pictures(dataset, sorted(shown))
    files = ", ".join(Path(name).name for name in content["scores"])
    facts = [
        ("Images", f"{source.n_images:,}"),
        ("Captions", f"{source.n_captions:,}"),
        ("Ties", _ties(content)),
        ("Resamples of the images", f"{content['bootstrap']['samples']:,}, seed {content['bootstrap']['seed']}"),
        *([("Exchanges for p", f"{content['permutations']:,}")] if "permutations" in content else []),
        *(("Scores", name) for name in content["scores"]),
    ]
    write_scores(
        path,
        ScoreReport(
            title=f"Scores: {files}",
            lead=f"Retrieval among {source.n_images:,} images and {source.n_captions:,} captions. Recalls are in "
            "percent; ranks count from 1.",
            warnings=content["warnings"],
            tables=[_table(name, measures) for name, measures in content["protocols"].items()],
            pictures=pictures,
            names=names,
            captions=_texts(dataset, source.n_captions),
            text_queries=text_queries,
            image_queries=image_queries,
            top=_SHOWN,
            facts=facts,
            credits=credits,
        ),
    )


def _ties(content: Mapping[str, Any]) -> str:
    if content["ties"] == "pessimistic":
        return "count as errors"
    exempt = [name for name, measures in content["protocols"].items() if "ties" in measures]
    return "do not count as errors" + (f", except in {', '.join(exempt)}" if exempt else "")


def _table(name: str, measures: Mapping[str, Any]) -> MeasureTable:
    from itm_fast.report import MeasureTable

    ends, against = measures.get("intervals", {}), measures.get("against")
    header = ["measure", "value"] + ["95 % interval"] * bool(ends)
    compared = against["differences"] if against else {}
    resampled = any("interval" in one for one in compared.values())
    header += ["against", "value minus against", *["95 % interval"] * resampled, "p"] if against else []
    rows = []
    for key, value in measures.items():
        if not isinstance(value, float):
            continue
        row = [key, f"{value:.2f}"]
        row += [f"{ends[key][0]:.2f} to {ends[key][1]:.2f}" if key in ends else ""] if ends else []
        if against:
            one = compared.get(key)
            row.append(f"{against[key]:.2f}" if key in against else "")
            if one is None:
                row += ["", *[""] * resampled, ""]
            else:
                ends_of = [f"{one['interval'][0]:+.2f} to {one['interval'][1]:+.2f}"] if resampled else []
                row += [f"{one['difference']:+.2f}", *ends_of, f"{one['p']:.4f}"]
        rows.append(row)
    title = name if against is None else f"{name}, against {Path(against['scores']).name}"
    return MeasureTable(title, header, rows)


def _worst_captions(
    result: Scored, source: ScoreSource, owners: Tensor, captions: Sequence[str], ties: str
) -> list[TextQuery]:
    from itm_fast.report import TextQuery

    found = []
    for rank, fold, place in _worst(result, "text_to_image", _TEXT_QUERIES):
        caption = int(fold.captions[place])
        scores = source.tile(fold.images, fold.captions[place : place + 1])[:, 0]
        found.append(
            TextQuery(captions[caption], _hits(scores, fold.images, fold.images == owners[caption], rank, ties))
        )
    return found


def _worst_images(result: Scored, source: ScoreSource, owners: Tensor, ties: str) -> list[ImageQuery]:
    from itm_fast.report import ImageQuery

    found = []
    for rank, fold, place in _worst(result, "image_to_text", _IMAGE_QUERIES):
        image = int(fold.images[place])
        scores = source.tile(fold.images[place : place + 1], fold.captions)[0]
        found.append(ImageQuery(image, _hits(scores, fold.captions, owners[fold.captions] == image, rank, ties)))
    return found


def _hits(scores: Tensor, items: Tensor, own: Tensor, rank: int, ties: str) -> list[Hit]:
    """Return the best items of a query, and its best own one, in the order by which ranks count.

    Args:
        scores: of all items, `(n,)`; NaN is the lowest value.
        items: their indices, int64 `(n,)`.
        own: which of them match, bool `(n,)`.
        rank: rank from 0 of the best own item.
        ties: own items come after others of the same score if "pessimistic", before them if "optimistic".
    """
    import numpy as np

    from itm_fast.report import Hit

    values = scores.double().numpy()
    among = (own if ties == "pessimistic" else ~own).numpy()
    order = np.lexsort((among, -np.nan_to_num(values, posinf=np.inf, neginf=-np.inf), np.isnan(values)))
    best = order[:_SHOWN]
    hits = [Hit(int(items[place]), number, bool(own[place])) for number, place in enumerate(best, start=1)]
    if not any(hit.right for hit in hits):
        first = next(place for place in order if own[place])
        hits.append(Hit(int(items[first]), rank + 1, True))
    return hits


def _worst(result: Scored, direction: str, most: int) -> list[tuple[int, Any, int]]:
    """Return the highest ranks above 0, each with its fold and the place in it."""
    ranks = [
        (int(rank), number, place)
        for number, fold in enumerate(result.rankings)
        for place, rank in enumerate(getattr(fold.ranks, direction).tolist())
        if rank > 0
    ]
    chosen = sorted(ranks, key=lambda one: (-one[0], one[1], one[2]))[:most]
    return [(rank, result.rankings[number], place) for rank, number, place in chosen]


def _texts(dataset: PrecomputedDataset | None, n_captions: int) -> Sequence[str]:
    return [f"caption {number}" for number in range(n_captions)] if dataset is None else dataset.captions


def _pictures(
    dataset: PrecomputedDataset | None, images: Sequence[int]
) -> tuple[dict[int, np.ndarray], dict[int, str], str]:
    """Return the pictures, names and credits of images."""
    from itm_fast.data import whole_picture_of

    if dataset is None:
        return {}, {image: f"image {image}" for image in images}, ""
    ids = dataset.image_ids
    names = {image: f"image {image}" if ids is None else ids[image] for image in images}
    pictures, credits = {}, ""
    for image in images:
        picture, _, source = find_picture(dataset, image)
        credits = credits or source
        if picture is None:
            picture = whole_picture_of(dataset, image)
        if picture is not None:
            pictures[image] = picture
    return pictures, names, credits
