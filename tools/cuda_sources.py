"""Say which architectures `make test-cuda-load` must compile: all, or one if the committed counts are of these sources.

    python tools/cuda_sources.py    # prints a TORCH_CUDA_ARCH_LIST

`make cuda-resources` compiles the kernels for all architectures and writes the digest of their sources and of nvcc's
release into docs/internals/cuda_loops.json. Neither comments nor white space change it. Uses only the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOP_COUNTS = ROOT / "docs" / "internals" / "cuda_loops.json"
ARCHITECTURES = (80, 86, 89, 90)

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def sources(root: Path = ROOT) -> list[Path]:
    """Return the files in csrc/cuda that nvcc compiles, and all headers of csrc that they include for it."""
    found: set[Path] = set()
    left = sorted((root / "csrc/cuda").glob("*.cu"))
    while left:
        path = left.pop()
        # Only a C++ compiler reads the simulator.
        if path not in found and path.parent != root / "csrc/shim":
            found.add(path)
            for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
                folders = (path.parent, root / "csrc", root / "csrc/include")
                left += [folder / name for folder in folders if (folder / name).is_file()][:1]
    return sorted(found)


def code(text: str) -> str:
    """Return C++ without comments, and with one space for each run of white space, also within strings."""
    kept = _COMMENT_OR_STRING.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    return "\n".join(" ".join(line.split()) for line in kept.splitlines() if line.strip())


def digest(compiler: str, root: Path = ROOT) -> str:
    """Return the SHA-256 of the sources and of `compiler`, what nvcc says of its release."""
    parts = [
        compiler,
        *(f"{path.relative_to(root)}\n{code(path.read_text(encoding='utf-8'))}" for path in sources(root)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compiler_release() -> str:
    """Return the release of the nvcc on the path, such as "13.0"."""
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([0-9.]+)", said)
    if found is None:
        raise SystemExit(f"cuda_sources: nvcc --version does not name its release: {said}")
    return found[1]


def due(counted: bool, commits: int) -> str:
    """Return the architectures to compile for; `commits` successive numbers go through all of them."""
    numbers = (ARCHITECTURES[commits % len(ARCHITECTURES)],) if counted else ARCHITECTURES
    return " ".join(f"{number // 10}.{number % 10}" for number in numbers) + "+PTX"


def main() -> None:
    description = "Say which architectures make test-cuda-load must compile."
    argparse.ArgumentParser(prog="cuda_sources", description=description).parse_args()
    counted = json.loads(LOOP_COUNTS.read_text(encoding="utf-8"))["sources"] == digest(compiler_release())
    git = ["git", "-C", str(ROOT), "rev-list", "--count", "HEAD"]
    commits = subprocess.run(git, capture_output=True, text=True).stdout
    print(due(counted, int(commits or 0)))


if __name__ == "__main__":
    main()
