"""The command that started this process, for files that say how they were made.

Inside: `command_line`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

__all__ = ["command_line"]

_INSTALLED = "itm-fast"


def command_line() -> str:
    """Return the command that started this process: `itm-fast ...`, `python -m MODULE ...` or `python FILE ...`."""
    script, *arguments = sys.argv or [""]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if Path(script).stem == _INSTALLED:
        words = [_INSTALLED]
    # A zip file or a folder that runs as a script has a module of this name.
    elif spec is not None and spec.name != "__main__":
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        words = ["python", *([script] if script else [])]
    return shlex.join([*words, *arguments])
