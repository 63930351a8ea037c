"""Find the native libraries: beside the sources, or in the installed package."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from itm_fast.version import __version__

__all__ = ["PACKAGE", "find_library", "host_module", "library_folder", "without_libraries"]

PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def library_folder() -> Path:
    """Return the folder with the native libraries.

    After `pip install .`, Python started in the source folder imports the sources, which have no libraries. The folder
    is then that of the installed package, if it has the same version.
    """
    installed = _installed_package()
    if (PACKAGE / "_C_cpu.so").exists() or installed is None or installed[1] != __version__:
        return PACKAGE
    return installed[0]


def find_library(name: str) -> Path | None:
    """Return the path of a native library such as "_C_cpu" or "_host", or None."""
    return next(iter(sorted(library_folder().glob(f"{name}.*so"))), None)


def host_module() -> Any:
    """Import `_host`, the pybind11 module; None if there is none for this Python."""
    folder, places = str(library_folder()), sys.modules["itm_fast"].__path__
    if folder not in places:
        places.append(folder)
    try:
        return importlib.import_module("itm_fast._host")
    except ImportError:
        return None


def without_libraries() -> str | None:
    """Explain why these sources have no libraries although an installed package has some; None if it has none."""
    installed = _installed_package()
    if installed is None:
        return None
    folder, version = installed
    return (
        f"Python imported itm_fast {__version__} from the sources in {PACKAGE.parent}, which have no native libraries; "
        f"those in {folder} are of version {version}. Run Python in another folder, or build in place: pip install -e ."
    )


def _installed_package() -> tuple[Path, str] | None:
    """Return the folder and the version of an installed package with libraries elsewhere, or None."""
    try:
        found = distribution("itm_fast")
    except PackageNotFoundError:
        return None
    folder = Path(str(found.locate_file("itm_fast")))
    if folder.resolve() == PACKAGE or not (folder / "_C_cpu.so").exists():
        return None
    return folder, found.version
