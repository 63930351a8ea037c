"""`data check` reads a whole folder and reports all problems at once."""

from __future__ import annotations

import json
import re
import tracemalloc
import warnings
from pathlib import Path

import attrs
import numpy as np
import pytest

from itm_fast import cli
from itm_fast.data import BertVocabulary, Vocabulary, check, check_split, emoji, open_split, pack
from itm_fast.data.check import Problem, check_folder
from itm_fast.training import TrainConfig
from itm_fast.training.run import load_data
from python_tests.helpers.bert import write_bert
from python_tests.helpers.commands import error
from python_tests.helpers.precomputed import SPECIAL, VOCABULARY, features_of, write_split
from python_tests.helpers.terminal import every_step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clean folder: train of 4 images, dev stored five times, test with a caption file of its own length."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_split(folder, "train", features_of(4), 20, ids=["a", "b", "c", "d"])
    write_split(folder, "dev", np.repeat(features_of(2) + 100, 5, axis=0), 10, ids=["e"] * 5 + ["f"] * 5)
    write_split(folder, "test", features_of(3) + 200, 4, cap2im=[0, 1, 1, 2], ids=["g", "h", "i"])
    VOCABULARY.save(folder / "vocab.json")
    return folder


def problems(folder: Path, **arguments: object) -> list[Problem]:
    return check_folder(folder, **arguments).problems


