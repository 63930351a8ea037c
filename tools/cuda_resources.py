"""Report the resources of every CUDA kernel: registers, shared memory, stack and spills per architecture, the
tensor-core instructions in its machine code, what its main loop issues beside them, and the loops of the cost model.

    python tools/cuda_resources.py            # writes docs/internals/cuda_resources.md and cuda_loops.json
    python tools/cuda_resources.py --check    # fails if a kernel spills more than it may, lacks tensor-core
                                              # instructions that it must have, or exceeds the budget of its loop
    python tools/cuda_resources.py --built FOLDER    # reads the machine code that a build kept there

Needs nvcc, nvdisasm and a C++ compiler, but no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import device_code
import loop_reasons
import named_loops
from cuda_sources import ARCHITECTURES, LOOP_COUNTS, ROOT, compiler_release, digest
from device_loops import Loop, TensorLoops, tensor_loops
from native_build import find_torch

PAGE = LOOP_COUNTS.with_name("cuda_resources.md")


@dataclass(frozen=True)
class Spill:
    """What a kernel may spill.

    Attributes:
        spilled: bytes stored and loaded.
        slow: slow accesses in a main loop.
        local: accesses to local memory in any loop with HMMA.
        why: why it spills.
        only_on: the only architectures where it may spill, or None for all.
    """

    spilled: int
    slow: int
    local: int
    why: str
    only_on: tuple[int, ...] | None = None


_TWO_BLOCKS = (
    "On sm_90 the launch bound for two blocks per multiprocessor leaves 128 registers, and score_tile alone uses them "
    "all. Elsewhere one block fits, without a bound."
)
_MORE_WARPS = (
    "Threads have 128 registers, for 16 warps per multiprocessor. Measured on an H200: faster than eight warps without "
    "spills."
)
# Kernels that may spill, by the prefix of their names, with their counts as limits.
MAY_SPILL: dict[str, Spill] = {
    f"matching_loss<{problem}<float>, {products} ProductTile<112, 128, 2, 4, 4, 256>, {directions}>": Spill(
        *limits, _TWO_BLOCKS, only_on=(90,)
    )
    for (problem, directions), of_products in {
        ("TripletProblem", 1): {"BFloat16, 1,": (628, 8, 25), "Half, 1,": (628, 8, 25), "float, 1,": (360, 7, 7)},
        ("TripletProblem", 2): {"BFloat16, 1,": (1332, 12, 30), "Half, 1,": (1332, 12, 30), "float, 1,": (668, 11, 11)},
        ("BoostingProblem", 1): {"BFloat16, 1,": (700, 8, 25), "Half, 1,": (700, 8, 25), "float, 1,": (432, 7, 7)},
        ("BoostingProblem", 2): {
            "BFloat16, 1,": (1440, 12, 30),
            "Half, 1,": (1440, 12, 30),
            "float, 1,": (776, 11, 11),
        },
    }.items()
    for products, limits in of_products.items()
} | {
    **{
        f"score_long_tiles<{products}": Spill(*limits, _MORE_WARPS, only_on=(80, 90))
        for products, limits in {
            "BFloat16, 1,": (1740, 7, 16),
            "Half, 1,": (2496, 32, 32),
            "float, 1,": (1372, 22, 22),
            "float, 2,": (1440, 11, 14),
            "float, 3,": (2032, 9, 20),
        }.items()
    },
    "regulate_tiles<BFloat16, 1,": Spill(3516, 0, 10, _MORE_WARPS, only_on=(80, 90)),
    "regulate_tiles<float, 2,": Spill(1676, 0, 0, _MORE_WARPS),
    "regulate_tiles<float, 3,": Spill(2524, 2, 2, _MORE_WARPS),
    "differentiate_regulation<": Spill(
        1288, 7, 14, "Numbers that are loaded ahead. It is faster with them on an H200."
    ),
}
# Kernels that must contain tensor-core instructions, by the prefix of their names.
MUST_USE_TENSOR_CORES = (
    "backpropagate_pairs<",
    "differentiate_regulation<",
    "matching_loss<",
    "prepare_regulation<",
    "prepare_scores<",
    "regulate_tiles<",
    "score_long_tiles<",
    "score_maxsim<",
    "score_tile<",
)
# What main loops may issue, by the prefix of the kernels' names and for each loop by its number of HMMA: other
# instructions per 16 HMMA, and instructions per asynchronous copy of 16 bytes. Rows of float32 are split into bfloat16
# parts there, and some products are added up by slice. backpropagate_pairs has loops for products of rows, for sums of
# matrices of two and three parts, for sums of rows, and for both products of blocks of scores; regulate_tiles for
# products with at most 64 columns and for others; differentiate_regulation also for sums of rows, its second loop;
# score_long_tiles for raw scores, and in either order for sums of 16-bit rows and for Gram matrices. loop_reasons.py
# has a reason for each budget above the goal of 40 and 12.
BUDGETS: dict[str, tuple[tuple[int, int], ...]] = {
    "backpropagate_pairs<BFloat16>": ((95, 10), (70, 6), (60, 8), (40, 8), (30, 8), (40, 8)),
    "backpropagate_pairs<Half>": ((95, 10), (70, 6), (60, 8), (40, 8), (55, 13)),
    "backpropagate_pairs<float>": ((125, 10), (40, 8), (85, 6), (60, 10), (50, 8)),
    "differentiate_regulation<": ((130, 16), (120, 24), (95, 18)),
    "prepare_regulation<BFloat16,": ((100, 6),),
    "prepare_regulation<float,": ((76, 6),),
    "prepare_scores<BFloat16,": ((45, 6),),
    "prepare_scores<Half,": ((45, 6),),
    "prepare_scores<float,": ((76, 6),),
    "regulate_tiles<BFloat16, 1,": ((85, 12), (45, 12)),
    "regulate_tiles<float, 2,": ((230, 20), (140, 20)),
    "regulate_tiles<float, 3,": ((160, 21), (105, 24)),
    "score_tile<BFloat16, 1,": ((40, 12),),
    "score_tile<Half, 1,": ((40, 12),),
    "score_tile<float, 1,": ((120, 12),),
    "score_tile<float, 2,": ((95, 12),),
    "score_tile<float, 3,": ((70, 12),),
    "score_long_tiles<BFloat16, 1,": ((45, 12), (45, 12), (90, 12)),
    "score_long_tiles<Half, 1,": ((45, 12), (95, 12), (55, 12)),
    "score_long_tiles<float, 1,": ((130, 12), (95, 12)),
    "score_long_tiles<float, 2,": ((115, 12), (90, 12)),
    "score_long_tiles<float, 3,": ((90, 12),),
    "score_maxsim<BFloat16, 1>": ((40, 12),),
    "score_maxsim<Half, 1>": ((40, 12),),
    "score_maxsim<float, 1>": ((140, 12),),
    "score_maxsim<float, 2>": ((95, 12),),
    "score_maxsim<float, 3>": ((70, 12),),
    **{
        f"matching_loss<{problem}<float>, {products}": (budget,)
        for problem in ("TripletProblem", "BoostingProblem")
        for products, budget in {
            "BFloat16, 1,": (45, 12),
            "Half, 1,": (45, 12),
            "float, 1,": (160, 12),
            "float, 2,": (95, 12),
            "float, 3,": (70, 12),
        }.items()
    },
}
# Dynamic shared memory requested by launches, by the prefix of the kernels' names: headers and expressions.
DYNAMIC = {
    "backpropagate_pairs<": ("cross_attention_backward_launch.h", "kBackwardBytes"),
    "differentiate_regulation<": ("regulation_backward_launch.h", "kRegulationBackwardBytes<RegulationTile112>"),
    "matching_loss<": ("cross_attention_launch.h", "kScoreBytes<ScoreTile112>"),
    "prepare_scores<": ("cross_attention_launch.h", "SetTile::kBytes"),
    "prepare_regulation<": ("regulation_launch.h", "SetTile::kBytes"),
    "regulate_tiles<": ("regulation_launch.h", "kRegulationBytes<RegulationTile112>"),
    "score_long_tiles<": ("cross_attention_launch.h", "kScoreBytes<ScoreTile112>"),
    "score_maxsim<": ("maxsim_launch.h", "MaxsimMemory<ScoreTile112>::kBytes"),
    "score_tile<": ("cross_attention_launch.h", "kScoreBytes<ScoreTile112>"),
}

HEAD = """# Resources of the CUDA kernels

