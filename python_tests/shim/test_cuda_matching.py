"""Scores, loss and gradient in one launch after the preparing one, in the CPU shim, and faults planted into it.

The kernel is compiled for the CPU and simulated; no GPU is involved. It must agree bit for bit with the kernels of
`cross_attention_scores` and of the losses, which other tests compare with the reference.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from python_tests.helpers.boosting import random_pair
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.shim import (
    DIRECTIONS,
    IN_ORDER,
    MINING,
    STRATEGIES,
    KernelError,
    OneLaunchKernels,
    compile_driver,
    compiled_driver,
)
from python_tests.helpers.shim_checks import array
from python_tests.shim.faults import planted
from python_tests.shim.shim_attention import AttentionKernels
from python_tests.shim.shim_matching import OTHER, MatchingKernels, Side

pytestmark = pytest.mark.shim

Separate = tuple[AttentionKernels, OneLaunchKernels]


@pytest.fixture(scope="module")
def separate() -> Separate:
    libraries = [compiled_driver(name, "-DITM_FAST_FLOAT32_ALONE") for name in ("cross_attention", "one_launch")]
    return AttentionKernels(libraries[0]), OneLaunchKernels(libraries[1])


@pytest.fixture(scope="module")
def kernels() -> MatchingKernels:
    return MatchingKernels(compiled_driver("matching"))


def sides(lengths: list[int], longest: int, seed: int) -> tuple[Side, Side]:
    """Draw query sets of these lengths and as many context sets of 1 to 7 rows, the last of them of `longest`."""
    counts = [1 + (3 * i) % 7 for i in range(len(lengths) - 1)] + [longest]
    drawn = (random_fragments(of, 12, torch.float32, seed=seed + i) for i, of in enumerate((lengths, counts)))
    queries, contexts = ((side.values.numpy(), side.offsets.numpy()) for side in drawn)
    return queries, contexts


def check(
    kernels: MatchingKernels,
    separate: Separate,
    queries: Side,
    contexts: Side,
    anchor: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    *,
    is_transposed: bool = False,
    weight_of_both: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> None:
    """Check that the bits of all results are those of the separate kernels. Both directions need `is_transposed`."""
    scores = separate[0].scores("float32", *queries, *contexts, seed=seed)
    scores = np.ascontiguousarray(scores.T) if is_transposed else scores
    if weight_of_both > 0:
        scores += separate[0].scores("float32", *contexts, *queries, seed=seed, **OTHER)
        scores *= np.float32(weight_of_both)
    if anchor is None:
        expected = separate[1].triplet(scores, mask, seed=seed, **options)
    else:
        expected = separate[1].boosting(scores, anchor, mask, seed=seed, **options)
    given = {"is_transposed": is_transposed, "weight_of_both": weight_of_both, "seed": seed + 1, **options}
    found = kernels.matching(queries, contexts, anchor, mask, **given)
    for name, one, other in zip(("scores", "loss", "negatives", "gradient"), found, [scores, *expected], strict=True):
        assert one.tobytes() == other.tobytes(), f"wrong {name}"


@settings(max_examples=12)
@given(st.data())
def test_all_results_are_those_of_separate_launches(
    kernels: MatchingKernels, separate: Separate, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 3, 9, 30, 70]), min_size=1, max_size=14))
    longest = data.draw(st.sampled_from([4, 60]))
    weight = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    # Separate launches score sets piece by piece if their average is longer than a tile.
    widest = 48 if weight > 0 else 64
    assume(sum(lengths) <= widest * len(lengths) and (longest < 60 or len(lengths) > 1))
    seed = data.draw(st.integers(0, 2**31))
    boosted = data.draw(st.booleans())
    options: dict[str, Any] = {
        "mining": data.draw(st.sampled_from(["all", "hardest"] if boosted else MINING)),
        "directions": data.draw(st.sampled_from(DIRECTIONS)),
        "reduction": data.draw(st.sampled_from(["sum", "mean"])),
        "large": data.draw(st.booleans()),
        "blocks": data.draw(st.integers(1, 4)),
    }
    if boosted:
        options |= {"strategy": data.draw(st.sampled_from(STRATEGIES)), "soft": data.draw(st.booleans())}
    else:
        options |= {"epsilon": data.draw(st.sampled_from([0.0, 0.3])), "halve": data.draw(st.booleans())}
    matrices = random_pair(len(lengths), torch.float32, seed)
    check(
        kernels,
        separate,
        *sides(lengths, longest, seed % 1000),
        matrices[0].numpy() if boosted else None,
        array(matrices[1] > 0.4) if data.draw(st.booleans()) else None,
        is_transposed=weight > 0 or data.draw(st.booleans()),
        weight_of_both=weight,
        seed=seed,
        **options,
    )


FIXED = [3, 30, 9, 0, 12, 40, 1, 20, 6]


def check_fixed(kernels: MatchingKernels, separate: Separate) -> None:
    """Check several tiles per block and several blocks, short and long sets, both losses, one direction and both."""
    for seed, longest in enumerate((5, 60)):
        queries, contexts = sides(FIXED, longest, seed)
        anchor = random_pair(len(FIXED), torch.float32, seed)[0].numpy()
        check(kernels, separate, queries, contexts, is_transposed=True, seed=seed, blocks=3, mining="hardest")
        check(kernels, separate, queries, contexts, anchor, seed=seed, blocks=2, mining="all", strategy="both")
        both = {"is_transposed": True, "weight_of_both": 0.5}
        check(kernels, separate, queries, contexts, seed=seed, blocks=3, mining="selective", **both)


def test_blocks_may_be_far_apart(kernels: MatchingKernels, separate: Separate) -> None:
    queries, contexts = sides(FIXED, 5, 0)
    both = {"is_transposed": True, "weight_of_both": 0.5}
    for seed in (IN_ORDER, IN_ORDER + 1):
        check(kernels, separate, queries, contexts, seed=seed, blocks=3, mining="hardest")
        check(kernels, separate, queries, contexts, seed=seed, blocks=3, mining="selective", **both)


def test_the_kernels_as_they_are_pass(kernels: MatchingKernels, separate: Separate) -> None:
    check_fixed(kernels, separate)


HEADERS = "csrc/include/itm_fast/cuda/"
BODY, SCORES, LAUNCH = (HEADERS + name for name in ("matching_loss.h", "cross_attention.h", "matching_loss_launch.h"))
FAULTS = {
    "missing barrier of the grid before the loss": ((BODY, "  grid_barrier(p.scored, 1);\n", ""), r"^wrong "),
    "missing barrier between tiles": (
        (BODY, "    barrier();  // All have read the shared memory of this pair of tiles.\n", ""),
        r"shared array '\w+': (race at|read of|write of) index \d+",
    ),
    "tiles left out": ((BODY, "pair += grid_blocks())", "pair += grid_blocks() + 1)"), r"^wrong scores"),
    "scores that are never transposed": (
        (SCORES, "return p.is_transposed ? context * p.queries.n_sets + query", "return false ? context"),
        r"^wrong scores",
    ),
    "both directions: missing barrier of the grid before the sum": (
        (BODY, "  grid_barrier(p.one.scored, 1);\n", ""),
        r"barrier of the grid",
    ),
    "both directions: missing barrier of the grid before the loss": (
        (BODY, "  grid_barrier(p.one.scored, 2);\n", ""),
        r"^wrong ",
    ),
    "both directions: the first tiles of the second left out": (
        (BODY, "(p.other, (block_index()", "(p.other, 1 + (block_index()"),
        r"^wrong scores",
    ),
    "both directions: a sum instead of the mean": ((BODY, "= p.weight * (", "= ("), r"^wrong scores"),
    "both directions: one block of the second not prepared": (
        (SCORES, "block_index() - p.blocks_of_one)", "block_index() - p.blocks_of_one + 1)"),
        r"^wrong scores",
    ),
    "counters that do not start at zero": (
        (LAUNCH, "(p.scoring, workspace);\n  return zeros;", "(p.scoring, workspace);\n  return 0 * zeros;"),
        r"barrier of the grid",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_checks(name: str, separate: Separate, tmp_path: Path) -> None:
    (file, place, change), message = FAULTS[name]
    root = planted(tmp_path / "faulty", file, place, change)
    library = compile_driver("matching", tmp_path, root=root)
    with pytest.raises((AssertionError, KernelError)) as caught:
        check_fixed(MatchingKernels(library), separate)
    assert re.search(message, str(caught.value)), str(caught.value)
