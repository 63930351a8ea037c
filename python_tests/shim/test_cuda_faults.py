"""Faults planted into the kernels: each must fail the checks that the original kernels pass.

A fault changes one place in a copy of the sources; the test names the check that must report it. One build uses
AddressSanitizer and UndefinedBehaviorSanitizer; the original kernels pass these, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from python_tests.helpers.shim import (
    SANITIZERS,
    BoostingKernels,
    KernelError,
    OneLaunchKernels,
    ProductKernels,
    RetrievalKernels,
    TripletKernels,
    compile_driver,
    compiled_driver,
)
from python_tests.helpers.shim_checks import (
    check_boosting,
    check_hardest,
    check_one_launch,
    check_product,
    check_ranks,
    check_scaling,
    check_triplet,
)
from python_tests.shim.faults import planted, run_sanitized
from python_tests.shim.shim_cases import outcomes

pytestmark = pytest.mark.shim

KERNELS = "csrc/include/itm_fast/cuda/"
TRIPLET, BACKWARD, TOGETHER, TILE, RANKS = (
    KERNELS + name
    for name in ("triplet_loss.h", "triplet_loss_backward.h", "triplet_loss_gradient.h", "score_tile.h", "retrieval.h")
)
LAUNCH = KERNELS + "triplet_launch.h"
BOOSTING = KERNELS + "boosting_problem.h"
FRAGMENTS, PRODUCT = KERNELS + "fragments.h", "python_tests/native/shim/product.h"


def check_all_triplets(library: Path) -> None:
    kernels = TripletKernels(library)
    generator = torch.Generator().manual_seed(0)
    for size in (16, 70):
        scores = torch.randint(-4, 5, (size, size), generator=generator) / 4
        for mining in ("hardest", "all"):
            check_triplet(kernels, scores, mining=mining, margin=0.25, exact=True)
        check_hardest(kernels, scores, None)


def check_all_ranks(library: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-4, 5, (20, 70), generator=generator) / 4
    check_ranks(RetrievalKernels(library), scores, torch.arange(70) % 20)


def check_all_products(library: Path) -> None:
    for seed in range(3):
        check_product(ProductKernels(library), 40, 24, 72, transposed=seed == 1, half=seed == 2, seed=seed)


def check_all_boosting(library: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, anchor = (torch.randint(-4, 5, (2, 40, 40), generator=generator) / 4).unbind()
    for mining in ("hardest", "all"):
        check_boosting(BoostingKernels(library), scores, anchor, strategy="both", mining=mining, margin=0.5, exact=True)


def check_all_together(library: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, anchor = (torch.randint(-4, 5, (2, 70, 70), generator=generator) / 4).unbind()
    for seed, mining in enumerate(("hardest", "all")):
        check_one_launch(OneLaunchKernels(library), scores, anchor, mining=mining, margin=0.25, blocks=5, seed=seed)
    check_scaling(OneLaunchKernels(library), np.float32)


CHECKS: dict[str, Callable[[Path], None]] = {
    "triplet": check_all_triplets,
    "boosting": check_all_boosting,
    "one_launch": check_all_together,
    "retrieval": check_all_ranks,
    "product": check_all_products,
}


@pytest.mark.parametrize("driver", CHECKS)
def test_the_kernels_as_they_are_pass(driver: str) -> None:
    CHECKS[driver](compiled_driver(driver))


FAULTS = {
    "out of bounds: one warp too many": (
        ("triplet", TRIPLET, "w < Tile::kWarps;", "w <= Tile::kWarps;"),
        r"shared array 'best_of_warps': read of index \d+, expected 0 to 511",
    ),
    "missing barrier before warps are merged": (
        ("triplet", TRIPLET, "  barrier();\n  for (int c = thread_index();", "  for (int c = thread_index();"),
        r"shared array '(best|index|sum)_of_warps': (race at|read of) index \d+",
    ),
    "missing barrier between the halves of a sum": (
        ("triplet", TRIPLET, "    barrier();\n    if (thread_index() < half)", "    if (thread_index() < half)"),
        r"shared array 'sums': (race at|read of) index \d+",
    ),
    "missing barrier before counts are cleared": (
        ("triplet", BACKWARD, "counts[c] = 0;\n    barrier();", "counts[c] = 0;"),
        r"shared array 'counts': (race at|atomic update of) index \d+",
    ),
    "missing barrier after the copies": (
        ("product", PRODUCT, "barrier();  // The copies of all threads are complete.", ""),
        r"shared array '(left|right)_parts': (race at|read of) index \d+",
    ),
    "missing barrier before the next copies": (
        ("product", PRODUCT, "barrier();  // All threads have read this stage before the next copies start.", ""),
        r"shared array '(left|right)_parts': (race at|read of|write of) index \d+",
    ),
    "missing wait for a copy": (
        ("product", PRODUCT, "    wait_copies<1>();\n", ""),
        r"shared array 'left_parts': (read|write) of index \d+ while an asynchronous copy to it is under way",
    ),
    "waiting for one copy too few": (
        ("product", PRODUCT, "wait_copies<1>();", "wait_copies<2>();"),
        r"shared array 'left_parts': (read|write) of index \d+ while an asynchronous copy to it is under way",
    ),
    "missing warp sync": (
        ("product", PRODUCT, "  warp_sync();\n", ""),
        r"shared array 'results': (race at|read of) index \d+",
    ),
    "swapped lanes where fragments are stored": (
        ("product", PRODUCT, "mma_sum_place(lane(), i);", "mma_sum_place(lane() % 4 * 8 + lane() / 4, i);"),
        r"^product: wrong numbers",
    ),
    "swapped lanes where fragments are loaded": (
        (
            "product",
            PRODUCT,
            "matrix = lane() / 8, matrix_row = lane() % 8;",
            "matrix = lane() % 4, matrix_row = lane() / 4;",
        ),
        r"^product: wrong numbers",
    ),
    "swapped halves in the table of fragments": (
        (
            "product",
            FRAGMENTS,
            "element % 2 + (element / 2) * 8, lane / 4}",
            "element / 2 + (element % 2) * 8, lane / 4}",
        ),
        r"^product: wrong numbers",
    ),
    "dropped tail of the depth": (
        ("product", PRODUCT, "(p.depth + kProductDepth - 1) / kProductDepth;", "p.depth / kProductDepth;"),
        r"^product: wrong numbers",
    ),
    "dropped tail tile": (
        ("triplet", TILE, "(size + tile - 1) / tile", "size / tile"),
        r"^triplet_loss, hardest: loss: wrong numbers",
    ),
    "of equal negatives the highest index": (
        ("triplet", TRIPLET, "return candidate.index < held.index;", "return candidate.index > held.index;"),
        r"^triplet_loss, hardest: gradient of the scores: wrong numbers",
    ),
    "a positive's term counted once where it counts with every negative": (
        ("boosting", TRIPLET, "options.mining == Mining::all) each =", "options.mining == Mining::hardest) each ="),
        r"^boosting_loss, both, all: loss: wrong numbers",
    ),
    "the target's score instead of the gap": (
        ("boosting", BOOSTING, "return scores[at] - anchor_scores[at];", "return scores[at];"),
        r"^boosting_loss, both, hardest: loss: wrong numbers",
    ),
    "a barrier of the grid that does not wait": (
        ("one_launch", TOGETHER, "grid_barrier(p.arrived, 1);", "grid_barrier(p.arrived, 0);"),
        r"^(triplet|boosting)_loss in one launch: (loss|gradient): wrong numbers",
    ),
    "missing barrier of the grid before the gradient": (
        ("one_launch", TOGETHER, "  grid_barrier(p.arrived, 2);\n", ""),
        r"^(triplet|boosting)_loss in one launch: (loss|gradient): wrong numbers",
    ),
    "missing barrier between the tiles of a block": (
        ("one_launch", TOGETHER, "barrier();  // All have read what the warps found before the next tile.", ""),
        r"shared array '(best|index|sum)_of_warps': (race at|read of) index \d+",
    ),
    "zeros of a gradient that are multiplied": (
        ("one_launch", TOGETHER, "if (value != T(0)) p.gradient[i]", "p.gradient[i]"),
        r"^scale_gradient: wrong numbers",
    ),
    "numbers of a gradient that two blocks multiply": (
        ("one_launch", TOGETHER, "step = grid_blocks() * block_threads();", "step = block_threads();"),
        r"^scale_gradient: wrong numbers",
    ),
    "losses of the columns in place of those of the rows": (
        ("triplet", LAUNCH, "p.columns = {values + of_rows,", "p.columns = {values,"),
        r"^triplet_loss, (hardest|all): loss: wrong numbers",
    ),
    "ties never count in ranks": (
        ("retrieval", RANKS, "(pessimistic && score == own)", "(pessimistic && score > own)"),
        r"^retrieval_ranks, pessimistic: wrong numbers",
    ),
    "an image's own captions count against it": (
        ("retrieval", RANKS, "caption < p.n_captions && image_of[k] != image", "caption < p.n_captions"),
        r"^retrieval_ranks, pessimistic: wrong numbers",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_checks(name: str, tmp_path: Path) -> None:
    (driver, file, place, change), message = FAULTS[name]
    root = planted(tmp_path / "faulty", file, place, change)
    library = compile_driver(driver, tmp_path, "-DITM_FAST_FLOAT32_ALONE", root=root)
    with pytest.raises((AssertionError, KernelError)) as caught:
        CHECKS[driver](library)
    assert re.search(message, str(caught.value)), str(caught.value)


# Faults for the sanitizers


@pytest.mark.thorough
def test_the_kernels_pass_the_sanitizers_with_the_same_results(tmp_path: Path) -> None:
    expected = outcomes({name: compiled_driver(name) for name in CHECKS})
    for name in CHECKS:
        compile_driver(name, tmp_path, *SANITIZERS)
    result = run_sanitized(tmp_path, *CHECKS)
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(tmp_path / "outcomes.npz") as actual:
        assert set(actual) == set(expected)
        for name, right in expected.items():
            assert actual[name].tobytes() == right.tobytes(), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("driver", "file", "place", "change", "message"),
    [
        (
            "triplet",
            TRIPLET,
            "if (column >= problem.columns || !problem.is_negative(row, column)) continue;",
            "if (column > problem.columns || !problem.is_negative(row, column)) continue;",
            "AddressSanitizer: heap-buffer-overflow",
        ),
        (
            "retrieval",
            RANKS,
            "if (caption >= p.n_captions || !p.has_image(caption)) return;",
            "if (!p.has_image(caption)) return;",
            "AddressSanitizer: heap-buffer-overflow",
        ),
        (
            "retrieval",
            RANKS,
            "image_count += count_bits(ballot(above_best));",
            "image_count += count_bits(ballot(above_best)) + (0x7fffffff - k);",
            "runtime error: signed integer overflow",
        ),
    ],
)
def test_the_sanitizers_see_what_lies_outside(
    driver: str, file: str, place: str, change: str, message: str, tmp_path: Path
) -> None:
    root = planted(tmp_path / "faulty", file, place, change)
    compile_driver(driver, tmp_path, *SANITIZERS, root=root)
    result = run_sanitized(tmp_path, driver)
    assert result.returncode != 0
    assert message in result.stderr
