"""Find the requirements of the native build: torch, a C++ compiler, CMake and Ninja. Uses only the standard library."""

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
    """Return the first number with a dot in `text`: (3, 25) for "cmake version 3.25.1"."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def find_torch() -> tuple[Path, str] | None:
    """Return folder and version of the first usable torch: on ``sys.path``, else in the interpreter's site-packages."""
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    for folder in dict.fromkeys([*sys.path, *own, site.getusersitepackages()]):
        for found in importlib.metadata.distributions(name="torch", path=[folder]):
            root = Path(folder) / "torch"
            if (root / "include").is_dir() and _version(found.version) >= OLDEST["torch"]:
                return root.resolve(), found.version
    return None


def _answers(command: str) -> str:
    """Return what ``command --version`` prints; empty if it fails."""
    try:
        result = subprocess.run([command, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout if result.returncode == 0 else ""


def find_compiler() -> str | None:
    """Return the C++ compiler that CMake will use; None if there is none, and on Windows, which has no native code.

    A file that does not answer does not count: on macOS, a stub named c++ exists until the command line tools are
    installed.
    """
    if platform.system() == "Windows":
        return None
    wanted = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, wanted) if path and _answers(path)), None)


def find_tool(name: str) -> str | None:
    """Return the path of a new enough cmake or ninja: on the PATH, else next to the interpreter."""
    for folder in (None, sysconfig.get_path("scripts")):
        path = shutil.which(name, path=folder)
        # Under build isolation, the script of a cmake from PyPI does not find its package, so run it as a check.
        if path and _version(_answers(path)) >= OLDEST[name]:
            return path
    return None
