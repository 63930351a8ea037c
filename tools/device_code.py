"""Find tensor-core instructions in the device code that nvcc writes. Needs no CUDA tool."""

from __future__ import annotations

import struct
from collections.abc import Iterator

# The lowest 12 bits of a 128-bit instruction are its opcode; this is a product of 16-bit matrices (HMMA).
_INSTRUCTION_BYTES, _OPERATION, _HMMA = 16, 0xFFF, 0x23C


def count_instructions(elf: bytes) -> dict[str, int]:
    """Map the mangled name of every kernel and function of a cubin to its number of HMMA instructions."""
    found = {}
    for name, code in _sections(elf):
        if name.startswith(".text."):
            starts = range(0, len(code), _INSTRUCTION_BYTES)
            operations = [struct.unpack_from("<I", code, start)[0] & _OPERATION for start in starts]
            found[name.removeprefix(".text.")] = operations.count(_HMMA)
    return found


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        first = names + name
        text = elf[first : elf.index(b"\0", first)].decode()
        yield text, b"" if kind == 8 else elf[offset : offset + size]  # 8: no content in the file
