"""A stream that reports to be a terminal, for output shown only on terminals.

Inside: `Terminal`, `every_step`.
"""

from __future__ import annotations

import functools
import io
import sys
from types import ModuleType

import pytest


class Terminal(io.StringIO):
    """A text stream that reports to be a terminal and keeps what is written."""

    def isatty(self) -> bool:
        return True


def every_step(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Terminal:
    """Make stderr a terminal, and make the progress bars of `module` draw every step, however fast."""
    monkeypatch.setattr(module, "tqdm", functools.partial(module.tqdm, mininterval=0))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal
