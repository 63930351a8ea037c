"""Detected regions become a store with boxes: after any interruption the same, and drawn by explain."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from itm_fast import cli, evaluation, models
from itm_fast.data import Vocabulary, detections, open_split, picture_of, whole_picture_of
from itm_fast.data.import_pictures import import_features, import_regions
from itm_fast.data.picture_folder import SplitPictures, collect
from itm_fast.data.preprocessing import Shrinking
from itm_fast.data.store_format import Manifest
from itm_fast.files import atomic
from itm_fast.fragments import Fragments
from itm_fast.models import detector_folder
from itm_fast.report.boxes import heat_of_boxes, numbered
from python_tests.cli.test_data_import import contents
from python_tests.data.colour_detector import ColourDetector, boxes_in
from python_tests.helpers.commands import error, train_small
from python_tests.helpers.grid_encoder import GridEncoder
from python_tests.helpers.pictures import write_captions
from python_tests.report.test_explain import pictures_in

COUNT = 40


def write_pictures(folder: Path) -> list[str]:
    """Write pictures of random colours, each 30 x 90, 90 x 30, 120 x 80 or 50 x 50 pixels; return their names."""
    folder.mkdir()
    random = np.random.default_rng(0)
    sizes = [(90, 30), (30, 90), (80, 120), (50, 50)]
    for number in range(COUNT):
        colours = random.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(colours).resize(sizes[number % 4][::-1]).save(folder / f"{number}.png")
    return [f"{number}.png" for number in range(COUNT)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 40 pictures and two captions of each."""
    folder = tmp_path_factory.mktemp("source")
    write_captions(folder / "captions.csv", write_pictures(folder / "pictures"))
    return folder


@pytest.fixture(scope="module")
def splits(source: Path) -> list[SplitPictures]:
    return collect(source / "pictures", source / "captions.csv").splits


@pytest.fixture(scope="module")
def whole(source: Path, splits: list[SplitPictures], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a store that was imported without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "store"
    write(splits, source, out)
    return contents(out)


def write(splits: list[SplitPictures], source: Path, out: Path, detector: object = None, **options: object) -> Manifest:
    options = {"shard_bytes": 400, "min_count": 1, **options}
    return import_regions(splits, source / "captions.csv", out, detector or ColourDetector(), **options)


def small(path: Path) -> np.ndarray:
    """Return the pixels of a picture, scaled so that no side has more than 64."""
    image = Image.open(path)
    factor = min(64 / max(image.size), 1)
    size = tuple(round(side * factor) for side in image.size)
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR) if factor < 1 else image)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_regions_of_each_picture_are_stored_with_their_boxes(
    source: Path, splits: list[SplitPictures], tmp_path: Path, dtype: str
) -> None:
    manifest = write(splits, source, tmp_path / "store", dtype=dtype)
    assert not (tmp_path / "store" / "detections").exists()
    assert [(one.name, one.images, one.regions, one.ragged, one.width) for one in manifest.splits] == [
        ("train", 32, 4, True, 7), ("dev", 4, 4, True, 7), ("test", 4, 4, True, 7)
    ]  # fmt: skip
    vocabulary = Vocabulary.from_file(tmp_path / "store" / "vocab.json")
    for pictures in splits:
        split = open_split(tmp_path / "store", pictures.name, vocabulary)
        assert split.image_ids == pictures.names
        features, boxes = (read(range(split.n_images)) for read in (split.image_batch, split.boxes))
        assert isinstance(features, Fragments)
        assert isinstance(boxes, Fragments)
        for image, path in enumerate(pictures.paths):
            pixels = small(path)
            expected = boxes_in(pixels)
            np.testing.assert_array_equal(boxes[image].numpy(), expected)
            row = torch.from_numpy(np.concatenate([expected[0], pixels.mean((0, 1)) / 255])).float()
            row = row.bfloat16().float() if dtype == "bf16" else row
            torch.testing.assert_close(features[image][0], row, rtol=0, atol=1e-7)


