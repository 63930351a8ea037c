"""Pictures become the features of the training data, whatever their proportions."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from itm_fast import cli
from itm_fast.data import Vocabulary, emoji, open_split
from itm_fast.search import Index
from itm_fast.search.pictures import features_of, grid_of, kind_of, thumbnail
from python_tests.helpers.pictures import write_captions


def photos(folder: Path) -> list[str]:
    """Write wide and high pictures with a colour gradient in each direction, which crops and scaling change."""
    folder.mkdir()
    for number in range(20):
        height, width = (60, 140) if number % 2 else (150, 70)
        rows, columns = np.mgrid[0:height, 0:width]
        pixels = np.stack([255 * rows / height, 255 * columns / width, np.full((height, width), 12.0 * number)], -1)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return [f"{number}.png" for number in range(20)]


@pytest.mark.parametrize(("options", "kind"), [([], "64x4"), (["--stretch"], "64x4 stretched")])
def test_a_picture_becomes_the_features_that_an_import_stores(tmp_path: Path, options: list[str], kind: str) -> None:
    captions = write_captions(tmp_path / "captions.csv", photos(tmp_path / "photos"))
    arguments = ["--images", tmp_path / "photos", "--captions", captions, "--size", 64, "--grid", 4, *options]
    arguments += ["--quality", 100, "--out", tmp_path / "store", "--workers", 0, "--min-count", 1]
    assert cli.run(["data", "import", *map(str, arguments)]) == 0
    data = open_split(tmp_path / "store", "test", Vocabulary.from_file(tmp_path / "store" / "vocab.json"))
    assert (kind_of(data), grid_of(kind)) == (kind, 4)
    pictures = [tmp_path / "photos" / name for name in data.image_ids or ()]
    stored = data.region_batch(list(range(data.n_images)))
    assert (features_of(pictures, kind) - stored).abs().mean() < 0.02
    other = {"64x4": "64x4 stretched", "64x4 stretched": "64x4"}[kind]
    assert (features_of(pictures, other) - stored).abs().mean() > 0.06


def test_a_picture_is_a_query_in_any_form(served_index: Path, tmp_path: Path) -> None:
    index = Index.open(served_index)
    pixels = emoji.pictures("test")[5]
    file = tmp_path / "picture.png"
    Image.fromarray(pixels).save(file)
    with Image.open(file) as opened:
        forms = (file, str(file), file.read_bytes(), pixels, opened, [opened], pixels[None])
        found = [index.search(pictures=form, k=4) for form in forms]
    for results in found:
        assert [one.hits for one in results] == [one.hits for one in found[0]]
    assert [one.query for one in found[4]] == ["picture"]
    # Transparent pixels become white, as in a file.
    clear = Image.new("RGBA", (72, 72), (0, 0, 0, 0))
    white = np.full((72, 72, 3), 255, np.uint8)
    assert index.search(pictures=clear, k=4)[0].hits == index.search(pictures=white, k=4)[0].hits
    assert len(index.search(pictures=np.stack([pixels, white]), k=4)) == 2
    assert len(index.search(pictures=np.array([str(file)] * 2), k=4)) == 2


def of_format(name: str) -> Image.Image:
    picture = Image.new("RGB", (2, 2))
    picture.format = name
    return picture


NO_TEXT = "query: expected a text, or several, got {}; pass a picture as pictures="
NO_PIXELS = "picture: expected uint8 (height, width, 3), got {}"
THIN = "picture: the picture cannot be decoded (2 x 300 pixels: a side is more than 100 times the other)"


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        ({"texts": Path("a.jpg")}, TypeError, NO_TEXT.format("<PosixPath>")),
        ({"texts": Image.new("RGB", (2, 2))}, TypeError, NO_TEXT.format("<Image>")),
        ({"texts": b"red"}, TypeError, NO_TEXT.format("<bytes>")),
        ({"texts": [Path("a.jpg")]}, TypeError, "query: expected a text, got <PosixPath>"),
        ({"items": 5}, TypeError, "items: expected the id of an image, or several, got 5"),
        ({"items": b"train3"}, TypeError, "items: expected the id of an image, or several, got <bytes>"),
        ({"items": ["train3", b"train4"]}, TypeError, "items: expected the id of an image, or several, got <bytes>"),
        ({"pictures": 5}, TypeError, "picture: expected a path, bytes, an array or a picture of Pillow, got 5"),
        ({"pictures": np.zeros((4, 4, 3))}, ValueError, NO_PIXELS.format("float64 (4, 4, 3)")),
        ({"pictures": np.zeros((4, 3), np.uint8)}, ValueError, NO_PIXELS.format("uint8 (4, 3)")),
        ({"pictures": Image.new("RGB", (2, 300))}, ValueError, THIN),
        ({"pictures": Image.new("RGB", (0, 0))}, ValueError, "picture: a picture of zero width or height"),
        ({"pictures": of_format("EPS")}, ValueError, "picture: pictures in the format EPS are not read"),
    ],
)
def test_a_query_of_another_kind_is_one_line(
    served_index: Path, query: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Index.open(served_index).search(**query)


def test_an_array_of_extreme_proportions_is_refused() -> None:
    message = r"^picture: expected sides up to 100 times as long as the other, got \(1, 101\)$"
    with pytest.raises(ValueError, match=message):
        features_of([np.zeros((1, 101, 3), np.uint8)], "64x4")


def test_thumbnails_show_the_part_that_becomes_features(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    for name, size in (("1.png", (140, 60)), ("0.png", (70, 150))):
        shown = {}
        for kind in ("", "64x4", "64x4 stretched", "emoji"):
            with Image.open(io.BytesIO(thumbnail(tmp_path / "photos" / name, kind))) as opened:
                shown[kind] = opened.copy()
        assert [shown[kind].size for kind in ("", "64x4 stretched", "emoji")] == [size] * 3
        short = min(size)
        assert shown["64x4"].size == (short, short)
        left, top = (size[0] - short) // 2, (size[1] - short) // 2
        centre = np.asarray(shown[""].crop((left, top, left + short, top + short))).astype(int)
        assert np.abs(np.asarray(shown["64x4"]) - centre).mean() < 3
