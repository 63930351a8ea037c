"""PEP 517 build backend: setuptools, building against the torch that is already installed.

Under build isolation pip hides the site-packages of its interpreter, and would download a torch listed in
``build-system.requires`` (half a gigabyte, and often another version than the one in use). These hooks look into the
calling interpreter's own site-packages first and request torch, CMake and Ninja only if they are missing.
"""

from __future__ import annotations

from native_build import OLDEST, find_compiler, find_tool, find_torch
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
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _requirements_of_the_native_build() -> list[str]:
    if find_compiler() is None:
        return []
    found = {"torch": find_torch(), "cmake": find_tool("cmake"), "ninja": find_tool("ninja")}
    return [f"{name}>={'.'.join(map(str, OLDEST[name]))}" for name, path in found.items() if path is None]


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _requirements_of_the_native_build()


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _requirements_of_the_native_build()
