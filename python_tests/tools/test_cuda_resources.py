"""The table of resources that the CUDA kernels use: parsing of compiler output, failures, and completeness."""

import json
import math
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path

import cuda_resources
import device_code
import device_loops
import loop_reasons
import named_loops
import pytest
from cuda_resources import Spill, Usage
from cuda_sources import ARCHITECTURES
from device_loops import Loop, TensorLoops
from named_loops import NamedLoop, Wanted

from benchmarks import kernels
from python_tests.helpers.processes import ROOT

REPORT = """\
ptxas info    : 28 bytes gmem, 224 bytes cmem[4]
ptxas info    : Compiling entry function '_ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_' for 'sm_80'
ptxas info    : Function properties for _ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 36 registers, used 1 barriers, 256 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_' for 'sm_90'
ptxas info    : Function properties for _ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_
    40 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 416 bytes cmem[0]
"""
CALLED = """\
ptxas info    : Function properties for _ZN8itm_fast4cuda12_GLOBAL__N_15apartEv
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""
NAME = "_ZN8itm_fast4cuda12_GLOBAL__N_111work_kernelIfEEvPT_"
TENSOR = {(80, NAME): 16, (90, NAME): 0}
USAGES = [Usage("work<float>", 80, 36, 256, 0, 0, 16), Usage("work<float>", 90, 255, 0, 40, 56, 0)]


def test_the_words_of_the_compiler_are_read() -> None:
    assert cuda_resources.parse(REPORT, TENSOR) == USAGES
    with pytest.raises(ValueError, match="not understood: ptxas info : Compiling entry function"):
        cuda_resources.parse("ptxas info : Compiling entry function 'work' for 'sm_80'\n", TENSOR)


def test_functions_that_a_kernel_calls_count() -> None:
    assert cuda_resources.parse(REPORT + CALLED, TENSOR)[1] == replace(USAGES[1], stack=48, spilled=64)


def test_the_table_has_a_line_for_each_kernel() -> None:
    idle = [Usage("idle", 80, 8, 0, 0, 0), Usage("idle", 90, 9, 0, 0, 0)]
    page = cuda_resources.page([*USAGES, *(cuda_resources.with_dynamic(u, {"id": 64, "work": 1}) for u in idle)])
    assert page.splitlines()[-2:] == [
        "| `idle` | 8/9 | 0 | 64 | 0 | 0 | 0 |",
        "| `work<float>` | 36/255 | 256/0 | 0 | 0/40 | 0/56 | 16/0 |",
    ]


def test_a_spill_is_a_problem_if_it_exceeds_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_resources.spilling(USAGES) == ["work<float> spills 56 bytes on sm_90, allowed 0"]
    monkeypatch.setattr(cuda_resources, "MAY_SPILL", {"work<": Spill(56, 0, 0, "as tested")})
    assert cuda_resources.spilling(USAGES) == []
    monkeypatch.setattr(cuda_resources, "MAY_SPILL", {"work<": Spill(52, 9, 9, "as tested")})
    assert cuda_resources.spilling(USAGES) == ["work<float> spills 56 bytes on sm_90, allowed 52"]


def test_a_kernel_without_tensor_cores_is_a_problem_where_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_resources, "MUST_USE_TENSOR_CORES", ())
    assert cuda_resources.without_tensor_cores(USAGES) == []
    monkeypatch.setattr(cuda_resources, "MUST_USE_TENSOR_CORES", ("work<", "gone<"))
    assert cuda_resources.without_tensor_cores(USAGES) == [
        "there is no kernel gone<...>",
        "work<float> has no tensor-core instruction on sm_90",
    ]


def elf_file(name: bytes, code: bytes) -> bytes:
    """Return a 64-bit ELF file with the section `.text.<name>`."""
    names = b"\0.text." + name + b"\0.shstrtab\0"
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(code) + len(names))
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 3, 2)
    sections = [(0, 0, 0, 0), (1, 1, 64, len(code)), (8 + len(name), 3, 64 + len(code), len(names))]
    table = b"".join(struct.pack("<IIQQQQ", n, kind, 0, 0, at, size).ljust(64, b"\0") for n, kind, at, size in sections)
    return header + code + names + table


def test_tensor_core_instructions_are_counted_in_machine_code() -> None:
    instructions = (0x000000101414723C, 0x0000000004047221, 0x0000002008089A3C, 0x000000000000023C)
    code = b"".join(struct.pack("<QQ", word, 0x023C) for word in instructions)
    elf = elf_file(b"work", code)
    assert device_code.count_instructions(elf) == {"work": 2}


def test_a_build_without_all_machine_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no machine code of boosting_loss.cu for sm_80 in "):
        cuda_resources.read_kernels(tmp_path, REPORT)
    with pytest.raises(SystemExit, match=r"^cuda_resources: ptxas reported no kernel of "):
        cuda_resources.read_kernels(tmp_path, "")


def test_the_page_names_every_kernel_and_spills_as_much_as_permitted() -> None:
    sources = "".join(source.read_text() for source in (ROOT / "csrc/cuda").iterdir())
    kernels = set(re.findall(r"__global__ [^;{]*?(\w+)_kernel\(", sources))
    rows = re.findall(
        r"^\| `(\w+<.*>)` \| [\d/]+ \| \d+ \| \d+ \| [\d/]+ \| ([\d/]+) \| [\d/]+ \|$",
        cuda_resources.PAGE.read_text(),
        re.M,
    )
    assert len(kernels) == 23
    assert {name.partition("<")[0] for name, _ in rows} == kernels
    spills = {name: by_architecture(spilled) for name, spilled in rows}
    assert {name for name, spilled in spills.items() if any(spilled.values())} == {
        name for name in spills if name.startswith(tuple(cuda_resources.MAY_SPILL))
    }
    assert [  # none
        (name, number)
        for name, spilled in spills.items()
        for number, count in spilled.items()
        if count > cuda_resources.allowed_spill(name, number).spilled
    ] == []
    for prefix, allowed in cuda_resources.MAY_SPILL.items():
        # The limits are the counts.
        most = {max(spilled.values()) for name, spilled in spills.items() if name.startswith(prefix)}
        assert most == {allowed.spilled}, prefix


def by_architecture(cell: str) -> dict[int, int]:
    """Return the numbers of a cell of the committed page, which has one number if they are equal."""
    numbers = [int(number) for number in cell.split("/")]
    return dict(zip(ARCHITECTURES, numbers * (len(ARCHITECTURES) // len(numbers)), strict=True))


SASS = """\
.text.work:
        /*0000*/                   IADD3 R9, R9, 0x40, RZ ;
