"""Gradient sparsity for any module that scores pairs.

Inside: `gradient_sparse_scores`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.func import functional_call

from itm_fast.ops import gradient_sparse
from itm_fast.ops.gradient_sparse import COUPLINGS, Sets
from itm_fast.ops.library import outside_graphs
from itm_fast.ops.replay import Buffers
from itm_fast.reference import validation

__all__ = ["gradient_sparse_scores"]


@outside_graphs
def gradient_sparse_scores(module: nn.Module, images: Sets, captions: Sets, *, chunk_pairs: int = 512) -> Tensor:
    """Score all pairs by any module; recompute only pairs with a non-zero gradient in the backward pass.

    The forward calls the module on blocks of the matrix, without gradient. The backward calls it again, with gradient,
    on pairs with a non-zero gradient: about 3 B of B x B with hardest negatives. On a GPU it calls it on groups of up
    to 256 pairs, which hold others, too. Scores and gradients are those of one call on everything, up to rounding.

    An attribute or property `coupling` of the module says which scores depend on each other. These are recomputed
    together:

    - "pair": each score is independent. The default; refused for a module with a batch normalisation.
    - "caption": all scores of one caption, for example if batch normalisation sees one caption at a time.
    - "batch": all scores. This saves memory only in the forward.

    Dropout masks are equal in the backward: a block that drew random numbers is recomputed as a whole. Buffers such
    as running statistics change in the forward only. Under torch.compile the call breaks the graph. Gradients reach the
    module's parameters, `images` and `captions`, and no other tensors it holds. Its mode (train, eval) must not change
    before the backward. With FSDP2, apply `fully_shard` to a module that calls this, not to `module` itself.

    Args:
        module: called as `module(images, captions)` with a subset of the images and of the captions; returns their
            scores `(n_images, n_captions)`.
        images: `Fragments`, a tensor whose first dimension counts the images, or a tuple, list or dict of these.
        captions: the same for captions.
        chunk_pairs: approximate number of pairs per block; a block has at least one unit of the coupling.

    Returns:
        `(n_images, n_captions)` in the dtype that the module returns.

    Raises:
        TypeError: `images` or `captions` hold something else.
        ValueError: their parts differ in the number of sets, the coupling is unknown or not declared beside a batch
            normalisation, or the module returns another shape.
        RuntimeError: in a second derivative, which is not supported.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> class Dot(torch.nn.Module):
        ...     def forward(self, images, captions):
        ...         return images @ captions.t()
        >>> images = torch.eye(3, requires_grad=True)
        >>> scores = F_itm.gradient_sparse_scores(Dot(), images, 2 * torch.eye(3))
        >>> scores[0, 1].backward()
        >>> images.grad.tolist()
        [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    check_options(module, chunk_pairs)
    parameters = dict(module.named_parameters())

    def score(
        values: Sequence[Tensor], state: dict[str, Tensor] | None, rows: Sets, columns: Sets, _: Tensor, __: Tensor
    ) -> Tensor:
        state = {name: copy.clone() for name, copy in (state or {}).items()}
        return functional_call(module, {**dict(zip(parameters, values, strict=True)), **state}, (rows, columns))

    return gradient_sparse.gradient_sparse_scores(
        score,
        list(parameters.values()),
        images,
        captions,
        coupling=_coupling(module),
        chunk_pairs=chunk_pairs,
        snapshot=Buffers(module),
    )


def check_options(module: object, chunk_pairs: object) -> None:
    """Raise unless `module` is a module and `chunk_pairs` a number of pairs."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {validation.describe(module)}")
    if isinstance(chunk_pairs, bool) or not isinstance(chunk_pairs, int):
        raise TypeError(f"chunk_pairs: expected an int, got {validation.describe(chunk_pairs)}")
    if chunk_pairs < 1:
        raise ValueError(f"chunk_pairs: expected at least 1, got {chunk_pairs}")


def _coupling(module: nn.Module) -> str:
    declared: str | None = getattr(module, "coupling", None)
    if declared is not None:
        validation.check_option("module.coupling", declared, COUPLINGS)
        return declared
    for name, part in module.named_modules():
        if _couples(part):
            where = f"its part {name!r} is" if name else "it is"
            raise ValueError(
                f"module: {where} a batch normalisation, by which pairs depend on each other; declare an attribute "
                f"coupling, 'caption' or 'batch', or 'pair' where its statistics are fixed"
            )
    return "pair"


def _couples(part: nn.Module) -> bool:
    """Whether it is a batch normalisation: torch's, or one of another class with its running statistics."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return True
    if isinstance(part, nn.modules.instancenorm._InstanceNorm):
        return False
    names = {name for name, _ in part.named_buffers(recurse=False)}
    return {"running_mean", "running_var"} <= names
