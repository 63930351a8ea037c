"""The kernels of domain_regularization in the shim, called with numpy arrays.

This module does not import torch, so that a process under AddressSanitizer starts quickly.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from python_tests.helpers.shim import call

# Values and offsets of regions and of words, weights, biases, then the negatives (both or neither).
Operands = tuple[np.ndarray | None, ...]
# adversarial, regularization, risks, sums
Found = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


class _Settings(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("pairs", "dim", "region_rows", "word_rows", "wide_offsets", "averages")),
        ("margin", ctypes.c_double),
    )


class DomainKernels:
    """The launches of forward and backward. 16-bit rows are passed as their bits; `dtype` names the type."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def forward(self, operands: Operands, *, for_weights: bool = True, dtype: str = "float32", **options) -> Found:
        kinds, pairs, dim = self._sizes(operands)
        one = np.full(pairs, 777, np.float32)
        risks = np.full((kinds, pairs), 777, np.float32)
        sums = np.full((kinds, pairs, dim + 1), 777, np.float32) if for_weights else None
        found = (one, one.copy(), risks, sums)
        call(getattr(self.library, f"domain_forward_{dtype}"), self._settings(operands, options), *operands, *found)
        return found

    def backward(
        self,
        incoming: tuple[np.ndarray, np.ndarray],
        operands: Operands,
        found: Found,
        *,
        for_features: bool = True,
        dtype: str = "float32",
        **options,
    ) -> tuple[np.ndarray | None, ...]:
        """Return the gradients of regions, words, weights and biases.

        The first two are None unless `for_features`; the last two are None without sums.
        """
        regions, words, weights, biases = operands[0], operands[2], operands[4], operands[5]
        wanted = (for_features, for_features, found[3] is not None, found[3] is not None)
        gradients = tuple(
            np.full(part.shape, 777, np.float32) if want else None
            for part, want in zip((regions, words, weights, biases), wanted, strict=True)
        )
        function = getattr(self.library, f"domain_backward_{dtype}")
        call(function, self._settings(operands, options), *operands, *incoming, *found[2:], *gradients)
        return gradients

    @staticmethod
    def _sizes(operands: Operands) -> tuple[int, int, int]:
        return 1 if operands[6] is None else 5, *operands[4].shape

    def _settings(self, operands: Operands, options: dict) -> object:
        _, pairs, dim = self._sizes(operands)
        return ctypes.byref(
            _Settings(
                options.get("seed", 0),
                pairs,
                dim,
                len(operands[0]),
                len(operands[2]),
                options.get("wide_offsets", True),
                options.get("aggregation", "sum") == "mean",
                options.get("margin", 0.05),
            )
        )


def outcomes(library: Path) -> dict[str, np.ndarray]:
    """Compute results of a fixed set of cases, for runs that must agree bit for bit."""
    kernels = DomainKernels(library)
    random = np.random.default_rng(0)
    found = {}
    # Ragged and empty sets, sets with more rows than fit at a time, and invalid offsets.
    cases = (
        ([0, 3, 3, 8], [0, 2, 5, 5], [1, 2, 0], [2, -1, 0]),
        ([0, 70], [0, 66], [0], [-1]),
        ([0, 50, 2, 8], [-5, 4, 2**40, 11], [1, 7, -9], [2, 2, 1]),
    )
    for number, (regions, words, captions, images) in enumerate(cases):
        pairs, dim = len(captions), (5, 33, 300)[number]
        rows = [random.standard_normal((max(side[-1], 1), dim)).astype(np.float32) for side in (regions, words)]
        operands = (
            *(rows[0], np.array(regions), rows[1], np.array(words)),
            *(
                random.standard_normal((pairs, dim)).astype(np.float32),
                random.standard_normal(pairs).astype(np.float32),
            ),
            *(np.array(captions), np.array(images)),
        )
        options = {"margin": 10.0, "aggregation": ("sum", "mean")[number % 2], "seed": number}
        results = kernels.forward(operands, **options)
        incoming = tuple(random.standard_normal((2, pairs)).astype(np.float32))
        results += kernels.backward(incoming, operands, results, **options)
        # Gradients of rows outside all pairs keep their initial value, which is the same in every run.
        found |= {f"{number} {i}": part for i, part in enumerate(results)}
    return found
