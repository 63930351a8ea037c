"""The wrappers of csrc/include/itm_fast/cuda/machine.h one by one: on the CPU with the shim, on a GPU with nvcc.

Inside: `WRAPPERS`, `CASES` with inputs and expected outputs, `Wrappers`, `compile_for_device`.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from python_tests.helpers.shim import ROOT, call

DRIVERS = ROOT / "python_tests/native/shim"
# In the order of the numbers in wrappers.h.
WRAPPERS = (
    "mma_bf16",
    "mma_fp16",
    "load_matrix",
    "load_matrix_transposed",
    "copy_halves",
    "copy_words",
    "shuffle",
    "shuffle_xor",
    "votes",
    "count_bits",
    "atomics",
    "load_coherent",
    "load_four",
    "widen",
    "narrow",
)
# Input, content of `out` before the call, and content after it: all uint32.
Case = tuple[np.ndarray, np.ndarray, np.ndarray]
LANES = np.arange(32)


class Wrappers:
    """A build of the drivers for the CPU or for a GPU; raises `KernelError` with the reported error."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def run(self, name: str, given: np.ndarray, out: np.ndarray, seed: int = 0) -> np.ndarray:
        out = out.copy()
        call(self.library.wrapper, WRAPPERS.index(name), seed, given, given.size, out, out.size)
        return out


