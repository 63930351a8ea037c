"""Describe where and with what figures are measured: commit, processor, versions.

Inside: `environment`, `processor_name`, `source_commit`.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from itm_fast.files.command_line import command_line

__all__ = ["environment", "processor_name", "source_commit"]


def environment(threads: int, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return command, machine, time and software versions of the measurement."""
    commit, dirty = source_commit()
    return {
        "commit": commit,
        "uncommitted_changes": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "itm_fast": info["version"],
        "instruction_set": info["dispatch"]["cross_attention_scores"]["cpu"].removeprefix("native "),
    }


def processor_name() -> str:
    """Return the name of the processor if the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def source_commit() -> tuple[str | None, bool | None]:
    """Return the commit of the source tree that the package runs from, and whether it was changed since.

    Both are None if the package runs from no source tree under git.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Ignore result files of earlier measurements.
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", ".", ":!benchmarks/results"))
    except (OSError, subprocess.CalledProcessError):
        return None, None
