"""How the weights of the discriminators and Adam's moments of them lie in memory, in float32 or in fewer bits.

Inside: `Rows`, `Float32Rows`, `LowPrecisionRows`, `PRECISIONS`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["PRECISIONS", "Float32Rows", "LowPrecisionRows", "Rows"]

# Gives a contiguous tensor of zeros of a shape and dtype.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Rows(abc.ABC):
    """Parameters (n, d) and both moments of each, all zero at first, read and written some rows at a time in float32.

    Attributes:
        tensors: what holds them, by name, to be saved as it is.
    """

    tensors: dict[str, Tensor]

    @abc.abstractmethod
    def weights(self, index: Tensor) -> Tensor:
        """The parameters of the rows `index` (U,) int64, (U, d) float32."""

    @abc.abstractmethod
    def moments(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Adam's first and second moments of these rows, (U, d) float32 each."""

    @abc.abstractmethod
    def write(self, index: Tensor, weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, draw: tuple[int, int]) -> None:
        """Keeps rows; where they are rounded, at random as the two numbers `draw` determine."""


class Float32Rows(Rows):
    """As they are: 12 bytes a parameter."""

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
    """Parameters and second moments in bfloat16, first moments in 8 bits with a scale per row: 5 bytes a parameter.

    A step changes a parameter, and a second moment, by less than the distance of two neighbours in bfloat16, and
    rounding to the nearest would lose it. All three are therefore rounded at random, up or down by how near each
    neighbour is, so that the mean is exact. Of a first moment its ratio to the root of the second is kept, which is
    what a step goes by: it is of one size whatever that of the gradient, and 127 levels up to the largest of its row
    do. A first moment keeps half of itself at a step (beta1 0.5), so that what rounding adds to it is gone after a few.
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
    """Finite float32 to a neighbour in bfloat16, the farther one with the probability that keeps the mean.

    bfloat16 has the upper 16 bits of a float32, whose bits but for the sign count its size up: noise of 16 bits carries
    into the upper ones as often as the lower ones ask for.
    """
    bits = (values.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)


PRECISIONS: Mapping[str, Callable[[int, int, Allocate], Rows]] = {"float32": Float32Rows, "low": LowPrecisionRows}