def compile_for_device(folder: Path, architecture: str) -> Path:
    """Compile wrappers.cu with nvcc for an architecture such as "sm_90"; return the library."""
    library, nvcc = folder / f"wrappers_{architecture}.so", shutil.which("nvcc")
    assert nvcc is not None, "no nvcc on the path"
    options = ["-std=c++20", "-O1", "--expt-relaxed-constexpr", "-Werror", "all-warnings", "-Xcompiler", "-fPIC"]
    command = [nvcc, *options, "-shared", "-arch", architecture, f"-I{ROOT / 'csrc/include'}", "-o", str(library)]
    result = subprocess.run([*command, str(DRIVERS / "wrappers.cu")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return library


def _mma(random: np.random.Generator, half: bool) -> Case:
    """Multiply small integers, so that the product is exact in any summation order."""
    a, b, sums = (random.integers(-8, 9, shape) for shape in ((16, 16), (16, 8), (16, 8)))

    def bits(values: np.ndarray) -> np.ndarray:
        if half:
            return values.astype(np.float16).view(np.uint16).astype(np.uint32)
        return values.astype(np.float32).view(np.uint32) >> 16

    # From the PTX manual: groupID is lane / 4, threadID_in_group is lane % 4.
    group, thread = LANES // 4, LANES % 4
    columns = []
    for register in range(4):
        rows, first = group + 8 * (register % 2), 2 * thread + 8 * (register // 2)
        columns.append(bits(a[rows, first]) | bits(a[rows, first + 1]) << 16)
    for register in range(2):
        first = 2 * thread + 8 * register
        columns.append(bits(b[first, group]) | bits(b[first + 1, group]) << 16)

    def of_lanes(matrix: np.ndarray) -> list[np.ndarray]:
        places = [(group + 8 * (i // 2), 2 * thread + i % 2) for i in range(4)]
        return [matrix[place].astype(np.float32).view(np.uint32) for place in places]

    given = np.stack([*columns, *of_lanes(sums)], axis=1)
    return (
        given.astype(np.uint32).reshape(-1),
        np.zeros(128, np.uint32),
        np.stack(of_lanes(a @ b + sums), 1).reshape(-1),
    )


def _load_matrix(random: np.random.Generator, transposed: bool) -> Case:
    rows = random.integers(0, 2**16, (32, 8)).astype(np.uint16)
    order = random.permutation(32).astype(np.uint32)
    given = np.concatenate([rows.view(np.uint32).reshape(-1), order])
    out = np.zeros((32, 4), np.uint32)
    for matrix in range(4):
        # Lanes 8 m to 8 m + 7 point to the rows of matrix m; lane l receives two neighbours of row l / 4, or of a
        # column.
        found = rows[order[8 * matrix : 8 * matrix + 8]].astype(np.uint32)
        found = found.T if transposed else found
        out[:, matrix] = found[LANES // 4, 2 * (LANES % 4)] | found[LANES // 4, 2 * (LANES % 4) + 1] << 16
    return given, np.zeros(128, np.uint32), out.reshape(-1)


def _copy(random: np.random.Generator, size: int) -> Case:
    """Copy every number of elements from none to all; the rest of the 16 bytes becomes zero."""
    source = random.integers(1, 256, (32, 2, 16)).astype(np.uint8)
    counts = random.integers(0, 16 // size + 1, (32, 2))
    counts[:2] = [[0, 16 // size], [16 // size, 0]]
    expected = np.where(np.arange(16) < size * counts[..., None], source, 0).astype(np.uint8)
    given = np.concatenate([source.view(np.uint32).reshape(-1), counts.astype(np.uint32).reshape(-1)])
    return given, np.zeros(256, np.uint32), np.ascontiguousarray(expected).view(np.uint32).reshape(-1)


def _words(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32)


def _shuffle(random: np.random.Generator) -> Case:
    values, sources = _words(random, 32), random.integers(0, 32, 32).astype(np.uint32)
    return np.concatenate([values, sources]), np.zeros(32, np.uint32), values[sources]


def _shuffle_xor(random: np.random.Generator) -> Case:
    values = _words(random, 32)
    expected = np.stack([values[LANES ^ 1 << i] for i in range(5)], axis=1)
    return values, np.zeros(160, np.uint32), expected.reshape(-1)


def _votes(random: np.random.Generator) -> Case:
    votes = (random.random(32) < random.choice([0.0, 0.5, 1.0])).astype(np.uint32)
    ballot = np.uint32(int((votes.astype(np.uint64) << LANES.astype(np.uint64)).sum()))
    row = np.array([votes.any(), votes.all(), ballot], np.uint32)
    return votes, np.zeros(96, np.uint32), np.tile(row, 32)


def _count_bits(random: np.random.Generator) -> Case:
    words = _words(random, 32)
    return words, np.zeros(32, np.uint32), np.array([int(word).bit_count() for word in words], np.uint32)


def _atomics(random: np.random.Generator) -> Case:
    pairs = _words(random, 32, 2)
    numbers = [int(high) << 32 | int(low) for low, high in pairs]
    lows = sum(int(low) for low, _ in pairs) % 2**32
    total, largest = sum(numbers) % 2**64, max(numbers)
    expected = [lows, lows, total % 2**32, total >> 32, largest % 2**32, largest >> 32]
    return pairs.reshape(-1), np.zeros(6, np.uint32), np.array(expected, np.uint32)


def _load_coherent(random: np.random.Generator) -> Case:
    words = _words(random, 32)
    return words, np.zeros(32, np.uint32), words


def _load_four(random: np.random.Generator) -> Case:
    numbers = random.standard_normal(128).astype(np.float32).view(np.uint32)
    return numbers, np.zeros(128, np.uint32), numbers


def _widen(random: np.random.Generator) -> Case:
    """Widen all values except the NaNs of float16, whose bits are not specified."""
    bits = random.integers(0, 2**16, 32 * 16).astype(np.uint16)
    bits[np.isnan(bits.view(np.float16))] = 0xFC00
    expected = np.stack([bits.astype(np.uint32) << 16, bits.view(np.float16).astype(np.float32).view(np.uint32)], 1)
    return bits.astype(np.uint32), np.zeros(32 * 16 * 2, np.uint32), expected.reshape(-1)


def _narrow(random: np.random.Generator) -> Case:
    """Narrow arbitrary bits and the halfway cases of bfloat16 and float16.

    Rounding is to nearest, ties to even; NaN becomes 0x7fff.
    """
    words = _words(random, 32 * 32)
    words[1::4] = words[1::4] & 0xFFFF0000 | 0x8000
    # Include exponents from -27 to 17: below 2^-14 and above float16's largest number.
    exponents = random.integers(100, 145, 512).astype(np.uint32) << 23
    words[::2] = words[::2] & 0x80000000 | exponents | random.choice([0x1000, 0x3000, 0x1001, 0x7FFFFF], 512)
    nan = np.isnan(words.view(np.float32))
    kept, rest = words >> 16, words & 0xFFFF
    as_bfloat16 = np.where(nan, 0x7FFF, kept + ((rest > 0x8000) | ((rest == 0x8000) & (kept % 2 == 1))))
    with np.errstate(over="ignore"):
        as_float16 = np.where(nan, 0x7FFF, words.view(np.float32).astype(np.float16).view(np.uint16))
    pairs = [(part[::2] | part[1::2] << 16).astype(np.uint32) for part in (as_bfloat16, as_float16.astype(np.uint32))]
    expected = np.stack([pairs[0], pairs[0], pairs[1]], axis=1)
    return words, np.zeros(32 * 16 * 3, np.uint32), expected.reshape(-1)


CASES: dict[str, Callable[[np.random.Generator], Case]] = {
    "mma_bf16": lambda random: _mma(random, half=False),
    "mma_fp16": lambda random: _mma(random, half=True),
    "load_matrix": lambda random: _load_matrix(random, transposed=False),
    "load_matrix_transposed": lambda random: _load_matrix(random, transposed=True),
    "copy_halves": lambda random: _copy(random, size=2),
    "copy_words": lambda random: _copy(random, size=4),
    "shuffle": _shuffle,
    "shuffle_xor": _shuffle_xor,
    "votes": _votes,
    "count_bits": _count_bits,
    "atomics": _atomics,
    "load_coherent": _load_coherent,
    "load_four": _load_four,
    "widen": _widen,
    "narrow": _narrow,
}
