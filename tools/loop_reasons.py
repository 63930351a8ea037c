"""Why main loops of CUDA kernels issue more than the goal allows; `tools/cuda_resources.py` writes this to its page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Other instructions per 16 HMMA, and instructions per asynchronous copy.
GOAL = (40, 12)
# Other instructions per 16 HMMA that take as long as these HMMA.
LIMITS = {"A100": 112, "RTX 4090": 496, "H200": 91}

_SPLIT = (
    "Splitting floats: 11 instructions per pair for three parts (three conversions, four shifts, four subtractions)"
)

_WAITS = "The kernel waits for the L2 cache and the tensor cores ([Predictions](../performance/predictions.md))."


@dataclass(frozen=True)
class Reason:
    """Of loops above the goal.

    Attributes:
        kernels: prefixes of the kernels' names.
        tensor: HMMA of the loops.
        instructions: what the loops issue.
        why: why they stay.
    """

    kernels: tuple[str, ...]
    tensor: tuple[int, ...]
    instructions: str
    why: str


def _of_scores(products: str) -> tuple[str, ...]:
    return (
        f"score_tile<{products}",
        f"score_maxsim<{products.rstrip(',')}>",
        f"score_long_tiles<{products}",
        f"matching_loss<TripletProblem<float>, {products}",
        f"matching_loss<BoostingProblem<float>, {products}",
    )


_SPILLING = (
    "score_long_tiles<",
    "matching_loss<TripletProblem<float>, ",
    "matching_loss<BoostingProblem<float>, ",
)
REASONS = (
    Reason(
        (*_of_scores("float, 3,"), "score_long_tiles<"),
        (96,),
        f"{_SPLIT}, 264 for 24 pairs; 64 additions of slices; 29 to 39 for copies; 12 loads of fragments. On sm_80 and "
        "sm_90 `score_long_tiles` also accesses local memory.",
        "Below 91. Splitting in the first launch would copy 6 bytes per number instead of 4, and load 1.5 times "
        "the fragments. Fragments of float32 are not loaded ahead: splitting hides the latency of loads and needs the "
        "registers. `score_long_tiles` multiplies float32 Gram matrices in three parts for every dtype.",
    ),
    Reason(
        ("score_long_tiles<float, 2,",),
        (48,),
        "As the next loop, and accesses to local memory.",
        "Bound by issue slots on an A100 and an H200, where two blocks per multiprocessor leave 128 registers. An H200 "
        "is faster with them.",
    ),
    Reason(
        _of_scores("float, 2,"),
        (48,),
        "Splitting 24 pairs in two parts: 144; 64 additions of slices; 30 for copies; 12 loads of fragments.",
        "Equal to the limit of an H200. Without slices, truncated sums would miss the accuracy of "
        '"high" ([Precision](design.md#6-precision)).',
    ),
    Reason(
        _of_scores("float, 1,"),
        (16,),
        "24 conversions, 30 to 33 for copies, 12 loads of fragments; the rest decides which products to skip.",
        'Bound by issue slots on an A100 and an H200. Only float32 rows with precision "medium" take this loop; 16-bit '
        "rows, as under autocast, take one with 32 to 43 other instructions. Two blocks per multiprocessor leave no "
        "registers for a loop without decisions. "
        "One block of `score_tile` and `score_maxsim` fits on sm_86 and sm_89, "
        "and one of `matching_loss` below sm_90: there `matching_loss` has no bound on registers, and the bound of the "
        "others costs no spills.",
    ),
    Reason(
        ("differentiate_regulation<",),
        (96,),
        f"{_SPLIT}, 264; 64 additions of slices; 70 for copies; 12 loads of fragments.",
        "Below 91. Rows may end within a copy, so each computes its size: the backward's rows are not padded.",
    ),
    Reason(
        ("regulate_tiles<float, 3,",),
        (48,),
        "As above, with 16 warps: each splits the fragments of half as many rows for as many columns.",
        "Bound by issue slots on an H200. But it is faster with 16 warps, which hide latencies, than with eight that "
        "issue less. Its copies compute their sizes, as above.",
    ),
    Reason(
        ("regulate_tiles<float, 2,",),
        (24,),
        "Splitting in two parts, additions of slices and copies, with 16 warps.",
        "Bound by issue slots on an A100 and an H200. Sixteen warps hide latencies, as above. Only float32 rows with "
        'precision "high" take this loop.',
    ),
    Reason(
        ("differentiate_regulation<",),
        (48,),
        "As the loop of this kernel for 128 columns, with the same fragments of rows for half of the products.",
        "Bound by issue slots on an A100 and an H200: fragments are split for half as many products. Products with at "
        "most 64 columns take this loop, such as those with the 36 contexts of a set. Without it, they would take the "
        "loop for 128 columns with a decision per product, which issues more, and whose HMMA wait for one another. Its "
        "copies compute their sizes, as above.",
    ),
    Reason(
        ("regulate_tiles<float, 3,",),
        (24,),
        "As the loop of this kernel for 128 columns, with the same fragments of rows for half of the products.",
        "Bound by issue slots on an A100 and an H200, as that loop. Products with at most 64 "
        "columns take this loop, such as those with the 36 contexts of a set.",
    ),
    Reason(
        ("regulate_tiles<float, 2,",),
        (12,),
        "As the loop of this kernel for 128 columns, with the same fragments of rows for half of the products.",
        "Bound by issue slots on an A100 and an H200, as that loop. Only products of float32 rows "
        'with at most 64 columns and precision "high" take this loop.',
    ),
    Reason(
        tuple(f"{kernel}{dtype}, 1," for kernel in _SPILLING for dtype in ("BFloat16", "Half")),
        (32, 36, 72, 120),
        "Up to 43, or 54 with additions of steps; where the kernel spills, also accesses to local memory.",
        "Two blocks per multiprocessor leave 128 registers. An H200 runs `score_long_tiles` faster with them, or as "
        "fast. For `matching_loss` that is assumed.",
    ),
    Reason(
        ("regulate_tiles<BFloat16, 1,",),
        (16,),
        "As the loop of this kernel for 128 columns, with the same fragments of rows for half of the products.",
        "Below 91. At most 64 columns. Shared memory takes longer than issue slots.",
    ),
    Reason(
        ("regulate_tiles<BFloat16, 1,",),
        (32,),
        "12 loads of fragments, 37 for copies.",
        "Below 91, and 33 on sm_86 and sm_89. Shared memory takes longer than issue slots.",
    ),
    Reason(
        ("differentiate_regulation<",),
        (72,),
        f"{_SPLIT}, 220 for 20 pairs; 48 additions of slices; 40 loads of operands; 119 for copies; 35 to find the "
        "next term; 53 NOP between dependent HMMA.",
        "Bound by issue slots on an H200. Storing the gradients in parts would save 132, but each kept step would "
        "take 1.5 times the memory. Its copies compute their sizes, as above.",
    ),
    Reason(
        ("prepare_regulation<float,", "prepare_scores<float,"),
        (96,),
        f"{_SPLIT}, 264; 64 additions of slices; 48 NOP between dependent HMMA on sm_90.",
        "Below 91. The loop skips rows and columns that a set does not have.",
    ),
    Reason(
        ("prepare_regulation<BFloat16,",),
        (16,),
        "12 loads of fragments, 21 for copies, conversion of 24 pairs of float32; the rest skips rows and columns that "
        "a set does not have.",
        "Bound by issue slots on an H200. Less than 1 % of RCAR's scores.",
    ),
    Reason(
        ("prepare_scores<BFloat16,", "prepare_scores<Half,"),
        (32,),
        "12 loads of fragments, 18 to 21 for copies; the rest skips rows and columns that a set does not have.",
        "Below 91: not bound by issue slots.",
    ),
    Reason(
        ("backpropagate_pairs<BFloat16>", "backpropagate_pairs<Half>"),
        (12,),
        "Raw scores of a tile: 28 for copies; the rest loads fragments and skips rows and columns that a tile does not "
        "have.",
        "Below 91. The gradients of a tile's scores take longer, on the ordinary units.",
    ),
    Reason(
        ("backpropagate_pairs<float>",),
        (36,),
        f"Raw scores of a tile. {_SPLIT}.",
        "Bound by issue slots on an A100 and an H200. The gradients of a tile's scores take longer, on the ordinary "
        "units.",
    ),
    Reason(
        ("backpropagate_pairs<Half>",),
        (96,),
        "Sums over a tile: loads of operands, additions of slices, splitting of float32 gradients.",
        "Below 91: not bound by issue slots.",
    ),
    Reason(
        ("backpropagate_pairs<float>",),
        (192,),
        "Sums over a tile: loads of operands, additions of slices, splitting of rows and gradients.",
        "Below 91: not bound by issue slots.",
    ),
    Reason(
        ("backpropagate_pairs<BFloat16>", "backpropagate_pairs<Half>"),
        (32, 36),
        "Raw scores (32): decisions that skip rows and columns of sets. Sums (36): additions of slices, loads of "
        "operands.",
        f"Below 91. {_WAITS}",
    ),
    Reason(
        ("backpropagate_pairs<float>",),
        (96, 144),
        "Raw scores (96): decisions that skip rows and columns of sets, splitting of float32. Sums (144): additions of "
        "slices, loads of operands, splitting of float32.",
        f"Below 91. {_WAITS}",
    ),
)


def reason_of(kernel: str, tensor: int) -> Reason | None:
    """Return the reason that names a kernel's loop by its number of HMMA."""
    return next((one for one in REASONS if tensor in one.tensor and kernel.startswith(one.kernels)), None)