.L_x_1:
        /*0010*/                   IADD3 R2, P1, R4, 0x40, RZ ;
        /*0020*/                   IMAD.X R3, RZ, RZ, R5, P1 ;
        /*0030*/                   ISETP.GT.AND P0, PT, R8, RZ, PT ;
        /*0040*/              @!P2 LDGSTS.E.BYPASS.128.ZFILL [R7+0x40], desc[UR4][R2.64], P0 ;
        /*0050*/                   LDG.E.U16 R20, desc[UR4][R4.64] ;
        /*0060*/                   LDG.E.128 R24, desc[UR4][R4.64] ;
        /*0070*/                   LDSM.16.M88.4 R12, [R10] ;
        /*0080*/                   STL [R1], R20 ;
        /*0090*/                   HMMA.16816.F32.BF16 R32, R12, R28, R32 ;
        /*00a0*/                   IADD3 R8, R8, -0x1, RZ ;
        /*00b0*/                   HMMA.16816.F32.BF16 R36, R12, R28, R36 ;
        /*00c0*/                   ISETP.NE.AND P3, PT, R10, RZ, PT ;
        /*00d0*/               @P3 BRA `(.L_x_1) ;
.L_x_2:
        /*00e0*/                   HMMA.16816.F32.BF16 R36, R12, R28, R36 ;
        /*00f0*/               @P3 BRA `(.L_x_2) ;
        /*0100*/                   EXIT ;
.text.idle:
        /*0000*/                   EXIT ;
