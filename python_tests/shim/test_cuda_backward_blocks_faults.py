"""Planted faults in the blocks of scores of the backward CUDA kernels of cross_attention_scores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from python_tests.helpers.shim import KernelError, compile_driver, compiled_driver
from python_tests.shim.backward_checks import check_all_blocks
from python_tests.shim.faults import planted
from python_tests.shim.shim_backward import BackwardKernels

pytestmark = pytest.mark.shim

DRIVER = "cross_attention_backward"
PLAN, SCORES, GRADIENTS = (f"csrc/include/itm_fast/cuda/block_{name}.h" for name in ("plan", "scores", "gradients"))
ERROR = r"^backward: gradient of the (queries|contexts): error"
RACE = r"shared array '\w+': (race at|read of) index \d+"
FAULTS = {
    "the attention is read before all of it is written": (
        (SCORES, "kStride] / total;\n    });\n    barrier();", "kStride] / total;\n    });"),
        RACE,
    ),
    "a tile replaces one that is still read": (
        (SCORES, "barrier();               // The next tile takes the place of all of this.", ""),
        RACE,
    ),
    "vectors that cancel are not refused": (
        (SCORES, "is_refused || norm.is_lost() ||", "is_refused ||"),
        r"^backward: blocks|" + ERROR,
    ),
    "sets longer than a tile are not refused": (
        (PLAN, " || sets.length(set) > most) *p.unsuitable = 1;", ") *p.unsuitable = most < 0;"),
        r"^backward: |shared array",
    ),
    "the products with M are left out": (
        (GRADIENTS, "p.context_sums[at] + sum,", "p.context_sums[at] + 0.0f * sum,"),
        ERROR,
    ),
    "terms of M are stored on one side of the diagonal only": (
        (SCORES, "if (first_l > first_k) store(first_l + e, first_k + i, sums[i][e]);", ""),
        ERROR,
    ),
    "the sums of earlier chunks are dropped": (
        (GRADIENTS, "product.is_first ? sum : found + sum;", "sum;"),
        ERROR,
    ),
    "terms of M of earlier chunks are dropped": (
        (GRADIENTS, "chunk.is_first_of_contexts ? 0.0f : chunk.squares_of(0)[at];", "0.0f;"),
        ERROR,
    ),
    "the factors of queries are those of one tile of contexts": (
        (GRADIENTS, "tile < contexts.n_tiles(); ++tile", "tile < 1; ++tile"),
        ERROR,
    ),
    "tasks are counted on from one chunk to the next": (
        (GRADIENTS, "BlockTasks::restart", "if (across + down == 0) BlockTasks::restart"),
        r"^backward: ",
    ),
    "a block reads whether sets are suitable after another one has refused a tile": (
        (GRADIENTS, "  wait();  // A block that is ahead may find its first tile unsuitable.\n", ""),
        r"^backward: |a barrier of the grid that other blocks never come to",
    ),
    "a tile without rows leaves its sums as they were": (
        (SCORES, "if (fits) store_sums();", "if (fits && n_rows_ > 0 && n_columns_ > 0) store_sums();"),
        ERROR,
    ),
    "no block waits for the tiles of the others": (
        (GRADIENTS, "      wait();\n      if (load_coherent",
         "      ++rounds;\n      if (thread_index() == 0) ++*p.arrived;\n      if (load_coherent"),
        r"^backward: |a barrier of the grid that other blocks never come to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags", [(), ("-DITM_FAST_SHIM_TRUNCATES",)], ids=["rounds", "truncates"])
def test_the_kernels_as_they_are_pass(flags: tuple[str, ...]) -> None:
    """Also if tensor cores cut off the last digits of their sums."""
    check_all_blocks(BackwardKernels(compiled_driver(DRIVER, *flags)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_checks(name: str, tmp_path: Path) -> None:
    fault, message = FAULTS[name]
    root = planted(tmp_path / "faulty", *fault)
    library = compile_driver(DRIVER, tmp_path, "-DITM_FAST_FLOAT32_ALONE", root=root)
    with pytest.raises((AssertionError, KernelError)) as caught:
        check_all_blocks(BackwardKernels(library))
    assert re.search(message, str(caught.value)), str(caught.value)
