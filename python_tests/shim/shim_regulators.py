"""The kernels of regulated_scores and cross_attention_alignments in the shim, with numpy arrays and without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.helpers.shim import call
from python_tests.shim.shim_attention import FOCAL_MODES, NORMALIZATIONS

ROOM = 130_000_000  # for the rows of a chunk, as in the launcher
_COUNTS = ("alignments", "correspondences", "aggregations", "scored", "learned_factors")
_OPTIONS = (
    *("tanh_activation", "normalize_mean", "normalize_attended", "normalize_guidance"),
    *("interleaved", "sees_query", "residual_correspondence", "residual_aggregation"),
)


class _Settings(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("large", "wide_offsets", "blocks", "aligns")),
        *((name, ctypes.c_int64) for name in ("query_sets", "query_rows", "context_sets", "context_rows")),
        *((name, ctypes.c_int64) for name in ("dim", "width", *_COUNTS, *_OPTIONS)),
        *((name, ctypes.c_double) for name in ("temperature", "negative_slope")),
        *((name, ctypes.c_int64) for name in ("normalization", "focal")),
        ("dropout", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("dropout_seed", "longest_query", "longest_context")),
    )


@dataclass
class Weights:
    """Tensors in the order of `RegulatorParameters.tensors()`, with their structure: `_COUNTS` and `_OPTIONS`."""

    tensors: Sequence[np.ndarray]  # float32
    width: int
    hidden: Sequence[int]  # output widths of w1 and w3 of each correspondence
    setting: dict[str, int]

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all tensors one after the other, and the hidden widths."""
        flat = np.concatenate([np.zeros(0, np.float32), *(tensor.reshape(-1) for tensor in self.tensors)])
        return flat, np.array([*self.hidden, 0])


def _settings(
    sizes: tuple[int, ...],  # query sets, query rows, context sets, context rows, dim
    weights: Weights,
    aligns: bool,
    large: bool,
    wide_offsets: bool,
    blocks: int,
    seed: int,
    options: dict[str, Any],
) -> _Settings:
    setting = {"residual_correspondence": 1, "normalize_attended": 1, "normalize_guidance": 1} | weights.setting
    return _Settings(
        seed,
        large,
        wide_offsets,
        blocks,
        aligns,
        *sizes,
        weights.width,
        *(int(setting.get(name, 0)) for name in (*_COUNTS, *_OPTIONS)),
        options.get("temperature", 10.0),
        options.get("negative_slope", 0.1),
        NORMALIZATIONS.index(options.get("normalization", "clipped_l2norm")),
        FOCAL_MODES.index(options.get("focal")),
        options.get("dropout", 0.0),
        options.get("dropout_seed", 0),
        *options.get("longest", (0, 0)),
    )


