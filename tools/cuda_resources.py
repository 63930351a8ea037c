"""What every CUDA kernel takes, as the compiler says: registers, shared memory, stack and spills per architecture.

    python tools/cuda_resources.py            # writes docs/cuda_resources.md
    python tools/cuda_resources.py --check    # fails where a kernel spills that is not on the list of those that may

Needs nvcc, and no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from native_build import find_torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cuda_resources.md"
ARCHITECTURES = (80, 86, 89, 90)
# Kernels that may spill, by the beginning of their names, and why.
MAY_SPILL: dict[str, str] = {}

HEAD = """# What the CUDA kernels take

Written by `make cuda-resources` from what the compiler reports; `.ci/run` fails where a kernel spills. Registers are
per thread, 65,536 to an SM; shared memory is per block, stack and spills per thread, in bytes.

"""


@dataclass(frozen=True)
class Usage:
    kernel: str
    architecture: int
    registers: int
    shared: int
    stack: int
    spilled: int


def compile_kernels(source: Path) -> str:
    """What ptxas says about the kernels of a file, for all architectures."""
    nvcc, torch = shutil.which("nvcc"), find_torch()
    if nvcc is None or torch is None:
        raise SystemExit("cuda_resources: needs nvcc on the path, and torch")
    command = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-DUSE_CUDA", "-fatbin"]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-Xptxas", "-v", f"-I{ROOT / 'csrc'}"]
    command += [f"-I{ROOT / 'csrc/include'}", "-isystem", f"{torch[0]}/include"]
    for number in ARCHITECTURES:
        command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [*command, "-o", f"{folder}/kernels.fatbin", str(source)], capture_output=True, text=True
        )
    if result.returncode != 0:
        raise SystemExit(f"cuda_resources: {source.name} does not compile\n{result.stderr}")
    return result.stderr


def short_name(mangled: str) -> str:
    """The kernel's name with its template arguments, without namespaces and parameters."""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|itm_fast::|cuda::|^void ", "", name.removeprefix("void "))
    return re.sub(r"_kernel(<.*>)\(.*", r"\1", name).replace(" >", ">")


def parse(report: str) -> list[Usage]:
    """The kernels of a report of `ptxas -v`."""
    found = []
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", report)[1:]:
        head = re.search(r"entry function '(\S+)' for 'sm_(\d+)'", part)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        if head is None or frame is None or used is None:
            raise ValueError(f"not understood: {part}")
        shared = re.search(r"(\d+) bytes smem", part)
        stack, stored, loaded = map(int, frame.groups())
        size = int(shared[1]) if shared else 0
        found.append(Usage(short_name(head[1]), int(head[2]), int(used[1]), size, stack, stored + loaded))
    return found


def page(usages: list[Usage]) -> str:
    """One line per kernel; what differs between architectures stands in their order."""
    architectures = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
    lines = [
        f"| kernel | registers ({architectures}) | shared memory | stack | spilled |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kernel in sorted({usage.kernel for usage in usages}):
        rows = sorted((u for u in usages if u.kernel == kernel), key=lambda usage: usage.architecture)
        cells = ["/".join(str(getattr(u, name)) for u in rows) for name in ("registers", "shared", "stack", "spilled")]
        cells[1:] = [cell.split("/")[0] if len(set(cell.split("/"))) == 1 else cell for cell in cells[1:]]
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def spilling(usages: list[Usage]) -> list[str]:
    """What spills and may not, one line each."""
    return [
        f"{u.kernel} spills {u.spilled} bytes on sm_{u.architecture}"
        for u in usages
        if u.spilled and not any(u.kernel.startswith(name) for name in MAY_SPILL)
    ]


def main() -> None:
    usages = [u for source in sorted((ROOT / "csrc/cuda").glob("*.cu")) for u in parse(compile_kernels(source))]
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(usages))
    problems = spilling(usages)
    if problems:
        raise SystemExit("cuda_resources: " + "\ncuda_resources: ".join(problems))
    print(f"{len(usages)} kernels, none spills")


if __name__ == "__main__":
    main()
