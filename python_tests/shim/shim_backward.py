"""The backward kernels of cross_attention_scores in the shim, called with numpy arrays.

This module does not import torch, so that a process under AddressSanitizer starts quickly.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.helpers.shim import call
from python_tests.shim.shim_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS

ROOM = 7_000_000  # for the numbers of pairs, as in the launcher
NEVER = 1.0  # the share of pairs above which blocks of scores take the place of lists


class _Settings(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("query_sets", ctypes.c_int64),
        ("query_rows", ctypes.c_int64),
        ("context_sets", ctypes.c_int64),
        ("context_rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("for_queries", ctypes.c_int64),
        ("for_contexts", ctypes.c_int64),
        ("room", ctypes.c_int64),
        ("dense_share", ctypes.c_double),
        ("temperature", ctypes.c_double),
        ("negative_slope", ctypes.c_double),
        ("logsumexp_temperature", ctypes.c_double),
        ("normalization", ctypes.c_int64),
        ("focal", ctypes.c_int64),
        ("aggregation", ctypes.c_int64),
        ("longest_query", ctypes.c_int64),
        ("longest_context", ctypes.c_int64),
        ("query_stride", ctypes.c_int64),
        ("context_stride", ctypes.c_int64),
    )


@dataclass
class Gradients:
    queries: np.ndarray | None
    contexts: np.ndarray | None
    pairs: int  # pairs that were differentiated
    launches: int
    blocks: str  # of scores, in place of lists: "taken", "refused" or "none"
    longest_gram: int  # contexts of the longest set with a Gram matrix


class BackwardKernels:
    """The backward kernels. bfloat16 and float16 arrays are passed as their bits in uint16; `dtype` names the type."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def backward(
        self,
        gradients: np.ndarray,  # (query sets, context sets) float32, or the transpose of a dense array
        queries: np.ndarray,  # (N, d)
        query_offsets: np.ndarray,
        contexts: np.ndarray,  # (M, d)
        context_offsets: np.ndarray,
        *,
        dtype: str = "float32",
        for_queries: bool = True,
        for_contexts: bool = True,
        room: int = ROOM,
        seed: int = 0,
        **options: Any,
    ) -> Gradients:
        """Return the gradients of both sides; None for a side that is not requested."""
        shape = (len(query_offsets) - 1, len(queries), len(context_offsets) - 1, *contexts.shape)
        settings = _settings(
            *shape, for_queries=for_queries, for_contexts=for_contexts, room=room, seed=seed, **options
        )
        of_queries = np.full_like(queries, 777) if for_queries else None
        of_contexts = np.full_like(contexts, 777) if for_contexts else None
        count, launches = np.full(1, 777, np.int64), np.zeros(3, np.int64)
        settings.query_stride, settings.context_stride = (stride // 4 for stride in gradients.strides)
        dense = gradients if gradients.flags.c_contiguous else gradients.T
        operands = (dense, queries, query_offsets, contexts, context_offsets)
        function = getattr(self.library, f"cross_attention_backward_{dtype}")
        call(function, ctypes.byref(settings), *operands, of_queries, of_contexts, count, launches)
        blocks = ("none", "taken", "refused")[launches[1]]
        return Gradients(of_queries, of_contexts, int(count[0]), int(launches[0]), blocks, int(launches[2]))

    def workspace_bytes(
        self,
        query_sets: int,
        query_rows: int,
        context_sets: int,
        context_rows: int,
        dim: int,
        *,
        longest: tuple[int, int] = (0, 0),
        element_bytes: int = 4,
    ) -> int:
        """Return the size of the workspace for rows of float32, or of 16 bits if `element_bytes` is 2."""
        function = self.library.cross_attention_backward_bytes
        function.restype = ctypes.c_int64
        sizes = (query_sets, query_rows, context_sets, context_rows, dim)
        settings = _settings(*sizes, longest=longest)
        return int(function(ctypes.byref(settings), ctypes.c_int64(element_bytes)))

    def numbers(self, n_queries: int, n_contexts: int) -> int:
        """Return how many numbers are kept of a pair of sets."""
        function = self.library.cross_attention_backward_numbers
        function.restype = ctypes.c_int64
        return int(function(ctypes.c_int64(n_queries), ctypes.c_int64(n_contexts)))

    def small_room(self, n_queries: int, n_contexts: int) -> int:
        """Return the smallest room in which a pair of sets of these lengths has a place."""
        return 2 * self.numbers(n_queries, n_contexts)


def _settings(
    *shape: int, for_queries: bool = True, for_contexts: bool = True, room: int = ROOM, seed: int = 0, **options: Any
) -> _Settings:
    return _Settings(
        seed,
        *shape,
        for_queries,
        for_contexts,
        room,
        options.get("dense_share", NEVER),
        options.get("temperature", 9.0),
        options.get("negative_slope", 0.1),
        options.get("logsumexp_temperature", 6.0),
        NORMALIZATIONS.index(options.get("normalization", "clipped_l2norm")),
        FOCAL_MODES.index(options.get("focal")),
        AGGREGATIONS.index(options.get("aggregation", "mean")),
        *options.get("longest", (0, 0)),
    )
