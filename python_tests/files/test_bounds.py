"""Files that declare more data than they hold are rejected before memory is allocated."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from itm_fast import models
from itm_fast.config import from_text
from itm_fast.data import Vocabulary, layout
from itm_fast.files.documents import parse_yaml, read_json
from itm_fast.training.config import read_yaml
from python_tests.helpers.commands import error
from python_tests.helpers.precomputed import features_of, write_split

SMALL_MODEL = {"vocab_size": 9, "feature_dim": 6, "embed_dim": 4, "word_dim": 5}


def refused(call: Callable[[], object], message: str) -> None:
    """Check that `call` raises ValueError with `message` in one line and allocates less than a megabyte."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def sparse(path: Path, start: bytes, size: int) -> Path:
    """Write a sparse file of `size` bytes, which takes almost no disk space."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    return path


# .npy


def npy_header(text: str, version: int = 1, length: int | None = None) -> bytes:
    content = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + (length or len(content)).to_bytes(width, "little") + content


@pytest.mark.parametrize(
    ("shape", "descr", "promised"),
    [
        ((10**15, 1, 1), "<f4", 4 * 10**15),
        ((10**6, 36, 2048), "<f4", 4 * 36 * 2048 * 10**6),
        # Products that overflow to a small 64-bit number.
        ((2**32, 2**32, 1), "<f4", 2**66),
        ((2**63, 2, 1), "<f8", 2**67),
    ],
)
def test_an_array_larger_than_its_file(tmp_path: Path, shape: tuple[int, ...], descr: str, promised: int) -> None:
    header = npy_header(repr({"descr": descr, "fortran_order": False, "shape": shape}))
    path = tmp_path / "a.npy"
    path.write_bytes(header + bytes(64))
    message = f"{path}: truncated: the header promises {promised + len(header)} bytes, the file has {len(header) + 64}"
    refused(lambda: layout.open_features(path), message)


def test_a_header_of_gigabytes(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.npy", npy_header("{", 2, length=4 * 10**9), 5 * 10**9)
    message = "its header claims 4000000000 bytes, more than 10000; 5000000000 bytes on disk"
    refused(lambda: layout.open_features(path), f"{path}: not a readable .npy array of numbers ({message})")


@pytest.mark.parametrize(
    "text",
    [
        "(" * 9000,
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "-" * 5000 + "1, 1, 1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3, 4)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3, 4.0)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': ({}, [], ())}",
        "{'descr': ('<f4', (10**9,)), 'fortran_order': False, 'shape': (1, 1, 1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808, 0, 9223372036854775808)}",
        "{'descr': 'zz', 'fortran_order': False, 'shape': (1, 1, 1)}",
        "[1]",
        "\x00",
    ],
)
def test_headers_made_to_do_harm(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(npy_header(text) + bytes(48))
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")) as caught:
        layout.open_features(path)
    assert "\n" not in str(caught.value)


# safetensors


def saved(folder: Path) -> Path:
    models.create("scan", **SMALL_MODEL).save(folder)
    return folder / "model.safetensors"


def change_header(path: Path, change: Callable[[dict], None]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_a_weights_header_of_a_hundred_gigabytes(tmp_path: Path) -> None:
    path = saved(tmp_path)
    sparse(path, (10**11).to_bytes(8, "little") + b"{", 2 * 10**11)
    message = "its header claims 100,000,000,000 bytes, more than 1,048,576"
    refused(lambda: models.load(tmp_path), f"{path}: not a readable safetensors file ({message})")


def test_a_weight_of_more_values_than_the_file_holds(tmp_path: Path) -> None:
    path = saved(tmp_path)

    def enlarge(header: dict) -> None:
        start = header["image_encoder.fc.weight"]["data_offsets"][0]
        header["image_encoder.fc.weight"].update(shape=[10**15], data_offsets=[start, start + 4 * 10**15])

    change_header(path, enlarge)
    start = load_header(path)["image_encoder.fc.weight"]["data_offsets"][0]
    promised = 8 + int.from_bytes(path.read_bytes()[:8], "little") + start + 4 * 10**15
    refused(
        lambda: models.load(tmp_path),
        f"{path}: truncated: the header promises {promised:,} bytes, the file has {path.stat().st_size:,}",
    )


def load_header(path: Path) -> dict:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def test_a_shape_that_its_bytes_do_not_fill(tmp_path: Path) -> None:
    path = saved(tmp_path)
    change_header(path, lambda header: header["image_encoder.fc.weight"].update(shape=[10**15]))
    refused(
        lambda: models.load(tmp_path),
        f"{path}: image_encoder.fc.weight: expected shape (4, 6), got (1000000000000000,)",
    )
    # If the configuration agrees with the header, safetensors still compares the header with the bytes.
    change_header(path, lambda header: header["image_encoder.fc.weight"].update(shape=[4, 10**15]))
    change_config(tmp_path, feature_dim=10**15)
    with pytest.raises(ValueError, match=r"model.safetensors: not a readable safetensors file \(.*"):
        models.load(tmp_path)


def change_config(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "config": {**content["config"], **changes}}))


@pytest.mark.parametrize("damage", [lambda header: header.clear() or header.update(a=1), lambda h: h.update(a=[])])
def test_a_damaged_weights_header(tmp_path: Path, damage: Callable[[dict], None]) -> None:
    path = saved(tmp_path)
    change_header(path, damage)
    refused(lambda: models.load(tmp_path), f"{path}: not a readable safetensors file (its header is damaged)")


@pytest.mark.parametrize(("kept", "what"), [(4, "file"), (60, "header"), (-1, "weights")])
def test_truncated_weights(tmp_path: Path, kept: int, what: str) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    header = int.from_bytes(whole[:8], "little")
    message = {
        "file": "not a readable safetensors file (4 bytes)",
        "header": f"truncated: the header has {header:,} bytes, the file 60",
        "weights": f"truncated: the header promises {len(whole):,} bytes, the file has {len(whole) - 1:,}",
    }[what]
    refused(lambda: models.load(tmp_path), f"{path}: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Sixteen terabytes: allocating them would fail with another message, about too little memory.
        ({"feature_dim": 10**12}, "image_encoder.fc.weight: expected shape (4, 1000000000000), got (4, 6)"),
        ({"vocab_size": 10**12}, "text_encoder.embed.weight: expected shape (1000000000000, 5), got (9, 5)"),
    ],
)
def test_a_configuration_larger_than_its_weights_takes_no_memory(tmp_path: Path, changes: dict, message: str) -> None:
    path = saved(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}$"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10**18, "word_dim": 10**18}, "Storage size calculation overflowed"),
        ({"num_layers": 10**9}, "num_layers: expected a number at least 1 and at most 64, got 1000000000"),
        ({"vocab_size": 10**30}, "Overflow when unpacking long"),
    ],
)
def test_a_configuration_that_no_machine_can_hold(tmp_path: Path, changes: dict, message: str) -> None:
    saved(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / 'config.json'))}: ") as caught:
        models.load(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loading_gives_what_was_saved(tmp_path: Path) -> None:
    path = saved(tmp_path)
    stored = load_file(path)
    loaded = models.load(tmp_path).state_dict()
    assert loaded.keys() == stored.keys()
    assert all(bool((loaded[name] == stored[name]).all()) and loaded[name].device.type == "cpu" for name in stored)


# JSON


def test_json_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = sparse(tmp_path / "config.json", b"{", 3 * 10**9)
    refused(lambda: models.load(tmp_path), f"{path}: expected at most 262,144 bytes, the file has 3,000,000,000")
    path = sparse(tmp_path / "vocab.json", b"{", 3 * 10**9)
    refused(
        lambda: Vocabulary.from_file(path), f"{path}: expected at most 67,108,864 bytes, the file has 3,000,000,000"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "expected JSON: nested too deeply"),
        ('{"a":' * 100_000, "expected JSON: nested too deeply"),
        ("9" * 5000, "expected JSON: Exceeds the limit"),
        ("{", "expected JSON: Expecting property name"),
    ],
)
def test_json_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}"):
        read_json(path, 10**6)


# YAML


def bomb() -> str:
    """Return a YAML document of ten lines that expands to ten billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(), "aliases (*a0) are not supported"),
        ("seed: &a 3\nepochs: *a", "aliases (*a) are not supported"),
        ("seed: " + "[" * 10_000, "nested more than 20 deep"),
        ("seed: " + "{a: " * 10_000, "nested more than 20 deep"),
        ("\n".join(f"{' ' * n}a:" for n in range(400)), "nested more than 20 deep"),
        ("seed: " + "9" * 5000, "Exceeds the limit (4300"),  # The rest of the message depends on the Python version.
        ("seed: 2001-99-99", "month must be in 1..12"),
        ("seed: !!python/name:os.system", "could not determine a constructor"),
    ],
)
def test_yaml_that_is_not_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'{path}: expected YAML of plain values: {message}')}"
    ) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value)


