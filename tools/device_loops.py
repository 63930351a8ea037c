"""Count the instructions in the main loops of tensor-core kernels, from the disassembly of their machine code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GUARD = re.compile(r"@!?(U?P\w+) ")
_REGISTER = re.compile(r"\b(?:UR|UP|R|P)\d+\b")
# Instructions that write no register: their first operand is read.
_WITHOUT_RESULT = (
    "LDGSTS",
    "STG",
    "STS",
    "STL",
    "ST",
    "BRA",
    "BAR",
    "DEPBAR",
    "LDGDEPBAR",
    "WARPSYNC",
    "BSSY",
    "BSYNC",
)


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop that multiplies matrices.

    Attributes:
        instructions: all of them.
        tensor: HMMA.
        copies: LDGSTS, asynchronous copies of 16 bytes.
        copying: copies and the instructions that compute their addresses and conditions.
        scalar_loads: loads of at most 4 bytes from global memory.
        slow_loads: accesses to local memory, or to memory of unknown kind.
    """

    instructions: int
    tensor: int
    copies: int
    copying: int
    scalar_loads: int
    slow_loads: int

    @property
    def beside_tensor(self) -> float:
        """Other instructions per 16 HMMA."""
        return 16 * (self.instructions - self.tensor) / self.tensor

    @property
    def per_copy(self) -> float:
        return self.copying / self.copies


@dataclass(frozen=True)
class TensorLoops:
    """The loops of a kernel that multiply matrices.

    Attributes:
        main: those that `main_loops` chooses.
        unusual: the most scalar loads and accesses to memory of unknown kind of an innermost loop with HMMA and
            asynchronous copies.
        local: the most accesses to local memory of any loop with HMMA.
    """

    main: tuple[Loop, ...] = ()
    unusual: int = 0
    local: int = 0


def disassembler() -> str:
    """Return the path of nvdisasm, from the PyPI package nvidia-cuda-nvdisasm or the CUDA toolkit."""
    places = [Path(folder, "nvidia", "cu13", "bin") for folder in sys.path]
    found = shutil.which("nvdisasm", path=":".join(map(str, places))) or shutil.which("nvdisasm")
    if found is None:
        raise SystemExit("device_loops: needs nvdisasm: pip install nvidia-cuda-nvdisasm, or the CUDA toolkit's")
    return found


def tensor_loops(cubin: bytes) -> dict[str, TensorLoops]:
    """Map the mangled name of each kernel to its loops that multiply matrices."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.cubin")
        path.write_bytes(cubin)
        command = [disassembler(), "-c", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: loops_of(code, labels) for name, code, labels in functions(text)}


def loops_of(code: list[str], labels: dict[str, int]) -> TensorLoops:
    """Return the loops of a kernel that multiply matrices; `labels` maps the labels to positions in `code`."""
    ends = loop_ends(code, labels)
    with_tensor = {(first, last) for first, last in ends if any(map(_is_tensor, code[first : last + 1]))}
    bodies = [code[first : last + 1] for first, last in sorted(_innermost(ends) & with_tensor)]
    copying = [(loop, body) for body in bodies if (loop := _count(body)).copies]
    unusual = [loop.scalar_loads + loop.slow_loads - _local(body) for loop, body in copying]
    # Some of these loops have a loop without HMMA within, which copies numbers one by one.
    local = [_local(code[first : last + 1]) for first, last in _innermost(with_tensor)]
    return TensorLoops(main_loops([loop for loop, _ in copying]), max(unusual, default=0), max(local, default=0))


def main_loops(innermost: list[Loop]) -> tuple[Loop, ...]:
    """Return the main ones of loops with HMMA and asynchronous copies, by their number of HMMA.

    Of loops with the same number only the shortest is chosen. Longer ones also run: they serve tiles that are not full,
    and the second direction of a loss.
    """
    found: dict[int, Loop] = {}
    for loop in innermost:
        found[loop.tensor] = min(loop, found.get(loop.tensor, loop), key=lambda loop: loop.instructions)
    return tuple(found[tensor] for tensor in sorted(found))


def _innermost(loops: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the loops without another one of them within."""
    innermost: set[tuple[int, int]] = set()
    for first, last in sorted(loops, key=lambda ends: ends[1] - ends[0]):
        if not any(first <= start and end <= last for start, end in innermost):
            innermost.add((first, last))
    return innermost


