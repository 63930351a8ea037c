"""Predictions from counted instructions: the minimum time of a workload's kernels on a GPU, and what bounds it.

Inside: `Gpu`, `GPUS`, `Launch`, `Prediction`, `predict`, and the launches of each workload. The counts are those of
docs/internals/cuda_loops.json, which `make cuda-resources` writes from the machine code of 16-bit inputs. Amounts of
work follow from the sizes and from the tiles of the kernels.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import costs
from benchmarks.costs import DEVICES, REGIONS, WORDS, Cost
from itm_fast.benchmarking.workloads import caption_lengths

__all__ = ["BOUNDS", "COUNTS", "GPUS", "Gpu", "Launch", "Prediction", "predict"]

COUNTS = Path(__file__).resolve().parents[1] / "docs" / "internals" / "cuda_loops.json"
# A multiprocessor issues this many instructions in a cycle, and moves this many bytes of shared memory.
SCHEDULERS, SHARED_BYTES, LANES = 4, 128, 32
HMMA_OPERATIONS = 2 * 16 * 8 * 16
LAUNCH_SECONDS = 3e-6
# Assumed: how much of the time a kernel keeps its busiest unit busy at least.
LEAST_SHARE = 0.6
# Warps of a block of the kernels over tiles, and bytes of a row in a slice (tile_product.h).
TILE_WARPS, SLICE_BYTES = 8, 64
# Rows of a product of a set with itself, and bytes of a row in a slice (set_products.h).
SET_ROWS, SET_SLICE_BYTES = 64, 256
# Channels of a chunk, and columns of a product (RegulationTile112).
CHUNK, COLUMNS = 512, 128
# Of a gradient, for a block that sums it over rows (row_sums.h).
SUM_ROWS, SUM_COLUMNS = 48, 256
WEIGHT_PARTS = 4  # of the tiles, for the gradients of weights
STRIP = 128  # scores that a warp reads at a time: ScoreTile<8, 8, 4>

SCORES, PREPARED = "score_tile<BFloat16, 1,", "prepare_scores<BFloat16, ProductTile<112, 128, 2, 4, 4, 256>, 1>"
LONG_SCORES = "score_long_tiles<BFloat16, 1,"
REGULATED, PREPARED_REGULATION = "regulate_tiles<BFloat16, 1,", "prepare_regulation<BFloat16,"
RANKS = "count_ranks<float, ScoreTile<8, 8, 4>>"
DIFFERENTIATED = "differentiate_regulation<"
# Rows whose steps fit the workspace of its backward: 130 million numbers, 23,000 a row (d = 1024, m = 256).
KEPT_ROWS = 130_000_000 // 23_000
# Products of bfloat16 parts for one product of float32 numbers.
FLOAT_PRODUCTS = 6
# And for one product of a float32 number with a bfloat16 one.
PRODUCTS_OF_ROWS = 3
LOSS = "triplet_with_gradient<TripletProblem<float>, ScoreTile<8, 8, 4>>"
BOOSTING = "triplet_with_gradient<BoostingProblem<float>, ScoreTile<8, 8, 4>>"
BOUNDS = ("tensor cores", "issue slots", "shared memory", "L2 cache", "device memory", "PyTorch", "launches")


@dataclass(frozen=True)
class Gpu:
    """What a bound depends on, beside `costs.Peaks`.

    Attributes:
        code: the architecture in the JSON file.
        cores: multiprocessors.
        tensor_operations: of a multiprocessor's tensor cores in a cycle, dense bf16; the peak gives the clock.
        mma_share: of that peak, by `mma.sync`.
        cache: bytes of the L2 cache per cycle.
    """

    code: str
    cores: int
    tensor_operations: int
    mma_share: float
    cache: int


GPUS = {
    "A100": Gpu("sm_80", 108, 2048, 1.0, 5120),
    "RTX 4090": Gpu("sm_89", 128, 512, 1.0, 2048),
    "H200": Gpu("sm_90", 132, 4096, 0.6, 5120),
}


def clock(device: str) -> float:
    """Return the cycles per second at which the GPU reaches the peak of `DEVICES`."""
    return DEVICES[device].tensor / (GPUS[device].cores * GPUS[device].tensor_operations)


@dataclass(frozen=True)
class Launch:
    """The work of a kernel.

    Attributes:
        kernel: prefix of its name.
        work: for each loop, units of work of all its warps.
        blocks: of equal work; a multiprocessor takes whole ones. 0: many.
        times: number of such launches.
        tasks: instead of `blocks`, numbers and sizes of tasks, in the order in which free multiprocessors take them.
    """

    kernel: str
    work: Mapping[str, float]
    blocks: int = 0
    times: float = 1.0
    tasks: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Work:
    """The launches of a workload.

    Attributes:
        cost: bytes, and the number of all launches.
        counted: launches whose instructions are counted.
        elsewhere: operations of PyTorch's kernels, at the peaks of the tensor cores and of the float32 units.
    """

    cost: Cost
    counted: tuple[Launch, ...] = ()
    elsewhere: Cost = field(default_factory=Cost)

    def __add__(self, other: Work) -> Work:
        return Work(self.cost + other.cost, self.counted + other.counted, self.elsewhere + other.elsewhere)


@dataclass(frozen=True)
class Prediction:
    """Seconds by bound, of all launches together."""

    parts: Mapping[str, float]

    @property
    def bound(self) -> str:
        """Return what takes most of the time."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def longest(self) -> float:
        """Return the seconds if every bound but the launches is reached by `LEAST_SHARE` only."""
        launches = self.parts["launches"]
        return (self.seconds - launches) / LEAST_SHARE + launches