def test_yaml_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = sparse(tmp_path / "c.yaml", b"seed: 1\n", 3 * 10**9)
    refused(lambda: read_yaml(path), f"{path}: expected at most 262,144 bytes, the file has 3,000,000,000")


def test_plain_yaml_is_read_as_always() -> None:
    values = {"a": [1, 2.5, True, None, "x"], "b": {"c": {"d": [[[1]]]}}, "e": "&no *alias"}
    assert parse_yaml(yaml.safe_dump(values)) == values
    assert [from_text(text) for text in ("3", "2.5", "true", "null", "a", "*a", "[" * 99)] == [
        3, 2.5, True, None, "a", "*a", "[" * 99,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"lr: {'1' * 400}", f"lr: expected a finite number, got {'1' * 60}... (400 characters)"),
        (f"lr: {'1' * 400}.5", "lr: expected a finite number, got inf"),
        ("lr: 1e400", "lr: expected a finite number, got inf"),
        (f"lr: 0x{'f' * 9000}", "lr: expected a finite number, got a number with too many digits"),
        (f"epochs: {'x' * 400}", f"epochs: expected a whole number, got '{'x' * 59}... (402 characters)"),
        (f"epochs: -0x{'f' * 9000}", "epochs: expected a number at least 1, got a number with too many digits"),
    ],
)
def test_numbers_that_no_float_holds(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{line}\n")
    assert error(capsys, "train", "--config", file, "--data", data, "--out", tmp_path / "run") == (1, message)
    assert not (tmp_path / "run").exists()


def test_a_small_split_is_still_opened(tmp_path: Path) -> None:
    write_split(tmp_path, "test", features_of(2), 10)
    np.testing.assert_array_equal(layout.open_features(tmp_path / "test_ims.npy"), features_of(2))


def test_a_device_is_refused_before_it_is_read() -> None:
    refused(lambda: read_yaml("/dev/zero"), "/dev/zero: expected a regular file, found a device")


def test_a_file_with_more_bytes_than_its_size_says_is_refused() -> None:
    """Files in /proc report a size of 0."""
    path = "/proc/self/status"
    refused(lambda: read_yaml(path), f"{path}: expected 0 bytes, as the size of the file says, found more")
