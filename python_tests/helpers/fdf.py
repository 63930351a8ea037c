"""FDF from its equations: one fragment, one conversion and one pair at a time, in the dtype of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from itm_fast.nn import FeatureConversions, FeatureDiversification, RegionAttention
from python_tests.helpers.pooling import pooled

Sets = Sequence[Tensor]  # rows (length, width) of each set


def unit(row: Tensor) -> Tensor:
    return row / (row.square().sum().sqrt() + 1e-8)


def converted(conversions: FeatureConversions, sets: Sets, n: int, *, running: bool = False) -> list[Tensor]:
    """Compute Eq 4 of conversion n: rows (length, d) of each set, or its vector (d,).

    `running`: use the running statistics for batch normalisation.
    """

    def linear(layer: torch.nn.Module, row: Tensor) -> Tensor:
        return layer.weight[n] @ row + layer.bias[n]

    rows = [row for own in sets for row in own]
    heads = rows if conversions.fc is None else [linear(conversions.fc, row) for row in rows]
    if conversions.mlp is not None:
        inner, norm, outer = conversions.mlp
        seen = rows if conversions.head == "residual" else heads
        hidden = torch.stack([linear(inner, row) for row in seen])
        mean, variance = hidden.mean(0), (hidden - hidden.mean(0)).square().mean(0)
        if running:
            mean, variance = norm.running_mean[n], norm.running_var[n]
        hidden = (hidden - mean) / (variance + 1e-5).sqrt() * norm.weight[n] + norm.bias[n]
        added = [linear(outer, row.clamp(min=0)) for row in hidden]
        heads = added if conversions.head == "mlp" else [a + b for a, b in zip(heads, added, strict=True)]
    of_sets = list(torch.stack(heads).split([len(own) for own in sets]))
    if conversions.attention is not None:
        of_sets = [_attended(conversions.attention.parts[n], own) for own in of_sets]
    if conversions.pool is not None:
        pools = conversions.pool.pools
        of_sets = [(own.mean(0) if pools is None else pooled(pools[n], own))[None] for own in of_sets]
    if conversions.network is not None:
        inner, outer = conversions.network

        def network(row: Tensor) -> Tensor:
            changed = linear(outer, linear(inner, row).clamp(min=0))
            return row + changed if conversions.residual else changed

        of_sets = [torch.stack([network(row) for row in own]) for own in of_sets]
    normed = [torch.stack([unit(row) for row in own]) for own in of_sets]
    return normed if conversions.pool is None else [own[0] for own in normed]


def _attended(part: RegionAttention, own: Tensor) -> Tensor:
    """Add to each row of a set what its heads attend to, row by row and head by head."""
    centred = own - own.mean(1, keepdim=True)
    normed = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * part.ln.weight + part.ln.bias
    rows = normed @ part.attn.in_proj_weight.T + part.attn.in_proj_bias
    query, key, value = (side.chunk(part.attn.num_heads, dim=1) for side in rows.chunk(3, dim=1))
    result = []
    for index in range(len(own)):
        parts = []
        for q, k, v in zip(query, key, value, strict=True):
            powers = (k @ q[index] / q.shape[1] ** 0.5).exp()
            parts.append(powers / powers.sum() @ v)
        result.append(own[index] + part.attn.out_proj.weight @ torch.cat(parts) + part.attn.out_proj.bias)
    return torch.stack(result)


def fused(side: FeatureDiversification, sets: Sets) -> list[Tensor]:
    """Compute Eq 5 and the weighted sum: rows (length, d) of each set, or its vector (d,)."""
    parts = [converted(side.conversions, sets, n) for n in range(side.count)]
    result = []
    for index, own in enumerate(sets):
        bases = [own.mean(0)] if side.is_global else list(own)
        vectors = []
        for row, base in enumerate(bases):
            of_row = [part[index] if side.is_global else part[index][row] for part in parts]
            weights = [torch.ones((), dtype=own.dtype) / side.count] * side.count
            if side.reweighting is not None:
                powers = (unit(base) @ side.reweighting.embedding).exp()
                weights = list(powers / powers.sum())
            total = sum(weight * vector for weight, vector in zip(weights, of_row, strict=True))
            vectors.append(unit(total) if side.normalize_fused else total)
        result.append(vectors[0] if side.is_global else torch.stack(vectors))
    return result


def scan_pair(regions: Tensor, words: Tensor) -> Tensor:
    """Compute SCAN's score of one pair: text-to-image, with the published settings."""
    raw = words @ regions.T
    raw = torch.where(raw > 0, raw, 0.1 * raw)
    raw = raw / (raw.square().sum(0).sqrt() + 1e-8)
    weights = (9.0 * raw).exp()
    attended = weights / weights.sum(1, keepdim=True) @ regions
    cosines = (words * attended).sum(1) / (words.square().sum(1).sqrt() * attended.square().sum(1).sqrt())
    return cosines.mean()


def chan_pair(regions: Tensor, words: Tensor) -> Tensor:
    """Compute CHAN's score of one pair: log-sum-exp over the words of their maximum cosine with a region."""
    best = [max((word @ region for region in regions), key=lambda one: float(one.detach())) for word in words]
    return torch.stack([(10.0 * cosine).exp() for cosine in best]).sum().log() / 10.0


def vse_pair(image: Tensor, caption: Tensor) -> Tensor:
    return image @ caption


def algorithm_1(
    pair: Callable[[Tensor, Tensor], Tensor],
    present: Sequence[tuple[list[Tensor], list[Tensor]]],
    others: Sequence[tuple[list[Tensor], list[Tensor]]],
    image_ids: Sequence[Sequence[int]],
    margin: float,
    *,
    every: bool = False,
) -> Tensor:
    """Compute L_realign with the hardest negatives, or with all negatives (`every`).

    `present[n]` and `others[n - 1]` hold images and captions of B_1 and B_(n + 1) under conversion n + 1.
    """

    def hinge(negatives: list[Tensor], positive: Tensor) -> Tensor:
        taken = negatives if every else [max(negatives, key=lambda one: float(one.detach()))] if negatives else []
        return sum(((margin + negative - positive).clamp(min=0) for negative in taken), positive * 0)

    total = torch.zeros((), dtype=torch.float64)
    for n, (images, captions) in enumerate(present):
        if n > len(others):
            break
        other_images, other_captions = others[n - 1] if n else (images, captions)
        own, ids = image_ids[0], image_ids[n]
        for i in range(len(images)):
            positive = pair(images[i], captions[i])
            negative = [j for j in range(len(ids)) if ids[j] != own[i]]
            total = total + hinge([pair(images[i], other_captions[j]) for j in negative], positive)
            total = total + hinge([pair(other_images[j], captions[i]) for j in negative], positive)
    return total
