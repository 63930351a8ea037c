"""FDF for one modality: feature conversions, their reweighting and the fused feature.

Inside: `FeatureConversions`, `FeatureReweighting`, `FeatureDiversification`, and what they may be made of, `HEADS`,
`CONVERSIONS`, `POOLINGS`.

Source: Zhou et al., "Achieving Ensemble-Like Performance in a Single Model: A Feature Diversification Framework for
Image-Text Matching" (AAAI 2025), Eq 4 and 5. Where the paper is ambiguous, we chose:

- Base features are the output of the shared extractor: the regions, or the states of a GRU or BERT. The encoder head is
  everything the host has above it. Each conversion has its own head.
- `FFN = Linear(d, 2d), ReLU, Linear(2d, d)` without a residual. It adds the 10 % of parameters that the paper states.
- sigma is l2norm: of each fragment for a local host, of the pooled vector for a global host.
- The weights of the conversions start at zero, which is the mean.
- A global host weighs each item by the mean of its base features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from itm_fast.fragments import Fragments
from itm_fast.nn.grouped import GroupedAttention, GroupedLinear, GroupedPooling, GroupedRowNorm, of_group
from itm_fast.nn.image_encoder import detach_blank_rows, narrowed
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.pooling import mean_pool
from itm_fast.ops.gradient_sparse_sets import gradient_sparse_sets
from itm_fast.ops.sets import values_of
from itm_fast.reference import validation

__all__ = [
    "CONVERSIONS",
    "HEADS",
    "POOLINGS",
    "FeatureConversions",
    "FeatureDiversification",
    "FeatureReweighting",
]

HEADS = ("identity", "linear", "residual", "projected_residual", "mlp")
CONVERSIONS = ("ffn", "adapter", "none")
POOLINGS = (None, "mean", "gpo")
# Attention and generalized pooling have a module per conversion; other weights have the conversions as first dimension.
_SEPARATE = ("attention.parts.", "pool.pools.")


class FeatureConversions(nn.Module):
    """Convert a base feature N times by encoder head, feed-forward network and l2norm (Eq 4), all at once.

    Args:
        count: the number N of conversions.
        feature_dim: width of the base features.
        embed_dim: width d of the converted features.
        head: the encoder of the host above the base features: "identity" (`feature_dim` is d then), "linear", or with a
            perceptron as `ResidualImageEncoder`: "residual", "projected_residual", "mlp".
        conversion: layer after the head: "ffn"; "adapter" (d to d / 4 to d with a residual); "none" (Table 4). With
            "none", an identity head is replaced by a linear layer, so that there is something to learn.
        residual: add the input of "ffn" to its output, as a transformer does and Eq 4 does not.
        attention: let the rows of each set attend to each other behind the head, as in `RegionAttention`.
        pooling: None for a local host, which keeps fragments; "mean" or "gpo" pools each set to one vector before the
            network.

    Raises:
        ValueError: an option is unknown, a width does not fit, or a size is below 1.
    """

    def __init__(
        self,
        count: int,
        feature_dim: int,
        embed_dim: int,
        *,
        head: str = "linear",
        conversion: str = "ffn",
        residual: bool = False,
        attention: bool = False,
        pooling: str | None = None,
    ) -> None:
        super().__init__()
        validation.check_sizes(count=count, feature_dim=feature_dim, embed_dim=embed_dim)
        for name, value, known in (
            ("head", head, HEADS),
            ("conversion", conversion, CONVERSIONS),
            ("pooling", pooling, POOLINGS),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}")
        if head == "identity" and feature_dim != embed_dim:
            raise ValueError(f"feature_dim: expected embed_dim, {embed_dim}, without a head, got {feature_dim}")
        if residual and conversion != "ffn":
            raise ValueError(f"residual: belongs to the conversion ffn, not {conversion}")
        self.count, self.feature_dim, self.head = count, feature_dim, head
        self.residual = residual or conversion == "adapter"
        linear = head != "identity" or conversion == "none"
        self.fc = GroupedLinear(count, feature_dim, embed_dim, xavier=True) if linear else None
        self.mlp: nn.ModuleList | None = None
        if head in ("residual", "projected_residual", "mlp"):
            hidden = max(embed_dim // 2, 1)
            seen = feature_dim if head == "residual" else embed_dim
            self.mlp = nn.ModuleList(
                [
                    GroupedLinear(count, seen, hidden),
                    GroupedRowNorm(count, hidden),
                    GroupedLinear(count, hidden, embed_dim),
                ]
            )
        self.attention = GroupedAttention(count, embed_dim) if attention else None
        self.pool = None if pooling is None else GroupedPooling(count, pooling)
        self.network: nn.ModuleList | None = None
        if conversion != "none":
            width = 2 * embed_dim if conversion == "ffn" else max(embed_dim // 4, 1)
            # Without biases at the start: features are small, and random biases would make all of them nearly equal.
            widths = ((embed_dim, width), (width, embed_dim))
            self.network = nn.ModuleList(GroupedLinear(count, *pair, xavier=True) for pair in widths)

    def forward(self, base: Fragments, only: int | None = None) -> Tensor:
        """Convert the features of all sets.

        Args:
            base: rows (R, feature_dim).
            only: compute only this conversion, counted from 0. Its batch normalisation uses the running statistics, so
                that sets do not depend on each other. None: all conversions.

        Returns:
            (N, R, d), or (N, n_sets, d) for a global host; N is 1 with `only`.
        """
        validation.check_fragments("base", base)
        if base.values.shape[1] != self.feature_dim:
            raise ValueError(f"base: expected rows of width {self.feature_dim}, got {base.values.shape[1]}")
        rows = base.values if self.fc is None else self.fc(base.values, only)
        if self.mlp is not None:
            inner, norm, outer = self.mlp
            added = outer(torch.relu(norm(inner(base.values if self.head == "residual" else rows, only), only)), only)
            rows = added if self.head == "mlp" else rows + added
        for of_sets in (self.attention, self.pool):
            if of_sets is not None:
                if rows.dim() == 2:
                    rows = rows.expand(self.count if only is None else 1, *rows.shape)
                rows = of_sets(base, rows, only)
        if self.network is not None:
            inner, outer = self.network
            changed = outer(torch.relu(inner(rows, only)), only)
            rows = rows + changed if self.residual else changed
        if torch.is_grad_enabled():
            rows = detach_blank_rows(rows, base.values if self.pool is None else mean_pool(base))
        if self.pool is None:
            return l2norm(rows)
        # One vector of an item is worth float32, which its pooling had; fragments keep their type.
        return l2norm(rows.to(torch.promote_types(rows.dtype, torch.float32)))

    def of_others(self, others: Sequence[Fragments], first: int = 1) -> list[Tensor]:
        """Convert `others[i]` by conversion `first + i`, counted from 0.

        If base features need no gradient, the forward keeps only the results, and the backward converts the sets with a
        gradient again. Otherwise all are converted as usual, and base features receive gradients. Batch
        normalisation uses the running statistics and does not change them.

        Args:
            others: rows (R, feature_dim) of each; at most as many as there are conversions from `first` on.
            first: the conversion of `others[0]`.

        Returns:
            For each, (R, d), or (n_sets, d) for a global host.

        Raises:
            ValueError: `others` has more entries than there are conversions.
        """
        if not 0 <= first <= self.count - len(others):
            raise ValueError(
                f"others: expected at most {self.count - first} of them for the conversions from {first} on, "
                f"got {len(others)}"
            )
        # All groups are parted at once, so that the backward puts their gradients together once, and each conversion
        # sees, and has a gradient for, its own weights alone.
        grouped = {name: tensor.split(1) for name, tensor in self.named_parameters() if not name.startswith(_SEPARATE)}
        separate = {name: tensor for name, tensor in self.named_parameters() if name.startswith(_SEPARATE)}
        converted = []
        for number, base in enumerate(others, start=first):
            weights = {name: parts[number] for name, parts in grouped.items()}
            own = tuple(f"{prefix}{number}." for prefix in _SEPARATE)
            weights |= {name: tensor for name, tensor in separate.items() if name.startswith(own)}
            converted.append(self._of_other(base, number, weights))
        return converted

    def _of_other(self, base: Fragments, number: int, own: Mapping[str, Tensor]) -> Tensor:
        """Apply conversion `number` with its own weights; weights of groups have shape (1, ...)."""
        buffers = {name: of_group(buffer, number).clone() for name, buffer in self.named_buffers()}

        def convert(weights: Sequence[Tensor], _: Any, sets: Fragments) -> Fragments | Tensor:
            named = dict(zip(own, weights, strict=True))
            converted: Tensor = functional_call(self, {**named, **buffers}, (sets, number))
            return sets.with_values(converted[0]) if self.pool is None else converted[0]

        weights = list(own.values())
        if base.values.requires_grad:
            return values_of(convert(weights, None, base))
        (rows,) = gradient_sparse_sets([(convert, base)], weights)
        return values_of(rows)


class FeatureReweighting(nn.Module):
    """Compute the weights of the conversions, `softmax_n(l2norm(f) E)` (Eq 5), for each fragment or item.

    Args:
        count: the number N of conversions.
        feature_dim: width of the base features f.
        pooled: compute one row of weights per set, from the mean of its base features, instead of one per fragment.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(self, count: int, feature_dim: int, *, pooled: bool = False) -> None:
        super().__init__()
        validation.check_sizes(count=count, feature_dim=feature_dim)
        self.pooled = pooled
        self.embedding = nn.Parameter(torch.zeros(feature_dim, count))

    def forward(self, base: Fragments) -> Tensor:
        """Compute weights (R, N), or (n_sets, N), from rows (R, feature_dim). Each row sums to one."""
        validation.check_fragments("base", base)
        features = mean_pool(base) if self.pooled else base.values
        logits = narrowed(l2norm(features), self.embedding) @ self.embedding
        return torch.softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))