`make cuda-resources` writes this page from the compiler's output. With nvcc, `.ci/run` compiles the kernels for one of
the architectures, or for all if the counts are not those of the present sources. It fails if a kernel spills more than
`MAY_SPILL` of the tool allows, or if one that should use tensor cores has no HMMA instructions. Registers are per
thread, of 65,536 in a multiprocessor. Shared memory is per block: static, and dynamic as launches request it. Stack and
spills are per thread. All sizes are in bytes.

"""
LOOPS = """
## Main loops

The innermost loops of a kernel that multiply matrices and copy the operands of a later product, counted from the
disassembly. Loops include code that they skip, such as that for rows that a set does not have. The instructions per
copy are the copy itself and those that compute its addresses and conditions. Loads from global memory are scalar if
they have at most 4 bytes. Slow accesses go to local memory, or to memory of unknown kind. `.ci/run` fails if a loop of
the table exceeds its budget, or has more slow accesses than `MAY_SPILL` allows. Values that differ between
architectures are listed in the order above.

Of the loops of a kernel with the same number of HMMA, the table has the shortest one. It leaves out:

- Loops that compare each group of rows and columns with the operands, and skip groups that these do not have. Products
  of aligned rows take them in `score_tile`, `score_long_tiles`, `score_maxsim` and `matching_loss` if they have at most
  96 rows or at most 64 columns. In blocks of scores of `backpropagate_pairs` they do so with at most 64 rows. On sm_90,
  that of `score_tile` for rows of 16 bits issues about twice as many other instructions as the loop in the table.
  Tiles of 112 rows hold whole sets. Three sets of 36 contexts have 108 rows, so one tile of a
  batch takes the loop: the last, if it has fewer sets. Sets of 38 to 48 and of 57 to 96 contexts leave more than 15
  rows of each tile empty, and always take it. So does the second of the two pieces of a set of 196 contexts, which has
  84 rows. Kernels of `float, 1` have no other loop for aligned rows, so the table has it.
