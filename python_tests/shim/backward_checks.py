"""Compare the backward kernels of cross_attention_scores in the shim with the reference gradients.

Each check raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast import Fragments, reference
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.shim import IN_ORDER
from python_tests.helpers.tolerance import Form, assert_as_accurate, assert_close_to_exact
from python_tests.shim.shim_backward import NEVER, ROOM, BackwardKernels, Gradients

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Minimum relative distance of an attention weight to the threshold of a focal mode; below it, rounding may decide.
CLEAR = 1e-4


def array(tensor: Tensor) -> np.ndarray:
    """Convert a tensor to numpy; 16-bit types become their bits."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)).detach().numpy().copy()


def run(
    kernels: BackwardKernels, queries: Fragments, contexts: Fragments, gradients: Tensor, **options: Any
) -> Gradients:
    """Run the kernels; with odd seeds, the gradients are the transpose of a dense matrix."""
    operands = (array(queries.values), queries.offsets.numpy(), array(contexts.values), contexts.offsets.numpy())
    if options.get("seed", 0) % 2:
        gradients = gradients.t().contiguous().t()
    return kernels.backward(gradients.numpy(), *operands, dtype=DTYPES[queries.dtype], **options)


def tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(values) if dtype == torch.float32 else torch.from_numpy(values).view(dtype)


def reference_gradients(
    queries: Fragments,
    contexts: Fragments,
    gradients: Tensor,
    dtype: torch.dtype,
    scores: Any = reference.cross_attention_scores,
    **options: Any,
) -> list[Tensor]:
    """Compute the gradients of both sides in `dtype`."""
    leaves = [part.values.detach().to(dtype).requires_grad_() for part in (queries, contexts)]
    result = scores(queries.with_values(leaves[0]), contexts.with_values(leaves[1]), **options)
    if not result.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    # A pair without a gradient has no effect, whatever its values.
    (result * torch.where(gradients != 0, gradients, 0.0).to(dtype)).sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def plain_gradients(queries: Fragments, contexts: Fragments, gradients: Tensor, **options: Any) -> list[list[Tensor]]:
    """Compute float32 gradients in plain PyTorch: both forms, each also with the rows of sets and the width reversed.

    In small cases the error of a single form depends on how a few raw scores happen to round.
    """
    orders = [_reversed_sets(part) for part in (queries, contexts)]
    turned = [
        part.with_values(part.values[order].flip(1)) for part, order in zip((queries, contexts), orders, strict=True)
    ]
    found = []
    for scores in (reference.cross_attention_scores, reference.cross_attention_scores_packed):
        found.append(reference_gradients(queries, contexts, gradients, torch.float32, scores, **options))
        of_turned = reference_gradients(*turned, gradients, torch.float32, scores, **options)
        found.append([part[order].flip(1) for part, order in zip(of_turned, orders, strict=True)])
    return found


def _reversed_sets(fragments: Fragments) -> Tensor:
    """Return row indices that reverse the rows of each set; applying them twice restores the order."""
    ends = fragments.offsets[1:] + fragments.offsets[:-1] - 1
    return ends[fragments.set_index()] - torch.arange(len(fragments.values))


def clear_of_thresholds(queries: Fragments, contexts: Fragments, focal: str | None, **options: Any) -> Tensor:
    """Return a bool mask of the pairs without an attention weight near the threshold of the focal mode.

    For "hard": only one context has nearly the largest attention weight.
    """
    clear = torch.ones(len(queries), len(contexts), dtype=torch.bool)
    if focal is None:
        return clear
    names = ("temperature", "normalization", "negative_slope")
    kept = {name: value for name, value in options.items() if name in names}
    for i in range(len(queries)):
        for j in range(len(contexts)):
            query, context = queries[i].double(), contexts[j].double()
            if not len(query) or not len(context):
                continue
            p = reference.cross_attention.cross_attention_weights(query[None], context[None], **kept)[0]
            if focal == "hard":
                first, second = torch.cat([p, torch.zeros_like(p[:, :1])], dim=1).topk(2, dim=1).values.unbind(1)
                clear[i, j] = bool((first - second > CLEAR * first).all())
                continue
            root = torch.ones_like(p) if focal == "equal" else p.sqrt()
            left, right = p * root.sum(1, keepdim=True), (p * root).sum(1, keepdim=True)
            clear[i, j] = bool(((left - right).abs() > CLEAR * right).all())
    return clear