@functools.cache
def counts() -> list[dict[str, Any]]:
    """Read the counts of all loops."""
    found: list[dict[str, Any]] = json.loads(COUNTS.read_text(encoding="utf-8"))["loops"]
    return found


def counts_of(kernel: str, loop: str, device: str) -> dict[str, float]:
    """Return the counts of a loop on a GPU; ValueError if the file has none."""
    for entry in counts():
        if entry["kernel"].startswith(kernel) and entry["loop"] == loop:
            of_device: dict[str, float] = entry["counts"][GPUS[device].code]
            return of_device
    raise ValueError(f"{COUNTS.name}: no loop '{loop}' of {kernel}...>: name it in tools/named_loops.py")


def times(launch: Launch, device: str) -> dict[str, float]:
    """Return the seconds that each unit of the GPU is busy with a launch."""
    gpu, total = GPUS[device], dict.fromkeys(("instructions", "tensor", "shared", "copied"), 0.0)
    for loop, units in launch.work.items():
        for name, value in counts_of(launch.kernel, loop, device).items():
            total[name] += units * value
    uneven = unevenness(launch, gpu.cores)
    cycles = clock(device) * gpu.cores / uneven
    return {
        "tensor cores": total["tensor"] * HMMA_OPERATIONS / (gpu.tensor_operations * gpu.mma_share) / cycles,
        "issue slots": total["instructions"] / SCHEDULERS / cycles,
        "shared memory": total["shared"] / cycles,
        "L2 cache": total["copied"] / (gpu.cache * clock(device)),
    }


def unevenness(launch: Launch, cores: int) -> float:
    """Return how much longer a launch takes than if all multiprocessors had equal work.

    Multiprocessors without a block are idle, and the last ones finish alone.
    """
    if launch.tasks:
        ends = [0.0] * cores
        for count, size in launch.tasks:
            for _ in range(count):
                heapq.heapreplace(ends, ends[0] + size)
        return max(ends) * cores / sum(ends)
    return math.ceil(launch.blocks / cores) * cores / launch.blocks if launch.blocks else 1.0


def predict(work: Work, device: str) -> Prediction:
    """Predict the minimum time of a workload.

    Each launch takes as long as its busiest unit, and all of them together at least as long as their bytes take in
    device memory. Launches and the operations of PyTorch are added.
    """
    parts = dict.fromkeys(BOUNDS, 0.0)
    for launch in work.counted:
        busy = times(launch, device)
        bound = max(busy, key=lambda name: busy[name])
        parts[bound] += launch.times * busy[bound]
    peaks = DEVICES[device]
    memory = work.cost.bytes / peaks.memory
    if memory > sum(parts.values()):
        parts = {**dict.fromkeys(BOUNDS, 0.0), "device memory": memory}
    parts["PyTorch"] = work.elsewhere.tensor / peaks.tensor + work.elsewhere.other / peaks.other
    parts["launches"] = LAUNCH_SECONDS * work.cost.launches
    return Prediction(parts)


