"""Faults planted into the CUDA forward of `cross_attention_scores`: each must fail the checks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import Fragments
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.shim import SANITIZERS, KernelError, compile_driver, compiled_driver
from python_tests.shim.attention_checks import cancelling_contexts, check_random_scores, check_scores
from python_tests.shim.faults import planted, run_sanitized
from python_tests.shim.shim_attention import AttentionKernels
from python_tests.shim.shim_cases import outcomes

pytestmark = pytest.mark.shim

KERNELS = "csrc/include/itm_fast/cuda/"
ELEMENTS, PRODUCT, SCORES, PAIR, LONG, LONG_TILES, TILES, TILE_PAIRS, GRAM, SETS, LAUNCH, LENGTHS, SUMS = (
    f"{KERNELS}{name}.h"
    for name in (
        *("elements", "tile_product", "cross_attention", "attention_pair", "long_pairs", "long_tiles", "set_tiles"),
        *("tile_pairs", "set_gram", "set_products", "cross_attention_launch", "longest_sets", "part_sums"),
    )
)

# What a driver is compiled for: fewer types take less time.
FLOAT32_ALONE = ("-DITM_FAST_FLOAT32_ALONE",)
WITH_16_BITS = (*FLOAT32_ALONE, "-DITM_FAST_AND_BFLOAT16")


def check(library: Path) -> None:
    """Check short sets in several tiles, contexts that cancel, one long set, and long sets on tensor cores.

    The lengths of long sets are unknown, or known but too short.
    """
    kernels = AttentionKernels(library)
    check_random_scores(kernels, [3, 30, 40], [6, 17, 40], 68, name="short sets")
    queries = random_fragments([3, 9], 24, seed=3)
    check_scores(kernels, queries, cancelling_contexts(1e-4), name="contexts that cancel", temperature=0.0)
    check_random_scores(kernels, [20], [60, 3], 40, name="long sets", aggregation="sum")
    check_random_scores(kernels, [70, 90], [60, 100], 24, name="long tiles", aggregation="sum")
    cancelling = Fragments(cancelling_contexts(1e-4).values[:2].repeat(30, 1), torch.tensor([0, 60]))
    check_scores(kernels, queries, cancelling, name="long contexts that cancel", temperature=0.0)
    check_random_scores(kernels, [20], [60, 3, 100], 24, name="too short a length", longest=(20, 60))
    assert kernels.slab(128, 128 * 13, 128, 128 * 36, (24, 300)) == [304, 128, 264], "known lengths: wrong slab"


def check_16_bits(library: Path) -> None:
    """Check long sets whose rows are summed: several runs of queries and of columns, and contexts that cancel.

    In the last case they cancel only if the attention has all of its digits.
    """
    kernels = AttentionKernels(library)
    check_random_scores(kernels, [70, 90], [280, 300], 264, "bf16", name="sums of rows", by_draws=True)
    queries = random_fragments([3, 9], 24, seed=3)
    apart = Fragments(cancelling_contexts(0.01).values[:2].repeat_interleave(30, 0), torch.tensor([0, 60]))
    check_scores(kernels, queries, apart, "bf16", name="long contexts that cancel", temperature=0.0)
    adjacent = Fragments(cancelling_contexts(0.001).values[:2].repeat(30, 1), torch.tensor([0, 60]))
    check_scores(kernels, queries, adjacent, "bf16", name="digits of the attention", temperature=1.0, by_draws=True)


def test_the_kernels_as_they_are_pass() -> None:
    check(compiled_driver("cross_attention", *FLOAT32_ALONE))
    check_16_bits(compiled_driver("cross_attention", *WITH_16_BITS))


FAULTS = {
    "norms of half of the columns": (
        (ELEMENTS, "for (int step = 16; step > 0; step /= 2)", "for (int step = 8; step > 0; step /= 2)"),
        r"^short sets: error",
    ),
    "missing wait for a copy": (
        (PRODUCT, "    wait_copies<Tile::kStages - 2>();\n", ""),
        r"shared array 'stages': (read|write) of index \d+ while an asynchronous copy to it is under way",
    ),
    "waiting for one copy too few": (
        (PRODUCT, "wait_copies<Tile::kStages - 2>();", "wait_copies<Tile::kStages - 1>();"),
        r"shared array 'stages': (read|write) of index \d+ while an asynchronous copy to it is under way",
    ),
    "missing barrier after the copies": (
        (PRODUCT, "barrier();  // The copies of all threads have landed, and", "// The copies of all threads"),
        r"shared array 'stages': (race at|read of|write of) index \d+",
    ),
    "missing barrier between pipeline and epilogue": (
        (PRODUCT, "barrier();  // The scores lie where the stages were.", ""),
        r"shared array '(scores|stages)': (race at|read of|write of) index \d+",
    ),
    "swapped lanes where scores are stored": (
        (PRODUCT, "mma_sum_place(lane(), i);", "mma_sum_place(lane() % 4 * 8 + lane() / 4, i);"),
        r"^short sets: error",
    ),
    "swapped parts where rows are read": (
        (
            PRODUCT,
            "lane_of_rows(int first) {\n  const int matrix = lane() / 8,",
            "lane_of_rows(int first) {\n  const int matrix = lane() % 4,",
        ),
        r"^short sets: error",
    ),
    "copies that do not advance": (
        (PRODUCT, "    rows_ += Tile::kSlice;\n", ""),
        r"^short sets: error",
    ),
    "a stage read twice": (
        (PRODUCT, "stage = stage + Tile::kStage < kEnd ?", "stage = stage + Tile::kStage < kEnd - Tile::kStage ?"),
        r"^short sets: error|shared array 'stages'",
    ),
    "dropped tail of the depth": (
        (PRODUCT, "sizeof(S)) + 63) / 64);", "sizeof(S))) / 64);"),
        r"^short sets: error",
    ),
    "dropped tail tile of the rows": (
        (PRODUCT, "(kRows / 16 + kWarpRows - 1) / kWarpRows;", "kRows / 16 / kWarpRows;"),
        r"^short sets: error|shared array 'scores': read of index \d+ before anything was written to it",
    ),
    "a product of parts left out": (
        (
            PRODUCT,
            "{{0, 2}, {2, 0}, {1, 1}, {0, 1}, {1, 0}, {0, 0}}",
            "{{0, 2}, {0, 2}, {1, 1}, {0, 1}, {1, 0}, {0, 0}}",
        ),
        r"^short sets: error",
    ),
    "missing barrier before the attention": (
        (
            SCORES,
            "  barrier();\n\n  // A thread per context set and two queries:",
            "\n  // A thread per context set and two queries:",
        ),
        r"shared array '(factors|column_sets)': (race at|read of) index \d+",
    ),
    "a second query that lies outside": (
        (SCORES, "const bool is_used = n > 0 && (i == 0 || last != column);", "const bool is_used = n > 0;"),
        r"^short sets",
    ),
    "missing warp sync before attention is read by the warp": (
        (SCORES, "if (lost != 0) warp_sync();  // All", "// All"),
        r"shared array 'scores': (race at|read of) index \d+",
    ),
    "missing barrier before the next product of a Gram matrix": (
        (GRAM, "barrier();  // The next product takes the place of this one.", ""),
        r"shared array '(planes|stages)': (race at|read of|write of) index \d+",
    ),
    "half of a long Gram matrix": (
        (GRAM, "if (!is_diagonal) store(first_column", "if (is_diagonal) store(first_column"),
        r"^long tiles: error",
    ),
    "columns of a Gram matrix where a stage has none": (
        (SETS, "(kSquare ? 0 : SetTile::kRows * SetTile::kSlice) +", "SetTile::kRows * SetTile::kSlice +"),
        r"shared array 'stages': read of index \d+ before anything was written to it|^short sets: error",
    ),
    "no contexts cancel": (
        (PAIR, "square < scale * scale * kCancellation", "square < 0.0f * scale"),
        r"^contexts that cancel: error",
    ),
    "a tile of one set too many": (
        (TILES, "window[set] <= max_rows", "window[set] <= max_rows + 16"),
        r"^short sets: error|shared array '\w+': ",
    ),
    "pairs with the first tile of queries alone": (
        (TILE_PAIRS, "first + place % together;", "first + place % together * 0;"),
        r"^short sets: error",
    ),
    "a piece of long queries left out": (
        (
            LONG_TILES,
            "column < n_columns_; column += Tile::kColumns) {\n        const int rows",
            "column < Tile::kColumns; column += Tile::kColumns) {\n        const int rows",
        ),
        r"^long tiles: error",
    ),
    "missing barrier before the next piece": (
        (
            LONG_TILES,
            "        barrier();  // Before the next product overwrites the scores.\n      }\n    }\n  }\n\n  template",
            "      }\n    }\n  }\n\n  template",
        ),
        r"shared array '(scores|stages)': (race at|read of|write of) index \d+",
    ),
    "a norm of the first piece of contexts": (
        (
            LONG_TILES,
            "row += Tile::kRows) {\n        const int rows = part_of(n_rows_ - row, Tile::kRows);\n        multiply",
            "row += n_rows_) {\n        const int rows = part_of(n_rows_ - row, Tile::kRows);\n        multiply",
        ),
        r"^long tiles: error",
    ),
    "no long contexts cancel": (
        (LONG_TILES, "if (norm.is_lost()) {", "if (norm.square < 0.0f) {"),
        r"^long contexts that cancel: error",
    ),
    "no block for the norms of the last queries": (
        (LAUNCH, "(p.queries.n_rows + kNormRows - 1) / kNormRows;", "p.queries.n_rows / kNormRows;"),
        r"^short sets: error",
    ),
    "no Gram matrices of long sets": (
        (LAUNCH, "p.gram_width = gram_width;", "p.gram_width = Tile::kRows;"),
        r"^long (sets|tiles|contexts that cancel): error",
    ),
    "known lengths have no effect": (
        (LENGTHS, "allowed = longest > 0 ? longest :", "allowed = longest < 0 ? longest :"),
        r"^known lengths: wrong slab",
    ),
    "sets that are longer than the slab are cut off": (
        (LONG_TILES, "<= p.layout.rows &&", "<= 2 * p.layout.rows &&"),
        r"^too short a length: error",
    ),
    "missing barrier before a long pair's next products": (
        (LONG, "barrier();  // Whatever was there has been read.", ""),
        r"shared array 'long_\w+': (race at|read of) index \d+",
    ),
    "a long pair's queries of the first run alone": (
        (LONG, "for (int run = 0; run < runs_; ++run) {", "for (int run = 0; run < 1; ++run) {"),
        r"^long sets: error",
    ),
}

FAULTS_OF_16_BITS = {
    "sums for the first run of queries alone": (
        (LONG_TILES, "query < n_queries; query += Sums::kRows", "query < Sums::kRows; query += Sums::kRows"),
        r"^sums of rows: error",
    ),
    "squares of the first columns alone": (
        (LONG_TILES, "d < dim; d += Sums::kColumns", "d < Sums::kColumns; d += Sums::kColumns"),
        r"^sums of rows: error",
    ),
    "the third part of the attention left out": (
        (SUMS, "if (order >= (kParts > kRowParts ? kParts : kRowParts)) continue;", "if (order >= 2) continue;"),
        r"^digits of the attention: error",
    ),
    "missing barrier before the next sums": (
        (SUMS, "barrier();  // The table is complete, and the sums of another range have been read.", "warp_sync();"),
        r"shared array '(row_sums|rows|coefficients|granules)': (.*copy|race at|read of|write of)",
    ),
    "no vectors that cancel among sums of rows": (
        (LONG_TILES, "scales_[column] = scale;", "scales_[column] = 0.0f * scale;"),
        r"^long contexts that cancel: error",
    ),
    "an empty diagonal": (
        (SCORES, "gram[gram_diagonal(k, n)] = norm * norm;", "gram[gram_diagonal(k, n)] = 0.0f * norm;"),
        r"^long contexts that cancel: error",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*FAULTS, *FAULTS_OF_16_BITS])
def test_a_planted_fault_fails_the_checks(name: str, tmp_path: Path) -> None:
    (file, place, change), message = {**FAULTS, **FAULTS_OF_16_BITS}[name]
    run, flags = (check_16_bits, WITH_16_BITS) if name in FAULTS_OF_16_BITS else (check, FLOAT32_ALONE)
    library = compile_driver(
        "cross_attention", tmp_path, *flags, root=planted(tmp_path / "faulty", file, place, change)
    )
    with pytest.raises((AssertionError, KernelError)) as caught:
        run(library)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.thorough
def test_the_kernels_pass_the_sanitizers_with_the_same_results(tmp_path: Path) -> None:
    expected = outcomes({"cross_attention": compiled_driver("cross_attention")})
    folder = tmp_path / "sanitized"
    folder.mkdir()
    compile_driver("cross_attention", folder, *SANITIZERS)
    result = run_sanitized(folder, "cross_attention")
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(folder / "outcomes.npz") as actual:
        assert set(actual) == set(expected)
        for name, right in expected.items():
            assert actual[name].tobytes() == right.tobytes(), name


@pytest.mark.thorough
def test_the_sanitizers_see_what_lies_outside(tmp_path: Path) -> None:
    """The fault copies one row too many of the rows copied one by one."""
    root = planted(tmp_path / "faulty", PRODUCT, "is_row_[i] = row < run.count;", "is_row_[i] = row <= run.count;")
    compile_driver("cross_attention", tmp_path, *FLOAT32_ALONE, *SANITIZERS, root=root)
    result = run_sanitized(tmp_path, "cross_attention")
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