def edit_line(path: Path, number: int, content: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = content
    path.write_bytes(b"\n".join(lines))


# Folders without problems


def test_a_clean_folder_is_summarised(folder: Path) -> None:
    report = check_folder(folder)
    assert report.problems == []
    assert (report.vocabulary, report.vocabulary_size) == (str(folder / "vocab.json"), len(VOCABULARY))
    found = {one.split: one for one in report.splits}
    assert list(found) == ["dev", "test", "train"]
    sizes = {name: (one.images, one.captions, one.regions, one.channels, one.dtype) for name, one in found.items()}
    assert sizes == {
        "dev": (2, 10, 3, 4, "float32"),
        "test": (3, 4, 3, 4, "float32"),
        "train": (4, 20, 3, 4, "float32"),
    }
    assert [one.stored_five_times for one in report.splits] == [True, False, False]
    # Captions "Caption 0 .", "Caption 1 caption .", ...: 3, 4, 5 and 6 words in turn, all of them known.
    assert found["train"].words == {"min": 3, "median": 4.5, "mean": 4.5, "p95": 6, "max": 6}
    assert found["test"].words == {"min": 3, "median": 4.5, "mean": 4.5, "p95": 5.85, "max": 6}
    assert [one.unknown_share for one in report.splits] == [0, 0, 0]


def test_pieces_of_words_are_known_to_a_bert(data: Path, tmp_path: Path) -> None:
    """A BERT divides "boat" and "dog" into pieces; "fish" is unknown. The share is that of a training."""
    write_bert(tmp_path / "bert")
    vocabulary = BertVocabulary.from_file(tmp_path / "bert" / "vocab.txt")
    report = check_folder(data, vocabulary_file=tmp_path / "bert" / "vocab.txt")
    found = {one.split: one.unknown_share for one in report.splits}
    assert found["train"] == pytest.approx(open_split(data, "train", vocabulary).unknown_share)
    assert 0 < found["train"] < 0.5


def test_splits_may_be_padded_to_different_numbers_of_regions(folder: Path, tmp_path: Path) -> None:
    """With counts, features are padded to the longest set of their split; training takes them, too."""
    for suffix in ("caps.txt", "ids.txt", "ims.npy"):
        (folder / f"dev_{suffix}").unlink()
    write_split(folder, "dev", features_of(2)[:, :2] + 100, 10, ids=["e", "f"])
    assert "regions of 4 channels, but dev has 2 of 4" in str(problems(folder))
    (folder / "dev_regions.txt").write_text("2\n1\n")
    assert problems(folder) == []
    load_data(TrainConfig(data=str(folder), out=str(tmp_path / "run")))
    (folder / "dev_regions.txt").unlink()
    with pytest.raises(ValueError, match=r"images of .*\(3, 4\).* values in train, but of .*\(2, 4\).* in dev"):
        load_data(TrainConfig(data=str(folder), out=str(tmp_path / "run")))


def test_the_bundled_data_are_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captions and ids of the emoji, with pictures of one value each."""
    for split in emoji.SPLITS:
        n_images, first = len(emoji.image_ids(split)), {"train": 0, "dev": 3000, "test": 4000}[split]
        numbers = np.arange(first, first + n_images, dtype=np.float32)
        np.save(tmp_path / f"{split}_ims.npy", np.ones((n_images, 2, 3), np.float32) * numbers[:, None, None])
        (tmp_path / f"{split}_caps.txt").write_text("".join(f"{text}\n" for text in emoji.captions(split)))
        (tmp_path / f"{split}_ids.txt").write_text("".join(f"{name}\n" for name in emoji.image_ids(split)))
    emoji.vocabulary().save(tmp_path / "vocab.json")
    report = check_folder(tmp_path)
    assert report.problems == []
    assert {one.split: (one.images, one.captions) for one in report.splits} == {
        "dev": (300, 1500), "test": (500, 2500), "train": (2821, 14105),
    }  # fmt: skip
    shares = {one.split: one.unknown_share for one in report.splits}
    assert shares == {split: pytest.approx(emoji_unknown_share(split)) for split in emoji.SPLITS}
    assert 0 < shares["dev"] < 0.02


def emoji_unknown_share(split: str) -> float:
    vocabulary = emoji.vocabulary()
    ids = [index for caption in emoji.captions(split) for index in vocabulary.encode(caption)[1:-1]]
    return ids.count(vocabulary.unk) / len(ids)


def test_without_a_vocabulary_one_is_built_from_the_training_captions(folder: Path) -> None:
    (folder / "vocab.json").unlink()
    report = check_folder(folder)
    assert report.problems == []
    # "caption", "." four times each at least; the figures only twice.
    assert (report.vocabulary, report.vocabulary_size) == ("built from train_caps.txt", 7)
    assert report.splits[2].unknown_share == pytest.approx(20 / 90)
    assert check_folder(folder, ["test"]).splits[0].unknown_share is None


def test_images_of_test_may_be_in_testall(folder: Path) -> None:
    write_split(folder, "testall", features_of(4) + 200, 20, ids=["g", "h", "i", "j"])
    assert problems(folder) == []


def test_row_numbers_as_ids_are_ignored(folder: Path) -> None:
    for split, n_images in (("train", 4), ("test", 3)):
        (folder / f"{split}_ids.txt").write_text("".join(f"{row}\n" for row in range(n_images)))
    assert problems(folder) == []


# Problems


def test_long_ids_are_whole_in_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "train2014/COCO_train2014_000000391895.jpg"
    for split in ("train", "test"):
        edit_line(folder / f"{split}_ids.txt", 1, name.encode())
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["data", "check", str(folder)]) == 1
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert "".join(row[-2].strip() for row in rows).endswith(name)


def lines(*numbers: int) -> tuple[str, ...]:
    return tuple(f"line {number}" for number in numbers)


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    images = features_of(4)
    images[1, 2, 3], images[3, 0, 0] = np.nan, np.inf
    np.save(folder / "train_ims.npy", images)
    for number, content in ((2, b""), (3, b"  "), (5, b"a \xff"), (7, b"b'a man'"), (9, b"\xfe")):
        edit_line(folder / "train_caps.txt", number, content)
    (folder / "train_ids.txt").write_text("a\na\nc\nc\n")
    repeated = np.repeat(features_of(2) + 100, 5, axis=0)
    repeated[7] += 1
    np.save(folder / "dev_ims.npy", repeated)
    (folder / "dev_ids.txt").write_text("e\n" * 3)
    (folder / "test_cap2im.txt").write_text("0\n3\nx\n-1\n")
    (folder / "test_ids.txt").write_text("g\nh\nc\n")
    np.save(folder / "val_ims.npy", np.ones((1, 5, 2)))
    (folder / "gold_caps.txt").write_text("a caption\n")
    (folder / "vocab.json").write_text('{"word2idx": {"<pad>": 0, "<start>": 1, "<end>": 2}}')

    report = check_folder(folder)
    assert sorted(report.problems, key=lambda one: (one.file, one.what)) == [
        Problem("dev_ids.txt", "expected one id per image or per caption (10 lines), got 3"),
        Problem("dev_ims.npy", "as many rows as captions (10), but rows 5 to 9 are not one image repeated five times: "
                "write dev_cap2im.txt with one image row per caption line"),
        Problem("gold_ims.npy", "no such file"),
        Problem("test_cap2im.txt", "expected an image row from 0 to 2", 2, lines(2, 4)),
        Problem("test_cap2im.txt", "expected the row of an image", 1, lines(3)),
        Problem("train_caps.txt", "not UTF-8", 2, lines(5, 9)),
        Problem("train_caps.txt", "the caption is empty", 2, lines(2, 3)),
        Problem("train_caps.txt", "the caption is the text of a bytes literal", 1, lines(7)),
        Problem("train_ids.txt", "ids of more than one image", 2, ("a", "c")),
        Problem("train_ids.txt", "images that are in test, too", 1, ("c",)),
        Problem("train_ims.npy", "values that are not finite in float32", 2, ("row 1", "row 3")),
        Problem("val_caps.txt", "no such file"),
        Problem("val_ims.npy", "5 regions of 2 channels, but dev has 3 of 4"),
        Problem("vocab.json", "vocabulary: expected the words <pad> <start> <end> <unk>, found no <unk>"),
    ]  # fmt: skip
    assert [one.split for one in report.splits] == ["dev", "gold", "test", "train", "val"]
    # The summary contains the known values of a bad split.
    assert attrs.asdict(report.splits[1]) == {
        "split": "gold", "images": None, "captions": 1, "regions": None, "channels": None, "dtype": None,
        "stored_five_times": False, "words": {"min": 2, "median": 2, "mean": 2, "p95": 2, "max": 2},
        "unknown_share": None, "boxes": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (features_of(4)[0], "expected features of shape (images, regions, channels), got shape (3, 4)"),
        (features_of(4).astype(np.int32), "expected float16, float32 or float64 features, got int32"),
        (features_of(0), "expected at least one image, region and channel, got shape (0, 3, 4)"),
        (np.array([[[{}]]], dtype=object), "not a readable .npy array of numbers (Array can't be memory-mapped: "
         "Python objects in dtype.; "),
        (None, "truncated: the header promises 320 bytes, the file has 300"),
    ],
)  # fmt: skip
def test_unreadable_features_are_a_problem(folder: Path, array: np.ndarray | None, what: str) -> None:
    path = folder / "train_ims.npy"
    if array is None:
        path.write_bytes(path.read_bytes()[:300])
    else:
        np.save(path, array, allow_pickle=True)
    (found,) = problems(folder)
    assert (found.file, found.count) == ("train_ims.npy", 1)
    assert found.what.startswith(what)


def test_counts_that_do_not_match_are_reported(folder: Path) -> None:
    (folder / "train_caps.txt").write_text("caption .\n" * 19)
    (folder / "test_cap2im.txt").write_text("0\n1\n2\n")
    (folder / "dev_caps.txt").write_text("")
    assert problems(folder) == [
        Problem("dev_caps.txt", "expected at least one caption, the file is empty"),
        Problem("test_cap2im.txt", "expected one line per caption (4), got 3 lines"),
        Problem("train_caps.txt", "19 captions do not fit 4 rows of train_ims.npy: expected 20 (five per image) or 4 "
                "(images repeated five times); otherwise write train_cap2im.txt with one image row per caption line"),
    ]  # fmt: skip


def test_images_without_captions_are_reported(folder: Path) -> None:
    (folder / "test_cap2im.txt").write_text("1\n1\n1\n1\n")
    assert problems(folder) == [Problem("test_ims.npy", "images without captions", 2, ("row 0", "row 2"))]


def test_long_lists_are_cut_but_counted(folder: Path) -> None:
    write_split(folder, "train", np.full((40, 3, 4), np.nan, np.float32), 200, ids=range(1, 41))
    (found,) = problems(folder)
    assert (found.count, found.places) == (40, tuple(f"row {row}" for row in range(10)))


def test_values_beyond_float32_are_not_finite(folder: Path) -> None:
    images = features_of(4, dtype="float64")
    images[2, 0, 0] = 1e39
    np.save(folder / "train_ims.npy", images)
    assert problems(folder) == [Problem("train_ims.npy", "values that are not finite in float32", 1, ("row 2",))]


def test_padding_may_hold_any_values(folder: Path) -> None:
    features = np.load(folder / "train_ims.npy")
    features[:, -1] = np.nan
    np.save(folder / "train_ims.npy", features)
    assert [problem.what for problem in problems(folder)] == ["values that are not finite in float32"]
    (folder / "train_regions.txt").write_text(f"{features.shape[1] - 1}\n" * len(features))
    assert problems(folder) == []


def test_companion_files_of_macos_are_no_split(folder: Path, tmp_path: Path) -> None:
    for name in ("._train_ims.npy", "._train_caps.txt"):
        (folder / name).write_bytes(b"\0\5\x16\7\xff")
    assert problems(folder) == []
    assert [split.name for split in pack(folder, tmp_path / "store").splits] == ["dev", "test", "train"]


def test_signalling_nans_are_problems_and_no_warnings(folder: Path) -> None:
    path = folder / "train_ims.npy"
    features = np.load(path).astype(np.float32)
    features.view(np.uint32)[2] = 0x7FA00000
    np.save(path, features)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = problems(folder)
    assert found == [Problem("train_ims.npy", "values that are not finite in float32", 1, ("row 2",))]


def test_repetitions_are_compared_in_every_row(folder: Path) -> None:
    """Opening a split samples sixteen images. The check reads all of them and treats NaN as equal to NaN."""
    rows = np.repeat(features_of(100) + 1000, 5, axis=0)
    rows[56] += 1  # One that is not sampled.
    rows[100:105, 0, 0] = np.nan
    write_split(folder, "dev", rows, 500)
    (folder / "dev_ids.txt").unlink()
    assert problems(folder) == [
        Problem("dev_ims.npy", "values that are not finite in float32", 5,
                ("row 100", "row 101", "row 102", "row 103", "row 104")),
        Problem("dev_ims.npy", "as many rows as captions (500), but not each image repeated five times", 1,
                ("rows 55 to 59",)),
    ]  # fmt: skip


def test_an_image_in_two_splits_is_a_leak(folder: Path) -> None:
    (folder / "test_ids.txt").write_text("b\nh\nd\n")
    (folder / "dev_ids.txt").write_text("d\n" * 5 + "f\n" * 5)
    assert problems(folder) == [
        Problem("test_ids.txt", "images that are in dev, too", 1, ("d",)),
        Problem("train_ids.txt", "images that are in dev, too", 1, ("d",)),
        Problem("train_ids.txt", "images that are in test, too", 2, ("b", "d")),
    ]
    assert problems(folder, splits=["test"]) == []


@pytest.mark.parametrize("ids", [True, False])
def test_an_image_in_two_splits_is_found_by_its_features(folder: Path, ids: bool) -> None:
    """One split may store the image five times. Images must be equal in all regions."""
    if not ids:
        for split in ("train", "dev", "test"):
            (folder / f"{split}_ids.txt").unlink()
    train = features_of(4)
    train[1], train[3] = np.load(folder / "test_ims.npy")[2], np.load(folder / "dev_ims.npy")[5]
    np.save(folder / "train_ims.npy", train)
    test = np.load(folder / "test_ims.npy")
    test[0] = train[0]
    test[0, 1, 2] += 1  # The first and the last region are equal, the one between them is not.
    np.save(folder / "test_ims.npy", test)
    assert problems(folder) == [
        Problem("train_ims.npy", "images whose features are those of images of dev", 1, ("row 3 (row 5 of dev)",)),
        Problem("train_ims.npy", "images whose features are those of images of test", 1, ("row 1 (row 2 of test)",)),
    ]


def test_a_copied_split_is_reported(folder: Path) -> None:
    write_split(folder, "val", features_of(4), 20)
    assert problems(folder) == [
        Problem("val_ims.npy", "images whose features are those of images of train", 4,
                tuple(f"row {row} (row {row} of train)" for row in range(4))),
    ]  # fmt: skip


def test_every_copy_of_an_image_counts(folder: Path) -> None:
    """Four rows of train equal one image of test, which occurs twice. A row that differs in the middle does not."""
    test, train = np.load(folder / "test_ims.npy"), features_of(4)
    test[2] = test[1]
    np.save(folder / "test_ims.npy", test)
    train[:] = test[1]
    np.save(folder / "train_ims.npy", train)
    (folder / "test_ids.txt").unlink()
    what = "images whose features are those of images of test"
    assert problems(folder) == [
        Problem("train_ims.npy", what, 4, tuple(f"row {row} (row 1 of test)" for row in range(4))),
    ]
    train[2, 1] += 1
    np.save(folder / "train_ims.npy", train)
    assert problems(folder) == [
        Problem("train_ims.npy", what, 3, tuple(f"row {row} (row 1 of test)" for row in (0, 1, 3))),
    ]


def test_a_vocabulary_of_other_data_is_reported(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    Vocabulary([*SPECIAL, "caption"]).save(other)
    (folder / "test_caps.txt").write_text("one two three caption\n" * 4)
    report = check_folder(folder, ["test"], vocabulary_file=other)
    assert report.splits[0].unknown_share == 0.75
    assert report.problems == [
        Problem(
            "test_caps.txt",
            "the vocabulary lacks 75% of the words; is it that of other data, or built with a high --min-count?",
        )
    ]


def test_a_built_vocabulary_without_many_words_causes_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "vocab.json").unlink()
    (folder / "train_caps.txt").write_text("a dog runs fast\n" * 3 + "a cat\n" * 17)
    (folder / "dev_caps.txt").write_text("a dog runs fast\n" * 10)
    what = "the vocabulary built from it leaves out {} of its words, as each occurs fewer than 4 times; a lower "
    what += "--min-count of train and data pack keeps more"
    report = check_folder(folder, ["train", "dev"])
    assert [one.unknown_share for one in report.splits] == [9 / 46, 0.75]
    # Most words of train are known, but few words of dev.
    assert report.warnings == [Problem("train_caps.txt", what.format("20%"))]
    assert report.problems == [
        Problem(
            "dev_caps.txt",
            "the vocabulary lacks 75% of the words; is it that of other data, or built with a high --min-count?",
        )
    ]
    # In a small data set, most words of both splits are rare.
    captions = [f"a dog{line} runs{line}\n" for line in range(20)]
    (folder / "train_caps.txt").write_text("".join(captions))
    (folder / "dev_caps.txt").write_text("".join(captions[:10]))
    report = check_folder(folder, ["train", "dev"])
    assert (report.warnings, report.problems) == ([Problem("train_caps.txt", what.format("67%"))], [])
    assert cli.run(["data", "check", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "--min-count" in printed
    assert "other data" not in printed


def test_block_size_does_not_change_the_problems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.repeat(features_of(40) + 1000, 5, axis=0)
    rows[6], rows[40:45] = 7, np.inf
    write_split(folder, "dev", rows, 200)
    (folder / "dev_ids.txt").unlink()
    expected = problems(folder)
    assert [(one.count, one.places[0]) for one in expected] == [(5, "row 40"), (1, "rows 5 to 9")]
    for size in (1, 250, 1000):
        monkeypatch.setattr(check_split, "BLOCK_BYTES", size)
        assert problems(folder) == expected


def test_memory_does_not_grow_with_the_file(folder: Path) -> None:
    """Only one block of a sparse file of 400 MB is in memory at a time."""
    header = np.lib.format.header_data_from_array_1_0(np.empty((1, 1, 1024), np.float32)) | {"shape": (1600, 64, 1024)}
    with (folder / "val_ims.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * 1600 * 64 * 1024)
    (folder / "val_caps.txt").write_text("caption\n")
    (folder / "val_cap2im.txt").write_text("1599\n")
    tracemalloc.start()
    found = problems(folder, splits=["val"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(one.what, one.count) for one in found] == [("images without captions", 1599)]
    assert peak < 100 * 2**20


# The command


def test_the_command_prints_tables_and_fails_on_problems(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.run(["data", "check", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"vocabulary: {folder / 'vocab.json'}, 17 words\n" in printed
    cells = [re.split(r"\s*│\s*", line.strip("│ ")) for line in printed.splitlines() if line.startswith("│")]
    assert cells == [
        ["dev", "2", "10", "3", "4", "float32", "3 to 6, median 4", "0.0%"],
        ["test", "3", "4", "3", "4", "float32", "3 to 6, median 4.5", "0.0%"],
        ["train", "4", "20", "3", "4", "float32", "3 to 6, median 4.5", "0.0%"],
    ]
    assert printed.endswith(f"{folder}: no problems found\n")

    write_split(folder, "train", np.full((12, 3, 4), np.nan, np.float32), 60, ids=[*"abcdefghijkl"])
    file = tmp_path / "report.json"
    assert cli.run(["data", "check", str(folder), "--split", "train", "--split", "test", "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    rows = "row 0, row 1, row 2, row 3, row 4, row 5, row 6, row 7, row 8, row 9, ..."
    joined = " ".join(re.sub(r"[│\s]+", " ", printed).split())
    assert "train_ims.npy values that are not finite in float32 12 " in joined
    assert "row 9, ..." in joined
    assert joined.endswith(f"{folder}: 2 problems")
    report = json.loads(file.read_text())
    assert [one["split"] for one in report["splits"]] == ["train", "test"]
    assert report["problems"] == [
        {"file": "train_ims.npy", "what": "values that are not finite in float32", "count": 12,
         "places": rows.removesuffix(", ...").split(", ")},
        {"file": "test_ids.txt", "what": "images that are in train, too", "count": 3, "places": ["g", "h", "i"]},
    ]  # fmt: skip


def test_square_brackets_are_printed_unchanged(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for split in ("train", "test"):
        (folder / f"{split}_ids.txt").write_text(
            "[red]x\n" + "".join(f"{split}{n}\n" for n in range(3 - (split == "test")))
        )
    assert cli.run(["data", "check", str(folder)]) == 1
    assert "[red]x" in capsys.readouterr().out


def test_control_characters_in_files_are_escaped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for split, n_images in (("train", 4), ("test", 3)):
        names = ["\x1b[2Jx\x07", *(f"{split}{number}" for number in range(1, n_images))]
        (folder / f"{split}_ids.txt").write_text("".join(f"{name}\n" for name in names))
    assert cli.run(["data", "check", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[2Jx\\x07" in printed
    edit_line(folder / "dev_caps.txt", 3, b"b'\x1b[2J'")
    status, message = error(capsys, "train", "--data", folder, "--out", tmp_path / "run")
    assert (status, message) == (
        1, f"{folder / 'dev_caps.txt'}: line 3: the caption is the text of a bytes literal (b'\\x1b[2J'): write the "
        "decoded text instead",
    )  # fmt: skip


def test_progress_is_shown_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = every_step(monkeypatch, check)
    assert cli.run(["data", "check", str(folder)]) == 0
    # 10, 3 and 4 rows of 48 bytes.
    assert re.search(r"train: 100%[^\r]* 816/816 ", terminal.getvalue())


def test_folders_that_cannot_be_checked_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no = tmp_path / "no"
    assert error(capsys, "data", "check", no) == (1, f"{no}: no such data directory")
    assert error(capsys, "data", "check", folder, "--vocab", no) == (1, f"{no}: no such vocabulary file")
    assert error(capsys, "data", "check", folder, "--json", folder)[1].startswith(f"{folder}: expected a file to write")
    assert problems(folder, splits=["val"]) == [
        Problem("val_caps.txt", "no such file"), Problem("val_ims.npy", "no such file"),
    ]  # fmt: skip
    no.mkdir()
    assert problems(no) == [Problem("", "no split: expected files such as train_ims.npy and train_caps.txt")]
    with pytest.raises(
        ValueError, match=r"^split: expected a name such as test, without folders, got '\.\./data/test'$"
    ):
        check_folder(folder, ["../data/test"])
    with pytest.raises(ValueError, match=r"^split: expected a name such as test, without folders, got '\.\.'$"):
        check_folder(folder, [".."])


def test_the_name_of_the_folder_hides_no_problem(folder: Path) -> None:
    renamed = folder.rename(folder.with_name("online data"))
    (renamed / "dev_ids.txt").write_text("e\n" * 3)
    found = problems(renamed)
    assert Problem("dev_ids.txt", "expected one id per image or per caption (2 or 10 lines), got 3") in found
