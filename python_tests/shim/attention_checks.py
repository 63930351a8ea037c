"""Compare the kernels of cross_attention_scores in the shim with the reference.

Each check raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast import Fragments, reference
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.tolerance import assert_as_accurate, assert_close_to_exact
from python_tests.shim.shim_attention import AttentionKernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def array(tensor: Tensor) -> np.ndarray:
    """Convert a tensor to numpy; 16-bit types become their bits."""
    tensor = tensor.detach().contiguous()
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy().view(np.uint16)


def scores_of(
    kernels: AttentionKernels, queries: Fragments, contexts: Fragments, kernel: str, **options: Any
) -> Tensor:
    """Run the kernels on fragments of the dtype that `kernel` takes."""
    operands = (array(queries.values), queries.offsets.numpy(), array(contexts.values), contexts.offsets.numpy())
    return torch.from_numpy(kernels.scores(kernel, *operands, **options))


def check_scores(
    kernels: AttentionKernels, queries: Fragments, contexts: Fragments, kernel: str = "float32", *,
    name: str = "scores", by_draws: bool = False, large: bool = False, shift: int = 0, wide_offsets: bool = True,
    seed: int = 0, longest: tuple[int, int] = (0, 0),
    **options: Any,
) -> None:  # fmt: skip
    """Check that the error is at most twice that of plain PyTorch in float32, both on the rounded inputs.

    `by_draws`: allow twice the largest error of many rounding draws. Random cases need this weaker bound, as the error
    of a single draw may be close to zero.
    """
    queries, contexts = (part.to(DTYPES.get(kernel, torch.float32)) for part in (queries, contexts))
    run = {"large": large, "shift": shift, "wide_offsets": wide_offsets, "seed": seed, "longest": longest}
    actual = scores_of(kernels, queries, contexts, kernel, **run, **options)
    single = (queries.to(torch.float32), contexts.to(torch.float32))
    exact = reference.cross_attention_scores(*(part.to(torch.float64) for part in single), **options)

    def plain(moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
        parts = (part.with_values(moved(part.values)) for part in single)
        return [reference.cross_attention_scores(*parts, **options)]

    if by_draws:
        assert_as_accurate([actual], [plain], [exact], names=[name])
    else:
        assert_close_to_exact(actual, *plain(lambda values: values), exact, name=name)


def check_random_scores(
    kernels: AttentionKernels, query_lengths: Sequence[int], context_lengths: Sequence[int], dim: int,
    kernel: str = "float32", *, values: int = 0, **options: Any,
) -> None:  # fmt: skip
    queries = random_fragments(query_lengths, dim, seed=2 * values)
    contexts = random_fragments(context_lengths, dim, seed=2 * values + 1)
    check_scores(kernels, queries, contexts, kernel, **options)


def cancelling_contexts(remainder: float, dim: int = 24) -> Fragments:
    """Make sets whose uniform mean has length about `remainder`, and a last set of length 1."""
    row = random_fragments([1], dim, seed=1).values
    rest = remainder * random_fragments([8], dim, seed=2).values
    return Fragments(
        torch.cat([row, rest[:1] - row, row, rest[1:2] - row, rest[2:], row]), torch.tensor([0, 2, 4, 10, 11])
    )


def long_cancelling_contexts(remainder: float, dim: int) -> Fragments:
    """Make a set of 40 rows whose uniform mean has length about `remainder / 9`, and an ordinary one of 36."""
    rows, rest = random_fragments([20], dim, seed=1).values, random_fragments([20], dim, seed=2).values
    ordinary = random_fragments([36], dim, seed=4).values
    return Fragments(torch.cat([rows, remainder * rest - rows, ordinary]), torch.tensor([0, 40, 76]))
