"""Optional files that exist but cannot be read are errors that name the file, never treated as absent."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from itm_fast import cli
from itm_fast.data import Vocabulary, emoji, find_vocabulary, load_vocabulary, open_split, pack
from itm_fast.data.check import Problem, check_folder
from itm_fast.files import regular
from itm_fast.models.bert_folder import bert_vocabulary_file
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.precomputed import VOCABULARY, features_of, write_split

DANGLING = "a symbolic link to a missing file; repair or remove it"
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "dangling link": (lambda path: path.symlink_to("nowhere"), DANGLING),
    "looping link": (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
    "folder": (Path.mkdir, "expected a regular file, found a folder"),
    "named pipe": (os.mkfifo, "expected a regular file, found a named pipe"),
}


@pytest.fixture(params=list(KINDS))
def unreadable(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """Put something unreadable in the place of a file and return the message about it."""

    def create(path: Path) -> str:
        path.unlink(missing_ok=True)
        make, message = KINDS[request.param]
        make(path)
        return message

    return create


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write_split(folder, "train", features_of(4), 20)
    VOCABULARY.save(folder / "vocab.json")
    return folder


def refused(path: Path, message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {re.escape(message)}$"):
        call()


def test_a_file_is_absent_only_if_nothing_has_its_name(tmp_path: Path, unreadable: Callable[[Path], str]) -> None:
    file = tmp_path / "file"
    assert not regular.is_present(file)
    refused(file, unreadable(file), lambda: regular.is_present(file))
    (tmp_path / "content").write_text("content")
    link = tmp_path / "link"
    link.symlink_to("content")
    assert regular.is_present(link)
    assert not regular.is_present(tmp_path / "content" / "below")
    (tmp_path / "inside").symlink_to("content/below")
    refused(tmp_path / "inside", DANGLING, lambda: regular.is_present(tmp_path / "inside"))


@pytest.mark.parametrize("suffix", ["cap2im.txt", "regions.txt", "ids.txt", "boxes.npy", "caps.txt", "ims.npy"])
def test_an_unreadable_file_of_a_split_is_an_error(
    data: Path, tmp_path: Path, suffix: str, unreadable: Callable[[Path], str]
) -> None:
    path = data / f"train_{suffix}"
    message = unreadable(path)
    refused(path, message, lambda: open_split(data, "train", VOCABULARY))
    refused(path, message, lambda: pack(data, tmp_path / "store"))
    assert not (tmp_path / "store").exists()
    assert [one for one in check_folder(data).problems if one.file == path.name] == [Problem(path.name, message)]
    assert len(check_folder(data).problems) == 1


def test_an_unreadable_vocabulary_is_an_error(data: Path, tmp_path: Path, unreadable: Callable[[Path], str]) -> None:
    path = data / "vocab.json"
    message = unreadable(path)
    refused(path, message, lambda: load_vocabulary(data))
    refused(path, message, lambda: pack(data, tmp_path / "store"))
    assert check_folder(data).problems == [Problem("", f"{path}: {message}")]


def test_an_unreadable_vocabulary_beside_the_data_is_an_error(data: Path, unreadable: Callable[[Path], str]) -> None:
    (data / "vocab.json").unlink()
    path = data.parent / "vocab" / "data_vocab.json"
    path.parent.mkdir()
    message = unreadable(path)
    refused(path, message, lambda: find_vocabulary(data))
    path.rename(path.with_name("other"))
    assert find_vocabulary(data) is None


def test_unreadable_captions_build_no_vocabulary(data: Path, unreadable: Callable[[Path], str]) -> None:
    (data / "vocab.json").unlink()
    path = data / "train_caps.txt"
    refused(path, unreadable(path), lambda: load_vocabulary(data))


@pytest.mark.parametrize("name", ["store.json", "unfinished.json"])
def test_a_folder_with_an_unreadable_manifest_is_not_read_as_data(
    data: Path, name: str, unreadable: Callable[[Path], str]
) -> None:
    message = unreadable(data / name)
    refused(data / name, message, lambda: open_split(data, "train", VOCABULARY))


def test_unreadable_files_of_a_bert_folder_are_errors(tmp_path: Path, unreadable: Callable[[Path], str]) -> None:
    text, settings = tmp_path / "vocab.txt", tmp_path / "tokenizer_config.json"
    text.write_text("[PAD]\n[CLS]\n[SEP]\n[UNK]\n[MASK]\na\n")
    message = unreadable(settings)
    refused(settings, message, lambda: Vocabulary.from_file(text))
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(text, unreadable(text), lambda: bert_vocabulary_file(tmp_path))


def test_the_bundled_data_are_not_written_beside_an_unreadable_file(
    tmp_path: Path, unreadable: Callable[[Path], str]
) -> None:
    path = tmp_path / "dev_cap2im.txt"
    refused(path, unreadable(path), lambda: emoji.write_dataset(tmp_path))


def test_training_stops_at_an_unreadable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_concepts(tmp_path / "data")
    path = data / "train_cap2im.txt"
    path.symlink_to("nowhere")
    command = ["train", "--data", data, "--out", tmp_path / "run", *SMALL]
    assert error(capsys, *command) == (1, f"{path}: {DANGLING}")
    assert cli.run(["data", "check", str(data)]) == 1
    assert "train_cap2im.txt" in capsys.readouterr().out