class RegulatorKernels:
    """The two launches of a call; `launches` and `slab_bytes` describe the latest call."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.launches = self.slab_bytes = 0

    def run(
        self,
        kernel: str,
        queries: np.ndarray,
        query_offsets: np.ndarray,
        contexts: np.ndarray,
        context_offsets: np.ndarray,
        weights: Weights,
        *,
        aligns: bool = False,
        large: bool = False,
        wide_offsets: bool = True,
        blocks: int = 3,
        seed: int = 0,
        **options: Any,
    ) -> np.ndarray:
        """Compute scores (query sets, context sets), or with `aligns` the alignments (context sets, query rows, width).

        Args:
            kernel: "float32", "bf16x3" or "bf16"; rows are always float32.
            blocks: maximum number of blocks of the second launch.
        """
        n_queries, n_contexts = len(query_offsets) - 1, len(context_offsets) - 1
        sizes = (n_queries, len(queries), n_contexts, *contexts.shape)
        settings = _settings(sizes, weights, aligns, large, wide_offsets, blocks, seed, options)
        # Alignments of rows outside all sets keep the fill value of the launcher.
        shape, fill = ((n_contexts, len(queries), weights.width), 0) if aligns else ((n_queries, n_contexts), 777)
        result, counts = np.full(shape, fill, np.float32), np.zeros(2, np.int64)
        operands = (queries, query_offsets, contexts, context_offsets, *weights.flat())
        call(getattr(self.library, f"regulated_{kernel}"), ctypes.byref(settings), *operands, result, counts)
        self.launches, self.slab_bytes = map(int, counts)
        return result

    def slabs(self, sizes: tuple[int, ...], weights: Weights, longest: tuple[int, int], blocks: int) -> list[int]:
        """Return the number of blocks of the second launch, at most `blocks`, the bytes of the slab of each, and the
        length of the longest context sets with a Gram matrix.

        Args:
            sizes: query sets, query rows, context sets, context rows, dim.
        """
        found = np.zeros(3, np.int64)
        settings = _settings(sizes, weights, False, True, True, blocks, 0, {"longest": longest})
        call(self.library.slabs, ctypes.byref(settings), max(weights.hidden, default=0), found)
        return found.tolist()

    def limits(self, n_rows: int, n_sets: int, longest: int) -> list[int]:
        """Return the maximum query rows, contexts and steps that the launchers support for sides of this size.

        Args:
            longest: length of the longest set, or 0: unknown.
        """
        found = np.zeros(3, np.int64)
        call(self.library.limits, n_rows, n_sets, longest, found)
        return found.tolist()


class RegulatorBackwardKernels:
    """The backward of a call; `launches`, `pairs`, `workspace_bytes` and `chunk_rows` describe the latest call."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.launches = self.pairs = self.workspace_bytes = self.chunk_rows = 0

    def run(
        self,
        gradients: np.ndarray,
        queries: np.ndarray,
        query_offsets: np.ndarray,
        contexts: np.ndarray,
        context_offsets: np.ndarray,
        weights: Weights,
        *,
        aligns: bool = False,
        large: bool = False,
        wide_offsets: bool = True,
        blocks: int = 3,
        room: int = ROOM,
        seed: int = 0,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the gradients of queries, contexts and weights, the last one after the other in one vector.

        Args:
            gradients: those of the scores, or with `aligns` of the alignments.
            blocks: number of blocks of the second launch.
            room: numbers that the arrays of a chunk have room for; a chunk has at least one tile.
        """
        sizes = (len(query_offsets) - 1, len(queries), len(context_offsets) - 1, *contexts.shape)
        settings = _settings(sizes, weights, aligns, large, wide_offsets, blocks, seed, options)
        flat, hidden = weights.flat()
        found = tuple(np.full_like(part, 777) for part in (queries, contexts, flat))
        counts = np.full(4, 777, np.int64)
        operands = (gradients, queries, query_offsets, contexts, context_offsets, flat, hidden, flat.size, room)
        call(self.library.regulated_backward, ctypes.byref(settings), *operands, *found, counts)
        self.launches, self.pairs, self.workspace_bytes, self.chunk_rows = map(int, counts)
        return found


def random_weights(random: np.random.Generator, dim: int, width: int, *counts: int, **options: int) -> Weights:
    """Draw weights of a setting without learned factors; `counts` are alignments, correspondences, aggregations."""
    aligned, corresponded, aggregated = counts
    seen = dim if options.get("sees_query") else width
    shapes: list[tuple[int, ...]] = [(width, dim), (width,)] * aligned
    shapes += [
        *((2 * width, seen), (2 * width,), (dim, 2 * width), (dim,)),
        *((width // 2, seen), (width // 2,), (1, width // 2), (1,)),
    ] * corresponded
    shapes += [(width, width), (width,), (width, width), (width,), (1, width), (1,)] * aggregated
    shapes += [(1, width), (1,)] * options.get("scored", 0)
    tensors = [0.5 * random.standard_normal(shape).astype(np.float32) for shape in shapes]
    setting = {"alignments": aligned, "correspondences": corresponded, "aggregations": aggregated} | options
    return Weights(tensors, width, [2 * width, width // 2] * corresponded, setting)


Case = tuple[list[np.ndarray], Weights, dict[str, Any]]  # operands, weights, and how to run them


def _cases() -> list[Case]:
    """Make the cases of `outcomes` and `backward_outcomes`."""
    random = np.random.default_rng(0)
    made: list[Case] = []
    rcar = {"scored": 1, "interleaved": 1}
    # Short sets, sets beyond the limits, invalid offsets, no contexts, long sets on both sides, and
    # such sets of known length among short ones.
    cases: tuple[tuple[list[int], list[int], int, dict[str, int], tuple[int, int, int]], ...] = (
        ([0, 3, 3, 9, 34], [0, 4, 9], 66, rcar, (2, 1, 2)),
        ([0, 40, 45], [0, 3, 40], 9, {}, (1, 1, 0)),
        ([0, 90, 2, 10], [0, -5, 2**40, 10], 8, rcar, (2, 1, 2)),
        ([0, 5, 11], [0, 0, 0], 13, {"aligns": 1}, (2, 1, 0)),
        ([0, 35], [0, 70], 66, rcar, (2, 1, 2)),
        ([0, 3, 38], [0, 4, 74], 9, rcar, (2, 1, 2)),
    )
    for number, (query_offsets, context_offsets, dim, setting, counts) in enumerate(cases):
        aligns = bool(setting.get("aligns", 0))
        weights = random_weights(random, dim, 10, *counts, **{k: v for k, v in setting.items() if k != "aligns"})
        operands: list[np.ndarray] = []
        for offsets in (query_offsets, context_offsets):
            rows = random.standard_normal((10 if number == 2 else offsets[-1], dim)).astype(np.float32)
            operands += [rows, np.array(offsets)]
        options = {"focal": FOCAL_MODES[number % 3], "dropout": 0.4 if counts[2] else 0.0, "dropout_seed": 2**40}
        longest = (35, 70) if number == 5 else (0, 0)
        made.append((operands, weights, {"aligns": aligns, "seed": number, "longest": longest, **options}))
    return made


def outcomes(library: Path) -> dict[str, np.ndarray]:
    """Compute results of a fixed set of cases, for runs that must agree bit for bit."""
    kernels = RegulatorKernels(library)
    return {
        str(number): kernels.run("float32", *operands, weights, **options)
        for number, (operands, weights, options) in enumerate(_cases())
    }


def backward_outcomes(library: Path) -> dict[str, np.ndarray]:
    """Compute gradients of the same cases, with chunks of one tile."""
    kernels, random = RegulatorBackwardKernels(library), np.random.default_rng(1)
    found: dict[str, np.ndarray] = {}
    for number, (operands, weights, options) in enumerate(_cases()):
        queries, query_offsets, _, context_offsets = operands
        sizes = len(query_offsets) - 1, len(context_offsets) - 1
        shape = (sizes[1], len(queries), weights.width) if options["aligns"] else sizes
        gradients = random.standard_normal(shape).astype(np.float32)
        parts = kernels.run(gradients, *operands, weights, room=0, **options)
        found |= {
            f"{number} {name}": part for name, part in zip(("queries", "contexts", "weights"), parts, strict=True)
        }
    return found