def test_regions_of_equal_number_are_no_fragments(source: Path, splits: list[SplitPictures], tmp_path: Path) -> None:
    class One(ColourDetector):
        regions, digest = 1, "one"

    manifest = write(splits, source, tmp_path / "store", One())
    assert not any(one.ragged for one in manifest.splits)
    split = open_split(tmp_path / "store", "dev", Vocabulary.from_file(tmp_path / "store" / "vocab.json"))
    assert split.boxes([0, 3]).shape == (2, 1, 4)
    assert write(splits, source, tmp_path / "store", One()) == manifest


def test_an_import_stopped_after_any_file_can_continue(
    source: Path,
    splits: list[SplitPictures],
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is full after some files. No picture of a finished file goes through the detector again."""
    finish, written = atomic._finish, []
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_finish", lambda *where: (written.append(where[-1]), finish(*where)))
        write(splits, source, tmp_path / "again", workers=2)
    assert contents(tmp_path / "again") == whole
    assert written[:4] == ["train-00000.safetensors", "train-00001.safetensors", "dev-00000.safetensors",
                           "test-00000.safetensors"]  # fmt: skip
    done = [0, 16, 32, 36, 40]
    for stop in (*range(5), 9, len(written) - 1):
        out = tmp_path / f"store{stop}"
        count = 0

        def failing(*where: object, stop: int = stop) -> None:
            nonlocal count
            count += 1
            if count > stop:
                raise OSError(28, "No space left on device")
            finish(*where)

        with monkeypatch.context() as patch:
            patch.setattr(atomic, "_finish", failing)
            with pytest.raises(OSError, match="cannot be written: No space left on device"):
                write(splits, source, out)
        if stop:
            with pytest.raises(ValueError, match="an unfinished store; finish it with the same itm-fast data command"):
                open_split(out, "train", Vocabulary(["<pad>", "<start>", "<end>", "<unk>"]))
        detector = ColourDetector()
        write(splits, source, out, detector)
        assert detector.calls == COUNT - done[min(stop, 4)]
        assert contents(out) == whole


def test_a_folder_of_detections_beside_features_is_no_unfinished_store(data: Path, tmp_path: Path) -> None:
    """A detector's own output may have such a folder."""
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "detections").mkdir()
    (tmp_path / "data" / "detections" / "train.json").write_text("{}")
    assert cli.run(["data", "check", str(tmp_path / "data")]) == 0


