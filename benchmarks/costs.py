"""The cost model: operations and bytes of a workload, and the minimum time that they take on a GPU.

Inside: `Cost`, one function per workload, `Peaks` of the GPUs in `DEVICES`, and `floors`.

A multiply-add counts as two operations. Tensor operations are the products that tensor cores can compute; all others
run on the ordinary float32 units. Bytes are what a workload must read and write in device memory once, independent of
the kernel. Captions have 13 words, images 36 regions, vectors 1024 components of two bytes unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

__all__ = [
    "DEVICES",
    "Cost",
    "Peaks",
    "backward",
    "boosting_loss",
    "device_of",
    "encoders",
    "epoch",
    "evaluation",
    "floors",
    "gemm",
    "loss",
    "matching_step",
    "most_tiles",
    "pairs_of_tiles",
    "ranks",
    "regulated_scores",
    "regulated_step",
    "scores",
    "step",
    "tiles",
]

WORDS, REGIONS, DIM, ELEMENT = 13.0, 36, 1024, 2
# RCAR as published: two steps of RAR and one of RCR; and the number of components of an alignment.
ALIGNMENT, STEPS = 256, 2
# COCO's training split, and its five captions per image.
EPOCH_IMAGES, EPOCH_CAPTIONS = 113_287, 5
# Widths of a region's features and of an embedded word.
FEATURES, EMBEDDED = 2048, 300

# Rows of a tile of regions and of one of words, and maximum sets per tile (ScoreTile112, kTileSets).
TILE_REGIONS, TILE_WORDS, TILE_SETS = 112, 128, 32

# In addition to the quadratic form, per region and word: clip, square and add, divide, scale, exponential, two sums.
SOFTMAX_OPERATIONS = 8


@dataclass(frozen=True)
class Cost:
    """Operations, bytes and launches."""

    tensor: float = 0.0  # operations
    other: float = 0.0  # operations
    bytes: float = 0.0
    launches: int = 0

    @property
    def operations(self) -> float:
        return self.tensor + self.other

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: float) -> Cost:
        return Cost(self.tensor * count, self.other * count, self.bytes * count, round(self.launches * count))


def gemm(rows: int, columns: int, depth: int, element: int = ELEMENT) -> Cost:
    """Return the cost of a matrix product, with the result in the operands' type."""
    moved = element * (rows * depth + columns * depth + rows * columns)
    return Cost(tensor=2.0 * rows * columns * depth, bytes=moved, launches=1)


def scores(
    images: int,
    captions: int,
    dim: int = DIM,
    words: float = WORDS,
    element: int = ELEMENT,
    regions: int = REGIONS,
) -> Cost:
    """Return the cost of scores of all pairs in the Gram form: products of regions and words, Gram matrices, epilogue.

    The epilogue needs, for each image and word, the softmax over the regions and the quadratic form of its numerators,
    K (K + 1) / 2 multiply-adds by symmetry. If the K regions are more than a tile has, tensor cores multiply the Gram
    matrix with the numerators, and K multiply-adds are left. Or they form the attended vectors, if these take fewer
    products. Two launches: plan and Gram matrices, pairs.
    """
    region_rows, word_rows = images * regions, captions * words
    cells = region_rows * word_rows
    gram, gram_bytes = 2 * images * regions**2 * dim, 2 * 4 * images * regions**2
    if regions <= TILE_REGIONS:
        epilogue = cells * (regions + 1 + SOFTMAX_OPERATIONS)
    else:
        gram += 2 * cells * regions
        epilogue = cells * (2 + SOFTMAX_OPERATIONS)
        if 2 * cells * dim < gram:
            gram, gram_bytes = 2 * cells * dim, 0
    moved = element * (region_rows + word_rows) * dim + gram_bytes + 4 * images * captions
    return Cost(2 * cells * dim + gram, epilogue, moved, launches=2)


def tiles(lengths: Iterable[int], rows: int) -> int:
    """Return the number of tiles of `rows` rows when whole sets of these lengths are packed in order."""
    count, sets, left = 0, 0, 0
    for length in lengths:
        if count == 0 or length > left or sets == TILE_SETS:
            count, sets, left = count + 1, 0, rows
        sets, left = sets + 1, left - length
    return count


