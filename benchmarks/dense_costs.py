"""The backward of scores in blocks, for gradients of all pairs, in the cost model: operations, bytes and counted loops.

Inside: `Chunks`, `chunks`, `backward_cost`, `backward`, `listed_seconds`, `on_tensor_cores`, `tile_seconds`, `step`,
`step_cost`.
Images have 36 regions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks import costs
from benchmarks.costs import DIM, ELEMENT, REGIONS, SOFTMAX_OPERATIONS, WORDS, Cost
from benchmarks.kernels import (
    LANES,
    LAUNCH_SECONDS,
    TILE_WARPS,
    Launch,
    Work,
    listed_pairs,
    loss,
    scores,
    slices,
    times,
)
from itm_fast.benchmarking.workloads import caption_lengths

__all__ = [
    "Chunks",
    "backward",
    "backward_cost",
    "chunks",
    "listed_seconds",
    "on_tensor_cores",
    "step",
    "step_cost",
    "tile_seconds",
]

KERNEL = "backpropagate_pairs<BFloat16>"
# Rows of a tile of regions and of one of words, parts of a coefficient, rows and columns of a task of a product, and
# numbers in the workspace (block_plan.h, part_steps.h, cross_attention_backward_launch.h).
ROWS, COLUMNS, PARTS, SIDE, ROOM = 80, 64, 2, 128, 7_000_000
DEPTH = 32  # of a step of a product
WIDTH = math.ceil(REGIONS / 8) * 8  # of a row of a Gram matrix
BLOCK = 4  # rows and columns of the terms of M that a thread sums
# Terms of M of an image: those on the diagonal of its blocks and right of it.
TERMS = math.ceil(REGIONS / BLOCK) * (math.ceil(REGIONS / BLOCK) + 1) // 2 * BLOCK**2


@dataclass(frozen=True)
class Chunks:
    """Runs of context tiles and of query tiles, and the tiles of each."""

    across: int
    down: int
    context_tiles: int
    query_tiles: int


def chunks(context_tiles: int, query_tiles: int, room: int = ROOM) -> Chunks:
    """Return how tiles are divided into chunks, as BlockChunks in block_plan.h does."""
    of_context = ROWS * WIDTH
    of_pair = PARTS * (ROWS + 8) * (COLUMNS + 8) + of_context + COLUMNS
    side = 1
    while 4 * (side + 1) * (5 * (side + 1) * of_pair + of_context) <= room:
        side += 1
    across = 4 * side if 4 * side * (5 * side * of_pair + of_context) <= room else 1
    down = math.ceil(query_tiles / min((room // across - of_context) // of_pair, query_tiles))
    of_queries = math.ceil(query_tiles / down)
    across = math.ceil(context_tiles / min(room // (of_queries * of_pair + of_context), context_tiles))
    return Chunks(across, down, math.ceil(context_tiles / across), of_queries)


def backward_cost(batch: int, dim: int = DIM, words: float = WORDS, element: int = ELEMENT) -> Cost:
    """Return the cost of the backward of a loss over all negatives.

    As `costs.backward`, for all pairs. Two products are on the ordinary units here: `K K n` multiply-adds with a Gram
    matrix, and about half as many for M, which is symmetric.
    """
    pairs, rows = batch**2, batch * (REGIONS + words)
    products = 2 * (pairs * 5 * REGIONS * words * dim + 3 * batch * REGIONS**2 * dim)
    other = pairs * words * (2 * SOFTMAX_OPERATIONS * REGIONS + 2 * (REGIONS**2 + TERMS))
    return Cost(products, other, 2 * element * rows * dim + 4 * batch**2, launches=3)


def backward(batch: int, dim: int = DIM) -> Work:
    """The backward of a loss over all negatives. Steps between barriers count as launches of their own.

    A multiprocessor has one block, so the steps of a tile do not overlap. The softmax over the regions and its gradient
    are not counted, as in `kernels.listed_pairs`.
    """
    lengths = caption_lengths(batch).tolist()
    found = chunks(*_tiles(batch))
    count = found.across * found.down
    contexts, queries = batch * REGIONS / found.across, sum(lengths) / found.down  # rows of a chunk
    # For each product: rows in groups of 16, times the depth in steps, in parts.
    sides = ((contexts, queries), (queries, contexts))
    hmma = sum(
        math.ceil(rows / 16) * (dim / 8) * math.ceil(depth / DEPTH) * (DEPTH / 16) * PARTS for rows, depth in sides
    )
    tasks = [(math.ceil(rows / SIDE) * math.ceil(dim / SIDE), float(depth)) for rows, depth in sides]
    # Rows in three groups of 16, depth in groups of 8.
    squares = 48 * WIDTH * batch * dim / LANES
    launches = (
        Launch(KERNEL, {"raw scores": batch * 48**2 * dim / LANES}, batch),
        *_tile_steps(batch, dim),
        Launch(KERNEL, {"block sums": hmma}, 0, count, tuple(sorted(tasks, key=lambda task: -task[1]))),
        Launch(KERNEL, {"contexts": squares}, batch * math.ceil(dim / 256)),
    )
    return Work(backward_cost(batch, dim), launches)


def _tiles(batch: int) -> tuple[int, int]:
    return costs.tiles([REGIONS] * batch, ROWS), costs.tiles(caption_lengths(batch).tolist(), COLUMNS)


def _tile_steps(batch: int, dim: int = DIM) -> tuple[Launch, ...]:
    """The steps of the tiles of a chunk, for all chunks."""
    of_sides = _tiles(batch)
    found = chunks(*of_sides)
    count = found.across * found.down
    tiles = math.ceil(math.prod(of_sides) / count)
    raw = batch * REGIONS * sum(caption_lengths(batch).tolist()) / count / LANES
    work = {
        # Of five groups of 16 rows, a warp takes three at most, of eight groups of 8 columns two; two steps of 16.
        "block product": tiles * slices(dim) * TILE_WARPS * 3 * 2 * 2,
        "block statistics": 2 * raw,
        "block Gram rows": raw * WIDTH / 8,
        "block cosines": raw,
        "block weights": raw,
        "block squares": raw * TERMS / REGIONS,
    }
    return tuple(Launch(KERNEL, {loop: units}, tiles, count) for loop, units in work.items())


def tile_seconds(batch: int, device: str) -> dict[str, float]:
    """Return the seconds of each step of the tiles: those of its busiest unit."""
    return {loop: step.times * max(times(step, device).values()) for step in _tile_steps(batch) for loop in step.work}


def on_tensor_cores(batch: int, device: str) -> dict[str, float]:
    """Return the seconds that tensor cores would take for the two products which now are on the ordinary units.

    Both operands in two bfloat16 parts, three products. The instructions that split float32 are not counted.
    """
    product = _tile_steps(batch)[0]
    rows, columns = math.ceil(REGIONS / 16), math.ceil(REGIONS / 8)
    # M is symmetric: its pieces of 16 x 8 on the diagonal or to its right.
    pieces = sum(columns - 2 * row for row in range(rows))
    hmma = {"block Gram rows": rows * rows * COLUMNS // 8, "block squares": pieces * COLUMNS // 16}
    images = product.blocks * (ROWS // REGIONS)
    alone = {loop: replace(product, work={"block product": 3 * images * count}) for loop, count in hmma.items()}
    return {loop: product.times * times(launch, device)["tensor cores"] for loop, launch in alone.items()}


def listed_seconds(batch: int, device: str) -> float:
    """Return the predicted seconds of the same backward as lists of pairs.

    A warp skips the groups of 16 rows that a caption does not have: their HMMA are left out, their copies count.
    """
    (lists,) = listed_pairs(batch**2)
    busy = times(lists, device)
    queries = times(Launch(KERNEL, {"queries": lists.work["queries"]}), device)
    busy["tensor cores"] -= queries["tensor cores"] * (1 - math.ceil(WORDS / 16) * 16 / 48)
    return max(busy.values()) + LAUNCH_SECONDS * backward_cost(batch).launches


def step_cost(batch: int, dim: int = DIM, words: float = WORDS, element: int = ELEMENT) -> Cost:
    """Return the cost of scores, a loss over all negatives, and the gradients of regions and words."""
    forward = costs.scores(batch, batch, dim, words, element) + costs.loss(batch)
    return forward + backward_cost(batch, dim, words, element)


def step(batch: int, dim: int = DIM) -> Work:
    """Scores, a loss over all negatives, and the gradients of regions and words."""
    return scores(batch, batch, dim) + loss(batch) + backward(batch, dim)
