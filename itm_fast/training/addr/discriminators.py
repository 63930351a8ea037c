"""The discriminators of a training set: gathered for a batch, updated by its gradients, saved to a file.

Inside: `Discriminators`, `GatheredRows`.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import torch
from torch import Tensor

from itm_fast.training.addr.adam import adam_rows
from itm_fast.training.addr.memory import in_memory, mapped
from itm_fast.training.addr.rows import PRECISIONS
from itm_fast.training.addr.snapshot import read_snapshot, write_snapshot

__all__ = ["Discriminators", "GatheredRows"]

_BIASES = ("bias", "bias_exp_avg", "bias_exp_avg_sq")
# Settings of `torch.optim.Adam`.
_ADAM = {"beta1": 0.5, "beta2": 0.999, "eps": 1e-8}


@attrs.frozen(eq=False)
class GatheredRows:
    """The discriminators of the images of a batch, on the device of the batch.

    Attributes:
        images: (U,) int64 on the CPU, the distinct images in ascending order.
        places: (B,) int64, the index in `images` of each pair's image.
        weights: (U, d) float32.
        biases: (U,) float32.
    """

    images: Tensor
    places: Tensor
    weights: Tensor
    biases: Tensor


class Discriminators:
    """Train `n_images` logistic discriminators `sigmoid(W_i x + b_i)`, which start at zero, with a lazy Adam.

    Adam is lazy: rows outside the batch keep their values and moments, and each row counts its own steps. In float32
    each row is updated bit for bit as by `torch.optim.Adam`.

    Source: Ren et al., "Beyond the Deep Metric Learning: Enhance the Cross-Modal Matching with Adversarial
    Discriminative Domain Regularization" (ADDR), sections IV and V-A. The paper specifies neither the start value nor
    the step counts: here a discriminator starts at zero, so that its risk starts at log 2 per fragment, and counts its
    own steps.

    Args:
        n_images: at least 1; 1 if all images share a discriminator.
        dim: width d of the fragments.
        precision: "float32" (12 d + 16 bytes per image) or "low" (5 d + 20 bytes per image): bfloat16 parameters and
            second moments and 8-bit first moments, with stochastic rounding. Biases stay in float32.
        folder: folder for memory-mapped files, if the rows do not fit in memory. The files have no names and disappear
            with the process. None: keep the rows in memory.
        root: the run directory above `folder`, below which no symbolic link is followed; None: `folder` itself.
        seed: seed of the stochastic rounding.

    Attributes: `n_images`, `dim`, `precision`; `updates`, the number of calls of `update`.

    Raises:
        OSError: `folder` has too little space.
    """

    def __init__(
        self,
        n_images: int,
        dim: int,
        *,
        precision: str = "float32",
        folder: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        if n_images < 1 or dim < 1:
            raise ValueError(f"n_images, dim: expected at least 1 each, got {n_images} and {dim}")
        if precision not in PRECISIONS:
            raise ValueError(f"precision: expected {' or '.join(PRECISIONS)}, got {precision!r}")
        self.n_images, self.dim, self.precision = n_images, dim, precision
        self.seed = seed
        self.updates = 0
        allocate = in_memory if folder is None else mapped(Path(folder), root)
        self._rows = PRECISIONS[precision](n_images, dim, allocate)
        self._biases = {name: allocate((n_images,), torch.float32) for name in _BIASES}
        self._steps = allocate((n_images,), torch.int32)

    @property
    def nbytes(self) -> int:
        """Size of all rows and their Adam moments in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def gather(self, images: Tensor) -> GatheredRows:
        """Return the discriminators of `images`: (B,) integers on any device, possibly repeated.

        Raises:
            ValueError: an image id is out of range.
        """
        if images.dim() != 1 or images.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"images: expected integers of shape (B,), got {images.dtype} of {tuple(images.shape)}")
        distinct, places = torch.unique(images.to("cpu", torch.int64), return_inverse=True)
        if len(distinct) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < self.n_images:
            raise ValueError(
                f"images: expected ids from 0 to {self.n_images - 1}, which the store has discriminators of, got "
                f"{int(distinct[0])} to {int(distinct[-1])}"
            )
        device = images.device
        weights, biases = self._rows.weights(distinct), self._biases["bias"][distinct]
        return GatheredRows(distinct, places.to(device), weights.to(device), biases.to(device))

    def update(self, rows: GatheredRows, weight_gradients: Tensor, bias_gradients: Tensor, lr: float) -> None:
        """Run one step on gathered rows with gradients (U, d) and (U,), summed over the pairs of each image.

        Raises:
            ValueError: a gradient has a wrong shape or is not finite. Nothing is changed in that case.
        """
        gradients = []
        for name, given, like in (
            ("weight_gradients", weight_gradients, rows.weights),
            ("bias_gradients", bias_gradients, rows.biases),
        ):
            if given.shape != like.shape:
                raise ValueError(f"{name}: expected shape {tuple(like.shape)}, got {tuple(given.shape)}")
            gradients.append(given.detach().to("cpu", torch.float32))
            if not bool(gradients[-1].isfinite().all()):
                raise ValueError(f"{name}: expected finite values")
        index = rows.images
        steps = self._steps[index] + 1
        adam = {"lr": lr, **_ADAM}
        weights, (exp_avg, exp_avg_sq) = self._rows.weights(index), self._rows.moments(index)
        adam_rows(weights, gradients[0], exp_avg, exp_avg_sq, steps.tolist(), **adam)
        biases = [tensor[index][:, None] for tensor in self._biases.values()]
        adam_rows(biases[0], gradients[1][:, None], biases[1], biases[2], steps.tolist(), **adam)
        self._rows.write(index, weights, exp_avg, exp_avg_sq, (self.seed, self.updates))
        for tensor, changed in zip(self._biases.values(), biases, strict=True):
            tensor.index_copy_(0, index, changed.squeeze(1))
        self._steps.index_copy_(0, index, steps)
        self.updates += 1

    def save(self, path: str | os.PathLike[str], data: str, root: str | os.PathLike[str] | None = None) -> None:
        """Write all rows and their moments to a safetensors file, atomically; `data` identifies their data set.

        Raises:
            OSError: the disk is full. The one-line message names the file.
        """
        write_snapshot(Path(path), self._tensors(), self._identity(data, self.updates), root)

    def load(self, path: str | os.PathLike[str], data: str, updates: int) -> None:
        """Read a file that `save` wrote after `updates` updates for the same `data`, number of images, width and
        precision.

        Raises:
            ValueError: the file is missing or damaged, or it belongs to other data, sizes or updates. The message names
                the file. Rows change only if the damage is found while the values are read.
        """
        read_snapshot(Path(path), self._tensors(), self._identity(data, updates))
        self.updates = updates

    def _identity(self, data: str, updates: int) -> dict[str, int | str]:
        sizes = {"images": self.n_images, "width": self.dim, "updates": updates}
        return {**sizes, "precision": self.precision, "data": data}

    def _tensors(self) -> dict[str, Tensor]:
        return {**self._rows.tensors, **self._biases, "steps": self._steps}