"""


def test_the_main_loop_is_counted() -> None:
    """The second loop has no copies. Each copy depends on four instructions, one of them in the previous iteration."""
    found = {name: device_loops.loops_of(code, labels) for name, code, labels in device_loops.functions(SASS)}
    loop = Loop(instructions=13, tensor=2, copies=1, copying=5, scalar_loads=1, slow_loads=1)
    assert found == {"work": TensorLoops((loop,), unusual=1, local=1), "idle": TensorLoops()}
    assert (loop.beside_tensor, loop.per_copy) == (88.0, 5.0)


def test_the_shortest_loop_with_each_number_of_products_counts() -> None:
    copy, product = "LDGSTS.E.BYPASS.128 [R7], [R2.64]", "HMMA.16816.F32.BF16 R32, R12, R28, R32"
    code: list[str] = []
    labels = {}
    for number, body in enumerate(([product] * 3, [product, "NOP", "NOP"], [product, "NOP"], [product] * 2)):
        labels[f".L_x_{number}"] = len(code)
        code += [copy, *body, f"@P3 BRA `(.L_x_{number})"]
    found = device_loops.loops_of(code, labels).main
    assert [(loop.tensor, loop.instructions) for loop in found] == [(1, 4), (2, 4), (3, 5)]


def test_accesses_of_all_loops_count() -> None:
    copy, product = "LDGSTS.E.BYPASS.128 [R7], [R2.64]", "HMMA.16816.F32.BF16 R32, R12, R28, R32"
    scalar, slow = "LDG.E.U16 R20, [R4.64]", ["LDL R3, [R1]", "STL [R1], R3"]
    chosen, longer = [copy, product], [copy, product, scalar, "ST [R4.64], R3", slow[0]]
    without_copies = [product, scalar, scalar, *slow]
    code: list[str] = []
    labels = {}
    for number, body in enumerate((chosen, longer, without_copies, ["NOP", *slow, *slow])):
        labels[f".L_x_{number}"] = len(code)
        code += [*body, f"@P3 BRA `(.L_x_{number})"]
    # An outer loop with HMMA beside a loop without.
    labels[".L_x_4"] = len(code)
    code += [copy, product, *slow, *slow, *["LD R3, [R4.64]"] * 3]
    labels[".L_x_5"] = len(code)
    code += ["NOP", "@P3 BRA `(.L_x_5)", "@P4 BRA `(.L_x_4)"]

    def found(last: int) -> tuple[int, int, int]:
        """Of the code up to a label."""
        end = labels.get(f".L_x_{last}", len(code))
        loops = device_loops.loops_of(code[:end], {name: at for name, at in labels.items() if at < end})
        return len(loops.main), loops.unusual, loops.local

    assert [found(last) for last in (1, 2, 3, 4, 6)] == [(1, 0, 0), (1, 2, 1), (1, 2, 2), (1, 2, 2), (1, 2, 4)]


def test_accesses_outside_of_main_loops_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    usage, where = replace(USAGES[1], local=3), "work<float> on sm_90: "
    assert cuda_resources.over_budget([usage]) == [f"{where}3 accesses to local memory in a loop with HMMA, limit 0"]
    monkeypatch.setattr(cuda_resources, "MAY_SPILL", {"work<": Spill(56, 0, 3, "as tested")})
    assert cuda_resources.over_budget([usage]) == []
    assert cuda_resources.over_budget([replace(usage, unusual=2)]) == [
        f"{where}2 scalar loads and accesses to unknown memory in a loop with HMMA, limit 0"
    ]
    page = cuda_resources.page([USAGES[0], usage])
    assert page.splitlines()[-1] == "| `work<float>` | 0/3 | 3 |"


def test_a_main_loop_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(instructions=14, tensor=2, copies=1, copying=5, scalar_loads=1, slow_loads=0)
    usage = replace(USAGES[1], loops=(loop,))
    assert cuda_resources.over_budget([usage]) == [
        "work<float> on sm_90: 1 loops multiply matrices and copy their operands, budgets for 0"
    ]
    monkeypatch.setattr(cuda_resources, "BUDGETS", {"work<": ((96, 4),)})
    assert cuda_resources.over_budget([usage]) == [
        "work<float> on sm_90: 5 instructions per copy in the main loop, budget 4",
        "work<float> on sm_90: 1 scalar loads in the main loop, budget 0",
    ]
    assert cuda_resources.over_budget(USAGES[:1]) == [
        "work<float> on sm_80: 0 loops multiply matrices and copy their operands, budgets for 1"
    ]
    monkeypatch.setattr(cuda_resources, "BUDGETS", {"work<": ((96, 5),)})
    spilling = replace(usage, loops=(replace(loop, scalar_loads=0, slow_loads=2),))
    assert cuda_resources.over_budget([spilling]) == [
        "work<float> on sm_90: 2 slow accesses in the main loop, budget 0"
    ]
    monkeypatch.setattr(cuda_resources, "MAY_SPILL", {"work<": Spill(9, 2, 2, "as tested")})
    assert cuda_resources.over_budget([spilling]) == []
    monkeypatch.setattr(cuda_resources, "MAY_SPILL", {"work<": Spill(9, 1, 1, "as tested")})
    assert cuda_resources.over_budget([spilling]) == [
        "work<float> on sm_90: 2 slow accesses in the main loop, budget 1"
    ]
    monkeypatch.setattr(cuda_resources, "BUDGETS", {"work<": ((96, 4),)})
    page = cuda_resources.page([replace(USAGES[0], loops=(replace(loop, tensor=4),)), usage])
    assert page.splitlines()[-1] == "| `work<float>` | 4/2 | 1 | 40.0/96.0 | 96 | 5.0 | 4 | 1 | 0 |"


def test_the_page_has_the_budgets_of_all_tensor_core_kernels() -> None:
    """On the committed page, no loop exceeds its budget. Scores of bfloat16 rows meet the goals of 40 and 12."""
    table = cuda_resources.PAGE.read_text(encoding="utf-8").split("\n## ")[1]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if line.startswith("| `")
    ]
    counted = 0
    for prefix, budgets in cuda_resources.BUDGETS.items():
        names = {row[0] for row in rows if row[0].strip("`").startswith(prefix)}
        assert names, prefix
        for name in names:
            of_kernel = [row for row in rows if row[0] == name]
            assert [[row[4], row[6]] for row in of_kernel] == [[str(number) for number in budget] for budget in budgets]
            for row, (beside, copying) in zip(of_kernel, budgets, strict=True):
                assert max(map(float, row[3].split("/"))) <= beside
                assert max(map(float, row[5].split("/"))) <= copying
            slow = [by_architecture(row[8]) for row in of_kernel]
            for number in ARCHITECTURES:
                allowed = cuda_resources.allowed_spill(name.strip("`"), number).slow
                assert max(of_loop[number] for of_loop in slow) <= allowed, name
            most_allowed = max(cuda_resources.allowed_spill(name.strip("`"), number).slow for number in ARCHITECTURES)
            assert max(n for of_loop in slow for n in of_loop.values()) == most_allowed, name
            counted += len(of_kernel)
    assert len(rows) == counted
    assert cuda_resources.BUDGETS["score_tile<BFloat16, 1,"] == ((40, 12),)


def test_the_page_has_the_limits_of_local_memory() -> None:
    """The limits are the counts of the committed page."""
    [section] = [
        part
        for part in cuda_resources.PAGE.read_text(encoding="utf-8").split("\n## ")
        if part.startswith("Local memory in loops")
    ]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    counts = {name.strip("`"): by_architecture(cell) for name, cell, _ in rows}
    for name, _, limits in rows:
        kernel = name.strip("`")
        of_kernel = {number: cuda_resources.allowed_spill(kernel, number).local for number in ARCHITECTURES}
        assert by_architecture(limits) == of_kernel, kernel
        assert [number for number in ARCHITECTURES if counts[kernel][number] > of_kernel[number]] == [], kernel
    for prefix, allowed in cuda_resources.MAY_SPILL.items():
        found = [max(numbers.values()) for name, numbers in counts.items() if name.startswith(prefix)]
        assert max(found, default=0) == allowed.local, prefix


def test_a_loop_above_the_goal_has_a_reason() -> None:
    """On the committed page: reasons name all such loops, and no others."""
    text = cuda_resources.PAGE.read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.split("\n## ")[1].splitlines() if line.startswith("| `")]
    loops = {(row[0].strip("` "), int(row[1])): (int(row[4]), int(row[6])) for row in lines}
    above = [key for key, budget in loops.items() if loop_reasons.is_above_goal(budget)]
    found = [loop_reasons.reason_of(*key) for key in above]
    assert None not in found, above[found.index(None)]
    assert {id(one) for one in found} == {id(one) for one in loop_reasons.REASONS}
    assert loop_reasons.section(loops) in text
    assert loop_reasons.section(dict.fromkeys(loops, loop_reasons.GOAL)) == ""


def test_a_reason_names_the_gpus_on_which_issue_slots_bind() -> None:
    """By the counts of the committed page. The limits follow from the rates of the cost model."""
    limits = {
        device: 16 * (kernels.SCHEDULERS * kernels.HMMA_OPERATIONS / (gpu.tensor_operations * gpu.mma_share) - 1)
        for device, gpu in kernels.GPUS.items()
    }
    assert {device: round(limit) for device, limit in limits.items()} == loop_reasons.LIMITS
    architectures = [f"sm_{number}" for number in cuda_resources.ARCHITECTURES]
    text = cuda_resources.PAGE.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.split("\n## ")[1].splitlines() if line.startswith("| `")]
    bound = 0
    for kernel, tensor, _, counts, *_ in rows:
        found = counts.split("/") if "/" in counts else [counts] * len(architectures)
        of_architecture = dict(zip(architectures, map(float, found), strict=True))
        reason = loop_reasons.reason_of(kernel.strip("` "), int(tensor))
        sentence = re.search(r"Bound by issue slots on an (\w+)(?: and an (\w+))?", reason.why if reason else "")
        # The page rounds counts to a tenth.
        above = [d for d, gpu in kernels.GPUS.items() if of_architecture[gpu.code] > limits[d] + 0.05]
        assert above == [device for device in (sentence.groups() if sentence else ()) if device], (kernel, tensor)
        bound += bool(above)
    assert bound


def test_reasons_state_the_counts_of_the_page() -> None:
    """Instructions for copies on sm_90. Other instructions of loops of 16-bit rows on all architectures."""
    text = cuda_resources.PAGE.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.split("\n## ")[1].splitlines() if line.startswith("| `")]
    copying: dict[str, set[int]] = {}
    beside: dict[int, list[float]] = {}
    for name, tensor, copies, others, _, per_copy, *_ in rows:
        kernel = name.strip("` ")
        if reason := loop_reasons.reason_of(kernel, int(tensor)):
            copying.setdefault(reason.instructions, set()).add(round(float(per_copy.split("/")[-1]) * int(copies)))
        if kernel.startswith(("score_", "matching_loss<")) and "float, " not in kernel:
            beside.setdefault(int(tensor), []).extend(map(float, others.split("/")))
    stated = 0
    for instructions, counts in copying.items():
        if found := re.search(r"([\d to]+) for copies", instructions):
            assert found[1].strip() == " to ".join(map(str, sorted({min(counts), max(counts)}))), instructions
            stated += 1
    assert stated == 9
    medium = loop_reasons.reason_of("score_tile<float, 1,", 16)
    spilling = loop_reasons.reason_of("matching_loss<TripletProblem<float>, Half, 1,", 32)
    assert medium is not None
    assert spilling is not None
    assert f"take one with {min(beside[32]):.0f} to {max(beside[32]):.0f} other instructions" in medium.why
    most = max(*beside[32], *beside[72])
    assert f"Up to {most:.0f}, or {max(beside[120]):.0f} with additions of steps" in spilling.instructions


def cells_of(prefix: str, column: int, section: int = 0) -> list[dict[int, float]]:
    """Return a column of a section of the committed page, by architecture, for the kernels with this prefix."""
    lines = cuda_resources.PAGE.read_text(encoding="utf-8").split("\n## ")[section].splitlines()
    cells = [line.strip("| ").split(" | ")[column].split("/") for line in lines if line.startswith(f"| `{prefix}")]
    assert cells, prefix
    per = len(ARCHITECTURES)
    return [dict(zip(ARCHITECTURES, map(float, cell * (per // len(cell))), strict=True)) for cell in cells]


def of_hopper(prefix: str, column: int, section: int = 0) -> float:
    """Return the number that all kernels with this prefix have on sm_90."""
    [number] = {cell[90] for cell in cells_of(prefix, column, section)}
    return number


def counted(kernel: str, loop: str) -> float:
    """Return the instructions of a loop of the cost model on sm_90."""
    entries = json.loads(cuda_resources.LOOP_COUNTS.read_text())["loops"]
    [found] = [entry for entry in entries if entry["kernel"].startswith(kernel) and entry["loop"] == loop]
    return float(found["counts"]["sm_90"]["instructions"])


def spans(cells: list[dict[int, float]], *architectures: int) -> tuple[float, float]:
    numbers = [cell[number] for cell in cells for number in architectures]
    return min(numbers), max(numbers)


def test_the_pages_on_design_state_the_committed_counts() -> None:
    registers, spilled, beside, slow = 1, 5, 3, 8  # columns
    tile, kinds = "ProductTile<112, 128, 2, 4, 4, 256>", ("BFloat16, 1,", "Half, 1,", "float, 1,")

    def matching(column: int, products: str, directions: int, problem: str = "Triplet", section: int = 0) -> float:
        name = f"matching_loss<{problem}Problem<float>, {products} {tile}, {directions}>"
        return of_hopper(name, column, section)

    one_part = [
        cell
        for problem in ("Triplet", "Boosting")
        for products in kinds
        for cell in cells_of(f"matching_loss<{problem}Problem<float>, {products}", registers)
    ]
    prepared = [cell for dtype in ("BFloat16", "Half") for cell in cells_of(f"prepare_scores<{dtype},", beside, 1)]
    fewest, most = spans(one_part, 80, 86, 89)
    lowest, highest = spans(cells_of("score_long_tiles<", spilled), 80, 90)
    assert spans(cells_of("score_long_tiles<", spilled), 86, 89) == (0, 0)
    assert spans(cells_of("score_long_tiles<", registers), 80, 90) == (128, 128)
    assert spans(cells_of("backpropagate_pairs<", spilled), *ARCHITECTURES) == (0, 0)
    assert spans(cells_of("regulate_tiles<", slow, 1), *ARCHITECTURES) == (0, 2)
    _, most_local = spans(cells_of("regulate_tiles<", 1, 2), *ARCHITECTURES)
    less, more = spans(prepared, *ARCHITECTURES)
    [backward] = cells_of("backpropagate_pairs<BFloat16>", registers)
    assert len(set(backward.values())) == 1
    design = [
        f"issues {math.floor(less)} to {math.ceil(more)} instructions beside 16 HMMA for rows of 16 bits",
        f"the goal of {loop_reasons.GOAL[0]}, and {of_hopper('prepare_scores<float,', beside, 1):.0f} for float32",
        f"take {counted('backpropagate_pairs<', 'block statistics'):.0f} instructions per raw score. With bfloat16 it "
        f"takes {backward[90]:.0f} registers; no type spills",
        f"`regulate_tiles` has {counted('regulate_tiles<', 'attention'):.0f} instructions per query",
        f"128 registers, and spill {lowest:.0f} to {highest:,.0f} bytes. On sm_86 and sm_89 one block fits",
        f"take {matching(registers, 'float, 3,', 2):.0f} registers, and {matching(registers, 'float, 3,', 1):.0f} with",
        f"spill {matching(spilled, 'Half, 1,', 2):,.0f} bytes, and {matching(spilled, 'Half, 1,', 1):.0f} with one "
        f"direction; boosting losses spill {matching(spilled, 'Half, 1,', 2, 'Boosting'):,.0f} and "
        f"{matching(spilled, 'Half, 1,', 1, 'Boosting'):.0f}. The main loop issues "
        f"{matching(beside, 'Half, 1,', 2, section=1):.0f} and {matching(beside, 'Half, 1,', 1, section=1):.0f} instr",
        f"products of one part take {fewest:.0f} to {most:.0f} registers and do not spill",
        f"at most {most_local:.0f} times, those of full tiles at most twice",
    ]
    kernel = "score_tile<BFloat16, 1,"
    norms = kernels.attended_norms(kernels.LANES / kernels.REGIONS)
    hopper = [
        f"take about {counted(kernel, 'statistics') + counted(kernel, 'attention'):.0f} of them",
        f"the Gram rows and blocks another {sum(work * counted(kernel, loop) for loop, work in norms.items()):.0f}.",
    ]
    for name, sentences in (("design.md", design), ("hopper.md", hopper)):
        text = " ".join((ROOT / "docs/internals" / name).read_text(encoding="utf-8").split())
        assert [sentence for sentence in sentences if sentence not in text] == []


def test_the_page_states_which_products_take_the_loops_that_it_leaves_out() -> None:
    """A product is whole if it reaches into the last groups of 16 rows, and of 16 columns per warp (multiply_tile)."""
    text = " ".join(cuda_resources.PAGE.read_text(encoding="utf-8").split())
    assert " ".join(cuda_resources.LOOPS.split()) in text
    found = re.search(r"`score_tile<BFloat16, 1, ProductTile<(\d+), (\d+), 2, (\d+),", text)
    assert found is not None
    rows, columns, warps = map(int, found.groups())
    most_rows, most_columns = rows - 16, columns - 16 * warps
    assert f"if they have at most {most_rows} rows or at most {most_columns} columns" in text
    assert f"Three sets of 36 contexts have {rows // 36 * 36} rows" in text
    assert rows // 36 * 36 > most_rows
    # Sets of the same length.
    never_whole = {length for length in range(36, rows + 1) if rows // length * length <= most_rows}
    assert never_whole == {*range(38, 49), *range(57, 97)}
    assert "Sets of 38 to 48 and of 57 to 96 contexts" in text
    assert f"the two pieces of a set of 196 contexts, which has {196 - rows} rows" in text
    assert 196 - rows <= most_rows
    assert f"With 196 contexts, these multiply {196 - rows} of the rows" in text


SOURCE = """\
ITM_FAST_DEVICE void outer(int n) {
  for (;;) inner(n);
}
template <typename T>
ITM_FAST_DEVICE_APART float inner(int n) {
  return n;
}
"""
# An outer loop around a loop of `inner` that is unrolled, and its remainder.
ANNOTATED = """\
.text.work:
	//## File "{file}", line 2
