"""Find the programs of the CUDA toolkit, such as nvcc, in the usual places. Uses only the standard library."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

PREFIX = Path("/usr/local")
# In pip's packages of the toolkit (nvidia-cuda-nvcc and others).
IN_PACKAGES = Path("nvidia", "cu13", "bin")
SEARCHED = "CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda*/bin and nvidia/cu13/bin of the Python packages"


def folders() -> list[Path]:
    """Return the folders to search, in order."""
    named = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    toolkits = sorted(PREFIX.glob("cuda*"), key=_version, reverse=True)
    return [*named, *path, *(kit / "bin" for kit in toolkits), *(Path(part) / IN_PACKAGES for part in sys.path)]


def find(program: str) -> str | None:
    """Return the path of a program of the toolkit, or None."""
    return shutil.which(program, path=os.pathsep.join(map(str, folders())))


def put_on_path() -> str | None:
    """Put the folder of nvcc on the PATH, for CMake and for the other programs; return the path of nvcc, or None."""
    nvcc = find("nvcc")
    if nvcc is not None and shutil.which("nvcc") != nvcc:
        os.environ["PATH"] = os.pathsep.join([str(Path(nvcc).parent), os.environ.get("PATH", "")])
    return nvcc


def _version(folder: Path) -> tuple[bool, list[int]]:
    """Order folders: "cuda", the machine's choice, then by version."""
    return folder.name == "cuda", [int(number) for number in re.findall(r"\d+", folder.name)]