- Loops of `regulate_tiles` for more than 64 columns that skip groups of 16 rows, for `BFloat16, 1` and `float, 2`.
  Tiles of at most 96 query rows take them.
- In kernels that prepare operands, loops for two different runs of 64 rows of a set. Six of the ten products of a set
  of 196 contexts take them.
- Loops that copy numbers one by one, without asynchronous copies. Only rows that are not aligned to 16 bytes take them.
- Second copies of loops. `matching_loss` for both directions has one for each direction, and both score all pairs.
  `score_long_tiles` has one for short and one for long sets. `differentiate_regulation` has one for gradients of
  weights and one for those of contexts; `backpropagate_pairs` one for gradients of contexts and one for those of
  queries.
- Other loops with as many HMMA as one in the table: in `backpropagate_pairs<Half>`, those of the gradients of contexts
  and queries from lists of pairs. The loop in the table with 72 HMMA adds up matrices of three parts.

"""


LOCAL = """
## Local memory in loops

The most accesses to local memory of any loop with HMMA, including loops that the table above leaves out, for kernels
that have some. The limit is that of `MAY_SPILL`. `.ci/run` fails if a kernel exceeds it. It also fails if any innermost
loop with HMMA and asynchronous copies has scalar loads, or accesses to memory of unknown kind.

