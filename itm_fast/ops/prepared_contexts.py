"""`PreparedContexts`: contexts with the intermediate results that depend only on the contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops.autograd import is_differentiated
from itm_fast.ops.library import operators_of, use_native
from itm_fast.ops.precision import autocast
from itm_fast.reference import validation

__all__ = ["PreparedContexts", "prepare"]


def _version(values: Tensor) -> int | None:
    """Return the version counter (in-place changes), or None for an inference tensor, which has none."""
    return None if torch.compiler.is_compiling() or values.is_inference() else values._version


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
    _version: int | None

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
        """Copies count changes of their own values. Raise if these were modified after `prepare`."""
        self._check_version()
        return _restored, (self.fragments, self.grams)

    def check_usable(self, queries: Tensor) -> None:
        """Raise if a gradient is needed, or if the contexts were modified after `prepare`."""
        if is_differentiated(queries, self.fragments.values):
            raise RuntimeError(
                "contexts: prepared contexts support no gradient; pass the Fragments, or call under torch.no_grad()"
            )
        self._check_version()

    def _check_version(self) -> None:
        if self._version is not None and _version(self.fragments.values) not in (None, self._version):
            raise RuntimeError("contexts: the values were modified in place after prepare; call prepare again")


def _restored(fragments: Fragments, grams: Tensor | None) -> PreparedContexts:
    return PreparedContexts(fragments, grams, _version(fragments.values))


def prepare(contexts: Fragments) -> PreparedContexts:
    if not isinstance(contexts, Fragments):
        raise TypeError(f"contexts: expected Fragments, got {validation.describe(contexts)}")
    validation.check_tensor("contexts.values", contexts.values, ("N", "d"))
    if validation.debugging():
        contexts.check_offsets()
    (contexts,) = autocast(contexts)
    grams: Tensor | None = None
    has_kernel = "cross_attention_grams" in operators_of(contexts.device.type)
    if has_kernel and use_native("cross_attention_scores", contexts.values):
        with torch.no_grad():
            grams = torch.ops.itm_fast.cross_attention_grams(contexts.values, contexts.offsets)
    return PreparedContexts(contexts, grams, _version(contexts.values))