def most_tiles(sets: int, total: int, rows: int) -> int:
    """Return the maximum number of tiles, given only the number of sets and of all their rows."""
    return min(2 * total // (rows + 1) + sets // TILE_SETS + 1, sets)


def pairs_of_tiles(region_counts: Sequence[int], word_counts: Sequence[int]) -> tuple[int, int]:
    """Return the pairs of tiles of scores: existing ones, and the maximum. Each has a thread block."""
    sides = ((region_counts, TILE_REGIONS), (word_counts, TILE_WORDS))
    found = [tiles(lengths, rows) for lengths, rows in sides]
    most = [most_tiles(len(lengths), sum(lengths), rows) for lengths, rows in sides]
    return found[0] * found[1], most[0] * most[1]


def loss(batch: int) -> Cost:
    """Return the cost of a triplet loss and its dense gradient in one launch."""
    return Cost(other=4.0 * batch**2, bytes=8.0 * batch**2, launches=1)


def boosting_loss(batch: int) -> Cost:
    """As `loss`, for the differences from the scores of an anchor branch, which are read, too."""
    return Cost(other=5.0 * batch**2, bytes=12.0 * batch**2, launches=1)


def backward(batch: int, dim: int = DIM, words: float = WORDS, element: int = ELEMENT, regions: int = REGIONS) -> Cost:
    """Return the cost of the backward of a loss over hardest negatives: recomputes at most three pairs per anchor.

    On tensor cores, a pair of K regions and n words needs its scores, `K n dim` multiply-adds, and the sums of both
    gradients, `2 K n dim`. An image needs its Gram matrix and one more sum, `K K dim` each. Sums count twice: their
    float32 coefficients have two parts of bfloat16. Two products of `K K n` float32 numbers for each pair count six and
    three times: the attention times the Gram matrix has three parts, the terms of M have two. Three launches: the one
    that scales the stored gradient of the loss (it returns at once if the incoming one is 1), lists, and pairs with
    their sums.
    """
    pairs, rows = 3 * batch, batch * (regions + words)
    of_pairs = 5 * regions * words * dim + (6 + 3) * regions**2 * words
    products = 2 * (pairs * of_pairs + 3 * batch * regions**2 * dim)
    epilogue = 2 * pairs * words * SOFTMAX_OPERATIONS * regions
    moved = 2 * element * rows * dim + 4 * batch**2
    return Cost(tensor=products, other=epilogue, bytes=moved, launches=3)


def step(batch: int, dim: int = DIM, words: float = WORDS, element: int = ELEMENT, regions: int = REGIONS) -> Cost:
    """Return the cost of scores, hardest-negative loss, and gradients of regions and words, without the encoders.

    Scores and loss are separate calls: six launches, without the fills and copies of PyTorch.
    """
    forward = scores(batch, batch, dim, words, element, regions) + loss(batch)
    return forward + backward(batch, dim, words, element, regions)


def matching_step(batch: int, dim: int = DIM, words: float = WORDS, element: int = ELEMENT) -> Cost:
    """Return the cost of a step with `matching_loss`: as `step`, with pairs and loss in the same launch."""
    return step(batch, dim, words, element) + Cost(launches=-1)


def regulated_scores(
    images: int,
    captions: int,
    dim: int = DIM,
    words: float = WORDS,
    element: int = ELEMENT,
    alignment: int = ALIGNMENT,
    steps: int = STEPS,
) -> Cost:
    """Return the cost of RCAR's text-to-image scores: `steps` of RAR, one less of RCR. Two launches: plan, pairs.

    Rows are pairs of a word and an image. The squares in an alignment need the attended vector itself; Gram matrices,
    which give its norm, are left out. Weights are float32, and read once.
    """
    pairs = images * captions
    products, epilogue = _regulated(pairs, pairs * words, dim, alignment, steps)
    moved = element * (images * REGIONS + captions * words) * dim + 4 * pairs + 4 * _weights(dim, alignment, steps)
    return Cost(products, epilogue, moved, launches=2)


def _regulated(pairs: float, rows: float, dim: int, alignment: int, steps: int) -> tuple[float, float]:
    """Return the products of RCAR's forward, and its other operations.

    For each step, a row takes its scores with the regions and the attended vector, the alignment, and the hidden layer
    of RAR; for each step but one, also RCR's perceptrons, of hidden widths 2m and m / 2. A pair takes RAR's other
    hidden layer at each step. Products with a single row or column (the last layers of temperature, weight and score)
    do not use tensor cores. Tanh, exponential and division count as one operation, a clamp as two.
    """
    d, m, k = dim, alignment, REGIONS
    of_row = steps * (4 * k * d + 2 * d * m + 2 * m * m) + (steps - 1) * (4 * m * m + 4 * m * d + m * m)
    products = rows * of_row + pairs * steps * 2 * m * m
    # Attention: its softmax. Alignment: the attended vector's norm (2d) and division, the difference and its square,
    # then bias, norm (2m) and division.
    attention = SOFTMAX_OPERATIONS * k + 5 * d + 4 * m
    # RCR: bias and tanh of the wide layer, then bias, tanh, sum and clamp of every channel, which multiplies the query;
    # bias and tanh of the narrow layer, its product with one row, and bias, sum and clip of the temperature.
    correspondence = 2 * 2 * m + 6 * d + 2 * (m / 2) + 2 * (m / 2) + 3
    # RAR: bias and tanh, product with the guide, with one row, softmax (6 with its bias), and the weighted sum.
    aggregation = 2 * m + m + 2 * m + 6 + 2 * m
    rest = rows * (steps * (attention + aggregation) + (steps - 1) * correspondence + m)
    # The guide's bias and tanh, and norm and division of the weighted sum; the mean of the first, and the score.
    rest += pairs * (steps * (2 * m + 3 * m) + m + 2 * m + 2)
    return products, rest


def _weights(dim: int, alignment: int, steps: int) -> int:
    """Return the number of RCAR's weights."""
    m, narrow = alignment, alignment // 2
    align = m * dim + m
    correspondence = (2 * m * m + 2 * m) + (dim * 2 * m + dim) + (narrow * m + narrow) + (narrow + 1)
    aggregation = 2 * (m * m + m) + m + 1
    return steps * align + (steps - 1) * correspondence + steps * aggregation + m + 1


def regulated_step(
    batch: int,
    dim: int = DIM,
    words: float = WORDS,
    element: int = ELEMENT,
    alignment: int = ALIGNMENT,
    steps: int = STEPS,
    partners: int = 3,
) -> Cost:
    """Return the cost of RCAR's scores, a loss, and the gradients of regions, words and weights.

    `partners` pairs per anchor are recomputed, in float32: at most three with hardest negatives, as in `step`, and
    `batch` with all. Each takes one forward, and two products for each of its products. Three launches: the gradient of
    the scores, operands, pairs.
    """
    pairs = partners * batch
    products, epilogue = _regulated(pairs, pairs * words, dim, alignment, steps)
    moved = 2 * element * batch * (REGIONS + words) * dim + 4 * batch**2 + 2 * 4 * _weights(dim, alignment, steps)
    backward = Cost(3 * products, 3 * epilogue, moved, launches=3)
    return regulated_scores(batch, batch, dim, words, element, alignment, steps) + loss(batch) + backward


def ranks(images: int, captions: int) -> Cost:
    """Return the cost of ranks: every score is read once and compared for its image and for its caption."""
    return Cost(
        other=2.0 * images * captions, bytes=4.0 * images * captions + 8.0 * (images + 2 * captions), launches=2
    )


def evaluation(images: int, captions: int, dim: int = DIM, words: float = WORDS, element: int = ELEMENT) -> Cost:
    """Return the cost of scores of all pairs and ranks in both directions."""
    return scores(images, captions, dim, words, element) + ranks(images, captions)


def encoders(batch: int) -> Cost:
    """SCAN's encoders, forward and backward (three products for each one): the linear layer over the regions, whose
    features are read in float32, and the bidirectional GRU over embedded words, with three gates a direction."""
    regions = 2.0 * batch * REGIONS * FEATURES * DIM
    gru = 2.0 * batch * WORDS * 2 * 3 * (EMBEDDED + DIM) * DIM
    return Cost(tensor=3 * (regions + gru), bytes=4.0 * batch * REGIONS * FEATURES)


def epoch(batch: int = 128) -> Cost:
    """Return the cost of one epoch of hardest-negative steps on COCO, without encoders and reading of features."""
    return matching_step(batch).times(EPOCH_IMAGES * EPOCH_CAPTIONS / batch)


@dataclass(frozen=True)
class Peaks:
    """A vendor's data for a GPU.

    Attributes:
        tensor: dense bf16 products with float32 sums, operations per second.
        other: float32 operations per second.
        memory: bytes per second.
        source: where the vendor states the three numbers.
    """

    tensor: float
    other: float
    memory: float
    source: str


DEVICES = {
    "A100": Peaks(312e12, 19.5e12, 2.039e12, "NVIDIA A100 data sheet, SXM, 80 GB"),
    "RTX 4090": Peaks(165.2e12, 82.6e12, 1.008e12, "NVIDIA Ada GPU architecture white paper, appendix A"),
    "H200": Peaks(989.5e12, 66.9e12, 4.8e12, "NVIDIA H200 data sheet, SXM"),
}


def device_of(name: str) -> str | None:
    """Return the entry of `DEVICES` for a GPU's name: "H200" for "NVIDIA H200"."""
    return next((key for key in DEVICES if key in name), None)


def floors(cost: Cost, peaks: Peaks) -> tuple[float, float]:
    """Return seconds of the tensor operations at the tensor cores' peak, and of the bytes at the memory's."""
    return cost.tensor / peaks.tensor, cost.bytes / peaks.memory
