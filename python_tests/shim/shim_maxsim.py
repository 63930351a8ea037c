"""The kernels of maxsim_scores in the shim, called with numpy arrays.

This module does not import torch, so that a process under AddressSanitizer starts quickly.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.helpers.shim import call

REDUCTIONS = ("sum", "mean")
DIRECTIONS = ("queries", "contexts", "both")
# Of the drivers' tile. Longer sets take several products.
TILE_CONTEXTS, TILE_QUERIES = 16, 32


class _Settings(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("query_sets", "query_rows", "context_sets", "context_rows", "dim")),
        *((name, ctypes.c_int64) for name in ("pairs", "reduction", "direction")),
        *((name, ctypes.c_int64) for name in ("longest_query", "longest_context")),
    )


class MaxsimKernels:
    """The kernels. 16-bit rows are passed as their bits.

    `launches` is the number of launches of the last call, `workspace` the bytes of its workspace. The option `kernel`
    is "float32", "float32_as_bf16x3", "bf16" or "fp16". The option `longest` has the lengths of the longest sets that
    the backward of listed pairs makes room for.
    """

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.launches = self.workspace = 0

    def scores(self, *operands: np.ndarray, pairs: np.ndarray | None = None, **options: Any) -> np.ndarray:
        """Return scores `(query sets, context sets)`, or `(P,)`, of queries, offsets, contexts and offsets."""
        shape = (len(operands[1]) - 1, len(operands[3]) - 1) if pairs is None else (len(pairs),)
        scores = np.full(shape, 777, np.float32)
        self._run(operands, pairs, None, scores, None, None, options)
        return scores

    def gradients(
        self,
        incoming: np.ndarray,
        *operands: np.ndarray,
        pairs: np.ndarray | None = None,
        for_queries: bool = True,
        for_contexts: bool = True,
        **options: Any,
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the gradients of both sides; None for one that is not requested."""
        of_queries = np.full_like(operands[0], 777) if for_queries else None
        of_contexts = np.full_like(operands[2], 777) if for_contexts else None
        self._run(operands, pairs, incoming, None, of_queries, of_contexts, options)
        return of_queries, of_contexts

    def _run(
        self,
        operands: tuple[np.ndarray, ...],
        pairs: np.ndarray | None,
        incoming: np.ndarray | None,
        scores: np.ndarray | None,
        of_queries: np.ndarray | None,
        of_contexts: np.ndarray | None,
        options: dict[str, Any],
    ) -> None:
        queries, query_offsets, contexts, context_offsets = operands
        settings = _Settings(
            options.get("seed", 0),
            len(query_offsets) - 1,
            len(queries),
            len(context_offsets) - 1,
            *contexts.shape,
            0 if pairs is None else len(pairs),
            REDUCTIONS.index(options.get("reduction", "sum")),
            DIRECTIONS.index(options.get("direction", "queries")),
            *options.get("longest", (len(queries), len(contexts))),
        )
        counts = np.zeros(2, np.int64)
        function = getattr(self.library, f"maxsim_{options.get('kernel', 'float32')}")
        call(
            function, ctypes.byref(settings), *operands, pairs, incoming, scores, of_queries, of_contexts, counts
        )  # fmt: skip
        self.launches, self.workspace = map(int, counts)


def outcomes(library: Path) -> dict[str, np.ndarray]:
    """Compute a fixed set of cases, for runs that must agree bit for bit."""
    kernels = MaxsimKernels(library)
    random = np.random.default_rng(0)
    found = {}
    # Short and empty sets; long sets on both sides; invalid offsets.
    cases = (([0, 3, 3, 20], [0, 4, 15], 24), ([0, 35, 37], [0, 18, 21], 9), ([0, 90, 2, 10], [0, -5, 2**40, 10], 8))
    for number, (query_offsets, context_offsets, dim) in enumerate(cases):
        operands: list[np.ndarray] = []
        for offsets in (query_offsets, context_offsets):
            rows = 10 if number == 2 else offsets[-1]
            operands += [random.standard_normal((rows, dim)).astype(np.float32), np.array(offsets)]
        pairs = random.integers(-1, 4, (7 if number == 0 else 2, 2)) if number != 1 else None
        options = {"reduction": REDUCTIONS[number % 2], "direction": "both", "seed": number, "pairs": pairs}
        if number == 2:  # The first query set is longer than that.
            options["longest"] = (8, 10)
        scores = kernels.scores(*operands, **options)
        gradients = kernels.gradients(np.ones_like(scores), *operands, **options)
        for name, part in zip(("scores", "queries", "contexts"), (scores, *gradients), strict=True):
            found[f"{number} {name}"] = part
    return found
