"""The CPU shim itself: its fragment table, its wrappers, and its reports of kernels that break the rules."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_tests.helpers.shim import KernelError, ProductKernels, call, compiled_driver
from python_tests.helpers.shim_checks import check_product

pytestmark = pytest.mark.shim


@pytest.fixture(scope="module")
def kernels() -> ProductKernels:
    return ProductKernels(compiled_driver("product"))


# From the figures in the PTX ISA, section "Matrix Fragments for mma.m16n8k16 with floating point type": the lane (T0 to
# T31) and its element for each row and column. A: rows 0 to 7 of the left half; the other quarters are in the elements
# named there, in the same lanes.
FIGURE_A = [[4 * row + column // 2 for column in range(8)] for row in range(8)]
QUARTERS_A = {(0, 0): ("a0", "a1"), (8, 0): ("a2", "a3"), (0, 8): ("a4", "a5"), (8, 8): ("a6", "a7")}
# B: rows 0 to 7; T0 holds b0 and b1 of column 0 in rows 0 and 1. Rows 8 to 15: the same lanes, b2 and b3.
FIGURE_B = [[4 * column + row // 2 for column in range(8)] for row in range(8)]
HALVES_B = {0: ("b0", "b1"), 8: ("b2", "b3")}
# Sums: rows 0 to 7 as in A, with c0 and c1; rows 8 to 15: the same lanes, c2 and c3.
HALVES_C = {0: ("c0", "c1"), 8: ("c2", "c3")}


def places(kernels: ProductKernels, table: int, elements: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (row, column) -> (lane, element) from the table that host bodies and kernels share."""
    found = {}
    for lane in range(32):
        for element in range(elements):
            out = np.zeros(2, np.int64)
            kernels.library.place(*map(ctypes.c_int64, (table, lane, element)), ctypes.c_void_p(out.ctypes.data))
            assert tuple(out.tolist()) not in found
            found[tuple(out.tolist())] = (lane, element)
    return found


def test_the_table_of_fragments_is_that_of_the_manual(kernels: ProductKernels) -> None:
    a, b, c = {}, {}, {}
    for row in range(8):
        for column in range(8):
            for (down, right), names in QUARTERS_A.items():
                a[row + down, column + right] = (FIGURE_A[row][column], int(names[column % 2][1]))
            for down, names in HALVES_B.items():
                b[row + down, column] = (FIGURE_B[row][column], int(names[row % 2][1]))
            for down, names in HALVES_C.items():
                c[row + down, column] = (FIGURE_A[row][column], int(names[column % 2][1]))
    assert places(kernels, 0, 8) == a
    assert places(kernels, 1, 4) == b
    assert places(kernels, 2, 4) == c
    # Some entries computed with the formulas of the manual.
    assert a[0, 0] == (0, 0)
    assert a[13, 3] == (21, 3)
    assert a[5, 14] == (23, 4)
    assert b[9, 7] == (28, 3)
    assert c[15, 6] == (31, 2)


