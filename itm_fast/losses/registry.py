"""Losses of a score matrix by name, as `--loss` and the setting `loss` know them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import attrs
from torch import nn

from itm_fast import config as settings
from itm_fast.files.messages import shown
from itm_fast.files.plugins import Plugins

__all__ = ["RegisteredLoss", "create", "find", "names", "register"]

Loss = TypeVar("Loss", bound=Callable[..., nn.Module])


@attrs.frozen
class RegisteredLoss:
    """A loss with a name.

    Attributes:
        make: the class, or another function that returns the module.
        mining: the negatives that the loss takes; the first one is its default. None: any, as it chooses its own.
    """

    name: str
    make: Callable[..., nn.Module]
    mining: tuple[str, ...] | None

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The keyword arguments of `make` by name."""
        return inspect.signature(self.make).parameters


_LOSSES: dict[str, RegisteredLoss] = {}
_plugins = Plugins("itm_fast.losses")


def register(name: str, *, mining: tuple[str, ...] | None = None) -> Callable[[Loss], Loss]:
    """Class decorator: make a loss known to training under `name`.

    An instance is called with the scores (B, B), image i and caption i being a pair, and the keyword `positives`: bool
    (B, B), True for further pairs that are not negatives, or None. It returns a scalar.

    The constructor gets those settings of the run that it has a parameter for: `margin`, `mining`, `epsilon`,
    `selective_divisor`, `halve`, `scale` and `reduction` ("sum" or "mean"). Its other parameters need a default; the
    setting `loss_options` (`--loss-option NAME=VALUE`) changes them. Parameters of the module are trained with the
    model, without weight decay. If the module has an attribute `copies`, training repeats each pair of a batch this
    often, side by side, before it augments the batch.

    Args:
        name: what `--loss` takes.
        mining: the values of `--mining` that the loss accepts; None accepts any.

    Raises:
        ValueError: another loss has this name.
    """

    def decorate(loss: Loss) -> Loss:
        known = _LOSSES.get(name)
        if known is not None and (known.make.__module__, known.make.__qualname__) != (
            loss.__module__,
            loss.__qualname__,
        ):
            raise ValueError(f"loss {name!r} is registered twice: by {known.make.__module__} and {loss.__module__}")
        _LOSSES[name] = RegisteredLoss(name, loss, mining)
        return loss

    return decorate


@cache
def _load_built_in() -> None:
    """Import every module of this folder, so that each registers its losses."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def names(*, plugins: bool = True) -> list[str]:
    """Return the names of all losses, those of installed plugins included unless `plugins` is False."""
    _load_built_in()
    return sorted({*_LOSSES, *(_plugins.names() if plugins else ())})


def find(name: str) -> RegisteredLoss:
    """Return the loss `name`.

    Raises:
        ValueError: no installed package registers this name.
    """
    _load_built_in()
    if name not in _LOSSES:
        _plugins.load(name)
    if name not in _LOSSES:
        raise ValueError(f"loss: {settings.unknown_name('loss', name, names())} (or install the package that adds it)")
    return _LOSSES[name]


def create(name: str, run: Mapping[str, Any], options: Mapping[str, Any]) -> nn.Module:
    """Build the loss `name`.

    Args:
        run: settings of the run; the loss gets those that it has a parameter for.
        options: values of its other parameters by name.

    Raises:
        ValueError: the name or an option is unknown, or an option has a wrong value.
    """
    loss = find(name)
    own = [parameter for parameter in loss.parameters if parameter not in run]
    for option in options:
        if option not in own:
            raise ValueError(f"loss_options: {settings.unknown_name(f'option of {name}', option, own)}")
    try:
        return loss.make(**{key: value for key, value in run.items() if key in loss.parameters}, **options)
    except TypeError as error:
        raise ValueError(f"loss_options: {name} does not accept {shown(dict(options))}: {error}") from None
