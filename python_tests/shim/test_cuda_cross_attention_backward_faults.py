"""Planted faults in the backward CUDA kernels of cross_attention_scores, and the kernels under the sanitizers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from python_tests.helpers.shim import SANITIZERS, KernelError, compile_driver, compiled_driver
from python_tests.shim.backward_checks import check_all_gradients
from python_tests.shim.faults import planted, run_sanitized
from python_tests.shim.shim_backward import BackwardKernels
from python_tests.shim.shim_cases import outcomes

pytestmark = pytest.mark.shim

DRIVER = "cross_attention_backward"
KERNELS = "csrc/include/itm_fast/cuda/"
ATTENTION, LISTS, PARTS, PRODUCTS, PAIR, TURN, STEPS, SUMS, CHUNK, SETS, BACKWARD, LAUNCH = (
    f"{KERNELS}{name}.h"
    for name in (
        "attention_pair",
        "pair_lists",
        "part_matrix",
        "set_products",
        "pair_recompute",
        "pair_gradient",
        "part_steps",
        "part_sums",
        "backward_chunk",
        "set_gradients",
        "cross_attention_backward",
        "cross_attention_backward_launch",
    )
)
ERROR = r"^backward: gradient of the (queries|contexts): error"
PAIR_AT = "to.values, to.n_rows};\n      const ListedPair pair = "
TERMS = "const int32_t last = entries.last + (has_squares ? 1 : 0);"
FAULTS = {
    "missing barrier between the runs of a list": (
        (LISTS, "  barrier();\n  int32_t at = 0;", "  int32_t at = 0;"),
        r"shared array '(counts|numbers)_of_warps': (race at|read of) index \d+",
    ),
    "the lists are added up before all are written": (
        (LISTS, "== blocks - 1;", "== 0;"),
        r"^backward: |asynchronous copy",
    ),
    "the runs of a list lie over each other": (
        (LISTS, "at += counts_of_warps[w * 32 + lane()];", "at += 0 * counts_of_warps[w * 32 + lane()];"),
        r"^backward: \d+ pairs",
    ),
    "an incoming gradient of zero counts": (
        (LISTS, "*gradient != 0.0f;", "(*gradient == 0.0f || true);"),
        r"^backward: \d+ pairs",
    ),
    "a transposed gradient is read as a dense one": (
        (LISTS, "query * query_stride + context * context_stride",
         "query * (query_stride == 1 ? context_stride : query_stride) + context"),
        r"^backward: ",
    ),
    "missing barrier between a product and the next": (
        (PRODUCTS, "barrier();  // The next product takes the place of this one.", ""),
        r"^backward: |race at index \d+",
    ),
    "a slice is multiplied before its copies have landed": (
        (PRODUCTS, "wait_copies<0>();\n    barrier();", "wait_copies<1>();\n    barrier();"),
        r"shared array 'stages': (.*copy|race at)",
    ),
    "a slice is filled while it is read": (
        (PRODUCTS, "barrier();  // The copies of all threads have landed, and all are done with the stage that is "
         "filled next.", "warp_sync();"),
        r"shared array 'stages': ",
    ),
    "the planes replace stages that are still read": (
        (PRODUCTS, "barrier();  // The planes take the place of the stages.", ""),
        r"shared array '(planes|stages)': ",
    ),
    "a row is copied past its end": ((PRODUCTS, "is_row && left_ > 0 ? 8 : 0", "is_row ? 8 : 0"), r"^backward: "),
    "a quarter of the width is left out": (
        (PRODUCTS, "quarter < SetTile::kQuarters; ++quarter", "quarter < SetTile::kQuarters - 1; ++quarter"),
        r"^backward: ",
    ),
    "attended vectors that cancel are taken from the Gram matrix": (
        (PAIR, "norm.is_lost() ? 1.0f : 0.0f", "norm.is_lost() ? 0.0f : 0.0f"),
        ERROR,
    ),
    "the greatest numerator of opposite vectors is not 1": (
        (ATTENTION, "static constexpr bool small_logits = false;", "static constexpr bool small_logits = true;"),
        r"^backward: gradient of the contexts: error",
    ),
    "the sums replace stages that are still read": (
        (SUMS, "barrier();  // The stages and the table are filled again, or replaced by the sums.", ""),
        r"shared array '\w+': (race at|read of) index \d+",
    ),
    "a step is multiplied before its copies have landed": (
        (SUMS, "wait_copies<kRing - 2>();", "wait_copies<kRing - 1>();"),
        r"shared array '(coefficients|rows)': (.*copy|race at)",
    ),
    "a stage is filled while it is read": (
        (SUMS, "barrier();  // All copies have landed, and all threads are done with the stage that is filled next.",
         "warp_sync();"),
        r"shared array '(coefficients|rows)': ",
    ),
    "the rows of a fragment of coefficients are swapped": (
        (SUMS, "kCoefficientStride + lane / 8 % 2 * 8;", "kCoefficientStride + (1 - lane / 8 % 2) * 8;"),
        ERROR,
    ),
    "coefficients past the end of a term are used": (
        (STEPS, "coefficient_depth_ < from.left ? 8 : 0", "8"),
        ERROR,
    ),
    "the last step is not filled up": (
        (SUMS, "granules[count] = Granule<S>{term.coefficients, term.rows, 0};", ""),
        r"shared array 'granules': read of index \d+ before",
    ),
    "the squares are written before all scores are read": (
        (TURN, "barrier();  // The squares take the place of the scores.", ""),
        ERROR,
    ),
    "the last term of a sum is dropped": (
        (SETS, TERMS, TERMS.replace("entries.last +", "entries.last - 1 +")),
        ERROR,
    ),
    "the sums of squares are left out": ((SETS, TERMS, TERMS.replace("? 1", "? 0")), ERROR),
    "all parts of a number have its first digits": (
        (PARTS, "value -= bf16_value(part[i * stride]);", "value -= 0.0f;"),
        ERROR,
    ),
    "exact queries are left out": ((SETS, "if (vote_any(has_exact)) {", "if (false) {"), ERROR),
    "the factors of the queries are those of the first pair": (
        (SETS, "numbers_of(p, chunk, pair).norm[row];", "numbers_of(p, chunk, pair).norm[0];"),
        ERROR,
    ),
    "pairs are added in an order that depends on the block": (
        (SETS, PAIR_AT + "pair_of(p, to, entry);", PAIR_AT
         + "pair_of(p, to, entries.first + (entry - entries.first + block_index()) % (entries.last - entries.first));"),
        r"^backward: the order of the threads shows",
    ),
    **{
        f"no block waits after {step}": (
            (BACKWARD, f"{step}<S>(p, chunk[0]);\n    wait({number});",
             f"{step}<S>(p, chunk[0]);\n    if (thread_index() == 0) ++*p.arrived;"),
            r"^backward: ",
        )
        for number, step in ((2, "differentiate_pairs"), (3, "sum_lists"))
    },
    "the sums of earlier chunks are dropped": ((SETS, "if (!chunk.is_first) sum += to.sums[at];", ""), ERROR),
    "Gram matrices lie over the numbers of a chunk": (
        (LAUNCH, "p.numbers = workspace.take<float>(p.room);", "p.numbers = workspace.take<float>(p.room / 2);"),
        ERROR,
    ),
    "the last pair of a chunk reaches into the next room": (
        (CHUNK, "(p.room - static_cast<int64_t>(*p.lists.largest)) / 16 * 16", "p.room"),
        r"^backward: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags", [(), ("-DITM_FAST_SHIM_TRUNCATES",)], ids=["rounds", "truncates"])
def test_the_kernels_as_they_are_pass(flags: tuple[str, ...]) -> None:
    """Also if tensor cores cut off the last digits of their sums."""
    check_all_gradients(BackwardKernels(compiled_driver(DRIVER, *flags)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_checks(name: str, tmp_path: Path) -> None:
    fault, message = FAULTS[name]
    root = planted(tmp_path / "faulty", *fault)
    library = compile_driver(DRIVER, tmp_path, "-DITM_FAST_FLOAT32_ALONE", root=root)
    with pytest.raises((AssertionError, KernelError)) as caught:
        check_all_gradients(BackwardKernels(library))
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.thorough
def test_the_kernels_pass_the_sanitizers_with_the_same_results(tmp_path: Path) -> None:
    expected = outcomes({DRIVER: compiled_driver(DRIVER)})
    compile_driver(DRIVER, tmp_path, *SANITIZERS)
    result = run_sanitized(tmp_path, DRIVER)
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(tmp_path / "outcomes.npz") as actual:
        assert set(actual) == set(expected)
        for name, right in expected.items():
            assert actual[name].tobytes() == right.tobytes(), name