def test_a_finished_import_is_left_as_it_is(
    source: Path, splits: list[SplitPictures], whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "store"
    write(splits, source, out)
    (out / "detections").mkdir()
    (out / "detections" / "train-00000.safetensors").write_bytes(b"left by a call that was killed at the end")
    detector = ColourDetector()
    write(splits, source, out, detector)
    assert detector.calls == 0
    assert contents(out) == whole
    detector.digest = "other weights"
    with pytest.raises(ValueError, match="contains a feature store of other data or settings; choose another --out"):
        write(splits, source, out, detector)
    assert detector.calls == 0


def half(splits: list[SplitPictures], source: Path, out: Path) -> Path:
    """Stop an import in the second half of its pictures; return the file of the first 16."""

    class Stopping(ColourDetector):
        def __call__(self, pixels: np.ndarray) -> detections.Detection:
            if self.calls == 20:
                raise KeyboardInterrupt
            return super().__call__(pixels)

    with pytest.raises(KeyboardInterrupt):
        write(splits, source, out, Stopping())
    return out / "detections" / "train-00000.safetensors"


def test_other_data_or_settings_do_not_continue_an_import(
    source: Path, splits: list[SplitPictures], tmp_path: Path
) -> None:
    out = tmp_path / "store"
    path = half(splits, source, out)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    other = ColourDetector()
    other.digest = "other weights"
    refused = f"^{out}: contains an unfinished store of other data or settings; remove it or choose another --out$"
    for options in ({"detector": other}, {"dtype": "fp16"}, {"splits": [splits[0], splits[0]]}):
        if "splits" in options:
            options = {"splits": collect(source / "pictures", source / "captions.csv", seed=1).splits}
        with pytest.raises(ValueError, match=refused):
            write(**{"splits": splits, "source": source, "out": out, **options})
    with pytest.raises(ValueError, match="expected an empty folder or a feature store, found 'detections'; choose"):
        import_features(splits, source / "captions.csv", out, GridEncoder(), min_count=1)
    assert other.calls == 0
    # An unfinished store of another import.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "unfinished.json").write_text("{}")
    with pytest.raises(ValueError, match="contains an unfinished store of other data or settings; remove it or choose"):
        write(splits, source, tmp_path / "other", other)
    (tmp_path / "other" / "unfinished.json").rename(tmp_path / "other" / "notes.json")
    with pytest.raises(ValueError, match=r"expected an empty folder or a feature store, found 'notes\.json'; choose"):
        write(splits, source, tmp_path / "other", other)
    assert other.calls == 0


def test_damaged_detections_are_one_line(source: Path, splits: list[SplitPictures], tmp_path: Path) -> None:
    out = tmp_path / "store"
    path = half(splits, source, out)
    content = load_file(path)
    content["features"][3, 2] += 1
    for damage in (lambda: save_file(content, path), lambda: path.write_bytes(b"damaged")):
        damage()
        message = f"^{path}: damaged; remove this file and run the command again$"
        with pytest.raises(ValueError, match=message):
            write(splits, source, out)
    path.unlink()
    write(splits, source, out)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), "bf16", "the detector returns values that are not finite"),
        (1e5, "fp16", "the detector returns values beyond the range of fp16"),
    ],
)
def test_a_picture_that_the_detector_cannot_take_is_one_line(
    source: Path, splits: list[SplitPictures], tmp_path: Path, value: float, dtype: str, message: str
) -> None:
    class Failing(ColourDetector):
        def __call__(self, pixels: np.ndarray) -> detections.Detection:
            found = super().__call__(pixels)
            if self.calls == 18:
                found.features[0, 1] = value
            return found

    with pytest.raises(ValueError, match=f"^{splits[0].paths[17]}: {message}$"):
        write(splits, source, tmp_path / "store", Failing(), dtype=dtype)


