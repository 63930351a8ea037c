"""Save and restore the state of a recomputed forward: random number generators, autocast, and module buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Buffers", "as_it_was", "drew", "random_state"]


class Buffers:
    """Snapshots of a module's buffers, such as running statistics. A buffer is copied only if its values changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, Tensor]:
        """Return the current buffers by name. An unchanged buffer is the same tensor as in the previous call."""
        # Compare values: code may replace a buffer, or change it without incrementing its version.
        for name, buffer in self._module.named_buffers():
            if name not in self._kept or not torch.equal(self._kept[name], buffer):
                self._kept[name] = buffer.clone()
        return dict(self._kept)


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of the default generators of the CPU and of the device."""
    if device.type == "cpu":
        return (torch.get_rng_state(),)
    of_device = torch.get_device_module(device.type).get_rng_state
    # There is only one MPS device, and its functions take no device argument.
    return torch.get_rng_state(), of_device() if device.type == "mps" else of_device(device)


def drew(before: tuple[Tensor, ...], device: torch.device) -> bool:
    """Return whether a random number was drawn since `random_state` returned `before`."""
    return any(not torch.equal(*states) for states in zip(before, random_state(device), strict=True))


@contextlib.contextmanager
def as_it_was(autocast: Any, random: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Restore autocast, and the generators if `random` holds their states, as they were in the forward."""
    with autocast():
        if random is None:
            yield
            return
        now = random_state(device)
        _set_random_state(random, device)
        try:
            yield
        finally:
            _set_random_state(now, device)


def _set_random_state(states: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device.type).set_rng_state(states[1], *(() if device.type == "mps" else (device,)))
