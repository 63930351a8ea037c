"""Training steps that score like published code: a loop over captions that keeps everything for the backward.

Inside: `published_loop`, `HAS_LOOP`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.fragments import Fragments
from itm_fast.losses import triplet_loss as triplet_loss_module

__all__ = ["HAS_LOOP", "published_loop"]

# Models whose published code scores in a loop; the others multiply two matrices.
HAS_LOOP = ("scan", "sgraf", "dbl")


@contextlib.contextmanager
def published_loop() -> Iterator[None]:
    """Make models score with the loops of `itm_fast.reference`, and triplet losses use plain PyTorch.

    Encoders, data, optimiser and settings do not change. Regulators use no dropout: drawing the kernels' masks would
    cost the loop more than the dropout of published code does.
    """
    functions: list[tuple[ModuleType, str, Callable[..., Any]]] = [
        (F_itm, "cross_attention_scores", reference.cross_attention_scores),
        (F_itm, "regulated_scores", _without_dropout),
        (F_itm, "gradient_sparse_scores", _caption_by_caption),
        (triplet_loss_module, "triplet_loss", reference.triplet_loss),
    ]
    kept = [getattr(module, name) for module, name, _ in functions]
    try:
        for module, name, function in functions:
            setattr(module, name, function)
        yield
    finally:
        for (module, name, _), function in zip(functions, kept, strict=True):
            setattr(module, name, function)


def _without_dropout(*arguments: Any, dropout: float = 0.0, seed: int | Tensor | None = None, **options: Any) -> Tensor:
    return reference.regulated_scores(*arguments, **options)


def _caption_by_caption(
    module: nn.Module, images: Any, captions: tuple[Fragments, Tensor], *, chunk_pairs: int
) -> Tensor:
    words, vectors = captions
    numbers = torch.arange(len(words), device=vectors.device)
    columns = [module(images, (words.index_select(numbers[i : i + 1]), vectors[i : i + 1])) for i in range(len(words))]
    return torch.cat(columns, dim=1)
