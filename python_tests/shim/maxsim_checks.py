"""Compare the CUDA kernels of maxsim_scores in the shim with the reference. Each check raises AssertionError."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from itm_fast import Fragments, reference
from python_tests.shim.shim_maxsim import MaxsimKernels

# Largest error, relative to numbers of about 1: of float32, and of gradients that are rounded to bfloat16.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def operands_of(queries: Fragments, contexts: Fragments) -> list[np.ndarray]:
    """Return rows and offsets of both sides; bfloat16 becomes its bits."""
    found = []
    for side in (queries, contexts):
        values = side.values.detach()
        found += [
            values.numpy() if values.dtype == torch.float32 else values.view(torch.uint16).numpy(),
            side.offsets.numpy(),
        ]
    return found


def rows_of(values: np.ndarray) -> torch.Tensor:
    """Return rows in float64."""
    rows = torch.from_numpy(values)
    return (rows if rows.dtype == torch.float32 else rows.view(torch.bfloat16)).double()


def exact_results(
    queries: Fragments,
    contexts: Fragments,
    incoming: torch.Tensor,
    function: Any = reference.maxsim_scores,
    **options: Any,
) -> list[torch.Tensor]:
    """Compute scores and gradients in float64."""
    leaves = [side.values.detach().double().requires_grad_() for side in (queries, contexts)]
    scores = function(queries.with_values(leaves[0]), contexts.with_values(leaves[1]), **options)
    return [scores.detach(), *torch.autograd.grad((scores * incoming.double()).sum(), leaves)]


def check_maxsim(
    kernels: MaxsimKernels,
    queries: Fragments,
    contexts: Fragments,
    *,
    pairs: torch.Tensor | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Check scores and gradients, with a gradient of zero for every fourth pair; return what the kernels found."""
    shape = (len(queries), len(contexts)) if pairs is None else (len(pairs),)
    incoming = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    incoming.view(-1)[::4] = 0.0
    seed = options.pop("seed", 0)
    right = exact_results(queries, contexts, incoming, pairs=pairs, **options)
    longest = (queries.max_length, contexts.max_length)
    given = {"pairs": None if pairs is None else pairs.numpy(), "seed": seed, "longest": longest, **options}
    operands = operands_of(queries, contexts)
    found = [kernels.scores(*operands, **given), *kernels.gradients(incoming.numpy(), *operands, **given)]
    tolerance = TOLERANCES[queries.dtype]
    for name, actual, expected, bound in zip(
        ("scores", "queries", "contexts"), found, right, (1e-5, tolerance, tolerance), strict=True
    ):
        error = (rows_of(actual) - expected).abs() / expected.abs().clamp(min=1.0)
        assert bool((error <= bound).all()), f"maxsim: {name}: error {float(error.max()):.2g}"
    return found
