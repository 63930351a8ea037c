"""Caption files: tables, JSON lines, COCO's annotations, Karpathy's file, and rows that cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from itm_fast.data.caption_files import read_caption_file

ROWS = [("a.png", "a red, round thing", "train"), ("sub/b.png", "a thing", "dev"), ("a.png", "it is red", "train")]
KARPATHY = {
    "images": [
        {"filename": "a.png", "split": "restval", "sentences": [{"raw": "a red, round thing"}, {"raw": "it is red"}]},
        {"filename": "b.png", "filepath": "sub", "split": "val", "sentences": [{"raw": "a thing"}]},
    ]
}
COCO = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 9, "file_name": "sub/b.png"}],
    "annotations": [
        {"image_id": 7, "caption": "a red, round thing"},
        {"image_id": 9, "caption": "a thing"},
        {"image_id": 7, "caption": "it is red"},
    ],
}
FILES = {
    "comma.csv": 'image,caption,split\na.png,"a red, round thing",train\nsub/b.png,a thing,dev\n'
    "a.png,it is red,train\n",
    "bar.csv": "\ufeffimage_name| comment| split\na.png| a red, round thing| train\nsub/b.png| a thing| val\n"
    "a.png| it is red| train\n",
    "tab.tsv": "split\tfilename\tcaption\r\ntrain\ta.png\ta red, round thing\r\nvalidation\tsub/b.png\ta thing\r\n"
    "train\ta.png\tit is red\r\n",
    "lines.jsonl": "\n".join(json.dumps({"image": i, "caption": c, "split": s}) for i, c, s in ROWS),
    "coco.json": json.dumps(COCO),
    "dataset_own.json": json.dumps(KARPATHY),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_captions(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8", newline="")
    rows, problems = read_caption_file(tmp_path / name)
    expected = [(i, c, None) for i, c, _ in ROWS] if name == "coco.json" else ROWS
    assert sorted((row.image, row.caption, row.split) for row in rows) == sorted(expected)
    assert problems == []


def test_captions_between_bars_may_contain_quotation_marks_and_commas(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text('image_name| comment_number| comment\n1.jpg| 0| "Stop," says a man .\n1.jpg| 1| A "sign\n')
    rows, problems = read_caption_file(path)
    assert [(row.image, row.caption) for row in rows] == [("1.jpg", '"Stop," says a man .'), ("1.jpg", 'A "sign')]
    assert problems == []


def test_captions_between_tabs_may_contain_quotation_marks(tmp_path: Path) -> None:
    """Marks around a whole cell are those of the program that wrote it."""
    texts = {
        '"hello there': '"hello there', 'good bye"': 'good bye"', '"the office" cast': '"the office" cast',
        '"a ""red"" thing"': 'a "red" thing', '"red" and "blue"': '"red" and "blue"', '"plain"': "plain",
    }  # fmt: skip
    path = tmp_path / "captions.tsv"
    path.write_text('"image"\tcaption\n' + "".join(f"a.jpg\t{text}\n" for text in texts))
    rows, problems = read_caption_file(path)
    assert [row.caption for row in rows] == list(texts.values())
    assert problems == []
    bars = tmp_path / "bars.csv"
    bars.write_text('"image"|"caption"\n"a.jpg"|"A ""red"" dog"\n')
    assert [row.caption for row in read_caption_file(bars)[0]] == ['A "red" dog']


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("columns.csv", "image,caption,note,note,,\na.png,a thing,1,2,,\n"),
        ("macintosh.csv", "image;caption\ra.png;a thing\r"),
        ("capitals.jsonl", '{"Image": "a.png", "Caption": "a thing"}'),
    ],
)
def test_tables_of_other_programs_are_read(tmp_path: Path, name: str, text: str) -> None:
    """Unused columns may share a name, lines may end in carriage returns, and keys may have capitals."""
    (tmp_path / name).write_text(text, newline="")
    rows, problems = read_caption_file(tmp_path / name)
    assert [(row.image, row.caption) for row in rows] == [("a.png", "a thing")]
    assert problems == []


def test_splits_beside_the_images_of_coco_are_used(tmp_path: Path) -> None:
    images = [{**image, "split": split} for image, split in zip(COCO["images"], ("train", "val"), strict=True)]
    (tmp_path / "a.json").write_text(json.dumps({**COCO, "images": images}))
    rows, _ = read_caption_file(tmp_path / "a.json")
    assert [row.split for row in rows] == ["train", "dev", "train"]


def test_captions_between_tabs_may_not_contain_tabs_or_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "captions.tsv"
    path.write_text('image\tcaption\na.jpg\t"a red\tthing"\nb.jpg\t"a blue\nthing"\n')
    _, problems = read_caption_file(path)
    advice = r"a caption cannot contain '\t' or a line break, even in quotation marks"
    assert problems == [
        f"{path}: line {line}: expected 2 cells as in line 1, got {cells}; {advice}" for line, cells in ((2, 3), (4, 1))
    ]


def test_a_line_may_have_several_captions(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"image": "a.png", "captions": ["one", "two\\n lines"]}\n')
    rows, _ = read_caption_file(tmp_path / "a.jsonl")
    assert [(row.caption, row.place) for row in rows] == [
        ("one", f"{tmp_path}/a.jsonl: line 1"), ("two lines", f"{tmp_path}/a.jsonl: line 1"),
    ]  # fmt: skip


def test_rows_that_cannot_be_used_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "image,caption,split\n../a.png,one,\na.png,,\na.png\n,two,\nb.png,b'three',\nc.png,four,../x\nd,5,\n"
        "e.png,six, seven,\n"
    )
    rows, problems = read_caption_file(path)
    assert [(row.image, row.caption) for row in rows] == [("d", "5")]
    assert problems == [
        f"{path}: line 2: expected a path below the folder of pictures, got '../a.png'",
        f"{path}: line 3: the caption is empty",
        f"{path}: line 4: expected 3 cells as in line 1, got 1",
        f"{path}: line 5: expected the file name of a picture, got ''",
        f"{path}: line 6: the caption is the text of a bytes literal (b'three'): write the decoded text instead",
        f"{path}: line 7: expected the name of a split, got '../x'",
        f"{path}: line 9: expected 3 cells as in line 1, got 4; put captions with ',' in quotation marks",
    ]


def test_bad_lines_of_json_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"image": "a.png"}\n[]\n{"image": "a.png", "caption": 3}\n{"image": "a.png", "captions": []}\n{\n')
    _, problems = read_caption_file(path)
    assert problems[:4] == [
        f"{path}: line 1: expected a key caption or captions, found ['image']",
        f"{path}: line 2: expected a JSON object, got []",
        f"{path}: line 3: expected a caption, got 3",
        f"{path}: line 4: expected at least one caption, got captions: []",
    ]
    assert problems[4].startswith(f"{path}: line 5: Expecting property name")


def test_an_image_of_karpathy_without_captions_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"images": [{"filename": "a.png", "sentences": []}]}))
    assert read_caption_file(path) == ([], [f"{path}: images[0]: expected at least one caption, got sentences: []"])


def test_names_that_no_file_or_store_can_have_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    name, split = "ä" * 126 + ".png", "s" * 201
    path.write_text(f"image\tcaption\tsplit\n{name}\tone\t\nb.png\ttwo\t{split}\nc.png\tthree\ta\\b\n")
    _, problems = read_caption_file(path)
    assert [problem.partition(": line ")[2].partition(",")[0] for problem in problems] == [
        "2: expected file names of at most 255 bytes",
        "3: expected the name of a split",
        "4: expected the name of a split",
    ]


def test_an_annotation_of_no_image_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**COCO, "annotations": [{"image_id": 8, "caption": "one"}]}))
    _, problems = read_caption_file(path)
    assert problems == [f"{path}: annotations[0]: image_id: no image has the id 8"]


@pytest.mark.parametrize("images", [[{"file_name": "a.png"}], [{"id": 1, "file_name": "a.png"}] * 2])
def test_images_without_an_own_id_are_refused(tmp_path: Path, images: list[dict[str, object]]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"images": images, "annotations": [{"caption": "one"}]}))
    number = len(images) - 1
    what = "not usable or repeated: 1" if number else "missing"
    with pytest.raises(ValueError, match=re.escape(f"{path}: images[{number}]: the id is {what}")):
        read_caption_file(path)


def test_a_line_with_a_stray_quotation_mark_is_a_problem_of_that_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('image,caption\na.png,"Hello" says the man\nb.png,"""Hello"" says the man"\nc.png,"an open quote')
    rows, problems = read_caption_file(path)
    assert [(row.image, row.caption) for row in rows] == [("b.png", '"Hello" says the man')]
    advice = "inside a caption in quotation marks, write each quotation mark twice"
    assert problems == [
        f"{path}: line 2: ',' expected after '\"'; {advice}", f"{path}: line 4: unexpected end of data; {advice}",
    ]  # fmt: skip


