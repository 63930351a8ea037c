"""Read the captions of pictures: CSV, TSV, JSON lines, COCO's annotations, or Karpathy's `dataset_*.json`.

Inside: `Row`, `read_caption_file`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from itm_fast.data import layout
from itm_fast.files import documents
from itm_fast.files.messages import shown

__all__ = ["Row", "read_caption_file"]

# Karpathy's file of COCO has 144 MB.
_MAX_BYTES = 2**31
# Names of columns and keys; the first that is present is used.
_IMAGE = ("image", "file_name", "filename", "image_name", "file", "image_path", "path")
_CAPTION = ("caption", "captions", "text", "sentence", "comment")
_SPLIT = "split"
# Of a file name on usual file systems, in bytes, and of a split in a store, in characters.
_LONGEST_NAME, _LONGEST_SPLIT = 255, 200
# Names of splits in published files, and those of this package.
_SPLITS = {
    "train": "train", "training": "train", "restval": "train", "dev": "dev", "val": "dev", "valid": "dev",
    "validation": "dev", "test": "test",
}  # fmt: skip


@attrs.frozen
class Row:
    """A caption: the picture's path below the folder of pictures, the split if the file names one, and the place."""

    image: str
    caption: str
    split: str | None
    place: str


def read_caption_file(path: Path) -> tuple[list[Row], list[str]]:
    """Read all captions.

    A `.csv` or `.tsv` file begins with column names: image, caption and optionally split. A `.jsonl` file has one
    object with these keys per line; `captions` may be a list. A `.json` file is one of COCO's or Karpathy's.

    Returns:
        The captions, and a line for each caption that cannot be used. It names file and row.

    Raises:
        ValueError: the file cannot be read, or is of another kind. The message names it.
    """
    readers = {".csv": _table, ".tsv": _table, ".jsonl": _json_lines, ".json": _json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: expected a file of captions that ends in {', '.join(readers)}")
    rows: list[Row] = []
    problems: list[str] = []
    try:
        for place, image, caption, split in reader(path):
            try:
                rows.append(Row(_image(image), _caption(caption), _split(split), f"{path}: {place}"))
            except ValueError as error:
                problems.append(f"{path}: {place}: {error}")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected the captions of the pictures") from None
    if not rows and not problems:
        raise ValueError(f"{path}: expected at least one caption, found none")
    return rows, problems


# The place of a caption in the file, and its picture (an error if the row has none), text and split, unchecked.
_Found = tuple[str, Any, Any, Any]


def _table(path: Path) -> Iterator[_Found]:
    text = documents.read_text(path, _MAX_BYTES, "utf-8-sig")
    header = re.split("[\r\n]", text, maxsplit=1)[0]
    # Some published files end in .csv and separate with semicolons or bars.
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;|\t", key=header.count)
    # Captions of Flickr30k, separated by bars, are not quoted, and those of .tsv files rarely are. There, quotation
    # marks count only around a whole cell.
    plain: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if delimiter in "|\t" else {}
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True, **plain)
    try:
        names = next(lines, [])
    except csv.Error as error:
        raise ValueError(f"{path}: line {lines.line_num}: {error}") from None
    columns = [name.strip().lower() for name in (map(_unquoted, names) if plain else names)]
    image, caption = (_first(names, columns, f"{path}: line 1: expected a column") for names in (_IMAGE, _CAPTION))
    repeated = next((name for name in (image, caption, _SPLIT) if columns.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"{path}: line 1: the column {shown(repeated)} appears twice")
    for place, cells in _records(lines, path):
        if isinstance(cells, ValueError):
            yield place, cells, None, None
        elif len(cells) == len(columns):
            if plain:
                cells = list(map(_unquoted, cells))
            row = dict(zip(columns, cells, strict=True))
            yield place, row[image], row[caption], row.get(_SPLIT)
        else:
            advice = ""
            if plain:
                advice = f"; a caption cannot contain {delimiter!r} or a line break, even in quotation marks"
            elif len(cells) > len(columns):
                advice = f"; put captions with {delimiter!r} in quotation marks"
            found = f"expected {len(columns)} cells as in line 1, got {len(cells)}{advice}"
            yield place, ValueError(found), None, None


def _records(lines: Any, path: Path) -> Iterator[tuple[str, list[str] | ValueError]]:
    """Yield the place and the cells of each record of a `csv.reader`, or the error of a line that has none."""
    while True:
        start = lines.line_num + 1
        try:
            cells = next(lines, None)
        except csv.Error as error:
            # Of a cell with too many characters, the message says all.
            advice = "; inside a caption in quotation marks, write each quotation mark twice"
            problem = f"{error}{'' if 'limit' in str(error) and lines.line_num == start else advice}"
            # An open quotation mark takes in the lines after it, and with them their captions.
            if lines.line_num > start:
                raise ValueError(f"{path}: line {start}: {problem}") from None
            yield f"line {start}", ValueError(problem)
            continue
        if cells is None:
            return
        if cells:
            yield f"line {lines.line_num}", cells


def _unquoted(cell: str) -> str:
    """Return the text of a cell that a program has put in quotation marks as a whole."""
    inner = cell[1:-1]
    is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if is_quoted else cell


def _first(names: tuple[str, ...], present: Any, expected: str) -> str:
    found = next((name for name in names if name in present), None)
    if found is None:
        raise ValueError(f"{expected} {' or '.join(names[:2])}, found {shown(list(present))}")
    return found


def _json_lines(path: Path) -> Iterator[_Found]:
    for number, line in enumerate(layout.read_lines(path), 1):
        place = f"line {number}"
        if not line.strip():
            continue
        try:
            content = documents.parse_json(layout.text_in(line))
            if not isinstance(content, dict):
                raise ValueError(f"expected a JSON object, got {shown(content)}")
            content = {name.strip().lower(): value for name, value in content.items()}
            image, caption = (_first(names, content, "expected a key") for names in (_IMAGE, _CAPTION))
        except ValueError as error:
            yield place, error, None, None
            continue
        several = content[caption] if isinstance(content[caption], list) else [content[caption]]
        if not several:
            yield place, ValueError(f"expected at least one caption, got {caption}: []"), None, None
        for one in several:
            yield place, content[image], one, content.get(_SPLIT)


def _json(path: Path) -> Iterator[_Found]:
    content = documents.read_json(path, _MAX_BYTES)
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list) or not all(isinstance(image, dict) for image in images):
        raise ValueError(f"{path}: expected captions as COCO or Karpathy write them: an object with a list 'images'")
    if "annotations" in content:
        return _coco(path, images, content["annotations"])
    return _karpathy(images)


