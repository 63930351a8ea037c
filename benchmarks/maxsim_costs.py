"""MaxSim in the cost model: operations and bytes, and the work of the counted loops.

Inside: `scores_cost`, `step_cost`, `scores`, `step`. All pairs of sets are scored in the direction of the queries.
"""

from __future__ import annotations

import math

from benchmarks import costs
from benchmarks.costs import ELEMENT, TILE_REGIONS, TILE_WORDS, Cost
from benchmarks.kernels import LANES, Launch, Work, loss, products, slices
from benchmarks.maxsim_workloads import MaxsimSizes

__all__ = ["GATHERED", "GATHERED_COLUMNS", "MAXSIM", "MAXSIM_SIZES", "scores", "scores_cost", "step", "step_cost"]

MAXSIM, GATHERED = "score_maxsim<BFloat16, 1>", "gather_maxsim<BFloat16>"
# Captions with ViT's patches, and passages as long as ColBERT's.
MAXSIM_SIZES = (MaxsimSizes(64, 64, 512, words=32, patches=196), MaxsimSizes(64, 64, 128, words=32, patches=1024))
GATHERED_COLUMNS = 256  # of a row, for a warp (maxsim_backward.h)


def scores_cost(sizes: MaxsimSizes, element: int = ELEMENT) -> Cost:
    """Return the cost of the scores: every product of rows is compared once. Two launches: plan, pairs of tiles."""
    queries, contexts = sizes.captions * sizes.words, sizes.images * sizes.patches
    moved = element * (queries + contexts) * sizes.dim + 4 * sizes.captions * sizes.images
    return Cost(2.0 * queries * contexts * sizes.dim, 1.0 * queries * contexts, moved, launches=2)


def step_cost(sizes: MaxsimSizes, element: int = ELEMENT) -> Cost:
    """Return the cost of scores, hardest-negative loss, and gradients of both sides.

    The backward multiplies at most three pairs per anchor again. It writes and reads an index for each of their query
    rows, and adds each query row to a context row and back. Four launches: the one in which autograd returns the stored
    gradient, plan, pairs of tiles, sums.
    """
    batch, rows = sizes.captions, sizes.captions * sizes.words + sizes.images * sizes.patches
    chosen = 3 * batch * sizes.words
    other = chosen * sizes.patches + 2 * 2 * chosen * sizes.dim
    moved = 2 * element * rows * sizes.dim + 4 * batch * sizes.images + 2 * 4 * chosen
    backward = Cost(2.0 * chosen * sizes.patches * sizes.dim, other, moved, launches=4)
    return scores_cost(sizes, element) + costs.loss(batch) + backward


def _of_tiles(sizes: MaxsimSizes, pairs: float) -> Launch:
    """The launch over `pairs` pairs of tiles; a set longer than a tile takes several products."""
    of_pair = math.ceil(sizes.patches / TILE_REGIONS) * math.ceil(sizes.words / TILE_WORDS)
    compared = pairs * _queries_of_tile(sizes) * sizes.words * _contexts_of_tile(sizes) * sizes.patches
    work = {"product": products(pairs * of_pair, slices(sizes.dim)), "maxima": compared / LANES}
    return Launch(MAXSIM, work, math.ceil(pairs))


def _contexts_of_tile(sizes: MaxsimSizes) -> float:
    return sizes.images / costs.tiles([sizes.patches] * sizes.images, TILE_REGIONS)


def _queries_of_tile(sizes: MaxsimSizes) -> float:
    return sizes.captions / costs.tiles([sizes.words] * sizes.captions, TILE_WORDS)


def _pairs_of_tiles(sizes: MaxsimSizes) -> float:
    return sizes.captions / _queries_of_tile(sizes) * sizes.images / _contexts_of_tile(sizes)


def scores(sizes: MaxsimSizes) -> Work:
    """Scores of all pairs: a block for each pair of tiles."""
    return Work(scores_cost(sizes), (_of_tiles(sizes, _pairs_of_tiles(sizes)),))


def step(sizes: MaxsimSizes) -> Work:
    """Scores, hardest-negative loss and gradients: pairs of tiles that hold three pairs per anchor, then sums of rows.

    A row of either side goes through the other sets, then through the three partners of its set. In each of them, a
    context row searches the query rows whose best partner it is.
    """
    batch, parts = sizes.captions, math.ceil(sizes.dim / GATHERED_COLUMNS)
    rows, of_contexts = batch * (sizes.words + sizes.patches), batch * sizes.patches
    gathered = {
        "candidates": rows * parts * math.ceil(batch / LANES),
        "partners": 3.0 * rows * parts,
        "search": 3.0 * of_contexts * parts * math.ceil(sizes.words / LANES),
        "rows": 3.0 * batch * sizes.words * parts,
    }
    again = _of_tiles(sizes, min(3.0 * batch, _pairs_of_tiles(sizes)))
    launches = (*scores(sizes).counted, *loss(batch).counted, again, Launch(GATHERED, gathered))
    return Work(step_cost(sizes), launches)