def _local(body: list[str]) -> int:
    return sum(operation(text).split(".")[0] in ("LDL", "STL") for text in body)


def _is_tensor(instruction: str) -> bool:
    return operation(instruction).startswith("HMMA")


def functions(text: str) -> Iterator[tuple[str, list[str], dict[str, int]]]:
    """Yield the name, the instructions and the labels of every function in a disassembly."""
    for part in re.split(r"(?m)^\.text\.(?=\S+:$)", text)[1:]:
        code: list[str] = []
        labels: dict[str, int] = {}
        for line in part.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
                code.append(instruction[1])
        yield part.split(":", 1)[0], code, labels


def loop_ends(code: list[str], labels: dict[str, int]) -> set[tuple[int, int]]:
    """Return the first and the last position of every loop: a branch to an earlier label closes it."""
    jumps = ((place, re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", text)) for place, text in enumerate(code))
    return {(labels[jump[1]], place) for place, jump in jumps if jump and labels.get(jump[1], len(code)) <= place}


def operation(instruction: str) -> str:
    """Return the name of an instruction with its modifiers, such as LDG.E.128."""
    return _GUARD.sub("", instruction, count=1).split()[0]


def _count(body: list[str]) -> Loop:
    names = [operation(text) for text in body]

    def count(*starts: str) -> int:
        return sum(name.split(".")[0] in starts for name in names)

    scalar = sum(name.split(".")[0] == "LDG" and ".64" not in name and ".128" not in name for name in names)
    copies = count("LDGSTS")
    return Loop(len(body), count("HMMA"), copies, _copying(body), scalar, count("LDL", "STL", "LD", "ST"))


def _copying(body: list[str]) -> int:
    """Count the copies and the instructions of the loop that compute their operands."""
    chosen: set[int] = set()
    open_places = [place for place, text in enumerate(body) if operation(text).startswith("LDGSTS")]
    while open_places:
        place = open_places.pop()
        if place in chosen:
            continue
        chosen.add(place)
        for register in _parse(body[place])[1]:
            open_places += _writers(body, place, register)
    return len(chosen)


def _writers(body: list[str], place: int, register: str) -> Iterator[int]:
    """Yield the latest instruction before `place` that writes `register`, and those after it on another condition."""
    for back in range(1, len(body) + 1):
        earlier = (place - back) % len(body)
        if register in _parse(body[earlier])[0]:
            yield earlier
            if _guard(body[earlier]) in ("", _guard(body[place])):
                return


def _guard(instruction: str) -> str:
    return instruction.split()[0] if instruction.startswith("@") else ""


def _parse(instruction: str) -> tuple[set[str], set[str]]:
    """Return the registers that an instruction writes and those that it reads."""
    rest = _GUARD.sub("", instruction, count=1).partition(" ")[2]
    operands = [_registers(part) for part in rest.split(",")]
    results = 0
    if operation(instruction).split(".")[0] not in _WITHOUT_RESULT:
        # Comparisons and additions with carry also write a predicate.
        results = 2 if len(operands) > 1 and any(one.lstrip("U").startswith("P") for one in operands[1]) else 1
    written = {one for part in operands[:results] for one in part}
    if "WIDE" in operation(instruction) or ".64" in operation(instruction):
        written |= _pair(operands[0])
    return written, {one for part in operands[results:] for one in part} | set(_GUARD.findall(instruction))


def _registers(operand: str) -> set[str]:
    found = set(_REGISTER.findall(operand))
    return found | _pair(found) if ".64" in operand else found


def _pair(registers: set[str]) -> set[str]:
    """Return the second registers of pairs, which are named by their first."""
    return {f"R{int(one[1:]) + 1}" for one in registers if one.startswith("R")}
