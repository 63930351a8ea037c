"""File contents in messages are shortened, however large or deeply nested they are."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from itm_fast import cli, compat, models
from itm_fast.data import Vocabulary
from itm_fast.files.documents import parse_yaml
from itm_fast.files.formats import Format
from itm_fast.files.messages import shortened, shown
from itm_fast.models.weights_file import read_shapes
from itm_fast.training.checkpoint import load_state, save_state
from python_tests.helpers.commands import error
from python_tests.helpers.official_scan import FORMS, options, random_model, write_checkpoint, write_vocabulary


@pytest.fixture
def frugal() -> Iterator[None]:
    """Check that the test takes little processor time and memory; writing out a whole value would take more."""
    tracemalloc.start()
    start = time.process_time()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 2**20
    assert time.process_time() - start < 10


def tangle(depth: int, kind: type = list) -> object:
    """Return `depth` nested containers that each repeat the previous one ten times: small, but endless when written
    out.
    """
    value: object = kind([1])
    for _ in range(depth):
        value = kind([value] * 10)
    return value


def shortened_id(value: object) -> str | None:
    """Return a test id for all values except strings: pytest cannot write out the largest values."""
    return None if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (3, "3"),
        (-2.5, "-2.5"),
        (None, "None"),
        (True, "True"),
        (float("nan"), "nan"),
        ([1, "a", (2,)], "[1, 'a', (2,)]"),
        ([1, 2, 3, 4, 5], "[1, 2, 3, 4, ...]"),
        ({"b": 1, "a": [2]}, "{'b': 1, 'a': [2]}"),
        (dict.fromkeys(range(5), 0), "{0: 0, 1: 0, 2: 0, 3: 0, ...}"),
        ({}, "{}"),
        ([[[[1]]]], "[[[[...]]]]"),
        ([[[{1: 2}]]], "[[[{...}]]]"),
        ({(1, 2)}, "<set>"),
        (torch.zeros(3), "<Tensor>"),
        (argparse.Namespace(a=1), "<Namespace>"),
        ("x" * 99, f"'{'x' * 59}... (101 characters)"),
        (10**400, f"1{'0' * 59}... (401 characters)"),
        (10**5000, "a number with too many digits"),
    ],
    ids=shortened_id,
)
def test_values(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.usefixtures("frugal")
def test_endless_values() -> None:
    looped: list[object] = []
    looped.append(looped)
    for value in (tangle(40), tangle(40, tuple), {"a": tangle(40)}, argparse.Namespace(a=tangle(40)), looped):
        assert len(shown(value)) < 90
    nested: list[object] = []
    for _ in range(10 * sys.getrecursionlimit()):
        nested = [nested]
    assert shown(nested) == "[[[[...]]]]"


def test_texts() -> None:
    assert shortened("x" * 100) == "x" * 100
    assert shortened("x" * 101) == f"{'x' * 60}... (101 characters)"
    assert shortened("abcdefghijk", 10) == "abcdef... (11 characters)"


@pytest.mark.usefixtures("frugal")
@pytest.mark.parametrize("name", ["img_dim", "cross_attn", "lambda_lse"])
def test_an_option_that_is_endless(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), options(**{name: tangle(40)}))
    vocabulary = write_vocabulary(tmp_path / "vocab.json")
    with pytest.raises(ValueError, match=rf"^{path}: opt\.{name}: expected .*, got \[\[\[\[\.\.\.\], .* characters\)$"):
        compat.convert("scan", path, vocabulary, tmp_path / "run")


@pytest.mark.usefixtures("frugal")
@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("place", ["model", "opt"])
def test_a_key_whose_hash_is_endless(tmp_path: Path, form: str, place: str) -> None:
    """Hashing the key would take minutes to years and could not be interrupted, so the file is rejected before."""
    vocabulary, message = write_vocabulary(tmp_path / "vocab.json"), "holds nested tuples that are far larger than"
    model, key = random_model(options()), _Key(tangle(9, tuple))
    model, opt = ([model[0], key], options()) if place == "model" else (model, key)
    path = write_checkpoint(tmp_path / "c.pth.tar", model, opt, form)
    assert path.stat().st_size < 20_000
    with pytest.raises(ValueError, match=rf"^{path}: not a readable checkpoint: {message}"):
        compat.convert("scan", path, vocabulary, tmp_path / "run")


class _Key:
    """An object that unpickles to a dictionary with the key `value`. Pickling it does not hash the key."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, (), None, None, iter([(self.value, 1)])


