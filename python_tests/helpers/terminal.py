"""A stream that says it is a terminal, for what is shown only there.

Inside: `Terminal`, `every_step`.
"""

from __future__ import annotations

import functools
import io
import sys
from types import ModuleType

import pytest


class Terminal(io.StringIO):
    """Keeps what is written, as a terminal would have been sent it."""

    def isatty(self) -> bool:
        return True


def every_step(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Terminal:
    """Makes stderr a terminal, and the progress bars of `module` draw each step however fast the steps are."""
    monkeypatch.setattr(module, "tqdm", functools.partial(module.tqdm, mininterval=0))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal
