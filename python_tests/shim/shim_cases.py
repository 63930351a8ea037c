"""Results of a fixed set of cases for the kernels in the shim, for runs that must agree bit for bit.

This module does not import torch, so that a process under AddressSanitizer starts quickly.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np

from python_tests.helpers.shim import (
    DIRECTIONS,
    MINING,
    REDUCTIONS,
    STRATEGIES,
    BoostingKernels,
    OneLaunchKernels,
    ProductKernels,
    RetrievalKernels,
    TripletKernels,
)
from python_tests.shim.shim_attention import AGGREGATIONS, NORMALIZATIONS
from python_tests.shim.shim_attention import outcomes as _cross_attention
from python_tests.shim.shim_backward import ROOM, BackwardKernels
from python_tests.shim.shim_domain import outcomes as _domain_regularization
from python_tests.shim.shim_maxsim import outcomes as _maxsim
from python_tests.shim.shim_regulators import backward_outcomes as _regulators_backward
from python_tests.shim.shim_regulators import outcomes as _regulators

Outcomes = dict[str, np.ndarray]


def _triplet(library: Path) -> Outcomes:
    kernels = TripletKernels(library)
    random = np.random.default_rng(0)
    found: Outcomes = {}
    for number, mining in enumerate(MINING * 2):
        dtype = (np.float32, np.float64)[number // len(MINING)]
        directions = DIRECTIONS[number % 3]
        size = (1, 16, 33, 70)[number % 4]
        scores = random.standard_normal((size, size)).astype(dtype)
        mask = random.random((size, size)) < 0.2
        own = random.standard_normal(size).astype(dtype) if directions != "both" else None
        options = {"mining": mining, "directions": directions, "reduction": REDUCTIONS[number % 3], "epsilon": 0.5}
        loss, negatives = kernels.forward(scores, mask, own, seed=number, **options)
        grad = np.ones_like(loss)
        gradients = kernels.backward(grad, scores, negatives, mask, own, large=number % 2 == 1, seed=number, **options)
        named = {"loss": loss, "negatives": negatives, "scores": gradients[0], "positive": gradients[1]}
        found |= {f"{number} {name}": value for name, value in named.items() if value is not None}
        values, indices = kernels.hardest_negatives(scores, mask, seed=number)
        found[f"{number} hardest"], found[f"{number} indices"] = values, indices
        found[f"{number} hardest gradient"] = kernels.hardest_negatives_backward(values, indices, seed=number)
    return found


def _boosting(library: Path) -> Outcomes:
    kernels = BoostingKernels(library)
    random = np.random.default_rng(0)
    found: Outcomes = {}
    for number, (strategy, mining) in enumerate(product(STRATEGIES, ("hardest", "all"))):
        size, dtype = (1, 16, 33, 70)[number % 4], (np.float32, np.float64)[number % 2]
        scores, anchor = random.uniform(-1, 1, (2, size, size)).astype(dtype)
        mask = random.random((size, size)) < 0.2
        options = {"strategy": strategy, "mining": mining, "soft": number % 3 == 0}
        loss, negatives = kernels.forward(scores, anchor, mask, seed=number, **options)
        gradient = kernels.backward(np.ones_like(loss), scores, anchor, negatives, mask, seed=number, **options)
        found |= {f"{number} loss": loss, f"{number} negatives": negatives, f"{number} gradient": gradient}
    return found


def _one_launch(library: Path) -> Outcomes:
    kernels = OneLaunchKernels(library)
    random = np.random.default_rng(0)
    found: Outcomes = {}
    for number, mining in enumerate(MINING):
        size = (1, 16, 33, 70)[number % 4]
        scores, anchor = random.uniform(-1, 1, (2, size, size)).astype((np.float32, np.float64)[number % 2])
        mask = random.random((size, size)) < 0.2
        options = {"mining": mining, "epsilon": 0.5, "blocks": 1 + number % 3, "seed": number}
        parts = kernels.triplet(scores, mask, **options)
        if mining in ("all", "hardest"):
            parts += kernels.boosting(scores, anchor, mask, strategy="both", **options)
        found |= {f"{number} {i}": part for i, part in enumerate(parts)}
        found[f"{number} scaled"] = kernels.scale(scores.reshape(-1), 0.5, seed=number)
    return found


def _retrieval(library: Path) -> Outcomes:
    kernels = RetrievalKernels(library)
    random = np.random.default_rng(0)
    found: Outcomes = {}
    for number, (n_images, n_captions) in enumerate(((1, 1), (5, 0), (17, 70), (16, 64))):
        scores = random.integers(-3, 4, (n_images, n_captions)).astype((np.float32, np.float64)[number % 2])
        owner = random.integers(-1, n_images + 1, n_captions)
        ties = ("pessimistic", "optimistic")[number % 2]
        ranks = kernels.ranks(scores, owner, ties, large=number == 3, seed=number)
        found[f"{number} images"], found[f"{number} captions"] = ranks
    return found


def _product(library: Path) -> Outcomes:
    kernels = ProductKernels(library)
    random = np.random.default_rng(0)
    found: Outcomes = {}
    for number in range(4):
        # Any bits except NaN and infinity, in both types.
        left, right = (random.integers(0, 0x7000, shape).astype(np.uint16) for shape in ((33, 40), (24, 40)))
        given = np.ascontiguousarray(right.T) if number % 2 else right
        found[str(number)] = kernels.product(left, given, transposed=number % 2 == 1, half=number > 1, seed=number)
    return found


def _cross_attention_backward(library: Path) -> Outcomes:
    kernels = BackwardKernels(library)
    random = np.random.default_rng(0)
    found: Outcomes = {}
    # Case 2 has long sets, case 3 invalid offsets, and the last case a small workspace.
    bounds = (
        ([0, 3, 3, 8], [0, 2, 19], [0, 50, 2, 8], [0, 3, 4, 8]),
        ([0, 4, 11], [0, 70, 73], [-5, 4, 30], [0, 4, 11]),
    )
    for number, (query_bounds, context_bounds) in enumerate(zip(*bounds, strict=True)):
        dtype = ("float32", "float16", "bfloat16", "float32")[number]
        operands: list[np.ndarray] = []
        for offsets, rows in ((query_bounds, (8, 19, 8, 8)[number]), (context_bounds, (11, 73, 11, 11)[number])):
            values = random.standard_normal((rows, 34)).astype(np.float32)
            if dtype != "float32":  # Bits of 1 to 2 in float16, and of 2^-7 to 2 in bfloat16.
                values = random.integers(0x3C00, 0x4000, values.shape).astype(np.uint16)
            operands += [values, np.array(offsets)]
        gradients = random.standard_normal((len(query_bounds) - 1, len(context_bounds) - 1)).astype(np.float32)
        gradients[0, 1] = 0.0
        options = {"normalization": NORMALIZATIONS[number], "aggregation": AGGREGATIONS[number]}
        room = kernels.small_room(5, 7) if number == 3 else ROOM
        result = kernels.backward(gradients, *operands, dtype=dtype, room=room, seed=number, **options)
        found[f"{number} queries"], found[f"{number} contexts"] = result.queries, result.contexts
    # Blocks of scores, in several chunks.
    bounds = (np.array([0, 3, 3, 43, 70]), np.array([0, 36, 40, 90]))
    rows = [random.standard_normal((offsets[-1], 34)).astype(np.float32) for offsets in bounds]
    operands = [rows[0], bounds[0], rows[1], bounds[1]]
    result = kernels.backward(np.ones((4, 3), np.float32), *operands, room=35_000, dense_share=0.0)
    assert result.blocks == "taken"
    found["blocks queries"], found["blocks contexts"] = result.queries, result.contexts
    return found


def outcomes(libraries: dict[str, Path]) -> Outcomes:
    """Return the results of the drivers by driver, case and name."""
    cases = {
        "triplet": _triplet,
        "boosting": _boosting,
        "one_launch": _one_launch,
        "retrieval": _retrieval,
        "product": _product,
        "cross_attention": _cross_attention,
        "cross_attention_backward": _cross_attention_backward,
        "domain_regularization": _domain_regularization,
        "maxsim": _maxsim,
        "regulators": _regulators,
        "regulators_backward": _regulators_backward,
    }
    return {f"{driver} {name}": v for driver, path in libraries.items() for name, v in cases[driver](path).items()}
