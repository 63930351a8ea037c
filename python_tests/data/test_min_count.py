"""The minimum count of words in a vocabulary that a run builds."""

from __future__ import annotations

import re
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest

from itm_fast import cli
from itm_fast.data import Vocabulary, pack
from itm_fast.training.config import read_yaml
from python_tests.helpers.commands import SMALL, error, train_small


@pytest.fixture
def rare(data: Path, tmp_path: Path) -> Path:
    """The data set of concepts with rare words: "owl" once, "elk" twice, "ant" four times."""
    folder = shutil.copytree(data, tmp_path / "rare")
    captions = (folder / "train_caps.txt").read_text().splitlines()
    captions[:3] = ["owl elk ant ant", "elk ant", "ant"]
    (folder / "train_caps.txt").write_text("\n".join(captions) + "\n")
    return folder


@pytest.mark.parametrize("min_count", [None, 1, 2, 3, 40])
def test_min_count_selects_the_words(rare: Path, tmp_path: Path, min_count: int | None) -> None:
    more = [] if min_count is None else ["--min-count", str(min_count)]
    run = train_small(rare, tmp_path / "run", *more)
    counts = Counter((rare / "train_caps.txt").read_text().split())
    expected = {word for word, count in counts.items() if count >= (min_count or 4)}
    words = Vocabulary.from_file(run / "vocab.json").words
    assert set(words) - {"<pad>", "<start>", "<end>", "<unk>", "<mask>"} == expected
    assert read_yaml(run / "train.yaml")["min_count"] == (min_count or 4)


def test_min_count_can_be_read_from_a_file_and_is_kept_on_resume(rare: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("min_count: 2\n")
    run = train_small(rare, tmp_path / "run", "--config", str(file))
    before = (run / "vocab.json").read_bytes()
    assert "elk" in Vocabulary.from_file(run / "vocab.json")
    assert "owl" not in Vocabulary.from_file(run / "vocab.json")
    assert cli.run(["train", "--out", str(run), "--resume", "--epochs", "2"]) == 0
    assert (run / "vocab.json").read_bytes() == before


@pytest.mark.parametrize("command", ["train", "pack"])
def test_a_vocabulary_without_many_words_causes_a_warning(data: Path, tmp_path: Path, command: str) -> None:
    """Every seventh word of this small data set is rare."""
    folder = shutil.copytree(data, tmp_path / "small")
    captions = [f"red ball dog tree car cup rare{line}" for line in range(120)]
    (folder / "train_caps.txt").write_text("\n".join(captions) + "\n")
    message = (
        f"{folder}: the vocabulary leaves out 14% of the words in the captions of train, as each occurs fewer than "
        "--min-count 4 times; a lower --min-count keeps more"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        train_small(folder, tmp_path / "run") if command == "train" else pack(folder, tmp_path / "store")
    # If most words are rare, that is the only warning.
    for split in ("train", "dev"):
        n_captions = len((folder / f"{split}_caps.txt").read_text().splitlines())
        captions = "".join(f"red rare{line} other{line}\n" for line in range(n_captions))
        (folder / f"{split}_caps.txt").write_text(captions)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_small(folder, tmp_path / "most") if command == "train" else pack(folder, tmp_path / "most")
    assert [str(one.message) for one in caught if "vocabulary" in str(one.message)] == [message.replace("14%", "67%")]
    Vocabulary.build(["red ball"], 1).save(folder / "vocab.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack(folder, tmp_path / "other")


def test_min_count_is_refused_with_an_existing_vocabulary(
    rare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = rare / "vocab.json"
    Vocabulary.build(["red ball"], 1).save(own)
    command = ["train", "--data", rare, "--out", tmp_path / "run", *SMALL]
    assert error(capsys, *command, "--min-count", "2") == (
        1,
        f"min_count: 2 is for a vocabulary that is built from the training captions, but {own} contains one already",
    )
    given = tmp_path / "given.json"
    Vocabulary.build(["red ball"], 1).save(given)
    packing = ["data", "pack", "--data", rare, "--out", tmp_path / "store", "--min-count", "2"]
    importing = ["data", "import", "--images", rare, "--captions", rare / "c.csv", "--out", tmp_path / "store",
                 "--min-count", "2", "--vocab", given]  # fmt: skip
    for arguments, path in ((packing, own), ([*packing, "--vocab", given], given), (importing, given)):
        status, message = error(capsys, *arguments)
        assert (status, message.endswith(f"the training captions, but {path} contains one already")) == (1, True)
    assert error(capsys, *command, "--min-count", "0") == (1, "min_count: expected a number at least 1, got 0")
    assert not (tmp_path / "run").exists()