def slices(depth: int, element: int = costs.ELEMENT) -> int:
    return math.ceil(depth * element / SLICE_BYTES)


def products(tiles: float, n_slices: int) -> float:
    """Return the HMMA of all warps for products of tiles with N slices each. Empty rows of a tile count, too."""
    # Two steps of 16 in a slice. Of seven groups of 16 rows, a warp takes four at most; it takes a quarter of the
    # groups of 8 columns.
    of_warp = 2 * math.ceil(costs.TILE_REGIONS / 16 / 2) * (costs.TILE_WORDS // 8 // 4)
    return tiles * n_slices * of_warp * TILE_WARPS


def gram_products(sets: int, length: int, row_bytes: int, element: int = costs.ELEMENT) -> float:
    """Return the HMMA of all warps for the Gram matrices of N sets. Empty rows of a tile count, too."""
    tiles = math.ceil(length / SET_ROWS)
    depth = math.ceil(row_bytes / SET_SLICE_BYTES) * SET_SLICE_BYTES / element
    return sets * tiles * (tiles + 1) / 2 * depth / 16 * (SET_ROWS / 16) * (SET_ROWS / 8)


def scores(images: int, captions: int, dim: int = costs.DIM) -> Work:
    """Scores of all pairs: Gram matrices, then a block for each pair of tiles."""
    lengths = caption_lengths(captions).tolist()
    pairs, _ = costs.pairs_of_tiles([REGIONS] * images, lengths)
    columns = images * sum(lengths)  # of the attention: a query and an image each
    work = {
        "product": products(pairs, slices(dim)),
        "statistics": columns * REGIONS / LANES,
        "attention": columns * REGIONS / LANES,
        "cosines": columns / LANES,
        **attended_norms(columns),
    }
    prepared = Launch(PREPARED, {"product": gram_products(images, REGIONS, dim * costs.ELEMENT)}, images)
    return Work(costs.scores(images, captions, dim), (prepared, Launch(SCORES, work, pairs)))


def long_scores(images: int, captions: int, patches: int, words: int, dim: int) -> Work:
    """Scores of all pairs if images have more patches than a tile: Gram matrices, then a block for each pair of tiles.

    An image is a tile of its own. The raw scores of a pair take a product for each piece of the size of a tile. The
    products of its Gram matrix with the attention, both float32, take as many. If sums of its rows take fewer
    multiply-adds, the kernel forms these instead, for runs of queries and columns.
    """
    pairs = images * costs.tiles([words] * captions, costs.TILE_WORDS)
    pieces = pairs * math.ceil(patches / costs.TILE_REGIONS) * math.ceil(words / costs.TILE_WORDS)
    columns = images * captions * words
    cells = columns * patches / LANES
    work = {
        "product": products(pieces, slices(dim)),
        **dict.fromkeys(("raw scores", "statistics"), cells),
        "cosines": columns,
    }
    if sums_rows(patches, dim):
        of_tile = max(costs.TILE_WORDS // words, 1)
        runs = captions // of_tile * math.ceil(of_tile * words / 16) + math.ceil(captions % of_tile * words / 16)
        # Warps multiply all of their 32 columns, 32 depths at a time.
        hmma = PRODUCTS_OF_ROWS * images * runs * 4 * math.ceil(dim / 32) * 2 * math.ceil(patches / 32)
        work |= {"sum of rows": hmma, "squares": columns * dim / LANES}
        work |= dict.fromkeys(("attention in parts", "scales"), cells)
        prepared = Launch(PREPARED, {}, images)
    else:
        # A slice has half as many float32 numbers as 16-bit ones.
        gram = FLOAT_PRODUCTS / 2 * products(pieces, slices(math.ceil(patches / 8) * 8, 4))
        work |= {"Gram product": gram} | dict.fromkeys(("attention", "norms"), cells)
        prepared = Launch(PREPARED, {"product": gram_products(images, patches, dim * costs.ELEMENT)}, images)
    cost = costs.scores(images, captions, dim, words, regions=patches)
    return Work(cost, (prepared, Launch(LONG_SCORES, work, pairs)))


def sums_rows(patches: int, dim: int) -> bool:
    """Return whether the norms of attended vectors of a long set come from sums of its bfloat16 rows."""
    return dim < patches


def attended_norms(columns: float) -> dict[str, float]:
    """Return the work for the norms of attended vectors from Gram matrices, one for each query and image."""
    blocks_of_eight = range(0, REGIONS, 8)
    return {
        "Gram rows": columns * sum(REGIONS - first for first in blocks_of_eight) / LANES,
        "Gram blocks": columns * 8 * len(blocks_of_eight) / LANES,
    }


def loss(batch: int, kernel: str = LOSS) -> Work:
    """A triplet loss, or with `kernel` a boosting loss, with its dense gradient."""
    strips = batch * batch / STRIP
    cost = costs.loss(batch) if kernel == LOSS else costs.boosting_loss(batch)
    return Work(cost, (Launch(kernel, {"scan": strips, "gradient": strips}),))


def backward(batch: int, dim: int = costs.DIM, words: float = WORDS, regions: int = REGIONS) -> Work:
    """The backward of a loss over hardest negatives, three pairs for each anchor.

    Two products of a pair have a float32 matrix of contexts by contexts: the attention with the Gram matrix in six
    products, and the terms of M in three. They take as many instructions per HMMA as the gradient of the contexts,
    whose coefficients have two parts, and so does one more sum for each image, M X. A Gram matrix takes the loop of raw
    scores.
    """
    (lists,) = listed_pairs(3 * batch, dim, words, regions)
    (squares,) = listed_pairs(batch, dim, regions, regions)
    of_matrices = (FLOAT_PRODUCTS + 3) / 2 * regions / dim * lists.work["contexts"]
    more = {"contexts": of_matrices + squares.work["contexts"], "raw scores": squares.work["raw scores"]}
    work = {loop: units + more.get(loop, 0.0) for loop, units in lists.work.items()}
    return Work(costs.backward(batch, dim, words, regions=regions), (replace(lists, work=work),))


def listed_pairs(pairs: int, dim: int = costs.DIM, words: float = WORDS, regions: int = REGIONS) -> tuple[Launch, ...]:
    """Return the loops that multiply the queries of listed pairs with their contexts, in whole tiles."""
    work: dict[str, dict[str, float]] = {}
    for entry in counts():
        if entry["products"]:
            queries, contexts = (math.ceil(n / of) * of for n, of in zip((words, regions), entry["tile"], strict=True))
            multiply_adds = entry["products"] * pairs * queries * contexts * dim
            work.setdefault(entry["kernel"], {})[entry["loop"]] = multiply_adds / LANES
    return tuple(Launch(kernel, of_kernel) for kernel, of_kernel in work.items())


def step(batch: int, dim: int = costs.DIM) -> Work:
    """Scores, hardest-negative loss and the gradients of regions and words."""
    return scores(batch, batch, dim) + loss(batch) + backward(batch, dim)


def long_step(batch: int, patches: int, words: int, dim: int) -> Work:
    """The same if images have more patches than a tile."""
    return long_scores(batch, batch, patches, words, dim) + loss(batch) + backward(batch, dim, words, patches)


def matching_step(batch: int, dim: int = costs.DIM) -> Work:
    """The same with `matching_loss`. Scores and loss have a barrier of the grid between them, as launches have."""
    return replace(step(batch, dim), cost=costs.matching_step(batch, dim))


def regulated_scores(images: int, captions: int, dim: int = costs.DIM, width: int = costs.ALIGNMENT) -> Work:
    """RCAR's text-to-image scores with two steps of RAR and one of RCR: pairs of a tile of words and an image."""
    lengths = caption_lengths(captions).tolist()
    pairs = costs.tiles(lengths, costs.TILE_REGIONS) * images
    hidden, narrow, chunks = 2 * width, width // 2, math.ceil(dim / CHUNK)
    outputs = math.ceil(width / COLUMNS)
    # For each product of a tile, its slices: attention of the first step; differences of both steps, from attended
    # vectors; alignments; RCR; RAR; channels and attention of the second step.
    depth = slices(dim) + 2 * math.ceil(dim / COLUMNS) * slices(REGIONS)
    depth += 2 * chunks * outputs * slices(CHUNK)
    depth += (math.ceil(narrow / COLUMNS) + math.ceil(hidden / COLUMNS)) * slices(width)
    depth += 2 * 2 * outputs * slices(width)
    depth += math.ceil(dim / COLUMNS) * slices(hidden) + chunks * slices(CHUNK)
    rows = images * sum(lengths)
    of_row = {
        "differences": 2 * dim,
        "channels": dim,
        "alignments": 2 * chunks * width,
        "wide layer": hidden,
        "narrow layer": narrow,
        "aggregation": 2 * width,
    }
    work = {name: rows * channels / LANES for name, channels in of_row.items()}
    work |= {"product": products(pairs, depth), "attention": 2.0 * rows} | attended_norms(2.0 * rows)
    # The rows of the contexts are float32.
    prepared = Launch(PREPARED_REGULATION, {"product": gram_products(images, REGIONS, dim * 4, 4)}, images)
    return Work(costs.regulated_scores(images, captions, dim), (prepared, Launch(REGULATED, work, pairs)))


def regulated_step(batch: int, dim: int = costs.DIM, partners: int = 3) -> Work:
    """RCAR's scores, a loss, and the backward, which recomputes `partners` captions for each image.

    With hardest negatives their words fill tiles of 16 rows, with all negatives whole tiles. Weights and contexts get
    their gradients from sums of rows, everything else from products.
    """
    forward = regulated_scores(batch, batch, dim) + loss(batch)
    cost = costs.regulated_step(batch, dim, partners=partners)
    words = partners * WORDS
    of_pass = (cost.tensor - forward.cost.tensor) / 3 * (math.ceil(words / 16) * 16 / words)
    hmma = FLOAT_PRODUCTS * of_pass / (2 * 16 * 8 * 16)
    # As many tiles at a time as the workspace has room for, with barriers before and after the sums.
    tiles = batch * math.ceil(words / costs.TILE_REGIONS)
    chunks = math.ceil(words * batch / KEPT_ROWS)
    of_tiles = Launch(DIFFERENTIATED, {"product": 2 * hmma / chunks}, math.ceil(tiles / chunks), chunks)
    of_rows, of_pairs = weight_tasks(words * batch / chunks, dim)
    of_contexts = (math.ceil(batch * sum_tasks(REGIONS, dim) / chunks), 4.0 * words)
    first = sorted([*of_rows, of_contexts], key=lambda task: -task[1])
    tasks = (*first, *of_pairs)
    sums = Launch(DIFFERENTIATED, {"sum of rows": hmma / chunks}, 0, chunks, tasks)
    return Work(cost, (*forward.counted, of_tiles, sums))


def weight_tasks(rows: float, dim: int) -> list[list[tuple[int, float]]]:
    """Return numbers and sizes of the tasks for the gradients of RCAR's weights: those that sum all rows, and the rest.

    The rest sums one row per pair. The time of biases is not counted.
    """
    width, hidden, narrow = costs.ALIGNMENT, 2 * costs.ALIGNMENT, costs.ALIGNMENT // 2
    of_rows = [(width, dim)] * 2 + [(hidden, width), (dim, hidden), (narrow, width), (1, narrow)]
    of_rows += [(width, width)] * 2
    of_pairs = [(width, width), (1, width)] * 2 + [(1, width)]
    depths = ((of_rows, rows), (of_pairs, rows / WORDS))
    return [[(WEIGHT_PARTS * sum_tasks(*sizes), depth / WEIGHT_PARTS) for sizes in layers] for layers, depth in depths]


def sum_tasks(rows: int, columns: int) -> int:
    """Return the number of blocks that share the sums of a gradient of `rows` x `columns` numbers."""
    return math.ceil(rows / SUM_ROWS) * math.ceil(columns / SUM_COLUMNS)


def ranks(images: int, captions: int) -> Work:
    """Ranks in both directions."""
    work = {"comparison": images * captions / STRIP}
    return Work(costs.ranks(images, captions), (Launch(RANKS, work),))


def evaluation(images: int, captions: int, dim: int = costs.DIM) -> Work:
    """Scores of all pairs and ranks in both directions."""
    return scores(images, captions, dim) + ranks(images, captions)


def repeated(work: Work, count: float) -> Work:
    """Return the work of `count` such steps."""
    launches: Sequence[Launch] = [replace(one, times=one.times * count) for one in work.counted]
    return Work(work.cost.times(count), tuple(launches), work.elsewhere.times(count))


def encoders(batch: int) -> Work:
    """SCAN's encoders, which PyTorch computes: products at the peak of the tensor cores."""
    cost = costs.encoders(batch)
    return Work(Cost(bytes=cost.bytes), (), Cost(tensor=cost.tensor))
