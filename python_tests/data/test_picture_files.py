"""Decoding of picture files: orientation, colours, transparency, damaged files, near-duplicates."""

from __future__ import annotations

import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from itm_fast.data.picture_files import MAX_PIXELS, Look, decoded, look_at, near_duplicates, open_picture
from itm_fast.data.picture_folder import pictures_in


def quadrants(size: int = 16) -> np.ndarray:
    """Return a picture with red, green, blue and grey quarters."""
    pixels = np.full((size, size, 3), 100, dtype=np.uint8)
    half = size // 2
    pixels[:half, :half], pixels[:half, half:], pixels[half:, :half] = (200, 0, 0), (0, 200, 0), (0, 0, 200)
    return pixels


def png_claiming(width: int, height: int) -> bytes:
    """Return a PNG file whose header claims a size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "webp", "gif", "ppm"])
def test_formats_without_loss_give_the_pixels(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(quadrants()).save(path, **({"lossless": True} if suffix == "webp" else {}))
    assert np.array_equal(np.asarray(open_picture(path)), quadrants())


def test_the_orientation_of_exif_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # The camera was turned: rotate by 90 degrees clockwise.
    Image.fromarray(quadrants()).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.asarray(open_picture(tmp_path / "a.png")), np.rot90(quadrants(), -1))


@pytest.mark.parametrize("suffix", ["png", "webp", "jpeg"])
def test_damaged_metadata_is_ignored(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(quadrants()).save(path, exif=b"Exif\0\0damaged")
    assert open_picture(path).size == (16, 16)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((80, 80, 80, 255), (0, 0, 4, 2))
    if mode == "P":
        image = image.convert("P")
        image.info["transparency"] = image.getpixel((0, 3))
    image = image.convert(mode)
    image.save(tmp_path / "a.png")
    pixels = np.asarray(open_picture(tmp_path / "a.png"))
    assert np.array_equal(pixels[3], np.full((4, 3), 255))
    assert np.abs(pixels[0].astype(int) - 80).max() <= 20  # A palette rounds colours.


def test_half_transparent_pixels_are_mixed_with_white(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (0, 100, 200, 128)).save(tmp_path / "a.png")
    expected = np.rint(np.array([0, 100, 200]) * 128 / 255 + 255 * 127 / 255)
    assert np.abs(np.asarray(open_picture(tmp_path / "a.png"))[0, 0] - expected).max() <= 1


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 256, 65535, 32768]], dtype=np.uint16)).save(tmp_path / "a.png")
    assert np.asarray(open_picture(tmp_path / "a.png"))[0].tolist() == [[0] * 3, [1] * 3, [255] * 3, [128] * 3]


def test_the_transparent_level_of_sixteen_bits_is_white(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 512, 768, 0]], dtype=np.uint16))
    image.save(tmp_path / "a.png", transparency=512)
    assert np.asarray(open_picture(tmp_path / "a.png"))[0].tolist() == [[0] * 3, [255] * 3, [3] * 3, [0] * 3]


@pytest.mark.parametrize(
    ("pixels", "numbers"),
    [
        (np.array([[0.0, 1.0]], dtype=np.float32), "from 0 to 1"),
        (np.array([[7, 70_000]], dtype=np.int32), "from 7 to 70000"),
        (np.array([[7, 255]], dtype=np.int32), "from 7 to 255"),
    ],
    ids=["float", "int", "small"],
)
def test_pixels_of_32_bits_are_refused(tmp_path: Path, pixels: np.ndarray, numbers: str) -> None:
    Image.fromarray(pixels).save(tmp_path / "a.tiff")
    expected = rf"a.tiff: the picture cannot be decoded \(pixels of 32 bits, {numbers}; convert it to 8 or 16 bits\)"
    with pytest.raises(ValueError, match=expected):
        open_picture(tmp_path / "a.tiff")


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8, 3), (200, 40, 90), dtype=np.uint8)).convert("CMYK").save(tmp_path / "a.tiff")
    assert np.abs(np.asarray(open_picture(tmp_path / "a.tiff")).astype(int) - (200, 40, 90)).max() <= 1


BAD = {
    "a.png: an empty file, not a picture": b"",
    "a.png: not a picture in a format that Pillow reads": b"no picture at all",
    f"a.png: a picture of more than {MAX_PIXELS:,} pixels; scale it down first": png_claiming(60_000, 60_000),
    "a.png: the picture cannot be decoded (image file is truncated": png_claiming(500, 500),
    "a.png: the picture cannot be decoded (1 x 20000 pixels: a side is more than 100 times the other)": png_claiming(
        1, 20_000
    ),
    # A texture of a kind that Pillow lacks.
    "a.png: the picture cannot be decoded (": b"DDS " + (124).to_bytes(4, "little") + bytes(68) + b"\x20" + bytes(71),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_one_line(tmp_path: Path, message: str) -> None:
    (tmp_path / "a.png").write_bytes(BAD[message])
    with pytest.raises(ValueError, match=re.escape(message)):
        open_picture(tmp_path / "a.png")


@pytest.mark.parametrize(("width", "height"), [(0, 4), (4, 0), (0, 0)])
def test_a_picture_without_pixels_is_one_line(tmp_path: Path, width: int, height: int) -> None:
    (tmp_path / "a.png").write_bytes(png_claiming(width, height))
    with pytest.raises(ValueError, match=r"a\.png: not a picture .*, or of zero width or height$"):
        open_picture(tmp_path / "a.png")


def test_eps_is_not_read(tmp_path: Path) -> None:
    """Pillow would run Ghostscript."""
    Image.fromarray(quadrants()).save(tmp_path / "a.eps")
    with pytest.raises(ValueError, match=r"a\.eps: not a picture in a format that Pillow reads"):
        open_picture(tmp_path / "a.eps")


@pytest.mark.parametrize(
    "content", [b"\x89HDF\r\n\x1a\n", b"\x00\x00\x01\xb3\x01\x00\x10\x00", b"GRIB\0\0\0\1", b"BUFR"]
)
def test_formats_without_a_decoder_are_not_pictures(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.png: not a picture in a format that Pillow reads"):
        open_picture(tmp_path / "a.png")


def test_a_folder_of_pictures_may_contain_other_files(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    pictures = [tmp_path / "b.JPG", tmp_path / "cats" / "a.png"]
    others = ["a.h5", "a.hdf", "a.mpg", "a.mpeg", "a.grib", "a.bufr", "a.wmf", "a.eps", "a.txt", "cats/._a.png"]
    for path in (*pictures, *(tmp_path / name for name in others)):
        path.touch()
    assert pictures_in(tmp_path) == pictures


def test_pictures_in_linked_folders_count_once(tmp_path: Path) -> None:
    pictures, elsewhere = tmp_path / "pictures", tmp_path / "elsewhere"
    for path in (pictures / "a.png", elsewhere / "b.png"):
        path.parent.mkdir()
        path.touch()
    for name, target in (("linked", elsewhere), ("linked_again", elsewhere), ("around", tmp_path), ("self", pictures)):
        (pictures / name).symlink_to(target)
    assert pictures_in(pictures) == [pictures / "a.png", pictures / "around" / "elsewhere" / "b.png"]
    (pictures / "z").mkdir()
    (pictures / "z" / "c.png").touch()
    (pictures / "also_z").symlink_to(pictures / "z")
    assert pictures / "z" / "c.png" in pictures_in(pictures)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match="closed"):
        pictures_in(tmp_path, strict=True)
    assert pictures_in(tmp_path) == []


def test_a_truncated_jpeg_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ValueError, match=re.escape(f"{path}: the picture cannot be decoded (image file is truncated")):
        open_picture(path)


def test_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    paths[3].write_bytes(b"no picture")
    alone, shared = (list(decoded(paths, look_at, workers)) for workers in (0, 2))
    assert [str(item) if isinstance(item, ValueError) else item.digest for item in alone] == [
        str(item) if isinstance(item, ValueError) else item.digest for item in shared
    ]
    assert str(shared[3]) == f"{paths[3]}: not a picture in a format that Pillow reads, or of zero width or height"


def test_near_duplicates_are_scaled_or_compressed_copies(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (6, 6, 3), dtype=np.uint8) for _ in range(3)]
    for number, pixels in enumerate(pictures):
        Image.fromarray(pixels).resize((96, 96), Image.Resampling.BICUBIC).save(tmp_path / f"{number}.png")
    left = [look_at(tmp_path / f"{number}.png") for number in range(2)]
    with Image.open(tmp_path / "1.png") as image:
        image.resize((60, 60)).save(tmp_path / "copy.jpg", quality=80)
    right = [look_at(tmp_path / name) for name in ("2.png", "copy.jpg")]
    assert near_duplicates(left, right) == [(1, 1)]
    assert near_duplicates(left, []) == []


def test_near_duplicates_are_those_of_a_comparison_of_all_pairs() -> None:
    """Copies of random pictures, with up to five bits of the hash changed and other levels of the thumbnail."""
    random = np.random.default_rng(0)

    def look(bits: int, thumbnail: np.ndarray) -> Look:
        return Look(b"", bits, thumbnail.clip(0, 255).astype(np.uint8))

    left = [look(int(random.integers(2**63)), random.integers(0, 256, 192)) for _ in range(200)]
    # Of equal pictures, the first one is named.
    left += left[:20]
    right = []
    for one in random.permutation(np.arange(200)):
        changed = left[one].hash
        for bit in random.choice(64, random.integers(0, 6), replace=False):
            changed ^= 1 << int(bit)
        most = int(random.integers(1, 25))
        right.append(look(changed, left[one].thumbnail + random.integers(-most, most + 1, 192)))
    expected = []
    for index, other in enumerate(right):
        levels = [np.abs(one.thumbnail.astype(int) - other.thumbnail).mean() for one in left]
        near = [number for number, one in enumerate(left) if (one.hash ^ other.hash).bit_count() <= 3]
        best = min(near, key=lambda number: levels[number], default=None)
        if best is not None and levels[best] <= 6:
            expected.append((best, index))
    assert 20 < len(expected) < 180
    assert near_duplicates(left, right) == expected
