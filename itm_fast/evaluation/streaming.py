"""Compute ranks and best matches tile by tile, without a score matrix.

Inside: `stream_ranks`, `top_k`; `Member` and `evaluation_modes`, which other files also use.

A rank counts the scores above the score of the matching pair, so that score must be known first. Tiles that contain
matching pairs are therefore scored first. Captions are sorted by image, so these tiles are few. They are kept until
they are counted, so that no pair is scored twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from itm_fast.distributed import World
from itm_fast.evaluation.best import BestMatches
from itm_fast.evaluation.ranks import Ranks
from itm_fast.evaluation.scoring import Gallery, Scorer, check_tiles, evaluation_mode
from itm_fast.evaluation.shares import encoded_tiles, split_tiles

__all__ = ["CHUNK_CAPTIONS", "Member", "evaluation_modes", "stream_ranks", "top_k"]

# Captions encoded at a time: 0.4 GB of embeddings for 13 words per caption and 1,024 float32 values per word.
CHUNK_CAPTIONS = 8192


class Member:
    """A model and its data set; encodes tiles."""

    def __init__(self, model: Scorer, dataset: Gallery) -> None:
        self.model, self.dataset = model, dataset
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def encode_images(self, images: Tensor) -> Any:
        return self.model.encode_images(self.dataset.image_batch(images).to(self.device))

    def encode_captions(self, captions: Tensor) -> Any:
        token_ids, lengths = self.dataset.caption_batch(captions)
        return self.model.encode_captions(token_ids.to(self.device), lengths.to(self.device))


def stream_ranks(
    members: Sequence[tuple[Scorer, Gallery]],
    images: Tensor,
    captions: Tensor,
    *,
    ties: str = "pessimistic",
    tile_images: int = 256,
    tile_captions: int = 512,
    chunk_captions: int = CHUNK_CAPTIONS,
    progress: bool = False,
    description: str = "scores",
    world: World | None = None,
) -> tuple[list[Ranks], Ranks]:
    """Compute the ranks of each model, and of the mean of their scores, without a score matrix.

    Memory holds one chunk of encoded captions, one tile of encoded images, one tile of scores, and the tiles with
    matching pairs, which grow linearly with the number of captions. Images are encoded again for each chunk, and once
    for the matching pairs.

    Args:
        members: each model with its data set, as in `evaluate_ensemble`.
        images: indices of the images, int64 `(n,)`, consecutive.
        captions: indices of their captions, int64 `(m,)`.
        ties: "pessimistic" or "optimistic", as in `retrieval_ranks`.
        tile_images: images in a tile.
        tile_captions: captions in a tile.
        progress: show a progress bar if stderr is a terminal.
        description: label of the progress bar.
        world: the processes that share the work; None: only this one.
        chunk_captions: captions encoded at a time, at least one tile.

    Returns:
        The ranks of each member, and those of the ensemble. Ranks of captions are in the order of `captions`.

    Raises:
        ValueError: a tile size is below 1, or `ties` is unknown.
    """
    check_tiles(tile_images, tile_captions)
    world = world or World()
    owners = members[0][1].caption_image[captions] - int(images[0])
    order = torch.argsort(owners, stable=True)
    chosen, owners = captions[order], owners[order]
    parts = [Member(*member) for member in members]
    ranks = [Ranks(owners, len(images), ties) for _ in parts]
    together = Ranks(owners, len(images), ties) if len(parts) > 1 else ranks[0]
    share = world.share(len(images))
    own_tiles = split_tiles(images[share], tile_images)
    image_tiles = list(zip(range(share.start, share.stop, tile_images), own_tiles, strict=True))
    caption_tiles = list(zip(range(0, len(chosen), tile_captions), split_tiles(chosen, tile_captions), strict=True))
    with evaluation_modes(parts), tqdm(
        total=len(image_tiles) * len(caption_tiles), desc=description, unit="tile", leave=False,
        disable=None if progress else True,
    ) as bar:  # fmt: skip
        with world.together():
            kept = _own_tiles(parts, image_tiles, caption_tiles, owners)
        for (row, column), own in kept.items():
            for rank, scores in zip(ranks, own, strict=True):
                rank.note_own(scores, row, column)
            if together is not ranks[0]:
                together.note_own(_sum(own), row, column)
        everyone = list(dict.fromkeys([*ranks, together]))
        for rank in everyone:
            rank.note_others(world)

        def add(row: int, column: int, tiles: list[Tensor]) -> None:
            for rank, scores in zip(ranks, tiles, strict=True):
                rank.add(scores, row, column)
            if together is not ranks[0]:
                together.add(_sum(tiles), row, column)
            bar.update()

        per_chunk = max(chunk_captions // tile_captions, 1)
        for start in range(0, len(caption_tiles), per_chunk):
            chunk = caption_tiles[start : start + per_chunk]
            _score_chunk(parts, image_tiles, chunk, tile_captions, kept, world, add)
    back = torch.argsort(order)
    for rank in everyone:
        rank.add_others(world)
        rank.text_to_image, rank.text_ties = rank.text_to_image[back], rank.text_ties[back]
    return ranks, together


Tiles = list[tuple[int, Tensor]]


def _own_tiles(
    parts: Sequence[Member], image_tiles: Tiles, caption_tiles: Tiles, owners: Tensor
) -> dict[tuple[int, int], list[Tensor]]:
    """Score the tiles that contain matching pairs; the keys are positions of the first image and caption."""
    kept: dict[tuple[int, int], list[Tensor]] = {}
    known: tuple[int, list[Any]] = (-1, [])
    for row, images in image_tiles:
        first, last = torch.searchsorted(owners, torch.tensor([row, row + len(images)])).tolist()
        inside = [(column, tile) for column, tile in caption_tiles if column < last and column + len(tile) > first]
        queries = [part.encode_images(images) for part in parts] if inside else []
        for column, tile in inside:
            # The last tile of captions is often also the first one for the next images.
            if known[0] != column:
                known[1].clear()
                known = (column, [part.encode_captions(tile) for part in parts])
            kept[row, column] = [
                part.model.score(query, encoded).cpu()
                for part, query, encoded in zip(parts, queries, known[1], strict=True)
            ]
        queries.clear()
    return kept


def _score_chunk(
    parts: Sequence[Member],
    image_tiles: Tiles,
    chunk: Tiles,
    tile_captions: int,
    kept: dict[tuple[int, int], list[Tensor]],
    world: World,
    add: Callable[[int, int, list[Tensor]], None],
) -> None:
    """Call `add` with the first image, the first caption and the scores of each tile of a chunk.

    Tiles in `kept` are taken from there and not scored again. The encodings are local variables, so that they are freed
    before the next chunk is encoded.
    """
    captions = torch.cat([tile for _, tile in chunk])
    encoded = [encoded_tiles(part.encode_captions, captions, tile_captions, world) for part in parts]
    with world.together():
        for row, images in image_tiles:
            queries: list[Any] = []
            for number, (column, _) in enumerate(chunk):
                tiles = kept.pop((row, column), [])
                if not tiles:
                    queries = queries or [part.encode_images(images) for part in parts]
                    tiles = [
                        part.model.score(query, known[number]).cpu()
                        for part, query, known in zip(parts, queries, encoded, strict=True)
                    ]
                add(row, column, tiles)


def _sum(tiles: Sequence[Tensor]) -> Tensor:
    """Add scores in the order of the members, as for whole matrices. The sum gives the same ranks as the mean."""
    total = tiles[0]
    for tile in tiles[1:]:
        total = total + tile
    return total


@contextlib.contextmanager
def evaluation_modes(parts: Sequence[Member]) -> Iterator[None]:
    """Run a block with all models in evaluation mode, without gradients."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(evaluation_mode(part.model))
        yield


