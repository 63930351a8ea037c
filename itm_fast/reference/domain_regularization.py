"""Reference implementation of the domain discriminators of ADDR: a loop over pairs, and a packed form.

- `domain_regularization`: computes one risk at a time, as in the equations. Tests compare against it.
- `domain_regularization_packed`: multiplies all rows with all discriminators in bounded memory, then selects the risks.
  It runs where no native kernel is available, and is the baseline of the benchmarks.

Both have the signature of `itm_fast.functional.domain_regularization`. They support derivatives of any order and
float64, and do not check their arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from itm_fast.fragments import Fragments

# Elements of one (rows, discriminators) block of the packed form: 64 MB in float32.
_BLOCK_ELEMENTS = 1 << 24


def domain_regularization(
    regions: Fragments,
    words: Fragments,
    weights: Tensor,
    biases: Tensor,
    negative_captions: Tensor | None = None,
    negative_images: Tensor | None = None,
    *,
    margin: float = 0.05,
    aggregation: str = "sum",
) -> tuple[Tensor, Tensor]:
    """Compute adversarial loss and regularization of each pair; see `itm_fast.functional.domain_regularization`."""
    dtype = torch.promote_types(regions.dtype, torch.float32)
    weights, biases = weights.to(dtype), biases.to(dtype)

    def risk(features: int, discriminator: int) -> Tensor:
        weight, bias = weights[discriminator], biases[discriminator]
        of_regions = -logsigmoid(regions[features].to(dtype) @ weight + bias)
        of_words = -logsigmoid(-(words[features].to(dtype) @ weight + bias))
        count = max(len(of_regions) + len(of_words), 1) if aggregation == "mean" else 1
        return (of_regions.sum() + of_words.sum()) / count

    own = [risk(p, p) for p in range(len(regions))]
    terms: list[Tensor] = []
    for p in range(len(regions)):
        total = biases.new_zeros(())
        for negatives in (negative_captions, negative_images):
            other = -1 if negatives is None else int(negatives[p])
            if 0 <= other < len(regions):
                total = total + torch.relu(margin + own[p] - risk(p, other))
                total = total + torch.relu(margin + own[other] - risk(other, p))
        terms.append(total)
    if not own:
        return biases * 0, biases * 0
    return torch.stack(own), torch.stack(terms)


def domain_regularization_packed(
    regions: Fragments,
    words: Fragments,
    weights: Tensor,
    biases: Tensor,
    negative_captions: Tensor | None = None,
    negative_images: Tensor | None = None,
    *,
    margin: float = 0.05,
    aggregation: str = "sum",
) -> tuple[Tensor, Tensor]:
    """Compute the same as `domain_regularization` in blocks of at most 2^24 elements (or one column of all rows)."""
    dtype = torch.promote_types(regions.dtype, torch.float32)
    weights, biases = weights.to(dtype), biases.to(dtype)
    sides = [(regions.values.to(dtype), regions.set_index(), -1.0), (words.values.to(dtype), words.set_index(), 1.0)]
    counts = (regions.lengths + words.lengths).clamp(min=1).to(dtype)
    pairs = len(regions)
    own = torch.arange(pairs, device=weights.device)

    def aggregated(risks: Tensor) -> Tensor:
        return risks / counts.reshape(-1, *[1] * (risks.dim() - 1)) if aggregation == "mean" else risks

    if negative_captions is None or negative_images is None:
        risk = weights.new_zeros(pairs)
        for values, sets, sign in sides:
            logits = (values * weights[sets]).sum(dim=1) + biases[sets]
            risk = risk.index_add(0, sets, -logsigmoid(-sign * logits))
        return aggregated(risk), torch.zeros_like(risk)

    def risks_of(first: int, last: int) -> Tensor:
        """Return the risks (pairs, last - first) of all features under discriminators `first` to `last - 1`."""
        found = weights.new_zeros(pairs, last - first)
        for values, sets, sign in sides:
            logits = torch.addmm(biases[first:last], values, weights[first:last].t())
            found = found.index_add(0, sets, -logsigmoid(-sign * logits))
        return found

    rows = max(values.shape[0] for values, _, _ in sides)
    step = max(1, _BLOCK_ELEMENTS // max(rows, 1))
    if pairs <= step:
        risks = risks_of(0, pairs)
    else:
        blocks = [(first, min(first + step, pairs)) for first in range(0, pairs, step)]
        # Recompute the logits of a block in the backward instead of storing them.
        risks = torch.cat([checkpoint(risks_of, *block, use_reentrant=False) for block in blocks], dim=1)
    risks = aggregated(risks)
    of_own = risks[own, own]
    total = torch.zeros_like(of_own)
    for negatives in (negative_captions, negative_images):
        exists = (negatives >= 0) & (negatives < pairs)
        other = torch.where(exists, negatives, own).to(torch.int64)
        terms = torch.relu(margin + of_own - risks[own, other]) + torch.relu(margin + of_own[other] - risks[other, own])
        total = total + torch.where(exists, terms, 0.0)
    return of_own, total