class FeatureDiversification(nn.Module):
    """Convert base features, and fuse the conversions to `l2norm(sum_n gamma_n V_n)`, which the host scores.

    Args:
        count: number N of conversions.
        feature_dim: width of the base features.
        embed_dim: width of a converted feature.
        head: as in `FeatureConversions`.
        conversion, residual, attention, pooling: as in `FeatureConversions`.
        reweighting: use the weights of `FeatureReweighting`; False: the mean of the conversions (Table 3, "+ FC").
        normalize_fused: l2-normalise the sum; the paper does not print this.
    """

    def __init__(
        self,
        count: int,
        feature_dim: int,
        embed_dim: int,
        *,
        head: str = "linear",
        conversion: str = "ffn",
        residual: bool = False,
        attention: bool = False,
        pooling: str | None = None,
        reweighting: bool = True,
        normalize_fused: bool = True,
    ) -> None:
        super().__init__()
        self.count, self.normalize_fused, self.is_global = count, normalize_fused, pooling is not None
        self.conversions = FeatureConversions(
            count,
            feature_dim,
            embed_dim,
            head=head,
            conversion=conversion,
            residual=residual,
            attention=attention,
            pooling=pooling,
        )
        self.reweighting = FeatureReweighting(count, feature_dim, pooled=self.is_global) if reweighting else None

    def forward(self, base: Fragments) -> Fragments | Tensor:
        """Fuse base features (R, feature_dim) to embeddings: Fragments (R, d), or (n_sets, d) for a global host."""
        return self.fuse(base, self.conversions(base))

    def fuse(self, base: Fragments, converted: Sequence[Tensor] | Tensor) -> Fragments | Tensor:
        """Fuse the converted features of `base`: (N, R, d), (N, n_sets, d), or a sequence of their parts."""
        first, *others = converted
        if self.reweighting is None:
            fused = sum(others, first) / self.count
        else:
            weight, *weights = self.reweighting(base).to(first.dtype).t()[:, :, None]
            fused = first * weight
            for own, part in zip(weights, others, strict=True):
                fused = torch.addcmul(fused, part, own)
        return self.embeddings(base, l2norm(fused) if self.normalize_fused else fused)

    def embeddings(self, base: Fragments, rows: Tensor) -> Fragments | Tensor:
        """Return the rows of one conversion in the form that the host scores."""
        return rows if self.is_global else base.with_values(rows)