@pytest.mark.usefixtures("frugal")
def test_names_that_are_no_strings(tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocab.json")
    model, shown_key = random_model(options()), r"\(\(\(\(1,\),"
    broken = [OrderedDict({tangle(3, tuple): torch.zeros(1)}), model[1]]
    path = write_checkpoint(tmp_path / "c.pth.tar", broken, options())
    with pytest.raises(ValueError, match=rf"^{path}: model\[0\]: expected names as strings, got \(\(\("):
        compat.convert("scan", path, vocabulary, tmp_path / "run")
    write_checkpoint(path, model, {**vars(options()), tangle(2, tuple): 1})
    with pytest.raises(ValueError, match=rf"^{path}: opt: expected names as strings, got {shown_key[2:]}"):
        compat.convert("scan", path, vocabulary, tmp_path / "run")


@pytest.mark.usefixtures("frugal")
def test_long_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, vocabulary = "n" * 500_000, write_vocabulary(tmp_path / "vocab.json")
    path, cut = tmp_path / "c.pth.tar", f"{'n' * 60}... (500000 characters)"
    command = ("convert", path, "--source", "scan", "--vocab", vocabulary, "--out", tmp_path / "run")
    write_checkpoint(path, random_model(options()), options(**{name: 1}))
    with pytest.warns(UserWarning, match=rf"^{path}: opt\.{re.escape(cut)}: unknown option, ignored .{{1,250}}$"):
        assert cli.run(list(map(str, command))) == 0
    model = random_model(options())
    model[0][name] = torch.zeros(1)
    write_checkpoint(path, model, options())
    assert error(capsys, *command) == (
        1, f"{path}: model[0]['{'n' * 59}... (500002 characters)]: this weight is unknown to scan",
    )  # fmt: skip


@pytest.mark.usefixtures("frugal")
def test_long_words_and_endless_ids_of_a_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    long, cut = "w" * 500_000, f"'{'w' * 59}... (500002 characters)"
    for word, index, message in (
        (long, 0.5, f"expected an integer id for the word {cut}, got 0.5"),
        ("a", long, f"expected an integer id for the word 'a', got {cut}"),
    ):
        path.write_text(json.dumps({"word2idx": {word: index}}))
        with pytest.raises(ValueError, match=r".") as caught:
            Vocabulary.from_file(path)
        assert str(caught.value).endswith(message)
        assert len(str(caught.value)) < 400
    path.write_text(f'{{"word2idx": {{"a": {"[" * 900}{"]" * 900}}}}}')
    with pytest.raises(ValueError, match=r"expected an integer id for the word 'a', got \[\[\[\[\.\.\.\]\]\]\]$"):
        Vocabulary.from_file(path)


def test_long_names_and_shapes_of_weights(tmp_path: Path) -> None:
    """The header of a weights file may hold names and shapes of any length."""
    models.create("scan", vocab_size=9, feature_dim=6, embed_dim=4, word_dim=5).save(tmp_path)
    path = tmp_path / "model.safetensors"
    shapes = read_shapes(path)
    for change, message in (
        ({"n" * 100_000: [1]}, f"the weight {'n' * 60}... (100000 characters) is unknown to the model"),
        (
            {"image_encoder.fc.bias": [1] * 100_000},
            "image_encoder.fc.bias: expected shape (4,), got (1, 1, 1, 1, ...)",
        ),
    ):
        header = {
            name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}
            for name, shape in {**shapes, **change}.items()
        }
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ValueError, match=rf"^{re.escape(f'{path}: {message}')}$"):
            models.load(tmp_path)


def test_long_yaml() -> None:
    with pytest.raises(ValueError, match=r"^aliases \(\*x{200,400}\.\.\. \(\d+ characters\)$"):
        parse_yaml(f"a: *{'x' * 9000}")


@pytest.mark.usefixtures("frugal")
@pytest.mark.parametrize("key", ["format_version", "best"])
def test_a_training_state_that_is_endless(tmp_path: Path, key: str) -> None:
    save_state(tmp_path, {key: tangle(40)})
    with pytest.raises(ValueError, match=r"checkpoint\.pt: .*\[\[\[\[\.\.\.\], .* characters\)$"):
        load_state(tmp_path, ["best"])


def test_versions_are_shown_in_short() -> None:
    with pytest.raises(ValueError, match=r"^f: format_version 1000.*\.\.\. \(401 characters\) is newer than 1, the"):
        Format().upgrade({"format_version": 10**400}, "f")


def test_numbers_of_a_checkpoint_that_cannot_be_written_out(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), options())
    content = torch.load(path, weights_only=False)
    torch.save({**content, "epoch": 10**400, "best_rsum": 10**400}, path)
    official = compat.convert("scan", path, write_vocabulary(tmp_path / "vocab.json"), tmp_path / "run")
    assert (official.epoch, official.best_rsum) == (None, None)
