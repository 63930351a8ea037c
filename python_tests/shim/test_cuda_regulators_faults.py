"""Faults planted into the CUDA kernels of the regulators: each must fail the checks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import random_parameters
from python_tests.helpers.shim import SANITIZERS, KernelError, compile_driver, compiled_driver
from python_tests.shim.attention_checks import cancelling_contexts, long_cancelling_contexts
from python_tests.shim.faults import planted, run_sanitized
from python_tests.shim.regulator_checks import check_alignments, check_low_parts, check_scores
from python_tests.shim.shim_cases import outcomes
from python_tests.shim.shim_regulators import RegulatorKernels

pytestmark = pytest.mark.shim

KERNELS = "csrc/include/itm_fast/cuda/"
TILE, CHAIN, ALIGNMENT, STEPS, DROPOUT, PROBLEM, LAUNCH = (
    f"{KERNELS}regulation{name}.h" for name in ("_tile", "", "_alignment", "_steps", "_dropout", "_problem", "_launch")
)
ATTENTION = f"{KERNELS}regulation_attention.h"
GRAM_OF_SET = f"{KERNELS}set_gram.h"
LONG, GRAM = r"^long sets: error", r"^Gram matrix of long sets: error"
SMALL = ("-DITM_FAST_SMALL_TILE_ALONE", "-DITM_FAST_FLOAT32_ALONE")


def check(library: Path) -> None:
    kernels = RegulatorKernels(library)
    queries, contexts = random_fragments([3, 1, 0, 9], 70), random_fragments([4, 17], 70, seed=1)
    options = {"focal": "equal", "dropout": 0.4, "seed": 7}
    parameters = random_parameters("rcar2", 70, 35)
    check_scores(kernels, queries, contexts, parameters, run={"blocks": 1}, **options)
    queries, contexts = random_fragments([40], 70), random_fragments([70], 70, seed=1)
    check_scores(kernels, queries, contexts, parameters, name="long sets", run={"blocks": 1}, **options)
    queries, contexts = random_fragments([40], 220), random_fragments([66], 220, seed=1)
    parameters = random_parameters("rcar2", 220, 35)
    check_scores(kernels, queries, contexts, parameters, name="Gram matrix of long sets", run={"blocks": 1}, **options)
    queries, contexts = random_fragments([3, 9], 20), random_fragments([7], 20, seed=1)
    for setting in ("rcr2, attended", "rcar2, guidance"):
        check_scores(kernels, queries, contexts, random_parameters(setting, 20, 10), name=setting, run={"blocks": 1})
    queries, parameters = random_fragments([3, 9], 24, seed=3), random_parameters("rar1", 24, 10)
    contexts = cancelling_contexts(1e-4)
    check_alignments(kernels, queries, contexts, parameters, name="contexts that cancel", temperature=0.0)
    queries, parameters = random_fragments([35, 40], 130, seed=3), random_parameters("rar1", 130, 10)
    contexts = long_cancelling_contexts(1e-4, 130)
    check_alignments(kernels, queries, contexts, parameters, name="long contexts that cancel", temperature=0.0)


def test_the_kernels_as_they_are_pass() -> None:
    check(compiled_driver("regulators", *SMALL))


FAULTS = {
    "missing barrier before a product": (
        (TILE, "barrier();  // The operands have been written, and what", "// The operands have been written, what"),
        r"shared array '\w+': (race at|read of|write of) index \d+",
    ),
    "missing barrier between two tiles": (
        (CHAIN, "barrier();  // The tile before is done.", ""),
        r"shared array '\w+': (race at|read of|write of) index \d+",
    ),
    "missing barrier between normalisation and softmax": (
        (
            ALIGNMENT,
            "    barrier();\n    // Sets of half a tile",
            "    // Sets of half a tile",
        ),
        r"shared array 'scores': (race at|read of|write of) index \d+",
    ),
    "missing barrier before the weights of the aggregation": (
        (
            STEPS,
            "    barrier();\n    for_each_row(s_.n_sets, [&](int set) {\n      const auto share",
            "    for_each_row(s_.n_sets, [&](int set) {\n      const auto share",
        ),
        r"shared array 'logits': (race at|read of|write of) index \d+",
    ),
    "alignments of the last chunk alone": (
        (ALIGNMENT, "return first == 0 ? bias : sums[place", "return first >= 0 ? bias : sums[place"),
        r"^scores: error",
    ),
    "temperatures without their bias": (
        (STEPS, "        sum += *shift.bias;\n", ""),
        r"^scores: error",
    ),
    "masks of the next row": (
        (
            STEPS,
            "place{s_.first_row + row, s_.context, 2 * step};",
            "place{s_.first_row + row + 1, s_.context, 2 * step};",
        ),
        r"^scores: error",
    ),
    "dropped elements kept": (
        (DROPOUT, "drops_ && words[i] < dropout_.threshold ? 0.0f : kept_", "kept_"),
        r"^scores: error",
    ),
    "scores of the first contexts for all contexts": (
        (ALIGNMENT, "contexts + context * dim_stride_, n,", "contexts, n,"),
        LONG,
    ),
    "scores of all contexts in place of the first": (
        (ALIGNMENT, "float* sums = logits(row) + context;", "float* sums = logits(row) + 0 * context;"),
        LONG,
    ),
    "a softmax over the contexts of one product": (
        (ALIGNMENT, "s_.n_contexts <= kColumns) {", "s_.n_contexts <= kMostContexts) {"),
        LONG,
    ),
    "the first queries for all queries": (
        (
            ALIGNMENT,
            "(s_.first_row + run_) * dim_stride_, dim_stride_, 0",
            "s_.first_row * dim_stride_, dim_stride_, 0",
        ),
        LONG,
    ),
    "attended vectors of the first queries for all queries": (
        (ALIGNMENT, "of_block(p_.slab.attention) + run_ * p_.columns,", "of_block(p_.slab.attention),"),
        LONG,
    ),
    "channels of the first queries for all queries": (
        (ALIGNMENT, "hidden_of(step) + run_ * stride,", "hidden_of(step),"),
        LONG,
    ),
    "layers of the first queries for all queries": (
        (STEPS, "const S* seen = operand + run_ * stride;", "const S* seen = operand;"),
        LONG,
    ),
    "logits of the first queries for all queries": (
        (STEPS, "const S* rows = aligned + run_ * width_stride_;", "const S* rows = aligned;"),
        LONG,
    ),
    "missing barrier before the norms": (
        (ALIGNMENT, "barrier();  // The attention of all rows is written.", ""),
        r"shared array 'scores': (race at|read of|write of) index \d+",
    ),
    "a softmax with a peak of each lane": (
        (ATTENTION, "peak = later_peak(peak, shuffle_xor(peak, step));", "peak = later_peak(peak, peak);"),
        r"^scores: error",
    ),
    "no attended vectors cancel": (
        (ALIGNMENT, "if (vote_any(any)) measure_rows", "if (vote_any(any && s_.n_rows < 0)) measure_rows"),
        r"^contexts that cancel: error",
    ),
    "norms of the scale": (
        (ALIGNMENT, "squares[row] = norm.square;", "squares[row] = norm.scale;"),
        r"^scores: error",
    ),
    "the Gram matrix of the first contexts": (
        (PROBLEM, "float* gram = p.grams + first * p.gram_width;", "float* gram = p.grams + 0 * first;"),
        r"^scores: error",
    ),
    "norms of the last contexts of long sets": (
        (ALIGNMENT, "is_first ? norm.square : squares[row] + norm.square;", "norm.square;"),
        GRAM,
    ),
    "attention of the first contexts for all products with a Gram matrix": (
        (ALIGNMENT, "widen(attention[place * p_.columns + first + k]);", "widen(attention[place * p_.columns + k]);"),
        GRAM,
    ),
    "attention of the first queries for all products with a Gram matrix": (
        (
            ALIGNMENT,
            "const S* attention = of_block(p_.slab.attention) + run_ * p_.columns;",
            "const S* attention = of_block(p_.slab.attention);",
        ),
        GRAM,
    ),
    "no attended vectors of long sets cancel": (
        (ALIGNMENT, "AttendedNorm{squares[row], lost[row]}.is_lost() ? 1.0f : 0.0f;", "0.0f;"),
        r"^long contexts that cancel: error",
    ),
    "half of a Gram matrix of long sets": (
        (GRAM_OF_SET, "if (!is_diagonal) store(first_column", "if (is_diagonal) store(first_column"),
        GRAM,
    ),
    "attended vectors normalised in every form": (
        (ALIGNMENT, "if (p_.options.normalize_attended) scale", "scale"),
        r"shared array 'squares': read of index \d+",
    ),
    "alignments normalised with the attended vectors alone": (
        (
            ALIGNMENT,
            "operand + row * width_stride_, true);",
            "operand + row * width_stride_, p_.options.normalize_attended);",
        ),
        r"^rcr2, attended: error",
    ),
    "guidance normalised in every form": (
        (STEPS, "operand, p_.options.normalize_guidance);", "operand, true);"),
        r"^rcar2, guidance: error",
    ),
    "guidance normalised with the attended vectors": (
        (STEPS, "operand, p_.options.normalize_guidance);", "operand, p_.options.normalize_attended);"),
        r"^rcar2, guidance: error",
    ),
    "no block packs the last rows": (
        (LAUNCH, "(rows + kPackedRows - 1) / kPackedRows;", "rows / kPackedRows;"),
        r": error",
    ),
    "transposed contexts of the set before": (
        (PROBLEM, "return (contexts.offset(set) + 7 * set) / 8 * 8;", "return set / 2 * 8;"),
        r"^scores: error",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_checks(name: str, tmp_path: Path) -> None:
    (file, place, change), message = FAULTS[name]
    root = planted(tmp_path / "faulty", file, place, change)
    library = compile_driver("regulators", tmp_path, *SMALL, root=root)
    with pytest.raises((AssertionError, KernelError)) as caught:
        check(library)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.thorough
def test_gram_matrices_in_bfloat16_without_low_parts_fail_the_check(tmp_path: Path) -> None:
    root = planted(tmp_path / "faulty", PROBLEM, "product -= widen(stored);", "product = 0.0f;")
    library = compile_driver("regulators", tmp_path, "-DITM_FAST_SMALL_TILE_ALONE", root=root)
    with pytest.raises(AssertionError, match=r"^low parts: error"):
        check_low_parts(RegulatorKernels(library))


@pytest.mark.thorough
def test_the_kernels_pass_the_sanitizers_with_the_same_results(tmp_path: Path) -> None:
    expected = outcomes({"regulators": compiled_driver("regulators", *SMALL)})
    folder = tmp_path / "sanitized"
    folder.mkdir()
    compile_driver("regulators", folder, *SMALL, *SANITIZERS)
    result = run_sanitized(folder, "regulators")
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(folder / "outcomes.npz") as actual:
        assert set(actual) == set(expected)
        for name, right in expected.items():
            assert actual[name].tobytes() == right.tobytes(), name


@pytest.mark.thorough
def test_the_sanitizers_see_what_lies_outside(tmp_path: Path) -> None:
    """The fault allocates one slab too few."""
    root = planted(tmp_path / "faulty", LAUNCH, "slab.bytes * (blocks - 1)", "slab.bytes * (blocks - 2)")
    compile_driver("regulators", tmp_path, *SMALL, *SANITIZERS, root=root)
    result = run_sanitized(tmp_path, "regulators")
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
