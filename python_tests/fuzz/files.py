"""Mutated files: a command succeeds or prints one error line, in bounded time and memory, and writes nowhere else.

A case copies a small data folder, a feature store and a run, changes one file, and runs a command in a child process.
Inside: `make_base`, `run_case`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from python_tests.helpers import official_scan
from python_tests.helpers.concepts import write_concepts

SECONDS, MORE_BYTES = 60, 4 * 2**30
SMALL = ["--model-option", "embed_dim=16", "--model-option", "word_dim=12", "--batch-size", "32"]
REPLACED = ("link", "dangling link", "loop", "pipe", "folder", "missing", "unreadable")
CONTENTS = ("bits", "head bits", "cut", "grown", "chunk", "empty", "numbers", "words", "lines")

_NUMBERS = (b"-1", b"0", b"99999999999999999999", b"1e999", b"nan", b"null", b'"x"', b"[[[[1]]]]")
_WORDS = (b"", b"\0", b"\xff\xfe", b"true", b"..", b"$(x)", b"{" * 500, "\u202e\U0001f600".encode())

# The attacked files, and the commands that read them.
DATA = [f"data/{split}_{part}" for split in ("train", "dev", "test") for part in ("ims.npy", "caps.txt")]
OPTIONAL = [f"data/{split}_{part}" for split in ("train", "test") for part in ("cap2im.txt", "regions.txt", "ids.txt")]
ON_DATA = ("check", "pack", "train", "evaluate")
ON_STORE = ("check store", "evaluate store")
ON_RUN = ("resume", "evaluate", "curves")
OFFICIAL, WORDS = "official.pth.tar", "words.json"
RUN = ["run/config.json", "run/model.safetensors", "run/vocab.json", "run/train.yaml", "run/metrics.jsonl"]


def commands(base: Path) -> dict[str, list[str]]:
    data, store, run, new = (str(base / name) for name in ("data", "store", "run", "new"))
    on_test = ["--split", "test", "--json", str(base / "result.json")]
    return {
        "check": ["data", "check", data],
        "pack": ["data", "pack", "--data", data, "--out", new],
        "train": ["train", "--data", data, "--out", new, "--epochs", "1", *SMALL],
        "evaluate": ["evaluate", "--checkpoint", run, "--data", data, *on_test],
        "check store": ["data", "check", store],
        "evaluate store": ["evaluate", "--checkpoint", run, "--data", store, *on_test],
        "resume": ["train", "--resume", "--out", run, "--data", data, "--epochs", "2"],
        "curves": ["curves", run, "--out", str(base / "new.svg")],
        "convert": ["convert", str(base / OFFICIAL), "--source", "scan", "--vocab", str(base / WORDS), "--out", new],
    }


def make_base(folder: Path) -> Path:
    """Write a data folder, a store of it, a run of one epoch, an official checkpoint, and the expected results."""
    write_concepts(folder / "data")
    settings = official_scan.options()
    official_scan.write_checkpoint(folder / OFFICIAL, official_scan.random_model(settings), settings)
    official_scan.write_vocabulary(folder / WORDS)
    for split, images in (("train", 24), ("test", 10)):
        captions = 5 * images
        (folder / "data" / f"{split}_cap2im.txt").write_text("".join(f"{i // 5}\n" for i in range(captions)))
        (folder / "data" / f"{split}_regions.txt").write_text("4\n" * images)
        (folder / "data" / f"{split}_ids.txt").write_text("".join(f"{i}.jpg\n" for i in range(images)))
    for name in ("pack", "train"):
        status, said = _in_child(commands(folder)[name])
        assert status == 0, said
        (folder / "new").rename(folder / {"pack": "store", "train": "run"}[name])
    expected = {}
    for name in ("evaluate store", "resume"):
        copy = Path(shutil.copytree(folder, folder.parent / "expected"))
        status, said = _in_child(commands(copy)[name])
        assert status == 0, said
        expected[name] = _outcome(copy, name)
        shutil.rmtree(copy)
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder


def run_case(seed: int, number: int, base: Path, folder: Path) -> str:
    """Run a case in `folder` and remove the folder; raise AssertionError with the description if the case fails."""
    random = Random(f"{seed} files {number}")
    copy = Path(shutil.copytree(base, folder / "base", symlinks=True))
    outside = folder / "outside"
    outside.mkdir()
    store = [f"store/{path.relative_to(base / 'store')}" for path in sorted((base / "store").rglob("*.*s*n*"))]
    targets = [
        (random.choice(DATA), ON_DATA),
        (random.choice(OPTIONAL), ON_DATA),
        (random.choice(store), ON_STORE),
        (random.choice(RUN), ON_RUN),
        ("run/last/checkpoint.pt", ("resume",)),
        (random.choice([OFFICIAL, WORDS]), ("convert",)),
    ]
    name, known = random.choice(targets)
    command = random.choice(known)
    original = (copy / name).read_bytes() if (copy / name).exists() else b""
    how = _mutate(random, copy / name, outside)
    description = f"{how} in {name}, then {command}"
    before = _digests(outside)
    try:
        status, said = _in_child(commands(copy)[command])
        if not (command.startswith("check") and (status, said) == (1, "")):  # Problems are printed on stdout.
            _judge(status, said)
        assert _digests(outside) == before, "a file outside was changed"
        expected = json.loads((base / "expected.json").read_text())
        # Digests and checksums protect these files: if a command accepts one, the result must be unchanged. Only
        # `data check` computes the digests of shards, which may have hundreds of gigabytes.
        exact = name.endswith((".json", "index.safetensors")) or name == "run/last/checkpoint.pt"
        if command == "check store" and how in CONTENTS and (copy / name).read_bytes() != original:
            assert status == 1, "the check found nothing"
        if status == 0 and exact and command in expected:
            assert _outcome(copy, command) == expected[command], "accepted, with another result"
    except AssertionError as error:
        raise AssertionError(f"{description}: {error}") from None
    finally:
        shutil.rmtree(folder)
    return description


def _outcome(base: Path, command: str) -> str:
    if command == "resume":
        return hashlib.sha256((base / "run" / "model.safetensors").read_bytes()).hexdigest()
    found = json.loads((base / "result.json").read_text())
    return json.dumps({name: value for name, value in _flat(found) if re.search(r"r(1|5|10)$|rsum|medr|meanr", name)})


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, value)]
    return [pair for key, part in value.items() for pair in _flat(part, f"{name}.{key}")]


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _mutate(random: Random, path: Path, outside: Path) -> str:
    how = random.choice([*REPLACED, *CONTENTS * 3])
    content = path.read_bytes() if path.exists() else b""
    if how == "unreadable" and content:
        path.chmod(0)  # No effect for root.
        return how
    if how in REPLACED:
        path.unlink(missing_ok=True)
        if how == "link":
            (outside / path.name).write_bytes(content)
            path.symlink_to(outside / path.name)
        elif how == "dangling link":
            path.symlink_to(outside / "new")
        elif how == "loop":
            path.symlink_to(path)
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "folder":
            path.mkdir()
        return how
    path.write_bytes(_changed(random, how, content))
    return how


def _changed(random: Random, how: str, content: bytes) -> bytes:
    data = bytearray(content)
    if how in ("bits", "head bits") and data:
        end = min(len(data), 300) if how == "head bits" else len(data)
        for _ in range(random.choice([1, 1, 2, 8])):
            data[random.randrange(end)] ^= 1 << random.randrange(8)
    elif how == "cut":
        del data[random.randrange(len(data) + 1) :]
    elif how == "grown":
        data += random.choice([b"\0", b"\n\n", b"1\n", data[: random.randrange(len(data) + 1)], random.randbytes(50)])
    elif how == "chunk" and data:
        start, size = random.randrange(len(data)), random.choice([1, 4, 16, 100])
        data[start : start + size] = random.choice([b"", bytes(size), random.randbytes(size), data[:size]])
    elif how == "empty":
        data.clear()
    elif how == "numbers":
        data = bytearray(_replace_one(random, rb"-?\d+(?:\.\d+)?", random.choice(_NUMBERS), bytes(data)))
    elif how == "words":
        data = bytearray(_replace_one(random, rb"[A-Za-z_]+", random.choice(_WORDS), bytes(data)))
    elif how == "lines":
        lines = bytes(data).splitlines(keepends=True)
        random.shuffle(lines)
        data = bytearray(b"".join(lines[: random.choice([len(lines), max(len(lines) - 1, 0)])]))
    return bytes(data)


def _replace_one(random: Random, pattern: bytes, new: bytes, content: bytes) -> bytes:
    found = list(re.finditer(pattern, content[:100_000]))
    if not found:
        return content + new
    place = random.choice(found)
    return content[: place.start()] + new + content[place.end() :]


def _in_child(arguments: list[str]) -> tuple[int | None, str]:
    """Return the exit status of a command (negative for a signal, None if it hangs) and its standard error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "itm_fast.cli", "itm_fast.training", "itm_fast.report.comparison"])
    with tempfile.NamedTemporaryFile("r", errors="replace") as said:
        child = context.Process(target=_run, args=(arguments, said.name))
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            return None, said.read()
        return child.exitcode, said.read()


def _run(arguments: list[str], log: str) -> None:
    from itm_fast import cli

    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 2)
    with Path(os.devnull).open("r+") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30,) * 2)
    import torch

    torch.set_num_threads(1)
    cli.main(arguments)


def _judge(status: int | None, said: str) -> None:
    assert status is not None, f"hangs for {SECONDS} s: {said[-500:]}"
    assert status >= 0, f"ended by signal {-status}: {said[-500:]}"
    assert status in (0, 1, 2), f"exit status {status}: {said[-1500:]}"
    if status == 0:
        assert "Traceback" not in said, said[-1500:]
        return
    errors = [line for line in said.splitlines() if not line.startswith("itm-fast: warning: ")]
    assert len(errors) == 1, said[-1500:]
    assert errors[0].startswith("itm-fast: error: "), said[-1500:]
    assert len(errors[0]) < 2000, f"an error line of {len(errors[0])} characters"
    assert "not enough memory" not in errors[0], "asks for more memory than the files can need"