.L_x_1:
        /*0000*/                   LDS R2, [R3] ;
        /*0010*/                   LDS.128 R4, [R3] ;
	//## File "{file}", line 6 inlined at "{file}", line 2
	//## File "{file}", line 2
.L_x_2:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   FFMA R8, R4, R5, R8 ;
        /*0040*/                   FFMA R8, R4, R5, R8 ;
        /*0050*/                   LDGSTS.E.BYPASS.128.ZFILL [R7+0x40], desc[UR4][R2.64], P0 ;
        /*0060*/                   HMMA.16816.F32.BF16 R36, R12, R28, R36 ;
        /*0070*/              @!P2 BRA `(.L_x_2) ;
.L_x_3:
        /*0080*/                   FFMA R8, R4, R5, R8 ;
        /*0090*/                   IADD3 R8, R8, -0x1, RZ ;
        /*00a0*/                   IADD3 R8, R8, -0x1, RZ ;
        /*00b0*/                   IADD3 R8, R8, -0x1, RZ ;
        /*00c0*/              @!P2 BRA `(.L_x_3) ;
	//## File "{file}", line 2
        /*00d0*/              @!P1 BRA `(.L_x_1) ;
        /*00e0*/                   EXIT ;
"""


Code = tuple[list[named_loops.Line], dict[str, int]]


@pytest.fixture
def annotated(tmp_path: Path) -> Code:
    file = tmp_path / "work.h"
    file.write_text(SOURCE)
    [(name, code, labels)] = named_loops.functions(ANNOTATED.format(file=file))
    assert (name, len(code)) == ("work", 15)
    return code, labels


@pytest.mark.parametrize(
    ("wanted", "loop"),
    [
        # Six instructions for two units; the remainder takes five for one.
        (Wanted("work", "run", ("inner", "outer"), "FFMA", "sum"), NamedLoop(3.0, 0.5, 2.0, 256.0)),
        (Wanted("work", "run", ("inner",), r"LDG\.E\.128", "sum", work=4.0), NamedLoop(1.5, 0.25, 1.0, 128.0)),
        (Wanted("work", "run", ("inner",), named_loops.ITERATION, "sum"), NamedLoop(5.0, 0.0, 0.0, 0.0)),
        (Wanted("work", "run", ("outer",), "LDS", "sum", around=True), NamedLoop(3.0, 0.0, 5.0, 0.0)),
    ],
)
def test_named_loops_are_counted(annotated: Code, wanted: Wanted, loop: NamedLoop) -> None:
    assert named_loops.count(wanted, *annotated) == loop


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted("work<", "run", ("inner", "gone"), "FFMA", "sum"),
        Wanted("work<", "run", ("inner",), "FFMA", "sum", without=("outer",)),
        Wanted("work<", "run", ("inner",), "MUFU", "sum"),
        Wanted("work<", "run", ("inner",), "FFMA", "sum", around=True),
    ],
)
def test_a_named_loop_that_is_gone_is_one_line(annotated: Code, wanted: Wanted) -> None:
    with pytest.raises(SystemExit) as error:
        named_loops.count(wanted, *annotated)
    functions = ", ".join(wanted.functions)
    assert str(error.value) == (
        f"named_loops: work<...> has no loop 'run' of {functions} with {wanted.unit}: correct WANTED in "
        "tools/named_loops.py"
    )


def test_the_committed_counts_are_those_of_the_page() -> None:
    entries = json.loads(cuda_resources.LOOP_COUNTS.read_text())["loops"]
    text = cuda_resources.PAGE.read_text(encoding="utf-8")
    assert text.endswith(named_loops.section(entries))
    for wanted in named_loops.WANTED:
        [entry] = [e for e in entries if e["kernel"].startswith(wanted.kernel) and e["loop"] == wanted.name]
        assert (entry["per"], entry["products"], entry["tile"]) == (wanted.of, wanted.products, list(wanted.tile))
        assert list(entry["counts"]) == [f"sm_{number}" for number in cuda_resources.ARCHITECTURES]
    assert len(entries) == len(named_loops.WANTED)
    # The main loop of the scores is counted twice, per 16 HMMA and per HMMA.
    [row] = re.findall(r"^\| `score_tile<BFloat16, 1,.*?` \| 32 \| 4 \| ([\d./]+) ", text, re.M)
    [product] = [e for e in entries if e["kernel"].startswith("score_tile<BFloat16") and e["loop"] == "product"]
    others = [16 * (counts["instructions"] - 1) for counts in product["counts"].values()]
    assert list(map(float, row.split("/"))) == pytest.approx(others, abs=0.06)


def test_kernels_without_a_named_loop_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = NamedLoop(3.0, 0.5, 2.0, 256.0)
    kernels = {number: {("work<float>", "run"): counted} for number in cuda_resources.ARCHITECTURES}
    monkeypatch.setattr(named_loops, "WANTED", (Wanted("work<", "run", ("inner",), "FFMA", "sum", products=2.0),))
    compiled = cuda_resources.Compiled("", {}, {}, kernels)
    [entry] = cuda_resources.loop_counts(compiled)
    counts = {f"sm_{number}": asdict(counted) for number in cuda_resources.ARCHITECTURES}
    backward = {"products": 2.0, "tile": [1, 1]}
    assert entry == {"kernel": "work<float>", "loop": "run", "per": "sum", **backward, "counts": counts}
    assert named_loops.section([entry]).splitlines()[-1] == "| `work<float>` | run | sum | 3.0 | 2.0 |"
    gone = Wanted("gone<", "run", ("inner",), "FFMA", "sum")
    monkeypatch.setattr(named_loops, "WANTED", (*named_loops.WANTED, gone))
    with pytest.raises(SystemExit) as error:
        cuda_resources.loop_counts(compiled)
    assert str(error.value) == "cuda_resources: no kernel gone<: correct WANTED in tools/named_loops.py"
