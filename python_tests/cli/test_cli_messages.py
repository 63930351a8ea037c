"""Messages about unsuitable files, folders and numbers, and messages at the start of a run."""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import cli
from itm_fast.data import Vocabulary
from itm_fast.evaluation import scoring
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.terminal import every_step


def test_train_says_what_it_works_on(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert cli.run(["train", "--data", str(data), "--out", str(out), "--validation-images", "4", *SMALL]) == 0
    words = len(Vocabulary.from_file(out / "vocab.json"))
    opening = [
        f"data: {data}: train 24 images, 120 captions; dev 4 images, 20 captions",
        "features: disk (0.00 GiB, which the system caches; training runs on the CPU)",
        f"vocabulary: built from the training captions, {words} words",
        f"device: cpu, threads: {torch.get_num_threads()}, precision: float32",
        "epochs: 1, steps per epoch: 4",
    ]
    assert capsys.readouterr().out.splitlines()[:5] == opening
    assert cli.run(["train", "--out", str(out), "--resume", "--epochs", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[2:5] == [
        f"vocabulary: {out / 'vocab.json'}, {words} words", opening[3], "epochs: 2, steps per epoch: 4",
    ]  # fmt: skip


def test_validation_shows_its_progress_on_a_terminal(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", "--data", str(data), "--out", str(tmp_path / "file"), *SMALL]) == 0
    assert "tile" not in capsys.readouterr().err
    terminal = every_step(monkeypatch, scoring)
    assert cli.run(["train", "--data", str(data), "--out", str(tmp_path / "terminal"), *SMALL]) == 0
    # Ten images and fifty captions: one tile of each, and one tile of scores.
    assert re.search(r"dev: 100%[^\r]* 3/3 ", terminal.getvalue())


def test_evaluate_needs_features_of_the_width_of_the_model(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = write_concepts(tmp_path / "wide", width=9)
    assert error(capsys, "evaluate", "--checkpoint", trained, "--data", wide) == (
        1,
        f"{wide / 'test_ims.npy'}: regions have 9 channels, but the model in {trained} needs 8",
    )


def test_truncated_features_are_called_so(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = write_concepts(tmp_path / "broken")
    features = broken / "train_ims.npy"
    features.write_bytes(features.read_bytes()[:1000])
    # 128 bytes of header and 24 x 4 x 8 four-byte numbers.
    assert np.load(data / "train_ims.npy").shape == (24, 4, 8)
    assert error(capsys, "train", "--data", broken, "--out", tmp_path / "run", *SMALL) == (
        1,
        f"{features}: truncated: the header promises 3200 bytes, the file has 1000",
    )


def test_a_json_target_is_looked_at_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"{tmp_path}: expected a file to write, found a folder"
    # The model is missing, too, so the message shows which check runs first.
    evaluate = ("evaluate", "--checkpoint", tmp_path / "no", "--data", tmp_path / "no", "--json", tmp_path)
    assert error(capsys, *evaluate) == (1, message)
    monkeypatch.setattr("itm_fast.benchmarking.run.run", lambda *_: pytest.fail("measured before the target was seen"))
    assert error(capsys, "bench", "--quick", "--json", tmp_path) == (1, message)


def test_files_for_folders_and_folders_for_files(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained / "model.safetensors"
    assert error(capsys, "evaluate", "--checkpoint", model, "--data", data) == (
        1,
        f"{model}: expected the folder of a saved model, found a file",
    )
    assert error(capsys, "train", "--config", tmp_path, "--data", data, "--out", tmp_path / "run") == (
        1,
        f"{tmp_path}: expected a YAML file, found a folder",
    )


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_seed_has_a_largest_value(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", tmp_path] if command == "train" else []
    for seed, text in ((2**64, "18446744073709551616"), (10**400, f"1{'0' * 59}... (401 characters)")):
        assert error(capsys, command, *given, "--out", tmp_path / "run", "--seed", seed) == (
            1,
            f"seed: expected a number at least 0 and at most 18446744073709551615, got {text}",
        )
    assert not (tmp_path / "run").exists()


def test_the_largest_seed_trains(data: Path, tmp_path: Path) -> None:
    assert cli.run(["train", "--data", str(data), "--out", str(tmp_path), "--seed", str(2**64 - 1), *SMALL]) == 0
    assert torch.initial_seed() == 2**64 - 1


def test_training_needs_no_streams(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    out = tmp_path / "run"
    arguments = ["train", "--data", str(data), "--out", str(out), "--epochs", "1", "--model-option", "embed_dim=8"]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert (out / "model.safetensors").is_file()


def test_a_file_in_the_place_of_a_folder_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    folder, out = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    vocab = tmp_path / "vocab.json"
    Vocabulary.build(["one two three"], 1).save(vocab)
    for arguments, message in (
        (["train", "--data", file, "--out", out], "expected a data directory, found a file"),
        (["data", "pack", "--data", file, "--out", out], "expected a data directory, found a file"),
        (["data", "check", file], "expected a data directory, found a file"),
        (["evaluate", "--checkpoint", file, "--data", folder], "expected the folder of a saved model, found a file"),
        (["curves", file], "expected a run directory, found a file"),
        (["realign", "--extractor", file, "--heads", folder, "--data", folder, "--out", out],
         "expected a run directory, found a file"),
    ):  # fmt: skip
        assert error(capsys, *arguments) == (1, f"{file}: {message}")
    assert error(capsys, "curves", out) == (1, f"{out}: no such run directory")
    arguments = ["convert", folder, "--source", "scan", "--vocab", vocab, "--out", out]
    assert error(capsys, *arguments) == (1, f"{folder}: expected a checkpoint file, found a folder")


def test_a_name_of_bert_is_no_folder(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = (
        "--bert needs a local folder of a BERT model, as nothing is downloaded: write one with save_pretrained of a "
        "BertModel and its tokenizer in transformers"
    )
    arguments = ["train", "--data", data, "--out", tmp_path / "run", "--bert"]
    message = f"bert-base-uncased: no such folder; {how}"
    assert error(capsys, *arguments, "bert-base-uncased") == (1, message)
    file = data / "train_caps.txt"
    assert error(capsys, *arguments, file) == (1, f"{file}: expected a folder, found a file; {how}")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["train", "--epochs", "1.5"], "'1.5'"),
        (["train", "--lr", "fast"], "'fast'"),
        (["evaluate", "--folds", "x", "--checkpoint", "a", "--data", "b"], "'x'"),
        (["data", "pack", "--data", "a", "--out", "b", "--dtype", "fp8"], "'fp8'"),
        (["data", "pack", "--data", "a", "--out", "b", "--min-count", "0"], "0"),
        (["bench", "--threads", "-3"], "-3"),
    ],
)
def test_a_value_of_a_wrong_type_is_shown(arguments: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = next(text for text in reversed(arguments) if text.startswith("--"))
    status, message = error(capsys, *arguments)
    assert status == 2
    assert value in message
    if arguments[0] == "train":
        assert f"'{option}'" in message


def test_words_that_a_vocabulary_of_small_data_leaves_out_are_counted(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    shutil.copytree(data, small)
    captions = (small / "train_caps.txt").read_text().splitlines()
    words = sum(len(caption.split()) for caption in captions)
    captions = [f"{caption} rare{number // 3}" for number, caption in enumerate(captions)]
    (small / "train_caps.txt").write_text("\n".join(captions) + "\n")
    share = len(captions) / (words + len(captions))
    assert 0.05 < share < 0.5
    message = (
        f"{small}: the vocabulary leaves out {share:.0%} of the words in the captions of train, as each occurs fewer "
        "than --min-count 4 times; a lower --min-count keeps more"
    )
    command = ["train", "--data", str(small), *SMALL]
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        assert cli.run([*command, "--out", str(tmp_path / "run")]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "10 images or fewer")
        assert cli.run([*command, "--out", str(tmp_path / "all"), "--min-count", "3"]) == 0
        vocab = str(tmp_path / "run" / "vocab.json")
        assert cli.run([*command, "--out", str(tmp_path / "given"), "--vocab", vocab]) == 0
