"""Learned pooling of sets by weights over the sorted values of each channel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from itm_fast.fragments import Fragments, check_has_values
from itm_fast.nn.no_rows import connected
from itm_fast.ops.library import outside_graphs

__all__ = ["GeneralizedPooling"]


class GeneralizedPooling(nn.Module):
    """Pool by GPO: sort each channel of a set in descending order, and sum with learned weights.

    The weights of a set with L members are `softmax(w^T h_p / temperature)` over the positions p = 0 ... L - 1, where
    `h_p` is the mean of both directions' states of a GRU that reads sinusoidal encodings of the positions. The weights
    (1, 0, ...) give the maximum, equal weights the mean. Source: Chen et al., "Learning the Best Pooling Strategy for
    Visual Semantic Embedding" (CVPR 2021), section 3; the temperature is that of its code.

    The weights depend only on L. In evaluation mode without gradient, they are computed once for each L and cached
    until a parameter changes.

    Args:
        position_dim: width of the position encodings, even.
        hidden_dim: width of the GRU's state per direction.
        temperature: of the softmax.

    Raises:
        ValueError: a setting is out of bounds.
    """

    def __init__(self, position_dim: int = 32, hidden_dim: int = 32, temperature: float = 0.1) -> None:
        super().__init__()
        if position_dim < 2 or position_dim % 2:
            raise ValueError(f"position_dim: expected an even number of at least 2, got {position_dim}")
        if hidden_dim < 1:
            raise ValueError(f"hidden_dim: expected at least 1, got {hidden_dim}")
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature: expected a finite number above 0, got {temperature}")
        self.position_dim, self.temperature = position_dim, temperature
        self.gru = nn.GRU(position_dim, hidden_dim, bidirectional=True)
        self.linear = nn.Linear(hidden_dim, 1, bias=False)
        self._kept: dict[int, Tensor] = {}
        self._kept_for: tuple[float, Tensor] | None = None

    @outside_graphs
    def forward(self, features: Fragments | Tensor, lengths: Tensor | None = None) -> Tensor:
        """Pool each set to one vector: `(n_sets, d)` float32 (float64 for float64), also under autocast.

        Args:
            features: Fragments of rows `(N, d)`, or padded sets `(n_sets, max_len, d)`.
            lengths: number of rows of each padded set, int `(n_sets,)`; None: all. Reading them waits for a GPU.

        Raises:
            TypeError, ValueError: a type or shape does not fit, or a set is empty.
        """
        sets = _as_sets(features, lengths)
        sets = sets if torch.compiler.is_compiling() else sets.trimmed()
        values = sets.values.to(torch.promote_types(sets.dtype, torch.float32))
        check_has_values("features", sets.offsets)
        counts = sets.lengths.cpu()
        if not len(counts):
            return connected(values.new_zeros(0, values.shape[1]), [values, *self.parameters()])
        if bool((counts == 0).any()):
            raise ValueError(f"features: expected at least one row in each set, set {int(counts.argmin())} has none")
        distinct, which = counts.unique(return_inverse=True)
        longest = int(distinct[-1])
        padded, _ = Fragments(values, sets.offsets, check=False, max_length=longest).to_padded(-math.inf)
        ordered = _ascending(padded.transpose(1, 2).contiguous())
        if len(distinct) > 1:
            padding = torch.arange(longest, device=values.device) < longest - sets.lengths[:, None]
            ordered = ordered.masked_fill(padding[:, None], 0.0)
        with torch.autocast(values.device.type, enabled=False):
            weights = self.weights(distinct.tolist())[which.to(values.device)].to(values.dtype)
            return torch.einsum("nk,ndk->nd", weights.flip(1), ordered)

    def weights(self, lengths: Sequence[int]) -> Tensor:
        """Return the weights for sets of each length: `(len(lengths), max(lengths))`, padded with 0."""
        # Training keeps nothing, so that a run goes the same way whatever was evaluated between its steps.
        wanted = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        if self.training or wanted:
            return self._computed(lengths)
        # What is kept may be wanted later where autograd is on, which takes no tensors of inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            self._drop_what_is_old()
            for length in dict.fromkeys(lengths):
                # Alone: beside others a length rounds otherwise, and what is kept would depend on who asked first.
                if length not in self._kept:
                    self._kept[length] = self._computed([length])[0]
            return pad_sequence([self._kept[length] for length in lengths], batch_first=True)

    def _drop_what_is_old(self) -> None:
        """Clear the cache if a parameter value changed; fused optimisers do not increase its version counter."""
        present = torch.cat([parameter.flatten() for parameter in self.parameters()])
        if self._kept_for is not None:
            temperature, before = self._kept_for
            same = temperature == self.temperature and present.dtype == before.dtype
            if same and present.device == before.device and torch.equal(present, before):
                return
        self._kept, self._kept_for = {}, (self.temperature, present)

    def _computed(self, lengths: Sequence[int]) -> Tensor:
        counts = torch.tensor(lengths, device="cpu")
        longest = int(counts.max())
        places = _encodings(longest, self.position_dim).to(self.linear.weight)
        inputs = pack_padded_sequence(places[:, None].expand(-1, len(counts), -1), counts, enforce_sorted=False)
        forward, backward = pad_packed_sequence(self.gru(inputs)[0])[0].chunk(2, dim=-1)
        scores = self.linear((forward + backward) / 2).squeeze(-1).t()
        behind = (torch.arange(longest, device="cpu") >= counts[:, None]).to(scores.device)
        return torch.softmax((scores / self.temperature).masked_fill(behind, -math.inf), dim=1)


def _ascending(values: Tensor) -> Tensor:
    """Sort the last dimension in ascending order, NaN last."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return values.sort(dim=-1).values
    # NumPy sorts many short rows several times as fast as torch.
    array = values.detach().numpy()
    if torch.is_grad_enabled() and values.requires_grad:
        return values.gather(-1, torch.from_numpy(np.argsort(array, axis=-1)))
    return torch.from_numpy(np.sort(array, axis=-1))


def _encodings(length: int, width: int) -> Tensor:
    """Return sinusoidal position encodings, float64 `(length, width)` (Vaswani et al., 2017)."""
    rates = 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(length, width)


def _as_sets(features: Fragments | Tensor, lengths: Tensor | None) -> Fragments:
    if isinstance(features, Fragments):
        if lengths is not None:
            raise ValueError("lengths: Fragments have their own; expected None")
        return features
    if not isinstance(features, Tensor) or features.dim() != 3 or not features.is_floating_point():
        found = f"{features.dtype} of shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features)
        raise TypeError(f"features: expected Fragments or a floating point tensor (n_sets, max_len, d), got {found}")
    return Fragments.from_padded(features, lengths)