"""


@dataclass(frozen=True)
class Usage:
    kernel: str
    architecture: int
    registers: int
    shared: int
    stack: int
    spilled: int
    tensor: int = 0  # HMMA instructions
    dynamic: int = 0
    loops: tuple[Loop, ...] = ()  # main loops
    unusual: int = 0  # see TensorLoops
    local: int = 0


@dataclass(frozen=True)
class Compiled:
    """The report of ptxas; HMMA and their loops by architecture and mangled name; named loops by architecture."""

    report: str
    tensor: dict[tuple[int, str], int]
    loops: dict[tuple[int, str], TensorLoops]
    named: dict[int, dict[tuple[str, str], named_loops.NamedLoop]]


def compile_kernels(folder: Path) -> str:
    """Compile all kernels, keep the machine code in `folder`, and return the report of ptxas."""
    nvcc, torch = shutil.which("nvcc"), find_torch()
    if nvcc is None or torch is None:
        raise SystemExit("cuda_resources: needs nvcc on the path, and torch")
    command = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-DUSE_CUDA", "-fatbin"]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-Xptxas", "-v", f"-I{ROOT / 'csrc'}"]
    command += [f"-I{ROOT / 'csrc/include'}", "-isystem", f"{torch[0]}/include"]
    command += ["--keep", "--keep-dir", str(folder), "-o", str(folder / "kernels.fatbin")]
    for number in ARCHITECTURES:
        command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    report = ""
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        result = subprocess.run([*command, str(source)], capture_output=True, text=True)
        if result.returncode != 0:
            raise SystemExit(f"cuda_resources: {source.name} does not compile\n{result.stderr}")
        report += result.stderr
    return report


def read_kernels(folder: Path, report: str) -> Compiled:
    """Count in the machine code that nvcc kept in `folder`; `report` is that of ptxas.

    A build may have compiled for some of the architectures only.
    """
    built = sorted({int(number) for number in re.findall(r"' for 'sm_(\d+)'", report)})
    if not built:
        raise SystemExit(f"cuda_resources: ptxas reported no kernel of {folder}; its output must be there")
    files = []
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        for number in built:
            found = list(folder.glob(f"{source.stem}.*_{number}.cubin"))
            if len(found) != 1:
                raise SystemExit(f"cuda_resources: no machine code of {source.name} for sm_{number} in {folder}")
            files.append((number, found[0].read_bytes()))
    tensor = {(number, name): n for number, elf in files for name, n in device_code.count_instructions(elf).items()}
    loops = {(number, name): found for number, elf in files for name, found in tensor_loops(elf).items()}
    named: dict[int, dict[tuple[str, str], named_loops.NamedLoop]] = {number: {} for number in built}
    for number, elf in files:
        named[number].update(named_loops.named_loops(elf, short_name))
    return Compiled(report, tensor, loops, named)


def dynamic_memory() -> dict[str, int]:
    """Evaluate `DYNAMIC`: the headers of the launches define these constants for host code."""
    headers = "".join(
        f'#include "itm_fast/cuda/{name}"\n' for name in sorted({header for header, _ in DYNAMIC.values()})
    )
    numbers = "".join(f'std::printf("%lld\\n", static_cast<long long>({value}));\n' for _, value in DYNAMIC.values())
    program = f"{headers}#include <cstdio>\nusing namespace itm_fast::cuda;\nint main() {{\n{numbers}}}\n"
    with tempfile.TemporaryDirectory() as folder:
        source, tool = Path(folder, "numbers.cpp"), Path(folder, "numbers")
        source.write_text(program)
        # The kernels are not run here, but their bodies refer to the shim.
        command = [os.environ.get("CXX", "c++"), "-std=c++20", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}"]
        sources = [source, *sorted((ROOT / "csrc/shim").glob("*.cpp"))]
        subprocess.run([*command, "-o", str(tool), *map(str, sources)], check=True)
        found = subprocess.run([str(tool)], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(DYNAMIC, map(int, found), strict=True))


def short_name(mangled: str) -> str:
    """Return the kernel's name with its template arguments, without namespaces and parameters."""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|itm_fast::|cuda::|^void ", "", name.removeprefix("void "))
    return re.sub(r"_kernel(<.*>)\(.*", r"\1", name).replace(" >", ">")


def parse(
    report: str, tensor: dict[tuple[int, str], int], loops: dict[tuple[int, str], TensorLoops] | None = None
) -> list[Usage]:
    """Parse the kernels of a report of `ptxas -v`.

    `tensor` and `loops` map architecture and mangled name to the HMMA and the loops that have them.
    """
    found = []
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", report)[1:]:
        head = re.search(r"entry function '(\S+)' for 'sm_(\d+)'", part)
        # For the kernel, and for the functions that it calls.
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        if head is None or not frames or used is None:
            raise ValueError(f"not understood: {part}")
        shared = re.search(r"(\d+) bytes smem", part)
        stack = sum(int(frame[0]) for frame in frames)
        spilled = sum(int(stored) + int(loaded) for _, stored, loaded in frames)
        size = int(shared[1]) if shared else 0
        architecture = int(head[2])
        counted = tensor[architecture, head[1]]
        of_kernel = (loops or {}).get((architecture, head[1]), TensorLoops())
        found.append(
            Usage(
                *(short_name(head[1]), architecture, int(used[1]), size, stack, spilled, counted),
                loops=of_kernel.main,
                unusual=of_kernel.unusual,
                local=of_kernel.local,
            )
        )
    return found


