"""Harmful pickles that name no foreign code and that torch would read: each is rejected before it is unpickled.

They are written opcode by opcode. Reading one would take noticeably long, but still end.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from itm_fast.files.torch_files import load_plain

DAMAGED = "damaged, or not written by torch.save"
COPIES = "copies far more values than it holds"
ENDLESS = "holds nested tuples that are far larger than the file"
START, STOP = b"\x80\x02", b"."
# Hashing takes 2**60 values: t = (t, t), sixty times over, then {t: 1}.
TUPLES = START + b")q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00K\x01s" + STOP


def name(module: str, what: str) -> bytes:
    return f"c{module}\n{what}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def tensor(key: str, count: int) -> bytes:
    """Return the pickle of a tensor of `count` float32 values in the storage `key`."""
    storage = b"(" + text("storage") + name("torch", "FloatStorage") + text(key) + text("cpu") + number(count) + b"tQ"
    hooks = name("collections", "OrderedDict") + b")R"
    arguments = storage + number(0) + number(count) + b"\x85" + number(1) + b"\x85\x89" + hooks
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def archive(pickled: bytes, *others: tuple[str, bytes], file: str = "c/data.pkl") -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as writer:
        for entry, data in ((file, pickled), ("c/version", b"3\n"), *others):
            writer.writestr(entry, data)
    return content.getvalue()


def stream(pickled: bytes, keys: list[str] | None = None) -> bytes:
    """Return a pickle in the container that torch used before zip archives."""
    magic = (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}})
    return b"".join(pickle.dumps(one, 2) for one in magic) + pickled + pickle.dumps(keys or [], 2)


def refused(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "c.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r".") as error:
        load_plain(path)
    return str(error.value)


def foreign(what: str) -> str:
    return f"names the Python object {what}, which is not allowed; no code was run"


def test_functions_that_make_much_out_of_little_are_foreign(tmp_path: Path) -> None:
    many = name("builtins", "bytearray") + number(10**8) + b"\x85R"
    assert refused(tmp_path, archive(START + many + STOP)) == foreign("builtins.bytearray")
    assert refused(tmp_path, stream(START + many + STOP)) == foreign("builtins.bytearray")
    # Each step doubles the length.
    encode = name("_codecs", "encode")
    doubled = encode + text("a") + text("latin1") + b"\x86R"
    for _ in range(20):
        doubled = encode + doubled + text("hex") + b"\x86R"
    assert refused(tmp_path, archive(START + doubled + STOP)) == foreign("_codecs.encode")
    assert refused(tmp_path, archive(START + name("torch", "FloatTensor") + STOP)) == foreign("torch.FloatTensor")


@pytest.mark.parametrize("put_in", [archive, stream])
def test_containers_that_are_copied_over_and_over(tmp_path: Path, put_in: type) -> None:
    pairs = b"](" + b"".join(b"K" + bytes([key]) + b"K\x01\x86" for key in range(100)) + b"e"
    ordered = name("collections", "OrderedDict")
    once = START + ordered + pairs + b"\x85R" + STOP
    (tmp_path / "c.pt").write_bytes(put_in(once))
    assert load_plain(tmp_path / "c.pt") == OrderedDict.fromkeys(range(100), 1)
    recalled = pairs + b"q\x00\x85q\x01" + ordered + b"q\x02" + b"]("
    assert refused(tmp_path, put_in(START + recalled + b"h\x02h\x01R" * 10 + b"e" + STOP)) == COPIES
    inside = pairs + b"q\x00" + ordered + b"q\x02" + b"]("
    assert refused(tmp_path, put_in(START + inside + b"h\x02h\x00\x85R" * 10 + b"e" + STOP)) == COPIES
    states = b"}(" + b"".join(text(f"k{key}") + b"K\x01" for key in range(100)) + b"uq\x00" + ordered + b"q\x02" + b"]("
    assert refused(tmp_path, put_in(START + states + b"h\x02)Rh\x00b" * 10 + b"e" + STOP)) == COPIES


def test_a_storage_is_read_under_its_own_key_alone(tmp_path: Path) -> None:
    # The archive reader ignores the case of names, but caches what it reads by the exact key.
    values = torch.arange(4.0)
    record = ("c/data/abc", values.numpy().tobytes())
    path = tmp_path / "c.pt"
    path.write_bytes(archive(START + b"](" + tensor("abc", 4) * 2 + b"e" + STOP, record))
    assert [one.tolist() for one in load_plain(path)] == [values.tolist()] * 2
    assert refused(tmp_path, archive(START + b"](" + tensor("abc", 4) + tensor("ABC", 4) + b"e" + STOP, record)) == (
        DAMAGED
    )


@pytest.mark.parametrize(
    "content",
    [
        archive(TUPLES),
        archive(TUPLES, file="c/DATA.PKL"),
        stream(TUPLES),
        # The first bytes make it a stream, the last bytes an archive.
        stream(TUPLES) + archive(START + b"}" + STOP),
    ],
    ids=["archive", "capitals", "stream", "both"],
)
def test_keys_that_would_be_hashed_without_end(tmp_path: Path, content: bytes) -> None:
    assert refused(tmp_path, content) == ENDLESS


def test_archives_whose_directory_others_would_look_for_elsewhere(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr("c/data.pkl", START + text("a" * 10**6) + STOP)
        writer.writestr("c/version", b"3\n")
    bomb = content.getvalue()
    assert refused(tmp_path, bomb) == f"claims to hold 1,000,010 bytes, but has only {len(bomb):,}"
    assert refused(tmp_path, bomb + b"PK\x05\x06") == DAMAGED
    # Python counts offsets from the directory at the end, torch from the start of the file.
    assert refused(tmp_path, bomb + archive(START + b"}" + STOP)) == DAMAGED
    saved = tmp_path / "saved.pt"
    torch.save({"a": torch.ones(3)}, saved)
    locator = bytearray(saved.read_bytes())
    assert locator[-42:-38] == b"PK\x06\x07"
    locator[-34] ^= 1
    assert refused(tmp_path, bytes(locator)) == DAMAGED