def _coco(path: Path, images: list[Mapping[str, Any]], annotations: Any) -> Iterator[_Found]:
    names: dict[str, Any] = {}
    splits: dict[str, Any] = {}
    for number, image in enumerate(images):
        found = image.get("id")
        if not isinstance(found, int | str) or json.dumps(found) in names:
            what = "missing" if found is None else f"not usable or repeated: {shown(found)}"
            raise ValueError(f"{path}: images[{number}]: the id is {what}")
        names[json.dumps(found)] = image.get("file_name")
        splits[json.dumps(found)] = image.get(_SPLIT)
    if not isinstance(annotations, list) or not all(isinstance(one, dict) for one in annotations):
        raise ValueError(f"{path}: annotations: expected a list of objects, got {shown(annotations)}")
    for number, one in enumerate(annotations):
        found = one.get("image_id")
        key = json.dumps(found)
        unknown = ValueError(f"image_id: no image has the id {shown(found)}")
        yield f"annotations[{number}]", names.get(key, unknown), one.get("caption"), splits.get(key)


def _karpathy(images: list[Mapping[str, Any]]) -> Iterator[_Found]:
    for number, image in enumerate(images):
        name, folder, sentences = image.get("filename"), image.get("filepath"), image.get("sentences")
        if isinstance(name, str) and isinstance(folder, str):
            name = f"{folder}/{name}"
        if sentences == []:
            yield f"images[{number}]", ValueError("expected at least one caption, got sentences: []"), None, None
        for index, sentence in enumerate(sentences if isinstance(sentences, list) else [None]):
            text = sentence.get("raw") if isinstance(sentence, dict) else None
            yield f"images[{number}].sentences[{index}]", name, text, image.get(_SPLIT)


def _image(value: Any) -> str:
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected the file name of a picture, got {shown(value)}")
    parts = Path(value.strip()).parts
    if Path(value.strip()).is_absolute() or ".." in parts or "\0" in value:
        raise ValueError(f"expected a path below the folder of pictures, got {shown(value)}")
    if any(len(part.encode("utf-8", "replace")) > _LONGEST_NAME for part in parts):
        raise ValueError(f"expected file names of at most {_LONGEST_NAME} bytes, got {shown(value)}")
    return "/".join(parts)


def _caption(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a caption, got {shown(value)}")
    # A line break inside a quoted cell is a space.
    return layout.caption_in(" ".join(value.split()).encode("utf-8", "replace"))


def _split(value: Any) -> str | None:
    if value is None or value == "":
        return None
    name = value.strip() if isinstance(value, str) else ""
    # Files differ in how they write the usual names.
    name = _SPLITS.get(name.lower(), name)
    try:
        layout.check_split_name(name)
        if len(name) > _LONGEST_SPLIT or "\\" in name:
            raise ValueError
    except ValueError:
        raise ValueError(f"expected the name of a split, got {shown(value)}") from None
    return name