def check_gradients(
    kernels: BackwardKernels,
    queries: Fragments,
    contexts: Fragments,
    gradients: Tensor,  # (n_queries, n_contexts) float32
    *,
    room: int = ROOM,
    seed: int = 0,
    dense_share: float = NEVER,
    longest: tuple[int, int] = (0, 0),
    **options: Any,
) -> Gradients:
    """Check the pair count and the errors of the gradients.

    An error may be at most twice that of plain PyTorch in float32, rounded to the dtype of the rows.
    """
    given = {"room": room, "seed": seed, "dense_share": dense_share, "longest": longest}
    found = run(kernels, queries, contexts, gradients, **given, **options)
    present = (queries.lengths > 0)[:, None] & (contexts.lengths > 0)
    assert found.pairs == int((present & (gradients != 0)).sum()), f"backward: {found.pairs} pairs"
    exact = reference_gradients(queries, contexts, gradients, torch.float64, **options)
    sides = (("queries", queries, found.queries), ("contexts", contexts, found.contexts))
    actual = [tensor(values, side.dtype) for _, side, values in sides]

    def form(number: int) -> Form:
        def results(moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
            # Plain PyTorch runs in float32, which holds 16-bit rows exactly.
            rows = [Fragments(moved(side.values.float()), side.offsets, check=False) for _, side, _ in sides]
            parts = plain_gradients(*rows, gradients, **options)[number]
            return [part.to(side.dtype) for part, (_, side, _) in zip(parts, sides, strict=True)]

        return results

    forms = [form(number) for number in range(len(plain_gradients(queries, contexts, gradients, **options)))]
    assert_as_accurate(actual, forms, exact, names=[f"backward: gradient of the {name}" for name, _, _ in sides])
    for number, (name, side, _) in enumerate(sides):
        # Sets without a pair have a gradient of exactly zero.
        with_pair = (present & (gradients != 0)).any(dim=1 if name == "queries" else 0)
        assert not bool(actual[number][~with_pair[side.set_index()]].any()), f"backward: {name} without a pair"
    return found


def sparse_gradients(n_queries: int, n_contexts: int, share: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(n_queries, n_contexts, generator=generator)
    return torch.where(torch.rand(n_queries, n_contexts, generator=generator) < share, gradients, 0.0)


def cancelling_sets(n_sets: int, dim: int = 16) -> tuple[Fragments, Fragments]:
    """Draw sets of two nearly opposite contexts: attended vectors are much shorter than their terms."""
    queries = random_fragments([8] * n_sets, dim, torch.float32, seed=10)
    contexts = random_fragments([2] * n_sets, dim, torch.float32, seed=11)
    contexts.values[1::2] = -contexts.values[::2] + 1e-3 * contexts.values[1::2]
    return queries, contexts


def check_opposite_vectors(kernels: BackwardKernels, n_pairs: int = 64, dim: int = 16) -> None:
    """Check a query with pairs of opposite contexts.

    With "softmax", all logits of a single query are equal: numerators of 1 have an exact sum, those of e^6 have not.
    The attended vector is zero, so cosines are divided by 1e-8, and an error of all weights shows in the gradients.
    Rows moved by a rounding would not be opposite, so errors are compared with those of the rows as they are.
    """
    queries = random_fragments([1], dim, torch.float32, seed=10)
    contexts = random_fragments([2 * n_pairs], dim, torch.float32, seed=11)
    contexts.values[1::2] = -contexts.values[::2]
    gradients, options = torch.ones(1, 1), {"normalization": "softmax", "temperature": 6.0}
    found = run(kernels, queries, contexts, gradients, **options)
    assert not found.queries.any(), "backward: gradient of the queries: opposite vectors do not cancel"
    (_, plain), (_, exact) = (
        reference_gradients(queries, contexts, gradients, dtype, **options) for dtype in (torch.float32, torch.float64)
    )
    actual = torch.from_numpy(found.contexts)
    assert_close_to_exact(actual, plain, exact, name="backward: gradient of the contexts")


def check_all_gradients(kernels: BackwardKernels) -> None:
    """Check fixed cases that planted faults must fail.

    Lists of several pairs in one chunk and in several, vectors that cancel, and opposite vectors.
    """
    lengths = (
        ([3, 1, 0, 9, 5], [4, 1, 11, 6]),
        ([3, 1, 0, 9, 5], [4, 1, 11, 6]),
        ([2, 1, 2, 2, 1, 2], [3, 2, 3, 3, 1]),
    )
    rooms = (ROOM, kernels.small_room(9, 11), 4 * kernels.small_room(2, 3))
    for seed, (of_queries, of_contexts) in enumerate(lengths):
        dim = (34, 34, 72)[seed]  # 72: two slices of a product
        queries = random_fragments(of_queries, dim, torch.float32, seed=1)
        contexts = random_fragments(of_contexts, dim, torch.float32, seed=2)
        gradients = sparse_gradients(len(of_queries), len(of_contexts), (1.0, 0.6, 1.0)[seed], seed)
        options = {"normalization": ("clipped_l2norm", "softmax", "l1norm")[seed], "temperature": 4.0}
        found = check_gradients(kernels, queries, contexts, gradients, room=rooms[seed], seed=seed, **options)
        for order in (10, 11):
            again = run(kernels, queries, contexts, gradients, room=rooms[seed], seed=order, **options)
            for one, other in ((found.queries, again.queries), (found.contexts, again.contexts)):
                assert one.tobytes() == other.tobytes(), "backward: the order of the threads shows"
    check_gradients(kernels, *cancelling_sets(3), sparse_gradients(3, 3, 1.0, 0), temperature=0.01)
    check_opposite_vectors(kernels)


def check_all_blocks(kernels: BackwardKernels) -> None:
    """Check fixed cases of blocks of scores that planted faults must fail: chunks, and what lists must take."""
    of_queries, of_contexts = [3, 1, 9, 40, 12, 30], [36, 4, 0, 36, 50]
    queries = random_fragments(of_queries, 34, torch.float32, seed=1)
    contexts = random_fragments(of_contexts, 34, torch.float32, seed=2)
    gradients = sparse_gradients(len(of_queries), len(of_contexts), 0.9, 0)
    for room in (150_000, 35_000):  # all tiles in one chunk, and one of each side
        found = check_gradients(kernels, queries, contexts, gradients, room=room, seed=2, dense_share=0.0)
        assert found.blocks == "taken", f"backward: blocks {found.blocks}"
        again = run(kernels, queries, contexts, gradients, room=room, seed=10, dense_share=0.0)
        for one, other in ((found.queries, again.queries), (found.contexts, again.contexts)):
            assert one.tobytes() == other.tobytes(), "backward: the order of the threads shows"
    empty = random_fragments([6, 5] + [0] * 34, 34, torch.float32, seed=5)
    for one, other in ((empty, contexts), (random_fragments([9, 12], 34, torch.float32, seed=6), empty)):
        gradients = sparse_gradients(len(one), len(other), 1.0, 0)
        found = check_gradients(kernels, one, other, gradients, dense_share=0.0)
        assert found.blocks == "taken", f"backward: blocks {found.blocks}"
    for refused, options in (
        (cancelling_sets(5), {"temperature": 0.01}),
        ((random_fragments([65, 3], 34, torch.float32, seed=2), contexts), {}),
        # Several tiles, each of which is refused: whichever block is ahead finds one.
        (tuple(random_fragments(sizes, 8, torch.float32, seed=3) for sizes in ([33] * 3, [1] * 64)), {}),
    ):
        gradients = sparse_gradients(len(refused[0]), len(refused[1]), 1.0, 0)
        for seed in (1, 2, IN_ORDER, IN_ORDER + 1):  # two and three blocks, together or as far apart as can be
            found = check_gradients(kernels, *refused, gradients, dense_share=0.0, seed=seed, **options)
            assert found.blocks == "refused", f"backward: blocks {found.blocks}"
