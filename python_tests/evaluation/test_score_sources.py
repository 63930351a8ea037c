"""Scores from files of any format and layout are the scores that were saved."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from itm_fast.evaluation.opening import open_embeddings, open_matrix
from itm_fast.evaluation.score_sources import EmbeddingScores, MatrixScores
from itm_fast.files.arrays import open_array

ALL = torch.arange(3), torch.arange(15)


def matrix(dtype: str = "float32") -> np.ndarray:
    return (np.arange(45).reshape(3, 15) * 7 % 45 - 11).astype(dtype)


def saved(path: Path, array: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.name == "packed.npz":
        np.savez_compressed(path, other=np.zeros(4), sims=array)
    elif path.suffix == ".npz":
        np.savez(path, other=np.zeros(4), sims=array)
    elif path.suffix == ".safetensors":
        save_file({"sims": torch.from_numpy(array), "bias": torch.zeros(3)}, path)
    elif path.name == "bare.pt":
        torch.save(torch.from_numpy(array), path)
    else:
        torch.save({"sims": torch.from_numpy(array), "npts": 3}, path)
    return path


FILES = ("s.npy", "s.npz", "packed.npz", "s.safetensors", "bare.pt", "s.pth")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "int8"])
def test_every_format_holds_the_scores(tmp_path: Path, name: str, dtype: str) -> None:
    source = open_matrix(saved(tmp_path / name, matrix(dtype))).source
    tile = source.tile(*ALL)
    assert tile.dtype == (torch.float64 if dtype in ("float64", "int64", "int8") else torch.float32)
    assert tile.tolist() == matrix("float64").tolist()


@pytest.mark.parametrize("name", ["s.npy", "s.npz"])
@pytest.mark.parametrize("array", [matrix(">f4"), np.asfortranarray(matrix())], ids=["big endian", "columns first"])
def test_foreign_byte_orders_and_layouts(tmp_path: Path, name: str, array: np.ndarray) -> None:
    assert open_matrix(saved(tmp_path / name, array)).source.tile(*ALL).tolist() == matrix("float64").tolist()


def test_matrices_on_disk_stay_there(tmp_path: Path) -> None:
    for name in ("s.npy", "s.npz"):
        assert isinstance(open_array(saved(tmp_path / name, matrix())), np.memmap)
    for name in ("bare.pt", "s.pth"):
        array = open_array(saved(tmp_path / name, matrix()))
        assert isinstance(array, torch.Tensor)
        if (maps := Path("/proc/self/maps")).exists():
            assert str(tmp_path / name) in maps.read_text()
    torch.save(torch.from_numpy(matrix()), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert open_matrix(tmp_path / "old.pt").source.tile(*ALL).tolist() == matrix("float64").tolist()


def test_bfloat16_tensors(tmp_path: Path) -> None:
    save_file({"sims": torch.from_numpy(matrix()).bfloat16()}, tmp_path / "s.safetensors")
    tile = open_matrix(tmp_path / "s.safetensors").source.tile(*ALL)
    assert (tile.dtype, tile.tolist()) == (torch.float32, matrix("float64").tolist())


def test_tiles_and_pairs_of_every_layout() -> None:
    expected = torch.from_numpy(matrix())
    transposed, repeated = matrix().T.copy(), np.repeat(matrix(), 5, axis=0)
    sources = {
        "rows": MatrixScores(matrix()),
        "columns": MatrixScores(transposed, captions_first=True),
        "repeated": MatrixScores(repeated, every=5),
        "both": MatrixScores(repeated.T.copy(), captions_first=True, every=5),
        "distances": MatrixScores(-matrix(), distances=True),
        "tensor": MatrixScores(torch.from_numpy(matrix())),
    }
    for name, source in sources.items():
        assert (source.n_images, source.n_captions) == (3, 15), name
        for images, captions in (([0, 1, 2], [3, 4, 5]), ([2, 0], [9, 2, 14]), ([1], [0]), ([0, 2], [])):
            rows, columns = torch.tensor(images), torch.tensor(captions, dtype=torch.int64)
            assert torch.equal(source.tile(rows, columns), expected[rows][:, columns]), name
        rows, columns = torch.tensor([2, 0, 2]), torch.tensor([0, 14, 3])
        assert torch.equal(source.pairs(rows, columns), expected[rows, columns]), name


def test_embeddings_are_scored_by_cosine_or_inner_product() -> None:
    random = np.random.default_rng(0)
    images, captions = random.standard_normal((3, 4)), random.standard_normal((15, 4))
    images[1] = 0
    for similarity in ("cosine", "dot"):
        source = EmbeddingScores(np.repeat(images, 5, axis=0), captions, similarity=similarity, every=5)
        for i in range(3):
            for c in range(15):
                expected = sum(x * y for x, y in zip(images[i], captions[c], strict=True))
                if similarity == "cosine" and i != 1:
                    expected /= sum(x * x for x in images[i]) ** 0.5 * sum(y * y for y in captions[c]) ** 0.5
                index = torch.tensor([i]), torch.tensor([c])
                assert float(source.tile(*index)) == pytest.approx(expected, abs=1e-14)
                assert float(source.pairs(*index)) == pytest.approx(expected, abs=1e-14)
    assert float(source.caption_pairs(torch.tensor([2]), torch.tensor([7]))) == pytest.approx(
        float(captions[2] @ captions[7])
    )
    assert float(source.image_pairs(torch.tensor([2]), torch.tensor([0]))) == pytest.approx(
        float(images[2] @ images[0])
    )


def test_paths_may_be_texts(tmp_path: Path) -> None:
    file = saved(tmp_path / "m.npy", matrix())
    rows, columns = torch.arange(len(matrix())), torch.arange(matrix().shape[1])
    tile = open_matrix(file).source.tile(rows, columns)
    assert torch.equal(open_matrix(str(file)).source.tile(rows, columns), tile)
    found = [open_embeddings(kind(file), kind(file)).source.tile(rows, rows) for kind in (str, Path)]
    assert torch.equal(*found)


def test_layouts_are_found_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "s.npy"
    for array, note in (
        (matrix(), None),
        (matrix().T, "15 x 3: read as captions x images, because images are the fewer; scores are images x captions"),
        (np.repeat(matrix(), 5, axis=0), "15 x 15 stores each image five times in a row; every fifth is used"),
        (np.repeat(matrix(), 5, axis=0).T, "15 x 15 stores each image five times in a row; every fifth is used"),
    ):
        np.save(path, array)
        opened = open_matrix(path)
        assert torch.equal(opened.source.tile(*ALL), torch.from_numpy(matrix()))
        assert [line.split(": ", 1)[1] if "read as" in line else line for line in opened.notes] == (
            [] if note is None else [note if "read as" in note else f"{path}: {note}"]
        )
    # Lost scores are equal as well.
    lost = np.repeat(matrix(), 5, axis=0)
    lost[5:10] = np.nan
    np.save(path, lost)
    assert open_matrix(path).source.n_images == 3
    # A square matrix with one caption per image is no matrix of repeated images. A constant one is not, either.
    for square in (np.arange(100.0).reshape(10, 10), np.ones((10, 10))):
        np.save(path, square)
        assert open_matrix(path).source.n_images == 10
    # A known number of captions decides.
    np.save(path, matrix()[:, :4])
    assert open_matrix(path, n_captions=3, captions_first=True).source.n_images == 4
    assert open_matrix(path, n_captions=4).source.n_images == 3


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil"),))


def refusals(tmp_path: Path) -> dict[str, tuple[Path, dict[str, Any], str]]:
    def npy(name: str, array: np.ndarray, pickled: bool = False) -> Path:
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=pickled)
        return tmp_path / f"{name}.npy"

    np.savez(tmp_path / "two.npz", a=matrix(), b=matrix())
    np.savez(tmp_path / "objects.npz", a=np.array([[{}]], dtype=object))
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros((2000, 2000)))
    torch.save({"sims": Evil()}, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 nothing")
    np.savez_compressed(tmp_path / "flipped.npz", a=matrix())
    content = bytearray((tmp_path / "flipped.npz").read_bytes())
    content[60] ^= 0xFF  # in the compressed header of the array
    (tmp_path / "flipped.npz").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "cut.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00\x76\x00{'descr'")
    (tmp_path / "damaged.safetensors").write_bytes(b"\x01\0\0\0\0\0\0\0{")
    (tmp_path / "text.csv").write_text("1,2\n")
    short = npy("short", matrix())
    short.write_bytes(short.read_bytes()[:-4])
    objects = (
        "holds Python objects, which are not loaded because they can run code; save the numbers alone, such as "
        "numpy.save(FILE, saved['sims']) for the dictionaries that SCAN's code saves"
    )
    return {
        "a dictionary": (npy("dict", np.array({"sims": 1}), True), {}, f"dict.npy: {objects}"),
        "objects in npz": (tmp_path / "objects.npz", {"key": "a"}, f"objects.npz: a {objects}"),
        "code": (
            tmp_path / "evil.pt",
            {},
            "evil.pt: names the Python object __builtin__.getattr, which is not allowed; no code was run; expected a "
            "tensor, or a dictionary of tensors, from torch.save",
        ),
        "a list": (tmp_path / "list.pt", {}, "list.pt: expected a tensor, or a dictionary of tensors, found list"),
        "complex numbers": (
            npy("complex", matrix().astype(complex)),
            {},
            "complex.npy: expected real numbers of at most 64 bits, found complex128",
        ),
        "booleans": (
            npy("bool", matrix() > 0), {}, "bool.npy: expected real numbers of at most 64 bits, found bool",
        ),
        "three dimensions": (
            npy("cube", np.zeros((2, 3, 4))),
            {},
            "cube.npy: expected a score matrix (images, captions), found shape (2, 3, 4)",
        ),
        "two arrays": (
            tmp_path / "two.npz",
            {},
            "two.npz: expected one array with two dimensions, found 2; its arrays: a [3, 15], b [3, 15]; --key NAME "
            "chooses one",
        ),
        "another name": (
            tmp_path / "two.npz", {"key": "c"}, "two.npz: has no array 'c'; its arrays: a [3, 15], b [3, 15]",
        ),
        "a name for one array": (
            npy("named", matrix()),
            {"key": "x"},
            "named.npy: a .npy file holds one array without a name, so leave out the name 'x'",
        ),
        "far more than its size": (
            tmp_path / "bomb.npz", {}, "bomb.npz: a claims 32,000,128 bytes, far more than the file holds",
        ),
        "damage": (
            tmp_path / "damaged.npz", {}, "damaged.npz: not a readable .npz archive (File is not a zip file)",
        ),
        "damage in a compressed array": (
            tmp_path / "flipped.npz", {}, "flipped.npz: a: not a readable array (",
        ),
        "a truncated header in an archive": (
            tmp_path / "cut.npz", {}, "cut.npz: a: not a readable array (",
        ),
        "a damaged header": (
            tmp_path / "damaged.safetensors", {}, "damaged.safetensors: not a readable safetensors file (",
        ),
        "a short file": (
            short, {}, f"short.npy: truncated: the header promises {128 + 180} bytes, the file has {128 + 176}",
        ),
        "another format": (
            tmp_path / "text.csv",
            {},
            "text.csv: expected a file that ends in .npy, .npz, .safetensors, .pt or .pth",
        ),
        "no multiple": (
            npy("odd", matrix()[:, :7]),
            {},
            "odd.npy: found 3 x 7: 7 captions are no multiple of 3 images, so their images are unknown: rows or "
            "columns missing? Give the image of each caption with --caption-image",
        ),
        "another split": (
            npy("split", matrix()),
            {"n_captions": 20},
            "split.npy: expected 20 captions as rows or columns, found 3 x 15: scores of another split?",
        ),
        "numbers of images in place of captions": (
            npy("few", matrix()),
            {"n_captions": 3},
            "few.npy: expected 3 captions as columns, found 3 x 15: captions of another split? If they are the rows, "
            "give --captions-first",
        ),
        "images as rows": (
            npy("rows", matrix()),
            {"captions_first": True},
            "rows.npy: expected at least as many captions (rows) as images (columns), found 3 x 15: are images the "
            "rows? Then leave out --captions-first",
        ),
        "nothing": (
            npy("empty", np.zeros((0, 5))),
            {},
            "empty.npy: expected a score matrix (images, captions), found the empty shape (0, 5)",
        ),
    }  # fmt: skip


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (path, options, message) in refusals(tmp_path).items():
        end = "" if message.endswith("(") else "$"
        with pytest.raises(ValueError, match=f"^{re.escape(str(path.parent / message))}{end}") as raised:
            open_matrix(path, **options)
        assert "\n" not in str(raised.value), name
    assert not (tmp_path / "evil").exists()


def test_embeddings_that_do_not_fit(tmp_path: Path) -> None:
    files = {}
    for name, shape in {"images": (3, 4), "captions": (15, 4), "wide": (15, 5), "odd": (7, 4)}.items():
        files[name] = tmp_path / f"{name}.npy"
        np.save(files[name], np.random.default_rng(0).standard_normal(shape))
    for images, captions, message in (
        ("images", "wide", f"expected embeddings with 4 channels, as in {files['images']}, found 5: another model?"),
        ("captions", "images", "expected at least as many captions as images, found 3 captions and 15 images: are the "
         "files exchanged?"),
        ("images", "odd", "found 3 images and 7 captions: 7 captions are no multiple of 3 images, so their images are "
         "unknown: rows or columns missing? Give the image of each caption with --caption-image"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{re.escape(f'{files[captions]}: {message}')}$"):
            open_embeddings(files[images], files[captions])
    repeated = np.repeat(np.load(files["images"]), 5, axis=0)
    np.save(tmp_path / "repeated.npy", repeated)
    opened = open_embeddings(tmp_path / "repeated.npy", files["captions"], similarity="dot")
    assert opened.notes == [
        f"{tmp_path / 'repeated.npy'}: stores each of 3 images five times in a row; every fifth is used"
    ]
    plain = open_embeddings(files["images"], files["captions"], similarity="dot").source
    assert torch.equal(opened.source.tile(*ALL), plain.tile(*ALL))
