"""The discriminators of a training set: gathered for a batch, changed by its gradients, kept in a file.

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


@attrs.frozen(eq=False)
class GatheredRows:
    """The discriminators of the images of a batch, on the device of the batch.

    Attributes:
        images: (U,) int64 on the CPU, the distinct images in rising order.
        places: (B,) int64, which of them each pair's image is.
        weights: (U, d) float32.
        biases: (U,) float32.
    """

    images: Tensor
    places: Tensor
    weights: Tensor
    biases: Tensor


class Discriminators:
    """`n_images` logistic discriminators `sigmoid(W_i x + b_i)`, zero at first, and the Adam that trains them.

    The Adam is lazy: a row that is not in a batch stays as it is, its moments, too, and each row counts its own steps.
    In float32 every row goes where `torch.optim.Adam` would take it, bit for bit.

    Source: Ren et al., "Beyond the Deep Metric Learning: Enhance the Cross-Modal Matching with Adversarial
    Discriminative Domain Regularization" (ADDR), sections IV and V-A; where the paper is silent, a discriminator starts
    at zero, so that its risk starts at log 2 a fragment, and counts its own steps.

    Args:
        n_images: at least 1; one where all images share a discriminator.
        dim: width d of the fragments.
        precision: "float32" (12 d + 16 bytes an image), or "low" (5 d + 20 bytes): bfloat16 parameters and second
            moments and 8-bit first moments, rounded at random; biases stay in float32.
        folder: where to keep the rows in files that the system maps into memory, for more rows than fit; None: in
            memory. The files have no names and are gone with the process.
        root: the run directory above `folder`, below which no symbolic link is followed; None: `folder` itself.
        betas, eps: Adam's.
        seed: of the rounding.

    Attributes: `n_images`, `dim`, `precision`; `updates`, how often `update` was called.

    Raises:
        OSError: there is no room in `folder`.
    """

    def __init__(
        self,
        n_images: int,
        dim: int,
        *,
        precision: str = "float32",
        folder: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
        betas: tuple[float, float] = (0.5, 0.999),
        eps: float = 1e-8,
        seed: int = 0,
    ) -> None:
        if n_images < 1 or dim < 1:
            raise ValueError(f"n_images, dim: expected at least 1 each, got {n_images} and {dim}")
        if precision not in PRECISIONS:
            raise ValueError(f"precision: expected {' or '.join(PRECISIONS)}, got {precision!r}")
        self.n_images, self.dim, self.precision = n_images, dim, precision
        self.betas, self.eps, self.seed = betas, eps, seed
        self.updates = 0
        allocate = in_memory if folder is None else mapped(Path(folder), root)
        self._rows = PRECISIONS[precision](n_images, dim, allocate)
        self._biases = {name: allocate((n_images,), torch.float32) for name in _BIASES}
        self._steps = allocate((n_images,), torch.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows with what Adam keeps of them."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def gather(self, images: Tensor) -> GatheredRows:
        """The discriminators of `images` (B,), integers on any device, which may repeat.

        Raises:
            ValueError: an image is none of the store.
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
        """One step of the rows that were gathered, by gradients (U, d) and (U,), summed over the pairs of each image.

        Raises:
            ValueError: a gradient has another shape, or is not finite; nothing is changed then.
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
        adam = {"lr": lr, "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}
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
        """Writes all rows and their moments as safetensors, in one step; `data` tells the data set that they belong to.

        Raises:
            OSError: the disk is full; one line that names the file.
        """
        write_snapshot(Path(path), self._tensors(), self._identity(data, self.updates), root)

    def load(self, path: str | os.PathLike[str], data: str, updates: int) -> None:
        """Takes what `save` wrote after so many updates, for as many images of the same `data`, width and precision.

        Raises:
            ValueError: the file is missing or damaged, or one of those is another; it is named, and no row has changed
                unless the file was found to be damaged on the way.
        """
        read_snapshot(Path(path), self._tensors(), self._identity(data, updates))
        self.updates = updates

    def _identity(self, data: str, updates: int) -> dict[str, int | str]:
        sizes = {"images": self.n_images, "width": self.dim, "updates": updates}
        return {**sizes, "precision": self.precision, "data": data}

    def _tensors(self) -> dict[str, Tensor]:
        return {**self._rows.tensors, **self._biases, "steps": self._steps}
