"""Re-rank the first candidates of one model by the scores of another.

Inside: `rerank`.

A model whose every pair is a forward pass, such as `oscar`, cannot score all pairs of a large split. A cheap model
orders all captions of each image, and all images of each caption. The expensive model scores only the first K of each
order and sorts these; the others stay behind them in the order of the cheap model.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from tqdm.auto import tqdm

from itm_fast.distributed import World, gather_rows
from itm_fast.evaluation.protocols import fold_indices, mean_summary, ranks_summary
from itm_fast.evaluation.ranks import FoldRanks, compared
from itm_fast.evaluation.scoring import Gallery, Scorer, check_tiles, evaluation_mode
from itm_fast.evaluation.shares import encoded_tiles, split_tiles
from itm_fast.evaluation.streaming import CHUNK_CAPTIONS, Member, stream_ranks, top_k
from itm_fast.fragments import Fragments
from itm_fast.functional import recall_summary
from itm_fast.ops.retrieval import TIES
from itm_fast.ops.sets import leaves_of
from itm_fast.reference import validation

__all__ = ["rerank"]


def rerank(
    model: Scorer,
    dataset: Gallery,
    candidates: tuple[Scorer, Gallery],
    k: int,
    *,
    folds: int = 1,
    first_images: int | None = None,
    ties: str = "pessimistic",
    tile_images: int = 256,
    tile_captions: int = 512,
    chunk_captions: int = CHUNK_CAPTIONS,
    progress: bool = False,
    description: str = "scores",
    world: World | None = None,
    found: list[FoldRanks] | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Compute the recalls of a model that re-ranks the first `k` candidates of a cheap model, in both directions.

    Equal scores of the cheap model are in ascending order of their index. The rank of a query without a match among its
    candidates is that of the cheap model. A pair that is a candidate in both directions is scored once. No score matrix
    is stored: memory holds K candidates per query and their scores, and what `stream_ranks` needs.

    Args:
        model: scores the candidates. Its embeddings are Fragments or tensors of one row per item, or tuples of these.
        dataset: as in `score_matrix`.
        candidates: the cheap model and its data set, which has the same images and captions. Features and token ids
            may differ.
        k: number of candidates per query. If there are fewer items, all of them are candidates.
        folds: as in `evaluate`.
        first_images: as in `evaluate`.
        ties: "pessimistic" or "optimistic", as in `retrieval_ranks`.
        tile_images: images in a tile.
        tile_captions: captions in a tile.
        chunk_captions: captions encoded at a time, at least one tile.
        progress: show a progress bar if stderr is a terminal.
        description: label of the progress bar.
        world: the processes that share the work; None: only this one.
        found: takes the new ranks of each fold.

    Returns:
        The keys of `itm_fast.functional.recall_summary`, re-ranked; and the summary of the cheap model, as in
        `evaluate`.

    Raises:
        ValueError: `k` or a tile size is below 1, `ties` is unknown, the data sets differ, or a fold is refused
            as in `evaluate`.
    """
    check_tiles(tile_images, tile_captions)
    validation.check_option("ties", ties, TIES)
    if k < 1:
        raise ValueError(f"k: expected at least 1 candidate per query, got {k}")
    _check_same(dataset, candidates[1])
    world = world or World()
    member = Member(model, dataset)
    sizes = (tile_images, tile_captions, chunk_captions)
    tiles: dict[str, Any] = dict(zip(("tile_images", "tile_captions", "chunk_captions"), sizes, strict=True))
    after, before = [], []
    for fold, (images, captions) in enumerate(
        fold_indices(dataset.caption_image, dataset.n_images, folds, first_images)
    ):
        part = f"{description}, fold {fold + 1}/{folds}" if folds > 1 else description
        shown: dict[str, Any] = {"progress": progress, "description": f"{part}, candidates"}
        (first, *_), _ = stream_ranks([candidates], images, captions, ties=ties, world=world, **tiles, **shown)
        before.append(ranks_summary(first, first.distance.value))
        of_images, of_captions = _candidates(candidates, images, captions, k, world, **tiles, **shown)
        n = len(captions)
        rows, columns = torch.arange(len(images))[:, None], torch.arange(n)[:, None]
        keys = (rows * n + of_images, of_captions * n + columns)
        pairs = torch.cat([one.flatten() for one in keys]).unique()
        scores = _scores(member, images, captions, pairs, world, sizes, part if progress else None)
        owners = dataset.caption_image[captions] - images[0]
        chosen = [scores[torch.searchsorted(pairs, key)] for key in keys]
        of_own = owners[of_images] == rows, of_captions == owners[:, None]
        known = first.image_to_text, first.text_to_image
        ranks = [_reranked(*one, ties) for one in zip(chosen, of_own, known, strict=True)]
        after.append(recall_summary(*ranks))
        if found is not None:
            found.append(FoldRanks(images, captions, *ranks))
    return mean_summary(after), mean_summary(before)


def _check_same(dataset: Any, other: Any) -> None:
    """Raise ValueError unless both data sets have the same images and captions, as far as they say."""
    same = dataset.n_images == other.n_images and torch.equal(dataset.caption_image, other.caption_image)
    for name in ("captions", "image_ids") if same else ():
        mine, theirs = getattr(dataset, name, None), getattr(other, name, None)
        same = same and (mine is None or theirs is None or list(mine) == list(theirs))
    if not same:
        raise ValueError(
            f"candidates: expected the {dataset.n_images} images and {len(dataset)} captions that are re-ranked, in "
            f"their order, got other ones ({other.n_images} images, {len(other)} captions)"
        )


