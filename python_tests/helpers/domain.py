"""ADDR's risks in plain Python loops over float64 numbers: the reference for the tests, from the paper's equations.

Inside: `Batch`, `random_batch`, `loop_regularization`, `run`, `NAMES`, `nearest_edge`, `plain_form`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from itm_fast import Fragments, reference
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.tolerance import Form

NAMES = ("adversarial", "regularization", "regions", "words", "weights", "biases")


@attrs.frozen
class Batch:
    """B pairs with their discriminators and negatives (None: no negatives)."""

    regions: Fragments
    words: Fragments
    weights: Tensor
    biases: Tensor
    negative_captions: Tensor | None
    negative_images: Tensor | None

    def arguments(self) -> tuple[Any, ...]:
        return attrs.astuple(self, recurse=False)

    def to(self, dtype: torch.dtype, weights: torch.dtype | None = None) -> Batch:
        weights = weights or dtype
        return attrs.evolve(
            self,
            regions=self.regions.to(dtype),
            words=self.words.to(dtype),
            weights=self.weights.to(weights),
            biases=self.biases.to(weights),
        )


def random_batch(
    regions: Sequence[int],
    words: Sequence[int],
    dim: int = 24,
    *,
    captions: Sequence[int] | None = None,
    images: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Batch:
    """Make a pair for each of these lengths. If `captions` is None, draw random negatives, some of them missing."""
    pairs = len(regions)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(pairs, dim, generator=generator, dtype=torch.float64)
    biases = torch.randn(pairs, generator=generator, dtype=torch.float64)
    drawn = torch.randint(-1, pairs, (2, pairs), generator=generator)
    given = drawn if captions is None else torch.tensor([captions, images], dtype=torch.int64)
    return Batch(
        random_fragments(regions, dim, dtype, seed=seed + 1),
        random_fragments(words, dim, dtype, seed=seed + 2),
        weights.to(dtype),
        biases.to(dtype),
        *given.reshape(2, pairs).unbind(),
    )


def run(
    function: Callable[..., tuple[Tensor, Tensor]],
    batch: Batch,
    incoming: Tensor,
    *,
    wanted: Sequence[str] = NAMES[2:],
    **options: Any,
) -> list[Tensor]:
    """Return both results, and the gradients of the `wanted` arguments for an incoming gradient (2, B)."""
    leaves = {
        "regions": batch.regions.values,
        "words": batch.words.values,
        "weights": batch.weights,
        "biases": batch.biases,
    }
    leaves = {name: leaf.detach().clone().requires_grad_(name in wanted) for name, leaf in leaves.items()}
    results = function(
        batch.regions.with_values(leaves["regions"]),
        batch.words.with_values(leaves["words"]),
        leaves["weights"],
        leaves["biases"],
        batch.negative_captions,
        batch.negative_images,
        **options,
    )
    total = sum((result * weight.to(result)).sum() for result, weight in zip(results, incoming, strict=True))
    gradients = torch.autograd.grad(total, [leaves[name] for name in wanted], allow_unused=True)
    zeros = [torch.zeros_like(leaves[name]) for name in wanted]
    found = [zero if grad is None else grad for grad, zero in zip(gradients, zeros, strict=True)]
    return [*(result.detach() for result in results), *found]


@attrs.frozen
class Loops:
    """Results and gradients in float64, in the order of `NAMES`.

    `doubt` is the smallest distance of a hinge to its edge.
    """

    results: list[Tensor]
    doubt: float


def loop_regularization(batch: Batch, incoming: Tensor, *, margin: float = 0.05, aggregation: str = "sum") -> Loops:
    """Compute Eq 2, 8 and 9 term by term, with the derivatives of the logistic function written out."""
    sides = [
        [[row.tolist() for row in fragments[p].double()] for p in range(len(fragments))]
        for fragments in (batch.regions, batch.words)
    ]
    weights, biases = batch.weights.double().tolist(), batch.biases.double().tolist()
    pairs, dim = len(biases), batch.weights.shape[1]
    outgoing = [[[[0.0] * dim for _ in rows] for rows in side] for side in sides]
    by_weights, by_biases = [[0.0] * dim for _ in range(pairs)], [0.0] * pairs
    doubts = [math.inf]

    def parts(x: int) -> float:
        return max(sum(len(side[x]) for side in sides), 1) if aggregation == "mean" else 1

    def risk(x: int, y: int) -> float:
        """Compute R_x(f_y): the cross-entropy of regions labelled 1 and words labelled 0."""
        total = 0.0
        for label, side in ((1, sides[0]), (0, sides[1])):
            for row in side[x]:
                probability = 1 / (1 + math.exp(-_affine(row, weights[y], biases[y])))
                total -= math.log(probability if label else 1 - probability)
        return total / parts(x)

    def differentiate(x: int, y: int, factor: float) -> None:
        for number, (label, side) in enumerate(((1, sides[0]), (0, sides[1]))):
            for at, row in enumerate(side[x]):
                slope = 1 / (1 + math.exp(-_affine(row, weights[y], biases[y]))) - label
                slope *= factor / parts(x)
                by_biases[y] += slope
                for d in range(dim):
                    by_weights[y][d] += slope * row[d]
                    outgoing[number][x][at][d] += slope * weights[y][d]

    adversarial, regularization = [0.0] * pairs, [0.0] * pairs
    for p in range(pairs):
        adversarial[p] = risk(p, p)
        differentiate(p, p, float(incoming[0, p]))
        for negatives in (batch.negative_captions, batch.negative_images):
            other = -1 if negatives is None else int(negatives[p])
            if other < 0:
                continue
            for features, discriminator in ((p, other), (other, p)):
                hinge = margin + risk(features, features) - risk(features, discriminator)
                doubts.append(abs(hinge))
                if hinge > 0:
                    regularization[p] += hinge
                    differentiate(features, features, float(incoming[1, p]))
                    differentiate(features, discriminator, -float(incoming[1, p]))
    rows = [torch.tensor([row for part in side for row in part], dtype=torch.float64) for side in outgoing]
    found = [torch.tensor(part, dtype=torch.float64) for part in (adversarial, regularization)]
    found += [part.reshape(-1, dim) for part in rows]
    found.append(torch.tensor(by_weights, dtype=torch.float64).reshape(pairs, dim))
    found.append(torch.tensor(by_biases, dtype=torch.float64))
    return Loops(found, min(doubts))


def _affine(row: list[float], weights: list[float], bias: float) -> float:
    return sum(x * w for x, w in zip(row, weights, strict=True)) + bias


def nearest_edge(batch: Batch, *, margin: float, aggregation: str) -> float:
    """Compute the smallest distance of a hinge to its edge in float64. A pair's hinge with itself is the margin."""
    wide = batch.to(torch.float64)
    pairs, risks = torch.arange(len(wide.regions)), torch.zeros(len(wide.regions), len(wide.regions)).double()
    for fragments, sign in ((wide.regions, -1.0), (wide.words, 1.0)):
        logits = fragments.values @ wide.weights.t() + wide.biases
        risks.index_add_(0, fragments.set_index(), torch.log1p(torch.exp(sign * logits)))
    if aggregation == "mean":
        risks /= (wide.regions.lengths + wide.words.lengths).clamp(min=1)[:, None]
    edges = [math.inf]
    for negatives in (batch.negative_captions, batch.negative_images):
        if negatives is not None:
            p, other = pairs[negatives >= 0], negatives[negatives >= 0]
            for features, discriminator in ((p, other), (other, p)):
                hinges = margin + risks[features, features] - risks[features, discriminator]
                edges += hinges.abs().tolist()
    return min(edges)


def plain_form(batch: Batch, incoming: Tensor, found: Sequence[Tensor], **options: Any) -> Form:
    """Return the packed PyTorch form in float32, with the dtypes of `found`, for `assert_as_accurate`."""

    def results(moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
        near = attrs.evolve(
            batch,
            regions=batch.regions.with_values(moved(batch.regions.values)).to(torch.float32),
            words=batch.words.with_values(moved(batch.words.values)).to(torch.float32),
            weights=moved(batch.weights).float(),
            biases=moved(batch.biases).float(),
        )
        parts = run(reference.domain_regularization_packed, near, incoming, **options)
        return [part.to(right.dtype) for part, right in zip(parts, found, strict=True)]

    return results