def page(usages: list[Usage], entries: list[dict[str, Any]] | None = None) -> str:
    """Return one line per kernel; values that differ between architectures are listed in their order.

    `entries` are the loops of `LOOP_COUNTS`.
    """
    architectures = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
    lines = [
        f"| kernel | registers ({architectures}) | static shared memory | dynamic | stack | spilled | HMMA |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    names = ("registers", "shared", "dynamic", "stack", "spilled", "tensor")
    for kernel in sorted({usage.kernel for usage in usages}):
        rows = sorted((u for u in usages if u.kernel == kernel), key=lambda usage: usage.architecture)
        cells = ["/".join(str(getattr(u, name)) for u in rows) for name in names]
        cells[1:] = [cell.split("/")[0] if len(set(cell.split("/"))) == 1 else cell for cell in cells[1:]]
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    named = named_loops.section(entries) if entries else ""
    loops = {
        (usage.kernel, loop.tensor): allowed
        for usage in usages
        for loop, allowed in zip(usage.loops, budget(usage.kernel), strict=False)
    }
    of_loops = _loop_table(usages) + _local_table(usages) + loop_reasons.section(loops) + named
    return HEAD + "\n".join(lines) + "\n" + of_loops


def _loop_table(usages: list[Usage]) -> str:
    lines = [
        "| kernel | HMMA | copies | other instructions per 16 HMMA | budget | instructions per copy | budget "
        "| scalar loads | slow accesses |",
        "| --- | " + " | ".join(["---:"] * 8) + " |",
    ]
    for kernel in sorted({usage.kernel for usage in usages if usage.loops}):
        of_kernel = [u.loops for u in sorted(usages, key=lambda u: u.architecture) if u.kernel == kernel and u.loops]
        # An architecture without one of the loops exceeds the budget, see over_budget.
        for number, loops in enumerate(zip(*of_kernel, strict=False)):

            def cell(text: str, loops: tuple[Loop, ...] = loops) -> str:
                values = [text.format(loop=loop) for loop in loops]
                return "/".join(values if len(set(values)) > 1 else values[:1])

            allowed = budget(kernel)[number : number + 1]
            beside, copying = map(str, allowed[0] if allowed else ("", ""))
            cells = [
                f"`{kernel}`",
                cell("{loop.tensor}"),
                cell("{loop.copies}"),
                cell("{loop.beside_tensor:.1f}"),
                beside,
            ]
            cells += [cell("{loop.per_copy:.1f}"), copying, cell("{loop.scalar_loads}"), cell("{loop.slow_loads}")]
            lines.append("| " + " | ".join(cells) + " |")
    return LOOPS + "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _local_table(usages: list[Usage]) -> str:
    """Return the table of kernels with accesses to local memory in a loop with HMMA."""
    architectures = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
    lines = [f"| kernel | accesses ({architectures}) | limit |", "| --- | --- | --- |"]
    for kernel in sorted({usage.kernel for usage in usages if usage.local}):
        rows = sorted((u for u in usages if u.kernel == kernel), key=lambda usage: usage.architecture)
        counts = [str(usage.local) for usage in rows]
        limits = [str(allowed_spill(kernel, usage.architecture).local) for usage in rows]
        cells = ["/".join(values if len(set(values)) > 1 else values[:1]) for values in (counts, limits)]
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return LOCAL + "\n".join(lines) + "\n" if len(lines) > 2 else ""


def budget(kernel: str) -> tuple[tuple[int, int], ...]:
    """Return the budgets of the kernel's main loops."""
    return next((found for name, found in BUDGETS.items() if kernel.startswith(name)), ())


def over_budget(usages: list[Usage]) -> list[str]:
    """Return one line for each main loop that exceeds its budget or loads slowly, and for each without a budget."""
    problems = []
    for usage in usages:
        allowed, where = budget(usage.kernel), f"{usage.kernel} on sm_{usage.architecture}"
        if len(usage.loops) != len(allowed):
            problems.append(
                f"{where}: {len(usage.loops)} loops multiply matrices and copy their operands, "
                f"budgets for {len(allowed)}"
            )
        for loop, (beside, copying) in zip(usage.loops, allowed, strict=False):
            for what, found, limit in (
                ("other instructions per 16 HMMA", loop.beside_tensor, beside),
                ("instructions per copy", loop.per_copy, copying),
                ("scalar loads", loop.scalar_loads, 0),
                ("slow accesses", loop.slow_loads, allowed_spill(usage.kernel, usage.architecture).slow),
            ):
                if found > limit:
                    problems.append(f"{where}: {found:.4g} {what} in the main loop, budget {limit}")
        most_local = allowed_spill(usage.kernel, usage.architecture).local
        for what, of_any, limit in (
            ("scalar loads and accesses to unknown memory", usage.unusual, 0),
            ("accesses to local memory", usage.local, most_local),
        ):
            if of_any > limit:
                problems.append(f"{where}: {of_any} {what} in a loop with HMMA, limit {limit}")
    return problems


def allowed_spill(kernel: str, architecture: int) -> Spill:
    """Return the limits of `MAY_SPILL`, zero for a kernel or an architecture that it does not list."""
    for name, spill in MAY_SPILL.items():
        if kernel.startswith(name) and (spill.only_on is None or architecture in spill.only_on):
            return spill
    return Spill(0, 0, 0, "")


def spilling(usages: list[Usage]) -> list[str]:
    """Return one line for each kernel that spills more than it may."""
    return [
        f"{u.kernel} spills {u.spilled} bytes on sm_{u.architecture}, allowed {allowed.spilled}"
        for u in usages
        if u.spilled > (allowed := allowed_spill(u.kernel, u.architecture)).spilled
    ]


def without_tensor_cores(usages: list[Usage]) -> list[str]:
    """Return one line for each kernel that lacks required tensor-core instructions, and for each unknown name."""
    missing = [name for name in MUST_USE_TENSOR_CORES if not any(u.kernel.startswith(name) for u in usages)]
    return [f"there is no kernel {name}...>" for name in missing] + [
        f"{u.kernel} has no tensor-core instruction on sm_{u.architecture}"
        for u in usages
        if u.tensor == 0 and u.kernel.startswith(MUST_USE_TENSOR_CORES)
    ]


def with_dynamic(usage: Usage, dynamic: dict[str, int]) -> Usage:
    return replace(usage, dynamic=sum(size for name, size in dynamic.items() if usage.kernel.startswith(name)))


def loop_counts(compiled: Compiled) -> list[dict[str, Any]]:
    """Return the loops of `LOOP_COUNTS`; SystemExit if no kernel has one of them."""
    entries = named_loops.content(compiled.named)
    gone = {one.kernel for one in named_loops.WANTED if not any(e["kernel"].startswith(one.kernel) for e in entries)}
    if gone:
        raise SystemExit(f"cuda_resources: no kernel {', '.join(sorted(gone))}: correct WANTED in tools/named_loops.py")
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(prog="cuda_resources", description="Report the resources of every CUDA kernel.")
    parser.add_argument("--check", action="store_true", help="write nothing, compare with the limits only")
    parser.add_argument(
        "--built",
        type=Path,
        metavar="FOLDER",
        help="do not compile: read the *.cubin files of a build with nvcc's --keep, and its output in ptxas.log",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = arguments.built or Path(folder)
        report = (built / "ptxas.log").read_text() if arguments.built else compile_kernels(built)
        compiled = read_kernels(built, report)
    dynamic = dynamic_memory()
    usages = [with_dynamic(usage, dynamic) for usage in parse(compiled.report, compiled.tensor, compiled.loops)]
    entries = loop_counts(compiled)
    if not arguments.check:
        PAGE.write_text(page(usages, entries))
        content = {"sources": digest(compiler_release()), "loops": entries}
        LOOP_COUNTS.write_text(json.dumps(content, indent=1) + "\n")
    problems = spilling(usages) + without_tensor_cores(usages) + over_budget(usages)
    if problems:
        raise SystemExit("cuda_resources: " + "\ncuda_resources: ".join(problems))
    print(
        f"{len(usages)} kernels: none spills more than it may, all that should use tensor cores do, and main loops "
        "keep their budgets"
    )


if __name__ == "__main__":
    main()
