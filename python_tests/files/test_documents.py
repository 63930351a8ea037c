"""JSON and YAML documents that different parsers read differently are rejected; the message names the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from itm_fast import models
from itm_fast.data import Vocabulary
from itm_fast.files.documents import json_text, parse_json, parse_yaml
from itm_fast.training.config import TrainConfig, read_yaml, to_yaml
from itm_fast.training.metrics_log import read_metrics


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nepochs: 2\nseed: 3\n", "line 3: the key 'seed' occurs twice in one mapping"),
        ("model_options: {embed_dim: 1, embed_dim: 2}\n", "line 1: the key 'embed_dim' occurs twice in one mapping"),
        ("seed: 1\n'seed': 2\n", "line 2: the key 'seed' occurs twice in one mapping"),
        ("1: a\n0x1: b\n", "line 2: the key 1 occurs twice in one mapping"),
        ('data: "\\uD800"\n', "expected Unicode characters, found the lone surrogate '\\ud800'"),
        ('"\\uDBFF": 1\n', "expected Unicode characters, found the lone surrogate '\\udbff'"),
    ],
)
def test_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: expected YAML of plain values: {message}')}$"):
        read_yaml(path)


DOUBLED = '{"word2idx": {"<pad>": 0, "a": 1, "a": 2}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DOUBLED, "the key 'a' occurs twice in one object"),
        ('{"word2idx": {"\\ud800": 0}}', "expected Unicode characters, found the lone surrogate '\\ud800'"),
        ('{"word2idx": {"a": "\\udcff"}}', "expected Unicode characters, found the lone surrogate '\\udcff'"),
    ],
)
def test_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: expected a vocabulary as UTF-8 JSON: {message}')}$"):
        Vocabulary.from_file(path)


def test_a_log_with_a_repeated_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 1, "loss": 2, "loss": 3}\n')
    message = f"{path}: line 2: expected JSON: the key 'loss' occurs twice in one object"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_metrics(path)


def test_a_weights_header_with_a_repeated_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    models.create("scan", vocab_size=9, feature_dim=6, embed_dim=4, word_dim=5).save(tmp_path)
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = f"{{{entry},{entry}}}".encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ValueError, match=f"^{path}: not a readable safetensors file \\(its header is damaged\\)$"):
        models.load(tmp_path)


def test_many_keys_take_no_quadratic_time() -> None:
    pairs = ", ".join(f'"{number}": 0' for number in range(300_000))
    with pytest.raises(ValueError, match=r"^the key '7' occurs twice in one object$"):
        parse_json(f'{{{pairs}, "7": 1}}')


def test_documents_without_repeated_keys_are_read_as_always() -> None:
    values = {"a": {"x": 1}, "b": {"x": 2}, "c": [{"x": 1}, {"x": 2}], "d": "\U0001f600é"}
    assert parse_yaml(yaml.safe_dump(values)) == values
    assert parse_json('{"a": {"x": "\\ud83d\\ude00"}, "b": {"x": 2}}') == {"a": {"x": "\U0001f600"}, "b": {"x": 2}}


def test_numbers_that_are_not_finite_become_null() -> None:
    text = json_text({"spearman": float("nan"), "intervals": {"rsum": (1.5, float("inf"))}, "n": 3})
    assert parse_json(text) == {"spearman": None, "intervals": {"rsum": [1.5, None]}, "n": 3}


def test_paths_that_are_not_utf8_survive_a_settings_file(tmp_path: Path) -> None:
    config = TrainConfig(data="data\udcff", out="run\udc80")
    (tmp_path / "train.yaml").write_text(to_yaml(config))
    values = read_yaml(tmp_path / "train.yaml")
    assert (values["data"], values["out"]) == ("data\udcff", "run\udc80")
