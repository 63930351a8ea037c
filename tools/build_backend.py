"""PEP 517 build backend: setuptools, with the torch that is already installed as the one to build against.

Under build isolation pip hides the site-packages of the interpreter that it runs in, and a torch listed in
``build-system.requires`` would be downloaded (half a gigabyte, and often another version than the one in use). These
hooks look into the calling interpreter's own site-packages first and ask for torch, CMake and Ninja only where they
are missing. ``setup.py`` uses the same ``find_*`` functions.
"""

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

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "find_compiler",
    "find_tool",
    "find_torch",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

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


def _requirements_of_the_native_build() -> list[str]:
    if find_compiler() is None:
        return []
    found = {"torch": find_torch(), "cmake": find_tool("cmake"), "ninja": find_tool("ninja")}
    return [f"{name}>={'.'.join(map(str, OLDEST[name]))}" for name, path in found.items() if path is None]


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _requirements_of_the_native_build()


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _requirements_of_the_native_build()
