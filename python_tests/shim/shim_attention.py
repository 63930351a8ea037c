"""The kernels of cross_attention_scores in the shim, called with numpy arrays.

This module does not import torch, so that a process under AddressSanitizer starts quickly.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.helpers.shim import call

NORMALIZATIONS = ("clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm", "softmax", "clipped", "no_norm")
FOCAL_MODES = (None, "equal", "prob", "hard")
AGGREGATIONS = ("mean", "sum", "max", "logsumexp")


class _Settings(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("large", "wide_offsets")),
        *((name, ctypes.c_int64) for name in ("query_sets", "query_rows", "context_sets", "context_rows")),
        *((name, ctypes.c_int64) for name in ("dim", "shift")),
        *((name, ctypes.c_double) for name in ("temperature", "negative_slope", "logsumexp_temperature")),
        *((name, ctypes.c_int64) for name in ("normalization", "focal", "aggregation")),
        *((name, ctypes.c_int64) for name in ("longest_query", "longest_context")),
    )


def _settings(*numbers: int, longest: tuple[int, int] = (0, 0), **options: Any) -> _Settings:
    return _Settings(
        *numbers,
        options.get("temperature", 9.0),
        options.get("negative_slope", 0.1),
        options.get("logsumexp_temperature", 6.0),
        NORMALIZATIONS.index(options.get("normalization", "clipped_l2norm")),
        FOCAL_MODES.index(options.get("focal")),
        AGGREGATIONS.index(options.get("aggregation", "mean")),
        *longest,
    )


class AttentionKernels:
    """The two launches of the forward. 16-bit rows are passed as their bits."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def scores(
        self,
        kernel: str,
        queries: np.ndarray,
        query_offsets: np.ndarray,
        contexts: np.ndarray,
        context_offsets: np.ndarray,
        *,
        large: bool = False,
        wide_offsets: bool = True,
        shift: int = 0,
        seed: int = 0,
        **options: Any,
    ) -> np.ndarray:
        """Compute scores `(query sets, context sets)`; the rows start `shift` elements after a 16-byte boundary.

        Args:
            kernel: "float32", "float32_as_bf16x3", "float32_as_bf16", "bf16" or "fp16".
            options: those of the operator, and `longest`: the known lengths of queries and contexts.
        """
        n_queries, n_contexts = len(query_offsets) - 1, len(context_offsets) - 1
        shape = (n_queries, len(queries), n_contexts, *contexts.shape)
        settings = _settings(seed, large, wide_offsets, *shape, shift, **options)
        scores = np.full((n_queries, n_contexts), 777, np.float32)
        function = getattr(self.library, f"scores_{kernel}")
        call(function, ctypes.byref(settings), queries, query_offsets, contexts, context_offsets, scores)
        return scores

    def slab(
        self, query_sets: int, query_rows: int, context_sets: int, context_rows: int, longest: tuple[int, int]
    ) -> list[int]:
        """Return the most contexts and queries of sets on tensor cores and the number of slabs, or zeros."""
        found = np.full(3, 777, np.int64)
        settings = _settings(0, 1, 1, query_sets, query_rows, context_sets, context_rows, 1, 0, longest=longest)
        call(self.library.slab, ctypes.byref(settings), found)
        return found.tolist()

    def plan(self, lengths: list[int], max_rows: int, seed: int = 0) -> tuple[list[int], int]:
        """Return the first set of every tile followed by the number of sets, and the maximum number of tiles."""
        offsets = np.cumsum([0, *lengths])
        first_sets, counts = np.full(len(lengths) + 2, 777, np.int64), np.zeros(2, np.int64)
        call(self.library.plan, seed, len(lengths), offsets, max_rows, first_sets, counts)
        return first_sets[: counts[0] + 1].tolist(), int(counts[1])


def outcomes(library: Path) -> dict[str, np.ndarray]:
    """Compute scores of a fixed set of cases, for runs that must agree bit for bit."""
    kernels = AttentionKernels(library)
    random = np.random.default_rng(0)
    found = {}
    # Short sets, long sets on both sides, invalid offsets, unaligned rows, long sets alone, and lengths that are known,
    # too short or too long.
    cases = (
        ([0, 3, 3, 20], [0, 4, 30], 24, 0, (0, 0)),
        ([0, 70, 75], [0, 3, 63], 9, 0, (0, 0)),
        ([0, 90, 2, 10], [0, -5, 2**40, 10], 8, 0, (9, 9)),
        ([0, 33, 40], [0, 40, 50], 13, 3, (0, 0)),
        ([0, 70, 140], [0, 60, 163], 12, 0, (0, 0)),
        ([0, 3, 9, 79], [0, 9, 110, 163], 12, 0, (70, 64)),
        ([0, 3, 9, 79], [0, 9, 110, 163], 12, 0, (1, 2**40)),
    )
    for number, (query_offsets, context_offsets, dim, shift, longest) in enumerate(cases):
        options = {"longest": longest, "normalization": NORMALIZATIONS[number], "aggregation": AGGREGATIONS[number % 4]}
        options["focal"] = FOCAL_MODES[number % 4]
        for kernel in ("float32", "bf16"):
            operands: list[np.ndarray] = []
            for offsets in (query_offsets, context_offsets):
                rows = random.standard_normal((10 if number == 2 else offsets[-1], dim)).astype(np.float32)
                bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
                operands += [rows if kernel == "float32" else bits, np.array(offsets)]
            found[f"{number} {kernel}"] = kernels.scores(kernel, *operands, shift=shift, seed=number, **options)
    return found