def is_above_goal(budget: tuple[int, int]) -> bool:
    return budget[0] > GOAL[0] or budget[1] > GOAL[1]


def section(loops: Mapping[tuple[str, int], tuple[int, int]]) -> str:
    """Render the reasons for those loops, by kernel and number of HMMA, whose budgets are above the goal."""
    lines = ["| HMMA | kernels | instructions | why they stay |", "| --- | --- | --- | --- |"]
    for one in REASONS:
        above = [key for key, budget in loops.items() if is_above_goal(budget) and reason_of(*key) is one]
        if not above:
            continue
        kernels = sorted({f"`{_short(kernel)}`" for kernel, _ in above})
        cells = [", ".join(map(str, one.tensor)), ", ".join(kernels), one.instructions, one.why]
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _short(kernel: str) -> str:
    """Leave out the tile and the loss: `score_tile<float, 3>`."""
    name, arguments = kernel.removesuffix(">").split("<", 1)
    kept = [one for one in re.split(r", (?![^<]*>)", arguments) if not one.endswith((">", "Tile112"))]
    return f"{name}<{', '.join(kept[:2])}>" if kept else name


HEAD = f"""
## Loops above the goal

The goal is {GOAL[0]} other instructions per 16 HMMA, and {GOAL[1]} per copy. A loop is bound by issue slots if its
instructions take longer than its HMMA. A scheduler issues one instruction per cycle; an HMMA takes it 8 cycles on an
A100, 32 on an RTX 4090, and 6.7 on an H200, if `mma.sync` reaches 60 % of the peak there. So up to {LIMITS["A100"]},
{LIMITS["RTX 4090"]} and {LIMITS["H200"]} other instructions per 16 HMMA leave the tensor cores busier. Counts per
iteration are those of sm_90.

"""
