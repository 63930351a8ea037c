"""Compile the CPU code for Linux aarch64 and macOS arm64, on any machine, through the same CMakeLists.txt.

The compiler is Zig (PyPI: ziglang), clang with the system headers of every target. Each source file of csrc/ is
compiled once as portable code, except those that only x86-64 or only the tests use. There is no link step: it would
need the torch of the target platform.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pybind11
from native_build import find_tool, find_torch

ROOT = Path(__file__).resolve().parents[1]
# Kernels that need x86-64 instructions, and code that is only compiled for tests of the CUDA kernels.
LEFT_OUT = ("csrc/cpu/kernels/low_precision/", "csrc/shim/")
# Processor by its name in CMake there: system, target of the compiler, architecture of the objects.
TARGETS = {
    "aarch64": ("Linux", "aarch64-linux-gnu", "ELF aarch64"),
    "arm64": ("Darwin", "aarch64-macos", "Mach-O arm64"),
}
ELF_MACHINES = {62: "x86-64", 183: "aarch64"}
MACH_O_PROCESSORS = {0x01000007: "x86-64", 0x0100000C: "arm64"}


def architecture(file: Path) -> str:
    """Return format and processor of a 64-bit little-endian object file, such as "ELF aarch64"."""
    with file.open("rb") as opened:
        header = opened.read(20)
    if header[:6] == b"\x7fELF\x02\x01":
        number, names, kind = int.from_bytes(header[18:20], "little"), ELF_MACHINES, "ELF"
    elif header[:4] == b"\xcf\xfa\xed\xfe":
        number, names, kind = int.from_bytes(header[4:8], "little"), MACH_O_PROCESSORS, "Mach-O"
    else:
        raise ValueError(f"{file}: neither an ELF nor a Mach-O object, it starts with {header[:6].hex()}")
    return f"{kind} {names.get(number, number)}"


def configure(build: Path, processor: str) -> None:
    system, target, _ = TARGETS[processor]
    found = find_torch()
    if found is None:
        raise SystemExit("check_cross: no torch 2.11 or newer found, whose headers are needed")
    options = {
        "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
        "CMAKE_SYSTEM_NAME": system,
        "CMAKE_SYSTEM_PROCESSOR": processor,
        "CMAKE_CXX_COMPILER_TARGET": target,
        # Zig would build its C++ library, for more than a minute, to link CMake's test programs.
        "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS_DEBUG": "-O0 -fno-sanitize=undefined",
        "ITM_FAST_CUDA": "off",
        "ITM_FAST_TORCH_ROOT": found[0],
        "ITM_FAST_TORCH_VERSION": found[1],
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    command = [find_tool("cmake"), "-S", ROOT, "-B", build, "-G", "Ninja"]
    environment = {**os.environ, "CXX": f"{sys.executable} -m ziglang c++"}
    subprocess.run([*command, *(f"-D{name}={value}" for name, value in options.items())], env=environment, check=True)


def check(build: Path, processor: str) -> str:
    """Compile all sources for one target and check the objects; AssertionError on a wrong one."""
    configure(build, processor)
    units = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    # An x86-64 build compiles the kernels several times, each time for another instruction set.
    not_portable = re.compile(r"\s-m(amx|avx|fma|sse)|ITM_FAST_ISA=(?!portable\b)")
    wide = [unit["file"] for unit in units if not_portable.search(unit["command"])]
    assert not wide, f"compiled for x86-64 instruction sets: {wide}"
    compiled = sorted(Path(unit["file"]).relative_to(ROOT).as_posix() for unit in units)
    names = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "csrc").rglob("*.cpp"))
    sources = [name for name in names if not name.startswith(LEFT_OUT)]
    assert compiled == sources, f"compiled {compiled}, expected each of {sources} once"

    objects = [build / unit["output"] for unit in units]
    subprocess.run([find_tool("ninja"), "-C", build, *(file.relative_to(build) for file in objects)], check=True)
    expected = TARGETS[processor][2]
    for file in objects:
        assert architecture(file) == expected, f"{file}: {architecture(file)}, expected {expected}"
    return f"check_cross: {len(objects)} units compiled, all of them {expected}"


def main() -> None:
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = str(ROOT / "build" / "cross" / "zig")
    results = [check(ROOT / "build" / "cross" / processor, processor) for processor in TARGETS]
    print(*results, sep="\n")


if __name__ == "__main__":
    main()
