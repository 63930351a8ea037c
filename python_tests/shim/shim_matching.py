"""The two kernels of matching_loss in the shim, called with numpy arrays."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.helpers.shim import boosting_results, call, loss_settings, triplet_results

Side = tuple[np.ndarray, np.ndarray]
# The options of the scores of contexts that attend to queries.
OTHER = {
    "temperature": 4.0,
    "logsumexp_temperature": 5.0,
    "normalization": "softmax",
    "focal": "equal",
    "aggregation": "logsumexp",
}


class _Sides(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("query_rows", "context_rows", "dim", "is_transposed")),
        ("weight_of_both", ctypes.c_float),
    )


class MatchingKernels:
    """The launch that prepares operands, and the one with `blocks` blocks resident at once."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def matching(
        self,
        queries: Side,
        contexts: Side,
        anchor_scores: np.ndarray | None = None,
        positives: np.ndarray | None = None,
        *,
        is_transposed: bool = False,
        weight_of_both: float = 0.0,
        large: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> list[np.ndarray]:
        """Return the scores, the loss, the negatives and the gradient of the scores.

        Args:
            queries: float32 rows and int64 offsets; as many sets as the contexts.
            contexts: the same.
            anchor_scores: of the boosting loss; None: the triplet loss.
            is_transposed: context sets are the rows of the scores.
            weight_of_both: add the scores of contexts that attend to queries, and multiply by this; 0: do not.
        """
        size = len(queries[1]) - 1
        settings = loss_settings((size, size), large, seed, options)
        sides = _Sides(len(queries[0]), len(contexts[0]), queries[0].shape[1], is_transposed, weight_of_both)
        scores, grad_scores = (np.full((size, size), 777, np.float32) for _ in range(2))
        results = triplet_results if anchor_scores is None else boosting_results
        loss, negatives = results(scores, options)
        inputs = (*queries, *contexts, anchor_scores, positives)
        arguments = (*inputs, scores, loss, negatives, negatives.size, grad_scores)
        call(self.library.matching, ctypes.byref(settings), ctypes.byref(sides), *arguments)
        return [scores, loss, negatives, grad_scores]