def _candidates(
    cheap: tuple[Scorer, Gallery], images: Tensor, captions: Tensor, k: int, world: World, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the first captions of each image, (n, k), and the first images of each caption, (m, k), as positions."""
    if world.size == 1:
        (_, of_images), (_, of_captions) = top_k(*cheap, k, images=images, captions=captions, **options)
    else:
        # Each process finds the candidates of its own queries.
        some, few = images[world.share(len(images))], captions[world.share(len(captions))]
        with world.together():
            of_images = top_k(*cheap, k, images=some, captions=captions, **options)[0][1]
            of_captions = top_k(*cheap, k, images=images, captions=few, **options)[1][1]
        of_images = of_images.reshape(len(some), min(k, len(captions)))
        of_captions = of_captions.reshape(len(few), min(k, len(images)))
        of_images = gather_rows(of_images, world.counts(len(images)), world)
        of_captions = gather_rows(of_captions, world.counts(len(captions)), world)
    return torch.searchsorted(captions, of_images), of_captions - images[0]


def _scores(
    member: Member,
    images: Tensor,
    captions: Tensor,
    pairs: Tensor,
    world: World,
    sizes: tuple[int, int, int],
    label: str | None,
) -> Tensor:
    """Score pairs, position of the image times n_captions plus that of the caption, ascending. Returns float64."""
    n, (tile_images, tile_captions, chunk_captions) = len(captions), sizes
    bounds = torch.tensor([0, *world.counts(len(images))]).cumsum(0) * n
    places = torch.searchsorted(pairs, bounds).tolist()
    own = pairs[places[world.rank] : places[world.rank + 1]]
    scores = torch.empty(len(own), dtype=torch.float64)
    share = world.share(len(images))
    starts = range(share.start, share.stop, tile_images)
    step = max(chunk_captions // tile_captions, 1) * tile_captions
    shown = None if label else True  # None: if stderr is a terminal
    with evaluation_mode(member.model), tqdm(
        total=len(own), desc=label, unit="pair", leave=False, disable=shown
    ) as bar:  # fmt: skip
        for first in range(0, n, step):
            chosen = captions[first : first + step]
            encoded = _joined(encoded_tiles(member.encode_captions, chosen, tile_captions, world))
            with world.together():
                for start, tile in zip(starts, split_tiles(images[share], tile_images), strict=True):
                    _score_tile(member, tile, start, encoded, range(first, first + len(chosen)), n, own, scores, bar)
    counts = [last - begin for begin, last in pairwise(places)]
    return gather_rows(scores, counts, world)


def _score_tile(
    member: Member,
    images: Tensor,
    start: int,
    captions: Any,
    columns: range,
    n: int,
    pairs: Tensor,
    scores: Tensor,
    bar: Any,
) -> None:
    """Score the pairs of a tile of images, which begins at `start`, with the encoded captions `columns`."""
    row, column = pairs // n, pairs % n
    inside = (row >= start) & (row < start + len(images)) & (column >= columns.start) & (column < columns.stop)
    places = inside.nonzero()[:, 0]
    if len(places) == 0:
        return
    encoded = member.encode_images(images)
    of_image, counts = row[places].unique_consecutive(return_counts=True)
    for image, some in zip((of_image - start).split(1), places.split(counts.tolist()), strict=True):
        chosen = _chosen(captions, column[some] - columns.start)
        scores[some] = member.model.score(_chosen(encoded, image), chosen)[0].cpu().to(torch.float64)
        bar.update(len(some))


def _reranked(scores: Tensor, own: Tensor, before: Tensor, ties: str) -> Tensor:
    """Return the ranks of queries.

    Args:
        scores: of the candidates, (q, k).
        own: whether a candidate matches, bool (q, k).
        before: ranks by the cheap model, (q,), -1 for a query without a match.
        ties: as in `rerank`.
    """
    comparable = own & ~scores.isnan()
    best = scores.masked_fill(~comparable, -torch.inf).amax(1, keepdim=True)
    best = best.masked_fill(~comparable.any(1, keepdim=True), torch.nan)
    above, equal = compared(scores, best)
    ahead = ((above | equal if ties == "pessimistic" else above) & ~own).sum(1)
    # Without a match among the candidates, all of them are ahead, also those with the score of the match.
    behind = torch.where(before < 0, before, before.clamp(min=own.shape[1]))
    return torch.where(own.any(1), ahead, behind)


def _joined(parts: list[Any]) -> Any:
    """Return the embeddings of all parts as one."""
    leaves, specs = zip(*(leaves_of(part) for part in parts), strict=True)
    joined = [
        Fragments.cat(some) if isinstance(some[0], Fragments) else torch.cat(some) for some in zip(*leaves, strict=True)
    ]
    return _pytree.tree_unflatten(joined, specs[0])


def _chosen(sets: Any, numbers: Tensor) -> Any:
    """Return some of the embeddings, by their numbers on the CPU."""
    leaves, spec = leaves_of(sets)
    chosen = [
        leaf.index_select(numbers) if isinstance(leaf, Fragments) else leaf[numbers.to(leaf.device)] for leaf in leaves
    ]
    return _pytree.tree_unflatten(chosen, spec)