def test_usual_splits_are_known_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    names = ["Train", "TRAIN", "Val", "restval", "TEST", "Mine"]
    path.write_text("image,caption,split\n" + "".join(f"{i}.png,words,{name}\n" for i, name in enumerate(names)))
    rows, problems = read_caption_file(path)
    assert problems == []
    assert [row.split for row in rows] == ["train", "train", "dev", "train", "test", "Mine"]


UNREADABLE = {
    "a.txt": ("", "expected a file of captions that ends in .csv, .tsv, .jsonl, .json"),
    "a.csv": ("picture,words\n", "line 1: expected a column image or file_name, found ['picture', 'words']"),
    "d.csv": ("image,caption,Caption\n", "line 1: the column 'caption' appears twice"),
    "b.csv": ("image,caption\n", "expected at least one caption, found none"),
    "c.csv": (
        'image,caption\na.png,words\nb.png,"an open quote\nc.png,words\nd.png,"words"\n',
        "line 3: ',' expected after '\"'; inside a caption in quotation marks, write each quotation mark twice",
    ),
    "a.json": ("[]", "expected captions as COCO or Karpathy write them: an object with a list 'images'"),
    "b.json": ('{"images": [], "annotations": 3}', "annotations: expected a list of objects, got 3"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_of_another_kind_is_one_line(tmp_path: Path, name: str) -> None:
    text, message = UNREADABLE[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name}: {message}")):
        read_caption_file(tmp_path / name)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/a.csv: no such file; expected the captions of the")):
        read_caption_file(tmp_path / "a.csv")