def test_large_pictures_are_scaled_down_with_their_proportions(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for size, bounds, expected in (
        ((120, 80), (40, 100), (40, 60)),
        ((120, 80), (60, 80), (53, 80)),
        ((120, 80), (200, 300), (80, 120)),
        ((200, 2), (40, 100), (1, 100)),
    ):
        Image.new("RGB", size).save(path)
        assert Shrinking(*bounds).picture(path).shape == (*expected, 3)


# The command line


@pytest.fixture
def imported(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[object]]:
    """Return a function that makes the arguments of an import with the detector of colours."""
    (tmp_path / "detector").mkdir()
    (tmp_path / "detector" / "detector.json").write_text("{}")
    monkeypatch.setattr(detector_folder, "load_detector", lambda *_, **__: ColourDetector())
    return lambda *more: [
        "data", "import", "--images", source / "pictures", "--captions", source / "captions.csv", "--encoder",
        tmp_path / "detector", "--out", tmp_path / "store", "--workers", 0, "--min-count", 1, *more,
    ]  # fmt: skip


def run(arguments: list[object]) -> None:
    assert cli.run([str(argument) for argument in arguments]) == 0


def test_attention_is_drawn_on_the_boxes(
    imported: Callable[..., list[object]], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    run(imported())
    # How many regions the detector finds, and so the size, depends on the version of torch.
    assert re.search(
        r"^train: 32 pictures, 64 captions, up to 4 regions of 7 numbers, 1\.\d+kB$", capsys.readouterr().out, re.M
    )
    run(["data", "check", store])
    train_small(store, tmp_path / "run", "--model-option", "direction=mean")
    test = open_split(store, "test", Vocabulary.from_file(store / "vocab.json"))
    image = next(number for number in range(4) if test.region_count(number) == 4)
    caption = test.caption_image.tolist().index(image)
    page = tmp_path / "pair.html"
    explain = ["explain", "--checkpoint", tmp_path / "run", "--data", store, "--caption", caption, "--out", page]
    run([*explain, "--json", tmp_path / "pair.json"])
    content = json.loads((tmp_path / "pair.json").read_text())
    boxes = test.boxes([image])[0].numpy()
    np.testing.assert_array_equal(np.float32(content["boxes"]), boxes)
    picture = whole_picture_of(test, image)
    assert picture is not None
    # A picture keeps its proportions; its longer side has 336 pixels.
    with Image.open(source / "pictures" / test.image_ids[image]) as file:
        longest = max(file.size)
        assert picture.shape == (*(round(336 * side / longest) for side in file.size[::-1]), 3)
        expected = np.asarray(file.resize(picture.shape[1::-1], Image.Resampling.BILINEAR), dtype=np.int16)
    assert np.abs(picture - expected).mean() < 8
    # As pixels to train on, it is a square.
    square = open_split(store / "pictures", "test", test.vocabulary).image_batch([image]).view(336, 336, 3)
    expected = np.asarray(Image.fromarray(picture).resize((336, 336)), dtype=np.float32) / 127.5 - 1
    np.testing.assert_allclose(square.numpy(), expected, rtol=0, atol=1e-6)
    # Four regions are no grid of 2 x 2.
    assert picture_of(test, image) == (None, 1)
    html = page.read_text(encoding="utf-8")
    images, pixels = pictures_in(html)
    np.testing.assert_array_equal(pixels[0], numbered(picture, boxes))
    attention = np.float32(content["directions"]["t2i"]["attention"][0])
    for index, weights in enumerate(attention):
        np.testing.assert_array_equal(pixels[1 + index], heat_of_boxes(picture, boxes, weights))
        name = f"region {int(weights.argmax()) + 1}"
        assert images[1 + index]["alt"] == f"{content['words'][index]}: most attention in {name}"
        assert html.count(f'<span class="share">{name}: {100 * weights.max():.1f} %</span>') >= 1
    words = np.float32(content["directions"]["i2t"]["attention"][0])
    for index in range(len(attention)):
        expected = heat_of_boxes(picture, boxes, words[:, index], largest=float(words.max()), power=1.0)
        np.testing.assert_array_equal(pixels[1 + len(attention) + index], expected)
    cutouts = pixels[1 + 2 * len(attention) :]
    height, width = picture.shape[:2]
    for region, (x0, y0, x1, y1) in enumerate(boxes.tolist()):
        left, top, right, bottom = int(x0 * width), int(y0 * height), math.ceil(x1 * width), math.ceil(y1 * height)
        np.testing.assert_array_equal(cutouts[region], picture[top:bottom, left:right])
    # On another picture.
    other = tmp_path / "other.png"
    Image.new("RGB", (700, 350), "red").save(other)
    run([*explain, "--picture", other])
    _, pixels = pictures_in(page.read_text(encoding="utf-8"))
    np.testing.assert_array_equal(pixels[0], numbered(np.full((168, 336, 3), (255, 0, 0), np.uint8), boxes))


@pytest.mark.parametrize("name", ["scan", "pfan"])
def test_the_report_of_a_run_draws_boxes(imported: Callable[..., list[object]], tmp_path: Path, name: str) -> None:
    """Each word of a caption over its own picture; pictures keep their proportions."""
    store = tmp_path / "store"
    run(imported())
    train_small(store, tmp_path / "run", "--model", name, "--report")
    model, vocabulary = models.load(tmp_path / "run"), Vocabulary.from_file(store / "vocab.json")
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    test = open_split(store, "test", vocabulary)
    model.prepare(test)
    images, pixels = pictures_in(html)
    shown = {image["alt"]: array for image, array in zip(images, pixels, strict=True)}
    drawn = [(image, array) for image, array in zip(images, pixels, strict=True) if "most attention" in image["alt"]]
    assert "Regions that a word attends to are bright and outlined" in html
    expected = []
    for caption, weights in enumerate(evaluation.word_attention(model, test, torch.arange(len(test)))):
        image = int(test.caption_image[caption])
        picture, boxes = whole_picture_of(test, image), test.boxes([image])[0].numpy()
        np.testing.assert_array_equal(shown[test.image_ids[image]], picture)
        expected += [heat_of_boxes(picture, boxes, row.numpy()) for row in weights[1:-1]]
    assert drawn
    for image, array in drawn:
        assert image["title"].startswith("most attention in region ")
        # The report encodes fewer captions at a time.
        same = [one for one in expected if one.shape == array.shape and np.abs(array.astype(int) - one).max() <= 1]
        assert same


def test_without_stored_pictures_attention_is_in_tables(
    imported: Callable[..., list[object]], tmp_path: Path, data: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(imported("--no-pictures"))
    store = tmp_path / "store"
    split = open_split(store, "test", Vocabulary.from_file(store / "vocab.json"))
    assert whole_picture_of(split, 0) is None
    train_small(store, tmp_path / "run")
    page = tmp_path / "pair.html"
    run(["explain", "--checkpoint", tmp_path / "run", "--data", store, "--caption", 0, "--out", page])
    assert "<img" not in page.read_text(encoding="utf-8")
    arguments = ["--caption", 0, "--out", page, "--picture", tmp_path / "none.png"]
    assert error(capsys, "explain", "--checkpoint", tmp_path / "run", "--data", store, *arguments) == (
        1, f"{tmp_path}/none.png: cannot be read: No such file or directory"
    )  # fmt: skip
    assert error(capsys, "explain", "--checkpoint", trained, "--data", data, "--split", "dev", *arguments) == (
        1, f"--picture: {data} contains no boxes of the regions, which would be drawn on it"
    )  # fmt: skip


def test_options_of_other_encoders_are_one_line(
    imported: Callable[..., list[object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"--layer, --pool: expected neither, as {tmp_path}/detector is a Faster R-CNN"
    assert error(capsys, *imported("--pool", "mean")) == (1, message)
    (tmp_path / "detector" / "detector.json").unlink()
    message = "--regions, --min-regions, --confidence: expected only with a Faster R-CNN as --encoder"
    assert error(capsys, *imported("--regions", "10")) == (1, message)


def test_bright_boxes_are_those_of_the_largest_weights() -> None:
    """A pixel has the light of the strongest of its boxes; the others are dark and grey."""
    picture = np.random.default_rng(0).integers(0, 256, (20, 40, 3), dtype=np.uint8)
    boxes = np.float32([[0, 0, 0.5, 1], [0.25, 0.25, 0.75, 0.75], [0.9, 0.9, 0.9, 0.9]])
    weights = np.float32([0.04, 0.01, 0.0])
    found = heat_of_boxes(picture, boxes, weights)
    grey = picture @ np.array([0.299, 0.587, 0.114])
    for y in range(20):
        for x in range(40):
            light = 1.0 if x < 20 else 0.5 if x < 30 and 5 <= y < 15 else 0.0
            expected = picture[y, x] * light + grey[y, x] * 0.4 * np.array([0.92, 0.98, 1.15]) * (1 - light)
            first = x < 20 and (x in (0, 19) or y in (0, 19))
            second = 10 <= x < 30 and 5 <= y < 15 and (x in (10, 29) or y in (5, 14))
            if not first and not second:
                np.testing.assert_array_equal(found[y, x], np.rint(expected))
    np.testing.assert_array_equal(found[0, :20], np.tile(np.uint8([255, 196, 0]), (20, 1)))
