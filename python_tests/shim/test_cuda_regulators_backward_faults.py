"""Faults planted into the backward CUDA kernels of the regulators: each must fail the checks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from python_tests.helpers.shim import SANITIZERS, KernelError, compile_driver, compiled_driver
from python_tests.shim.faults import planted, run_sanitized
from python_tests.shim.regulator_backward_checks import check_all_gradients
from python_tests.shim.shim_cases import outcomes
from python_tests.shim.shim_regulators import RegulatorBackwardKernels

pytestmark = pytest.mark.shim

DRIVER = "regulators_backward"
KERNELS = "csrc/include/itm_fast/cuda/"
KERNEL, TILE, ATTENTION, STEPS, SUMS, LAUNCH = (
    f"{KERNELS}regulation_backward{name}.h" for name in ("", "_tile", "_attention", "_steps", "_sums", "_launch")
)
AGAIN, LISTS, PROBLEM, ROW_SUMS, TASKS = (
    f"{KERNELS}{name}.h"
    for name in (
        "regulation_recompute",
        "regulation_backward_lists",
        "regulation_backward_problem",
        "row_sums",
        "block_tasks",
    )
)
SMALL = ("-DITM_FAST_SMALL_TILE_ALONE",)


def check(library: Path) -> None:
    check_all_gradients(RegulatorBackwardKernels(library))


RACE = r"shared array '\w+': (race at|read of|write of) index \d+"
ERROR = r"^gradient of [\w.\[\]]+: error"
FAULTS = {
    "missing barrier before normalisation": (
        (
            AGAIN,
            "    barrier();\n    for (int i = thread_index(); i < s_.n_sets * s_.n_contexts",
            "    for (int i = thread_index(); i < s_.n_sets * s_.n_contexts",
        ),
        ERROR,
    ),
    "missing barrier after normalisation": (
        (AGAIN, "start_of(set + 1), p_.attention);\n    }\n    barrier();", "start_of(set + 1), p_.attention);\n    }"),
        ERROR,
    ),
    "products of the first rows for all rows": ((TILE, "rows + run * row_stride, n_run", "rows, n_run"), ERROR),
    "products of the first rows in place of all": ((TILE, "body(run + row, first + c,", "body(row, first + c,"), ERROR),
    "a row per pair for the gradient of a weight of all rows": (
        (
            PROBLEM,
            "list(a.turned_local, a.aligned, i, aligned, width, width, false,",
            "list(a.turned_local, a.aligned, i, aligned, width, width, true,",
        ),
        ERROR,
    ),
    "gradients of the first contexts alone": ((SUMS, "row_blocks(f.columns)", "1"), ERROR),
    "weights of one row per pair left out": ((SUMS, "  share_weights(true);\n", ""), ERROR),
    "tasks that do not begin where others end": ((TASKS, "    first_ += count;\n", ""), ERROR),
    "tasks are counted on from one chunk to the next": (
        (KERNEL, "BlockTasks::restart", "if (first == 0) BlockTasks::restart"),
        ERROR,
    ),
    "blocks that have not read the number of their task": (
        (TASKS, "    barrier();  // All have read it.\n", ""),
        r"shared array 'next': race at index 0",
    ),
    "the first part of the gradients of weights left out": (
        (SUMS, "float sum = p.weight_gradients[i];", "float sum = 0.0f;"),
        ERROR,
    ),
    "contexts left out after the weights": ((SUMS, "  if (!contexts_first) share_contexts();\n", ""), ERROR),
    "the first part of the gradients of weights alone": ((KERNEL, "  add_weight_parts(p);\n", ""), ERROR),
    "parts of the gradients of weights that overlap": (
        (SUMS, "n_tiles * part /", "n_tiles * (part / 2) /"),
        ERROR,
    ),
    "missing barrier of the grid before the sums": (
        (KERNEL, "    grid_barrier(p.arrived, ++round);\n    add_chunk", "    add_chunk"),
        ERROR,
    ),
    "gradients of the last chunk alone": (
        (SUMS, "range.width + range.column + column] += sum;", "range.width + range.column + column] = sum;"),
        ERROR,
    ),
    "a product with one row too many": (
        (TILE, "n_rows - run : Tile::kRows;", "n_rows - run : Tile::kRows + 1;"),
        r"shared array 'scores': .*expected 0 to 2079",
    ),
    "temperatures without a gradient": (
        (ATTENTION, "row) += of_temperature;", "row) += 0.0f * of_temperature;"),
        ERROR,
    ),
    "attended vectors scaled with the guidance": (
        (TILE, "return p_.options.normalize_attended ? 1.0f /", "return p_.options.normalize_guidance ? 1.0f /"),
        ERROR,
    ),
    "gradients through a norm of attended vectors in every form": (
        (ATTENTION, "normalizes ? unit.of(gradient[d]", "normalizes || true ? unit.of(gradient[d]"),
        ERROR,
    ),
    "guidance normalised again in every form": ((AGAIN, "if (!p_.options.normalize_guidance) return;", ""), ERROR),
    "gradients through a norm of the guidance in every form": (
        (STEPS, "normalizes ? unit.of(incoming[i]", "normalizes || true ? unit.of(incoming[i]"),
        ERROR,
    ),
    "channels without a bound": (
        (STEPS, "loaded.value >= -1.0f && loaded.value <= 1.0f ?", "loaded.value == loaded.value ?"),
        ERROR,
    ),
    "masks of the next row": (
        (TILE, "return {query_row(row), s_.context, 2 * step};", "return {query_row(row) + 1, s_.context, 2 * step};"),
        ERROR,
    ),
    "a softmax without its temperature": (
        (ATTENTION, "= of_logit * temperature;", "= of_logit + 0.0f * temperature;"),
        ERROR,
    ),
    "a direction that is not projected out": (
        (ATTENTION, "found -= along * scale * (clipped / norm)", "found -= 0"),
        ERROR,
    ),
    "gradients of zero rows": (
        (KERNEL, "  clear_zero_rows(f.queries, f.dim, p.query_gradients);\n", ""),
        r"^gradient of (queries: error|a zero row)",
    ),
    "the first term of a context alone": (
        (SUMS, "(end - first) * per_tile, p.context", "end - first, p.context"),
        ERROR,
    ),
    "a gradient of zero counts": (
        (LISTS, "contexts.n_sets + context] != 0.0f;", "contexts.n_sets + context] != 1.0f;"),
        r"^gradients of \d+ pairs, expected \d+",
    ),
    "a query set without its last context set": (
        (LISTS, "listed = context < n_contexts &&", "listed = context < n_contexts - 1 &&"),
        ERROR,
    ),
    "no block packs the last rows of the turned layers": (
        (LAUNCH, "(rows + kPackedRows - 1) / kPackedRows;", "rows / kPackedRows;"),
        ERROR,
    ),
    "a step is multiplied before its copies have landed": (
        (ROW_SUMS, "wait_copies<kRing - 2>();", "wait_copies<kRing - 1>();"),
        r"shared array '(coefficients|rows)': (.*copy|race at)",
    ),
    "the sums replace stages that are still read": (
        (ROW_SUMS, "barrier();  // The stages are filled again, or replaced by the sums.", ""),
        RACE,
    ),
}


def test_the_kernels_as_they_are_pass() -> None:
    check(compiled_driver(DRIVER, *SMALL))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_checks(name: str, tmp_path: Path) -> None:
    (file, place, change), message = FAULTS[name]
    root = planted(tmp_path / "faulty", file, place, change)
    library = compile_driver(DRIVER, tmp_path, *SMALL, root=root)
    with pytest.raises((AssertionError, KernelError)) as caught:
        check(library)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.thorough
def test_the_kernels_pass_the_sanitizers_with_the_same_results(tmp_path: Path) -> None:
    expected = outcomes({DRIVER: compiled_driver(DRIVER, *SMALL)})
    folder = tmp_path / "sanitized"
    folder.mkdir()
    compile_driver(DRIVER, folder, *SMALL, *SANITIZERS)
    result = run_sanitized(folder, DRIVER)
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(folder / "outcomes.npz") as actual:
        assert set(actual) == set(expected)
        for name, right in expected.items():
            assert actual[name].tobytes() == right.tobytes(), name


@pytest.mark.thorough
def test_the_sanitizers_see_what_lies_outside(tmp_path: Path) -> None:
    """The fault leaves no room for the tile that a chunk always holds."""
    root = planted(tmp_path / "faulty", LAUNCH, "padded(f.rows));", "padded(f.rows) / 4);")
    compile_driver(DRIVER, tmp_path, *SMALL, *SANITIZERS, root=root)
    result = run_sanitized(tmp_path, DRIVER)
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
