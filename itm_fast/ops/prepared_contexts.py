"""`PreparedContexts`: contexts with the intermediate results that depend only on the contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops.autograd import is_differentiated
from itm_fast.ops.library import instruction_set, operators_of, use_native
from itm_fast.ops.precision import autocast
from itm_fast.reference import validation

__all__ = ["PreparedContexts", "prepare"]


Versions = tuple[int | None, int | None]


def _version(tensor: Tensor) -> int | None:
    """Return the version counter (in-place changes), or None for an inference tensor, which has none."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _versions(contexts: Fragments) -> Versions:
    """Return the versions of values and offsets."""
    return _version(contexts.values), _version(contexts.offsets)


@dataclass(frozen=True, eq=False, repr=False)
class PreparedContexts:
    """Contexts for repeated calls of `cross_attention_scores`, returned by `itm_fast.functional.prepare`.

    Attributes:
        fragments: the contexts. Their values are not copied.
        grams: the Gram matrices of all sets in the layout of the CPU kernels, float32 (float64 for float64 contexts);
            None if no kernel uses them.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> from itm_fast import Fragments
        >>> gallery = F_itm.prepare(Fragments.from_padded(torch.randn(6, 36, 32)))
        >>> len(gallery), gallery.dtype
        (6, torch.float32)
    """

    fragments: Fragments
    grams: Tensor | None
    _versions: Versions

    @property
    def dtype(self) -> torch.dtype:
        return self.fragments.dtype

    @property
    def device(self) -> torch.device:
        return self.fragments.device

    @property
    def nbytes(self) -> int:
        """Memory of this object in bytes, without the contexts."""
        return 0 if self.grams is None else self.grams.nbytes

    def __len__(self) -> int:
        return len(self.fragments)

    def __repr__(self) -> str:
        return f"PreparedContexts({self.fragments!r}, nbytes={self.nbytes})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies count changes of their own tensors. Raise if the contexts were modified after `prepare`."""
        self._check_versions()
        return _restored, (self.fragments, self.grams, instruction_set())

    def check_usable(self, queries: Tensor) -> None:
        """Raise if a gradient is needed, or if the contexts were modified after `prepare`."""
        if is_differentiated(queries, self.fragments.values):
            raise RuntimeError(
                "contexts: prepared contexts support no gradient; pass the Fragments, or call under torch.no_grad()"
            )
        self._check_versions()

    def _check_versions(self) -> None:
        for name, before, now in zip(("values", "offsets"), self._versions, _versions(self.fragments), strict=True):
            if before is not None and now not in (None, before):
                raise RuntimeError(f"contexts: the {name} were modified in place after prepare; call prepare again")


def _restored(fragments: Fragments, grams: Tensor | None, written_with: str | None = None) -> PreparedContexts:
    # The layout of the Gram matrices depends on the instruction set, which may differ where a file is read.
    if written_with != instruction_set():
        grams = _grams_of(fragments)
    return PreparedContexts(fragments, grams, _versions(fragments))


def prepare(contexts: Fragments) -> PreparedContexts:
    validation.check_fragments("contexts", contexts)
    validation.check_tensor("contexts.values", contexts.values, ("N", "d"))
    if validation.debugging():
        contexts.check_offsets()
    (contexts,) = autocast(contexts)
    return PreparedContexts(contexts, _grams_of(contexts), _versions(contexts))


def _grams_of(contexts: Fragments) -> Tensor | None:
    has_kernel = "cross_attention_grams" in operators_of(contexts.device.type)
    if not (has_kernel and use_native("cross_attention_scores", contexts.values)):
        return None
    with torch.no_grad():
        grams: Tensor = torch.ops.itm_fast.cross_attention_grams(contexts.values, contexts.offsets)
    return grams
