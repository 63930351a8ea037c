"""How discriminator weights and their Adam moments are stored: in float32 or in fewer bits.

Inside: `Rows`, `Float32Rows`, `LowPrecisionRows`, `PRECISIONS`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["PRECISIONS", "Float32Rows", "LowPrecisionRows", "Rows"]

# Returns a contiguous zero tensor of the given shape and dtype.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Rows(abc.ABC):
    """Parameters (n, d) and their two Adam moments, initially zero. Selected rows are read and written in float32.

    Attributes:
        tensors: the stored tensors by name, in the form in which they are saved.
    """

    tensors: dict[str, Tensor]

    @abc.abstractmethod
    def weights(self, index: Tensor) -> Tensor:
        """Return the parameters of the rows `index` ((U,) int64) as (U, d) float32."""

    @abc.abstractmethod
    def moments(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return Adam's first and second moments of these rows, each (U, d) float32."""

    @abc.abstractmethod
    def write(self, index: Tensor, weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, draw: tuple[int, int]) -> None:
        """Store rows. The two numbers `draw` seed the stochastic rounding, if the storage rounds."""


class Float32Rows(Rows):
    """Store everything in float32: 12 bytes per parameter."""

    def __init__(self, n_rows: int, dim: int, allocate: Allocate) -> None:
        self.tensors = {name: allocate((n_rows, dim), torch.float32) for name in ("weight", "exp_avg", "exp_avg_sq")}

    def weights(self, index: Tensor) -> Tensor:
        return self.tensors["weight"][index]

    def moments(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.tensors["exp_avg"][index], self.tensors["exp_avg_sq"][index]

    def write(self, index: Tensor, weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, draw: tuple[int, int]) -> None:
        for name, values in (("weight", weights), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            self.tensors[name].index_copy_(0, index, values)


class LowPrecisionRows(Rows):
    """Store parameters and second moments in bfloat16 and first moments in 8 bits with a scale per row: 5 bytes each.

    One step changes a parameter or a second moment by less than the distance between neighbouring bfloat16 values, so
    rounding to nearest would lose the change. Stochastic rounding of all three keeps their mean exact. Instead of a
    first moment, its ratio to the root of the second moment is stored. Adam's step depends on this ratio, whose size
    does not depend on that of the gradient, so 127 levels up to the row's maximum are enough. With beta1 = 0.5, a first
    moment halves at each step, so that rounding errors fade after a few steps.
    """

    def __init__(self, n_rows: int, dim: int, allocate: Allocate) -> None:
        self.tensors = {
            "weight": allocate((n_rows, dim), torch.bfloat16),
            "exp_avg": allocate((n_rows, dim), torch.int8),
            "exp_avg_scale": allocate((n_rows,), torch.float32),
            "exp_avg_sq": allocate((n_rows, dim), torch.bfloat16),
        }

    def weights(self, index: Tensor) -> Tensor:
        return self.tensors["weight"][index].float()

    def moments(self, index: Tensor) -> tuple[Tensor, Tensor]:
        exp_avg_sq = self.tensors["exp_avg_sq"][index].float()
        ratios = self.tensors["exp_avg"][index] * self.tensors["exp_avg_scale"][index][:, None]
        return ratios * exp_avg_sq.sqrt(), exp_avg_sq

    def write(self, index: Tensor, weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, draw: tuple[int, int]) -> None:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(draw)))
        noise = torch.from_numpy(random.integers(0, 1 << 16, (3, *weights.shape), dtype=np.uint16).astype(np.int32))
        kept_sq = _rounded_to_bfloat16(exp_avg_sq, noise[2])
        root = kept_sq.float().sqrt()
        ratios = torch.where(root > 0, exp_avg / root, 0.0)
        scale = ratios.abs().amax(dim=1) / 127
        levels = ratios / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        rounded = (levels + noise[1] / (1 << 16)).floor_().clamp_(-127, 127)
        for name, values in (
            ("weight", _rounded_to_bfloat16(weights, noise[0])),
            ("exp_avg", rounded.to(torch.int8)),
            ("exp_avg_scale", scale),
            ("exp_avg_sq", kept_sq),
        ):
            self.tensors[name].index_copy_(0, index, values)


def _rounded_to_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    """Round finite float32 values stochastically to one of the two neighbouring bfloat16 values, keeping the mean.

    A bfloat16 value is the upper half of a float32 value. Adding 16 random bits to the lower half carries into the
    upper half with exactly the probability that stochastic rounding needs.
    """
    bits = (values.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)


PRECISIONS: Mapping[str, Callable[[int, int, Allocate], Rows]] = {"float32": Float32Rows, "low": LowPrecisionRows}
