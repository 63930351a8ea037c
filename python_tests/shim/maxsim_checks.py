"""Compare the CUDA kernels of maxsim_scores in the shim with the reference. Each check raises AssertionError."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from itm_fast import Fragments, reference
from python_tests.shim.attention_checks import DTYPES, array
from python_tests.shim.shim_maxsim import MaxsimKernels

KERNELS = ("float32", "float32_as_bf16x3", "bf16", "fp16")
# Largest error, relative to numbers of about 1: of float32, and of gradients that are rounded to 16 bits.
FLOAT32, ROUNDED = 1e-5, {"bf16": 2**-8, "fp16": 2**-11}
# Largest error of a term x y of products in two bfloat16 parts: what the parts of x leave out, and those of y, and the
# product of both second parts are 2^-16 of the term at most.
TWO_PARTS = 3 * 2**-16


def dtype_of(kernel: str) -> torch.dtype:
    """Return the dtype of the rows that a kernel takes."""
    return DTYPES.get(kernel, torch.float32)


def operands_of(queries: Fragments, contexts: Fragments) -> list[np.ndarray]:
    """Return rows and offsets of both sides; 16-bit rows become their bits."""
    return [part for side in (queries, contexts) for part in (array(side.values), side.offsets.numpy())]


def rows_of(values: np.ndarray, kernel: str = "float32") -> torch.Tensor:
    """Return scores, or rows that a kernel wrote, in float64."""
    rows = torch.from_numpy(values)
    return (rows if rows.dtype == torch.float32 else rows.view(dtype_of(kernel))).double()


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
    kernel: str = "float32",
    *,
    pairs: torch.Tensor | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Check scores and gradients, with a gradient of zero for every fourth pair; return what the kernels found.

    The sets have the dtype that `kernel` takes.
    """
    shape = (len(queries), len(contexts)) if pairs is None else (len(pairs),)
    incoming = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    incoming.view(-1)[::4] = 0.0
    seed = options.pop("seed", 0)
    right = exact_results(queries, contexts, incoming, pairs=pairs, **options)
    longest = (queries.max_length, contexts.max_length)
    given: dict[str, Any] = {"pairs": None if pairs is None else pairs.numpy(), "seed": seed, "longest": longest}
    given |= {"kernel": kernel, **options}
    operands = operands_of(queries, contexts)
    found = [kernels.scores(*operands, **given), *kernels.gradients(incoming.numpy(), *operands, **given)]
    of_gradients = ROUNDED.get(kernel, FLOAT32)
    allowed = [
        tolerance * expected.abs().clamp(min=1.0)
        for tolerance, expected in zip((FLOAT32, of_gradients, of_gradients), right, strict=True)
    ]
    if kernel == "float32_as_bf16x3":
        # The greatest product differs by no more than the greatest sum of the magnitudes of its terms allows.
        magnitudes = (side.with_values(side.values.detach().double().abs()) for side in (queries, contexts))
        allowed[0] += TWO_PARTS * reference.maxsim_scores(*magnitudes, pairs=pairs, **options)
    for name, actual, expected, bound in zip(("scores", "queries", "contexts"), found, right, allowed, strict=True):
        error = (rows_of(actual, kernel) - expected).abs()
        assert bool((error <= bound).all()), f"maxsim: {name}: error {float(error.max()):.2g}"
    return found
