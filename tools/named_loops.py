"""Count the instructions of the loops that the cost model of benchmarks/kernels.py multiplies with amounts of work.

A loop is named by its kernel and by functions of the sources that it runs code of, inlined or called in line. The
disassembly states them, because kernels are compiled with line information. Own instructions of a loop exclude those
of loops within it, and include those of branches that default options never take. A loop may have several copies, for
example unrolled and for the remainder, or for other options; the fastest one counts.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from device_loops import disassembler, loop_ends, operation

ITERATION = "iteration"
HEAD = """
## Loops of the cost model

[Predictions](../performance/predictions.md) multiplies these counts with amounts of work. `cuda_loops.json` holds them
for every architecture. Instructions are those of a warp for one unit of work in every lane. `regulate_tiles` has
branches that the default options never take, whose instructions count, too. A cycle of shared memory moves 128 bytes;
conflicts between banks are not counted. Of several such loops of a kernel the fastest counts, as if all tiles were
full. So predictions leave out the [slower loops](#main-loops). With 196 contexts, these multiply 84 of the rows.

"""


@dataclass(frozen=True)
class Wanted:
    """A loop to count.

    Attributes:
        kernel: prefix of the kernel's name.
        name: of the loop.
        functions: all of them are run by the loop.
        unit: regular expression of the operations that count the loop's work, such as FFMA, or `ITERATION`.
        of: what a unit of work is.
        work: units of work of each such operation, for every lane.
        products: for the loops of a backward, how often they multiply all queries of a pair with all contexts: a unit
            is then a multiply-add.
        tile: queries and contexts that such a loop multiplies at a time, whether a pair has them or not.
        around: whether the loop has loops within it.
        without: no function of these is run by the loop.
    """

    kernel: str
    name: str
    functions: tuple[str, ...]
    unit: str
    of: str
    work: float = 1.0
    products: float = 0.0
    tile: tuple[int, int] = (1, 1)
    around: bool = False
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedLoop:
    """Counts of a loop, for a warp and one unit of work in every lane.

    Attributes:
        instructions: issued by the warp.
        tensor: HMMA of 16 x 8 x 16 products.
        shared: cycles of shared memory without bank conflicts, 128 bytes each.
        copied: bytes of asynchronous copies from global memory.
    """

    instructions: float
    tensor: float
    shared: float
    copied: float


_SCORES, _REGULATED = "score_tile<BFloat16, 1,", "regulate_tiles<BFloat16, 1,"
# For one direction of attention.
_PREPARED = "prepare_scores<BFloat16, ProductTile<112, 128, 2, 4, 4, 256>, 1>"
_PREPARED_REGULATION = "prepare_regulation<BFloat16,"
_LONG_SCORES = "score_long_tiles<BFloat16, 1,"
_MAXSIM, _GATHERED = "score_maxsim<BFloat16, 1>", "gather_maxsim<BFloat16>"
_BACKPROPAGATED, _DIFFERENTIATED = "backpropagate_pairs<BFloat16>", "differentiate_regulation<"
_LOSSES = (
    "triplet_with_gradient<TripletProblem<float>, ScoreTile<8, 8, 4>>",
    "triplet_with_gradient<BoostingProblem<float>, ScoreTile<8, 8, 4>>",
)
_STRIP, _MADD = "row of 128 scores", "multiply-add"
_BACKWARD = (
    Wanted(_BACKPROPAGATED, "raw scores", ("multiply_sets",), "HMMA.*", _MADD, 64.0, products=1.0, tile=(16, 16)),
    Wanted(
        *(_BACKPROPAGATED, "contexts", ("add_step",), "HMMA.*", _MADD, 32.0),
        products=1.0,
        tile=(8, 48),
        without=("multiply_block",),
    ),
    Wanted(
        *(_BACKPROPAGATED, "queries", ("add_step",), "HMMA.*", _MADD, 32.0),
        products=1.0,
        tile=(48, 8),
        without=("multiply_block",),
    ),
    # Blocks of scores, without the softmax over the regions and its gradient.
    Wanted(_BACKPROPAGATED, "block product", ("multiply_slices",), "HMMA.*", "HMMA"),
    Wanted(_BACKPROPAGATED, "block sums", ("add_step", "multiply_block"), "HMMA.*", "HMMA"),
    Wanted(_BACKPROPAGATED, "block statistics", ("attend", "row_factor"), "LDS", "raw score"),
    Wanted(
        *(_BACKPROPAGATED, "block Gram rows", ("multiply_by_grams",), r"LDG?\.E\.128.*", "8 elements of a Gram matrix"),
        work=0.5,
    ),
    Wanted(_BACKPROPAGATED, "block cosines", ("compare",), r"MUFU\.RSQ", "raw score"),
    Wanted(_BACKPROPAGATED, "block weights", ("store_weights",), "STS", "raw score"),
    Wanted(_BACKPROPAGATED, "block squares", ("store_sums",), "FFMA", _MADD),
)
_LONG = (
    Wanted(_LONG_SCORES, "product", ("multiply", "multiply_slices"), "HMMA.*", "HMMA"),
    Wanted(_LONG_SCORES, "raw scores", ("multiply", "raw"), "STG.*", "raw score"),
    Wanted(_LONG_SCORES, "statistics", ("write_factors", "row_factor"), "LDG.*", "raw score"),
    # The attention is stored twice, once transposed or in three parts.
    Wanted(
        *(_LONG_SCORES, "attention", ("attend", "attend_column"), "STG.*", "raw score"),
        work=0.5,
        without=("attend_hard", "store"),
    ),
    Wanted(
        *(_LONG_SCORES, "attention in parts", ("attend", "attend_column", "store"), "STG.*", "raw score"),
        work=0.25,
        without=("attend_hard",),
    ),
    Wanted(_LONG_SCORES, "Gram product", ("write_norms", "multiply_slices"), "HMMA.*", "HMMA"),
    Wanted(_LONG_SCORES, "norms", ("write_norms", "raw"), r"MUFU\.RSQ", "raw score"),
    Wanted(_LONG_SCORES, "sum of rows", ("write_squares", "add_step"), "HMMA.*", "HMMA"),
    Wanted(_LONG_SCORES, "squares", ("write_squares",), "LDS", "element of an attended vector", without=("add_step",)),
    Wanted(_LONG_SCORES, "scales", ("write_scales", "raw"), r"MUFU\.RSQ", "raw score"),
    Wanted(
        *(_LONG_SCORES, "cosines", ("write_cosines", "cosine_of"), ITERATION, "query and image"),
        around=True,
        without=("score_products", "score_long_pair"),
    ),
)
WANTED = (
    *(
        Wanted(kernel, "product", ("multiply_slices",), "HMMA.*", "HMMA")
        for kernel in (_SCORES, _REGULATED, _DIFFERENTIATED, _MAXSIM)
    ),
    *(Wanted(kernel, "product", ("add_slice",), "HMMA.*", "HMMA") for kernel in (_PREPARED, _PREPARED_REGULATION)),
    Wanted(_DIFFERENTIATED, "sum of rows", ("add_to_weight", "sum_rows"), "HMMA.*", "HMMA"),
    Wanted(_SCORES, "statistics", ("row_factor",), "LDS", "raw score"),
    Wanted(_SCORES, "attention", ("attend_column",), "STS", "raw score", without=("attend_hard",)),
    # A thread of score_tile takes two queries at a time, one of regulate_tiles one.
    *(
        Wanted(
            *(kernel, "Gram rows", ("find_attended_norms",), r"LDG?\.E\.128.*", "8 elements of a Gram matrix"),
            work=0.5 * queries,
        )
        for kernel, queries in ((_SCORES, 2), (_REGULATED, 1))
    ),
    *(
        Wanted(
            *(kernel, "Gram blocks", ("find_attended_norms",), r"MUFU\.RSQ", "diagonal element"),
            work=queries,
            around=True,
            without=("cosine_of",),
        )
        for kernel, queries in ((_SCORES, 2), (_REGULATED, 1))
    ),
    Wanted(_SCORES, "cosines", ("score_products", "cosine_of"), ITERATION, "query and image", work=2.0, around=True),
    *_LONG,
    *_BACKWARD,
    Wanted(_MAXSIM, "maxima", ("fold", "add"), "LDS", "product"),
    Wanted(_GATHERED, "candidates", ("gather", "place"), ITERATION, "32 sets and a row", around=True),
    Wanted(
        *(_GATHERED, "partners", ("add_partner", "add_row"), ITERATION, "set and a row"),
        around=True,
        without=("ballot",),
    ),
    Wanted(
        *(_GATHERED, "search", ("add_partner", "ballot"), ITERATION, "32 rows and a row"),
        around=True,
        without=("shuffle", "place"),
    ),
    Wanted(_GATHERED, "rows", ("add_partner", "add_row"), ITERATION, "row of 256 columns"),
    *(Wanted(kernel, "scan", ("scan_tile", "take"), ITERATION, _STRIP) for kernel in _LOSSES),
    *(Wanted(kernel, "gradient", ("write_gradient_tile", "is_active"), ITERATION, _STRIP) for kernel in _LOSSES),
    Wanted("count_ranks<float, ScoreTile<8, 8, 4>>", "comparison", ("is_above",), ITERATION, _STRIP),
    Wanted(_REGULATED, "attention", ("attend_row",), ITERATION, "query"),
    Wanted(_REGULATED, "differences", ("write_differences", "attended_at"), "LDS", "channel"),
    Wanted(_REGULATED, "channels", ("reweight",), r"MUFU\.EX2", "channel"),
    Wanted(_REGULATED, "alignments", ("align_rows", "for_each_product_and_number"), "LDS", "output"),
    Wanted(_REGULATED, "wide layer", ("correspond", "for_each_product"), r"MUFU\.EX2", "output"),
    Wanted(_REGULATED, "narrow layer", ("correspond",), r"MUFU\.EX2", "output"),
    Wanted(_REGULATED, "aggregation", ("aggregate", "for_each_channel"), r"MUFU\.EX2", "output"),
)
# Shared memory serves 128 bytes in a cycle: a warp's operands of 4 bytes, a quarter of those of 16 bytes.
_WIDTHS = {"64": 2, "128": 4, "M88.2": 2, "M88.4": 4}
_BYTES_OF_COPY = 32 * 16


def named_loops(cubin: bytes, short_name: Any) -> dict[tuple[str, str], NamedLoop]:
    """Map kernel and loop to the counts of the loops in `WANTED` that the machine code has.

    Args:
        short_name: returns a kernel's name from its mangled name.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.cubin")
        path.write_bytes(cubin)
        command = [disassembler(), "-c", "-gi", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for mangled, code, labels in functions(text):
        kernel = short_name(mangled)
        for wanted in WANTED:
            if kernel.startswith(wanted.kernel):
                found[kernel, wanted.name] = count(wanted, code, labels)
    return found


Line = tuple[str, frozenset[str]]  # an instruction and the functions that it belongs to


def functions(text: str) -> Iterator[tuple[str, list[Line], dict[str, int]]]:
    """Yield the name, the instructions and the labels of every function in a disassembly with line information."""
    for part in re.split(r"(?m)^\.text\.(?=\S+:$)", text)[1:]:
        code: list[Line] = []
        labels: dict[str, int] = {}
        within: frozenset[str] = frozenset()
        complete = True  # The next line information is that of other instructions.
        for line in part.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            elif place := re.match(r'\s+//## File "(.*?)", line (\d+)', line):
                within = (frozenset() if complete else within) | {function_at(place[1], int(place[2]))}
                complete = False
            elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
                code.append((instruction[1], within))
                complete = True
        yield part.split(":", 1)[0], code, labels


def function_at(file: str, line: int) -> str:
    """Return the name of the function of the sources that holds a line; empty outside of functions."""
    before = [name for first, name in _definitions(file) if first <= line]
    return before[-1] if before else ""


@functools.cache
def _definitions(file: str) -> list[tuple[int, str]]:
    start = re.compile(r"\s*(?:ITM_FAST_DEVICE(?:_APART)?|__global__)\b[^;]*?(\w+)\(")
    lines = Path(file).read_text(encoding="utf-8").splitlines() if Path(file).exists() else []
    return [(number, found[1]) for number, line in enumerate(lines, 1) if (found := start.match(line))]


def count(wanted: Wanted, code: list[Line], labels: dict[str, int]) -> NamedLoop:
    """Return the counts of the fastest such loop; SystemExit if there is none."""
    ends = loop_ends([text for text, _ in code], labels)
    found = []
    for first, last in ends:
        inner = [(a, b) for a, b in ends if (a, b) != (first, last) and first <= a and b <= last]
        own = [code[place] for place in range(first, last + 1) if not any(a <= place <= b for a, b in inner)]
        run = set().union(*(within for _, within in own))
        names = [operation(text) for text, _ in own]
        counting = 1 if wanted.unit == ITERATION else sum(re.fullmatch(wanted.unit, name) is not None for name in names)
        chosen = run.issuperset(wanted.functions) and run.isdisjoint(wanted.without)
        if counting and chosen and bool(inner) == wanted.around:
            found.append(_counted(names, wanted.work * counting))
    if not found:
        raise SystemExit(
            f"named_loops: {wanted.kernel}...> has no loop '{wanted.name}' of {', '.join(wanted.functions)} with "
            f"{wanted.unit}: correct WANTED in tools/named_loops.py"
        )
    return min(found, key=lambda loop: loop.instructions)


def _counted(names: list[str], units: float) -> NamedLoop:
    copies = sum(name.startswith("LDGSTS") for name in names)
    shared = sum(map(_shared_cycles, names))
    tensor = sum(name.startswith("HMMA.16816") for name in names)
    return NamedLoop(len(names) / units, tensor / units, shared / units, copies * _BYTES_OF_COPY / units)


def _shared_cycles(name: str) -> int:
    if name.split(".")[0] not in ("LDS", "STS", "LDSM", "LDGSTS"):
        return 0
    return next((cycles for width, cycles in _WIDTHS.items() if name.endswith(f".{width}") or f".{width}." in name), 1)


def content(loops: dict[int, dict[tuple[str, str], NamedLoop]]) -> list[dict[str, Any]]:
    """Return the content of the JSON file: an entry for each loop, with its counts by architecture."""
    entries = []
    for kernel, name in sorted(set().union(*loops.values())):
        wanted = next(one for one in WANTED if kernel.startswith(one.kernel) and one.name == name)
        counts = {f"sm_{number}": _rounded(loops[number][kernel, name]) for number in sorted(loops)}
        backward = {"products": wanted.products, "tile": list(wanted.tile)}
        entries.append({"kernel": kernel, "loop": name, "per": wanted.of, **backward, "counts": counts})
    return entries


def _rounded(loop: NamedLoop) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(loop).items()}


def section(entries: list[dict[str, Any]]) -> str:
    """Render the entries of the JSON file as a section of the page."""
    lines = [
        "| kernel | loop | a unit of work | instructions | shared memory cycles |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for entry in entries:
        cells = [f"`{entry['kernel']}`", entry["loop"], entry["per"]]
        for name in ("instructions", "shared"):
            values = [f"{counts[name]:.1f}" for counts in entry["counts"].values()]
            cells.append("/".join(values if len(set(values)) > 1 else values[:1]))
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"