def top_k(
    model: Scorer,
    dataset: Gallery,
    k: int,
    *,
    images: Tensor | None = None,
    captions: Tensor | None = None,
    images_per_caption: int | None = None,
    tile_images: int = 256,
    tile_captions: int = 512,
    chunk_captions: int = CHUNK_CAPTIONS,
    progress: bool = False,
    description: str = "scores",
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Find the best captions of each image and the best images of each caption, without a score matrix.

    Memory holds one chunk of encoded captions, one tile of encoded images, one tile of scores, and the best results so
    far. Images are encoded again for each chunk.

    Args:
        model: as in `score_matrix`.
        dataset: as in `score_matrix`.
        images: indices of the images, int64 `(n,)`; None: all.
        captions: indices of the captions, int64 `(m,)`; None: all.
        tile_images: images in a tile.
        tile_captions: captions in a tile.
        progress: show a progress bar if stderr is a terminal.
        description: label of the progress bar.
        k: number of results per query; fewer if there are fewer candidates.
        images_per_caption: number of results per caption; None: k.
        chunk_captions: captions encoded at a time, at least one tile.

    Returns:
        For images `(n, k)`, then for captions `(m, k)`: scores in descending order, and int64 indices into the data
        set, on the CPU. Equal scores are in ascending order of their index; NaN is last.

    Raises:
        ValueError: `k` or a tile size is below 1.
    """
    check_tiles(tile_images, tile_captions)
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    if images_per_caption is not None and images_per_caption < 1:
        raise ValueError(f"images_per_caption: expected at least 1, got {images_per_caption}")
    part = Member(model, dataset)
    images = torch.arange(dataset.n_images) if images is None else images
    captions = torch.arange(len(dataset)) if captions is None else captions
    image_tiles = list(enumerate(split_tiles(images, tile_images)))
    caption_tiles = list(enumerate(split_tiles(captions, tile_captions)))
    best = BestMatches([tile for _, tile in image_tiles], [tile for _, tile in caption_tiles], k, images_per_caption)
    per_chunk = max(chunk_captions // tile_captions, 1)
    with evaluation_mode(model), tqdm(
        total=len(image_tiles) * len(caption_tiles), desc=description, unit="tile", leave=False,
        disable=None if progress else True,
    ) as bar:  # fmt: skip

        def merge(row: int, column: int, tiles: list[Tensor]) -> None:
            best.add(row, column, tiles[0])
            bar.update()

        for start in range(0, len(caption_tiles), per_chunk):
            chunk = caption_tiles[start : start + per_chunk]
            _score_chunk([part], image_tiles, chunk, tile_captions, {}, World(), merge)
    return best.of_images, best.of_captions