def test_the_table_of_matrix_loads_is_that_of_the_manual(kernels: ProductKernels) -> None:
    # ldmatrix: lanes 0 to 3 receive row 0, two neighbouring elements each; transposed: column 0.
    rows = places(kernels, 3, 2)
    assert rows == {(i, j): (4 * i + j // 2, j % 2) for i in range(8) for j in range(8)}
    assert places(kernels, 4, 2) == {(j, i): value for (i, j), value in rows.items()}
    # With .x4, lanes 0 to 7 hold the row addresses of the first matrix, lanes 8 to 15 those of the second.
    lanes = [kernels.library.address_lane(ctypes.c_int64(m), ctypes.c_int64(r)) for m in range(4) for r in range(8)]
    assert lanes == list(range(32))


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 14), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_products_through_copies_fragments_and_tensor_cores(
    kernels: ProductKernels, rows: int, columns: int, depth: int, transposed: bool, half: bool, seed: int
) -> None:
    """Covers tails in every dimension; a copy moves eight elements."""
    width = 8 * columns if transposed else 7 * columns
    check_product(kernels, rows, width, 8 * depth, transposed=transposed, half=half, seed=seed)


@pytest.mark.parametrize("half", [False, True])
def test_sixteen_bit_values_are_those_of_numpy_and_torch(kernels: ProductKernels, half: bool) -> None:
    """Every finite value of the type is multiplied by one."""
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(np.float16).astype(np.float32) if half else (bits.astype(np.uint32) << 16).view(np.float32)
    bits, values = bits[np.isfinite(values)], values[np.isfinite(values)]
    left, values = bits.reshape(-1, 8), values.reshape(-1, 8)
    # The identity maps a row of eight values to eight results.
    right = np.diag(np.full(8, 0x3C00 if half else 0x3F80, np.uint16))
    for first in range(0, len(left), 512):
        part = np.ascontiguousarray(left[first : first + 512])
        assert np.array_equal(kernels.product(part, right, half=half), values[first : first + 512])


@pytest.mark.parametrize("seed", range(3))
def test_shuffles_and_votes(kernels: ProductKernels, seed: int) -> None:
    out = np.zeros((5, 32), np.int64)
    call(kernels.library.collectives, seed, out)
    own = [3 * lane + 1 for lane in range(32)]
    assert out[0].tolist() == [own[(lane + 5) % 32] for lane in range(32)]
    assert out[1].tolist() == [own[lane ^ 6] for lane in range(32)]
    assert out[2].tolist() == [0xAAAAAAAA] * 32  # 3 lane + 1 is even for odd lanes.
    assert out[3].tolist() == [1 + 4] * 32
    assert out[4].tolist() == [3] * 32


def order(kernels: ProductKernels, seed: int) -> list[int]:
    out = np.zeros(64, np.int64)
    call(kernels.library.order_of_threads, seed, out)
    return out.tolist()


def test_threads_run_in_an_order_that_the_seed_decides(kernels: ProductKernels) -> None:
    orders = [order(kernels, seed) for seed in (0, 1, 2)]
    assert all(sorted(found) == list(range(64)) for found in orders)
    assert orders == [order(kernels, seed) for seed in (0, 1, 2)]
    assert len({tuple(found) for found in orders}) == 3
    assert list(range(64)) not in orders


def broken(kernels: ProductKernels, rule: int, seed: int) -> None:
    call(kernels.library.broken, rule, seed)


BROKEN: list[Any] = [
    (1, r"shared array 'numbers': write of index 64, expected 0 to 63$"),
    (2, r"shared array 'numbers': read of index \d+ before anything was written to it$"),
    (3, r"shared array 'numbers': race at index \d+, write here and write by thread \d+ with no barrier between them$"),
    (4, r"shared array 'counts': race at index 0, (write here and atomic update|atomic update here and write) by"),
    (5, r"thread \d+: waits for a barrier that other threads never come to$"),
    (6, r"waits for (a vote|warp_sync) while thread \d+ of its warp waits for (a vote|warp_sync)$"),
    (7, r"shared array 'numbers': asynchronous copy to index \d+, expected source and target on 16-byte boundaries$"),
    (8, r"thread 0: the kernel ends with asynchronous copies that nothing waited for$"),
    (9, r"shared array 'halves': load_matrix of index 1, expected rows on 16-byte boundaries$"),
    (10, r"shared array 'numbers': race at index 1, write here and write by thread [01] with no barrier between them$"),
    (11, r"shared array 'counts': something was written beside it$"),
    (12, r"shared array 'floats': read of index \d+ before anything was written to it$"),
    (
        13,
        r"shared array '(floats|words)': race at index \d+, write here and write by thread \d+ with no barrier between",
    ),
    (14, r"shared array 'beyond': bytes 128 to 384 of the dynamic shared memory, of which there are 256$"),
    (15, r"shared array 'floats': write of index 64, expected 0 to 63$"),
    (16, r"shared array 'floats': write of index 5 while an asynchronous copy to it is under way$"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_those_of_torch(kernels: ProductKernels, dtype: torch.dtype) -> None:
    """All 16-bit numbers convert to float32; back conversion covers these, their neighbours and the halfway values."""
    half = ctypes.c_int64(dtype == torch.float16)
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = np.empty(bits.size, np.float32)
    kernels.library.widen_halves(half, ctypes.c_int64(bits.size), *map(pointer, (bits, wide)))
    right = torch.from_numpy(bits.view(np.int16)).view(dtype).float()
    assert torch.equal(torch.from_numpy(wide).nan_to_num(nan=3.0), right.nan_to_num(nan=3.0))
    with np.errstate(over="ignore", invalid="ignore"):
        middles = (wide[:-1].astype(np.float64) + wide[1:]) / 2
        near = np.concatenate([wide, middles, np.nextafter(wide, np.inf), np.nextafter(wide, -np.inf)])
        values = np.concatenate([near, np.nextafter(middles.astype(np.float32), np.inf)]).astype(np.float32)
    narrow = np.empty(values.size, np.uint16)
    kernels.library.narrow_floats(half, ctypes.c_int64(values.size), *map(pointer, (values, narrow)))
    actual, expected = torch.from_numpy(narrow.view(np.int16)).view(dtype), torch.from_numpy(values).to(dtype)
    assert torch.equal(actual.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(actual[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_that_keeps_the_rules_passes(kernels: ProductKernels, seed: int) -> None:
    broken(kernels, 0, seed)


@pytest.mark.parametrize(("rule", "message"), BROKEN)
def test_a_broken_rule_is_reported_whatever_the_order(kernels: ProductKernels, rule: int, message: str) -> None:
    for seed in range(4):
        with pytest.raises(KernelError, match=message):
            broken(kernels, rule, seed)
    # The next launch is unaffected.
    broken(kernels, 0, 0)
