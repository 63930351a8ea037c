"""Count the memory that a computation keeps for its backward pass.

Inside: `saved_bytes`, `without_memory`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["saved_bytes", "without_memory"]


def saved_bytes(call: Callable[[], Any], known: Iterable[Tensor] = ()) -> int:
    """Return the bytes that the graph of the result of `call` keeps, each storage once.

    Args:
        call: the forward pass; its result holds the graph.
        known: tensors in memory before the call, such as weights. They do not count.
    """
    sizes: dict[int, int] = {}
    before = {_identity(tensor) for tensor in known}

    def pack(tensor: Tensor) -> Tensor:
        if _identity(tensor) not in before:
            sizes[_identity(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        # While the graph exists, no two of its storages share an address.
        kept = call()
    del kept
    gc.collect()  # Hooks and graph may refer to each other.
    return sum(sizes.values())


def without_memory() -> FakeTensorMode:
    """Return a context whose new tensors have shapes and types but no values, and take no memory.

    Weights may be ordinary tensors. The context, as `mode`, replaces them by `mode.from_tensor(weight)`: both are known
    to `saved_bytes` then.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def _identity(tensor: Tensor) -> int:
    # Tensors without memory have no address of their data.
    return tensor.untyped_storage()._cdata
