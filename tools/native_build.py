"""Finds what the native build needs: torch, a C++ compiler, CMake and Ninja. Needs the standard library alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

OLDEST = {"torch": (2, 11), "cmake": (3, 26), "ninja": (1, 10)}


def _version(text: str) -> tuple[int, ...]:
    """The first number with a dot in `text`: (3, 25) of "cmake version 3.25.1"."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def find_torch() -> tuple[Path, str] | None:
    """Folder and version of the first usable torch: on ``sys.path``, else in the interpreter's own site-packages."""
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    for folder in dict.fromkeys([*sys.path, *own, site.getusersitepackages()]):
        for found in importlib.metadata.distributions(name="torch", path=[folder]):
            root = Path(folder) / "torch"
            if (root / "include").is_dir() and _version(found.version) >= OLDEST["torch"]:
                return root.resolve(), found.version
    return None


def _answers(command: str) -> str:
    """What ``command --version`` prints; empty where it fails."""
    try:
        result = subprocess.run([command, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout if result.returncode == 0 else ""


def find_compiler() -> str | None:
    """The C++ compiler that CMake is going to take; None where there is none, and on Windows, which has no native code.

    A file that does not answer is none: on macOS a stub named c++ stands in until the command line tools are installed.
    """
    if platform.system() == "Windows":
        return None
    wanted = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, wanted) if path and _answers(path)), None)


def find_tool(name: str) -> str | None:
    """Path of a new enough cmake or ninja: on the PATH, else beside the interpreter."""
    for folder in (None, sysconfig.get_path("scripts")):
        path = shutil.which(name, path=folder)
        # Under build isolation the script of a cmake from PyPI does not find its package, so asking is needed.
        if path and _version(_answers(path)) >= OLDEST[name]:
            return path
    return None
