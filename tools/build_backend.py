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
    "find_torch",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

TORCH_REQUIREMENT = "torch>=2.11"
OLDEST_TORCH = (2, 11)


def find_torch() -> tuple[Path, str] | None:
    """Folder and version of the first usable torch: on ``sys.path``, else in the interpreter's own site-packages."""
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    for folder in dict.fromkeys([*sys.path, *own, site.getusersitepackages()]):
        for found in importlib.metadata.distributions(name="torch", path=[folder]):
            root = Path(folder) / "torch"
            version = re.match(r"(\d+)\.(\d+)", found.version)
            if version and (root / "include").is_dir() and tuple(map(int, version.groups())) >= OLDEST_TORCH:
                return root.resolve(), found.version
    return None


def find_compiler() -> str | None:
    """The C++ compiler that CMake is going to take, or None where there is none that answers ``--version``."""
    if platform.system() == "Windows":
        return None
    wanted = os.environ.get("CXX", "").split()[:1]
    for name in wanted or ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        # On macOS a stub named c++ exists before the command line tools are installed; it exits with an error.
        if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    return None


def _requirements_of_the_native_build() -> list[str]:
    if find_compiler() is None:
        return []
    missing = [f"{tool}>={oldest}" for tool, oldest in [("cmake", "3.22"), ("ninja", "1.10")] if not shutil.which(tool)]
    return missing if find_torch() else [*missing, TORCH_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _requirements_of_the_native_build()


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _requirements_of_the_native_build()
