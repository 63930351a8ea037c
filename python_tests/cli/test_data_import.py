"""`itm-fast data import`: from pictures and captions to a trained model, after a kill, and with bad pictures."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from itm_fast import cli
from itm_fast.data import (
    BatchLoader,
    TokenizerVocabulary,
    Vocabulary,
    emoji,
    open_split,
    picture_folder,
    picture_lookup,
    picture_of,
    picture_shards,
)
from itm_fast.data.import_pictures import import_features, import_pictures
from itm_fast.data.pack import check_target
from itm_fast.data.picture_files import open_picture
from itm_fast.data.picture_folder import collect
from itm_fast.data.picture_shards import StoredPictures
from itm_fast.data.picture_sources import EncodedPictures
from itm_fast.data.preprocessing import Preprocessing
from itm_fast.models.vision_folder import load_picture_encoder
from python_tests.helpers.bert import write_bert
from python_tests.helpers.clip import write_clip
from python_tests.helpers.commands import SMALL, error, output, train_small
from python_tests.helpers.grid_encoder import GridEncoder
from python_tests.helpers.pictures import SIDE, write_captions, write_encoder, write_pictures
from python_tests.helpers.processes import ROOT
from python_tests.helpers.recording import recording


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "vit"
    write_encoder(folder)
    return folder


@pytest.fixture
def arguments(tmp_path: Path, encoder: Path) -> list[object]:
    """Return the arguments of an import of 40 pictures with two captions each."""
    captions = write_captions(tmp_path / "captions.csv", write_pictures(tmp_path / "pictures", 40))
    return [
        "data", "import", "--images", tmp_path / "pictures", "--captions", captions, "--encoder", encoder,
        "--out", tmp_path / "store", "--workers", 0, "--min-count", 1,
    ]  # fmt: skip


def run(arguments: list[object]) -> int:
    return cli.run([str(argument) for argument in arguments])


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a store and of the store of pictures in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pictures_become_a_trained_model(
    tmp_path: Path,
    arguments: list[object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "store"
    assert run(arguments) == 0
    assert "train: 32 pictures, 64 captions, 16 regions of 16 numbers" in capsys.readouterr().out
    splits = {split: open_split(store, split, Vocabulary.from_file(store / "vocab.json")) for split in
              ("train", "dev", "test")}  # fmt: skip
    names = [name for split in splits.values() for name in split.image_ids or ()]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert [split.n_images for split in splits.values()] == [32, 4, 4]
    # Each row of the store is what the encoder computes for that picture alone, and captions keep their pictures.
    lines = (tmp_path / "captions.csv").read_text(encoding="utf-8").splitlines()
    vision = load_picture_encoder(arguments[7])
    for split in splits.values():
        picture = tmp_path / "pictures" / (split.image_ids or [])[1]
        expected = vision(torch.from_numpy(vision.preprocessing.picture(picture))[None])
        torch.testing.assert_close(split.image_batch([1]), expected.bfloat16().float(), rtol=1e-2, atol=1e-3)
        for caption, image in zip(split.captions, split.caption_image.tolist(), strict=True):
            assert any(line.startswith((split.image_ids or [])[image]) and caption in line for line in lines)
    assert run(["data", "check", store]) == 0
    train_small(store, tmp_path / "run")
    assert run(["evaluate", "--checkpoint", tmp_path / "run", "--data", store, "--split", "test"]) == 0
    page = tmp_path / "pair.html"
    assert run(["explain", "--checkpoint", tmp_path / "run", "--data", store, "--caption", 0, "--out", page]) == 0
    assert page.read_text(encoding="utf-8").count("data:image/png") > 2
    opened: list[tuple[object, ...]] = []
    monkeypatch.setattr(picture_lookup, "StoredPictures", recording(StoredPictures, opened))
    assert all(picture_of(splits["test"], image)[0] is not None for image in range(4))
    assert len(opened) == 1
    picture, grid = picture_of(splits["test"], 2)
    with Image.open(tmp_path / "pictures" / (splits["test"].image_ids or [])[2]) as image:
        expected = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR), dtype=np.int16)
    assert grid == 4
    assert picture is not None
    assert np.abs(picture - expected).mean() < 12  # JPEG stores colours at half the resolution.


def test_stored_pictures_become_a_trained_model(
    tmp_path: Path, arguments: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    del arguments[6:8]
    assert run([*arguments, "--size", 24, "--grid", 2, "--format", "webp", "--quality", 100]) == 0
    printed = capsys.readouterr().out
    assert "train: 32 pictures, 64 captions, 4 regions of 432 numbers" in printed
    assert printed.endswith(f"--data {store} --model scan --out RUN --report\n")
    vocabulary = Vocabulary.from_file(store / "vocab.json")
    train = open_split(store, "train", vocabulary)
    batch = train.image_batch([3, 0]).view(2, 2, 2, 12, 12, 3)
    with Image.open(tmp_path / "pictures" / (train.image_ids or [])[3]) as image:
        expected = np.asarray(image.resize((24, 24), Image.Resampling.BICUBIC), dtype=np.float32)
    for row, column in itertools.product(range(2), range(2)):
        patch = expected[12 * row : 12 * row + 12, 12 * column : 12 * column + 12] / 127.5 - 1
        assert np.abs(batch[0, row, column].numpy() - patch).mean() < 0.05
    # Worker processes and a shorter split give the same batches.
    loader = BatchLoader(train, [np.array([0, 7]), np.array([5])], workers=2)
    for batches, indices in zip(loader, ([0, 7], [5]), strict=True):
        torch.testing.assert_close(batches.features, train.batch(indices).features, rtol=0, atol=0)
    few = open_split(store, "train", vocabulary, max_images=3)
    torch.testing.assert_close(few.image_batch([2, 0]), train.image_batch([2, 0]), rtol=0, atol=0)
    assert run(["data", "check", store]) == 0
    train_small(store, tmp_path / "run", "--workers", "1")
    train_small(store, tmp_path / "host", "--model-option", "image_encoder=patches", "--features", "host")
    runs = [load_file(tmp_path / name / "model.safetensors") for name in ("run", "host")]
    assert all(torch.equal(weight, runs[1][name]) for name, weight in runs[0].items())
    page = tmp_path / "pair.html"
    assert run(["explain", "--checkpoint", tmp_path / "run", "--data", store, "--caption", 0, "--out", page]) == 0
    assert page.read_text(encoding="utf-8").count("data:image/png") > 2
    arguments[arguments.index("--out") + 1] = other = tmp_path / "other"
    assert error(capsys, *arguments, "--encoder", store) == (
        1, f"{store}/config.json: no such file; expected the folder of a vision model"
    )  # fmt: skip
    assert run([*arguments, "--size", 24, "--grid", 4]) == 0
    assert error(capsys, "evaluate", "--checkpoint", tmp_path / "run", "--data", other) == (
        1, f"{other}/test-00000.safetensors: pictures are cut into patches of 6 x 6 pixels, but the model in "
        f"{tmp_path}/run reads patches of 12 x 12; import them with a --size of 12 times --grid"
    )  # fmt: skip


@pytest.mark.parametrize("stretch", [True, False])
def test_oblong_pictures_are_cropped_or_stretched(tmp_path: Path, stretch: bool) -> None:
    """Three shades side by side: a crop has the middle one, a stretched picture all."""
    (tmp_path / "pictures").mkdir()
    shades = np.repeat(np.repeat(np.array([[0, 128, 255]], dtype=np.uint8), 12, axis=1), 12, axis=0)
    Image.fromarray(shades).save(tmp_path / "pictures" / "wide.png")
    Image.fromarray(shades.T.copy()).save(tmp_path / "pictures" / "tall.png")
    captions = tmp_path / "captions.csv"
    captions.write_text("image,caption,split\nwide.png,a b,train\ntall.png,a b,dev\n")
    command = ["data", "import", "--images", tmp_path / "pictures", "--captions", captions, "--out", tmp_path / "store",
               "--workers", 0, "--min-count", 1, "--size", 12, "--grid", 1, "--format", "webp"]  # fmt: skip
    assert run(command + ["--stretch"] * stretch) == 0
    vocabulary = Vocabulary.from_file(tmp_path / "store" / "vocab.json")
    for split in ("train", "dev"):
        pixels = open_split(tmp_path / "store", split, vocabulary).image_batch([0]).view(12, 12, 3).mean(2)
        corners = sorted(round(float(pixels[row, column]), 1) for row in (0, -1) for column in (0, -1))
        assert corners == ([-1, -1, 1, 1] if stretch else [0, 0, 0, 0])


def test_damaged_pictures_of_a_store_are_found(tmp_path: Path, arguments: list[object]) -> None:
    assert run(arguments) == 0
    store = tmp_path / "store" / "pictures"
    path = store / "train-00000.safetensors"
    whole = path.read_bytes()
    vocabulary = Vocabulary.from_file(store / "vocab.json")
    start = 8 + int.from_bytes(whole[:8], "little") + 8 * 32
    path.write_bytes(whole[:start] + bytes(100) + whole[start + 100 :])
    report = tmp_path / "report.json"
    assert run(["data", "check", tmp_path / "store", "--json", report]) == 1
    (problem,) = json.loads(report.read_text())["problems"]
    assert problem["file"] == "pictures/train-00000.safetensors"
    assert problem["what"] == "damaged: its checksum is not that of the store"
    with pytest.raises(ValueError, match=re.escape(f"{path}: row 0 (image 0) cannot be decoded (cannot identify")):
        open_split(store, "train", vocabulary).image_batch([0])
    path.write_bytes(whole[: start - 8] + b"\xff" * 8 + whole[start:])
    with pytest.raises(ValueError, match=re.escape(f"{path}: not the shard that the store wrote: its header or its")):
        open_split(store, "train", vocabulary)
    path.write_bytes(whole)
    manifest = json.loads((store / "store.json").read_text())
    manifest["splits"][0]["width"] = 3 * 9999**2
    (store / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="train: pictures of 9,999 pixels per side"):
        open_split(store, "train", vocabulary)
    manifest["splits"][0]["width"] = 3 * SIDE**2 + 1
    (store / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="train: expected square pictures of square patches"):
        open_split(store, "train", vocabulary)
    manifest["splits"][0]["width"] = 3 * SIDE**2
    (store / "store.json").write_text(json.dumps(manifest))
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=re.escape(f"{path}: truncated: the store wrote {len(whole):,} bytes")):
        open_split(store, "train", vocabulary)


def test_workers_seed_and_split(tmp_path: Path, arguments: list[object]) -> None:
    assert run(arguments) == 0
    arguments[arguments.index("--out") + 1] = tmp_path / "again"
    arguments[arguments.index("--workers") + 1] = 2
    assert run(arguments) == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "store")
    arguments[arguments.index("--out") + 1] = tmp_path / "other"
    assert run([*arguments, "--seed", 1, "--split", "0.5,0.5,0"]) == 0
    vocabulary = Vocabulary.from_file(tmp_path / "other" / "vocab.json")
    first, other = (open_split(tmp_path / name, "dev", vocabulary).image_ids for name in ("store", "other"))
    assert first is not None
    assert other is not None
    assert (len(first), len(other)) == (4, 20)
    assert set(other) - set(first)


@pytest.mark.parametrize(
    ("named", "shares", "command"),
    [
        ("", "1,0,0", "train on them, without a split dev, with: itm-fast train --data {store} --model scan "
         "--validation-split train --out RUN"),
        ("test", "0.8,0.1,0.1",
         "evaluate on them with: itm-fast evaluate --checkpoint RUN --data {store} --split test"),
    ],
)  # fmt: skip
def test_the_command_after_an_import_fits_its_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str, shares: str, command: str
) -> None:
    names = write_pictures(tmp_path / "pictures", 11)
    table = "".join(f"{name},a thing{',' * bool(named)}{named}\n" for name in names)
    (tmp_path / "a.csv").write_text(f"image,caption{',split' * bool(named)}\n{table}")
    Vocabulary.build(["a thing"], 1).save(tmp_path / "words.json")
    store = tmp_path / "store"
    printed = output(
        capsys, "data", "import", "--images", tmp_path / "pictures", "--captions", tmp_path / "a.csv", "--out", store,
        "--size", 24, "--grid", 2, "--split", shares, "--vocab", tmp_path / "words.json", "--workers", 0,
    )  # fmt: skip
    assert printed.splitlines()[-1] == command.format(store=store)
    if not named:
        words = printed.splitlines()[-1].split(" with: itm-fast ")[1].replace("RUN", str(tmp_path / "run")).split()
        assert run([*words, *SMALL]) == 0


def test_splits_of_ten_images_or_fewer_are_warned_of(tmp_path: Path, arguments: list[object]) -> None:
    message = (
        "10 images or fewer in dev (10), test (4): caption-to-image R@10 is 100 for any model, and the best model can "
        "hardly be told; use more images there (--split of itm-fast data import, --validation-images)"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        assert run([*arguments, "--split", "0.65,0.25,0.1"]) == 0
    arguments[arguments.index("--out") + 1] = tmp_path / "more"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run([*arguments, "--split", "0.2,0.5,0.3"]) == 0


def test_an_import_with_other_settings_needs_another_folder(
    tmp_path: Path, arguments: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    before = contents(tmp_path / "store")
    assert run(arguments) == 0
    assert contents(tmp_path / "store") == before
    status, message = error(capsys, *arguments, "--pool", "mean")
    assert (status, message) == (
        1, f"{tmp_path}/store: contains a feature store of other data or settings; choose another --out"
    )  # fmt: skip


# Prints a line before each shard and waits for a line of input.
IMPORTING = """
import importlib, sys
from pathlib import Path
pack = importlib.import_module("itm_fast.data.pack")
from itm_fast.data.import_pictures import import_features
from itm_fast.data.picture_folder import collect
from python_tests.helpers.grid_encoder import GridEncoder
write_shard = pack._write_shard
def when_told(*arguments):
    sys.stdin.readline()
    return write_shard(*arguments)
pack._write_shard = when_told
images, captions, out = map(Path, sys.argv[1:])
import_features(collect(images, captions).splits, captions, out, GridEncoder(), shard_bytes=400, min_count=1)
"""


def test_copies_of_a_file_are_drawn_into_one_split(tmp_path: Path) -> None:
    names = write_pictures(tmp_path / "pictures", 20)
    copies = [f"copy_{name}" for name in names]
    for name, copy in zip(names, copies, strict=True):
        (tmp_path / "pictures" / copy).write_bytes((tmp_path / "pictures" / name).read_bytes())
    (tmp_path / "a.csv").write_text("image,caption\n" + "".join(f"{name},one\n" for name in (*names, *copies)))
    found = collect(tmp_path / "pictures", tmp_path / "a.csv", shares=(0.6, 0.2, 0.2))
    assert [len(split.names) for split in found.splits] == [24, 8, 8]
    for split in found.splits:
        assert {f"copy_{name}" for name in split.names if name in names} == set(split.names) & set(copies)


def test_workers_end_with_the_last_picture(tmp_path: Path, arguments: list[object]) -> None:
    splits = collect(tmp_path / "pictures", tmp_path / "captions.csv").splits
    before = set(multiprocessing.active_children())
    source = EncodedPictures(splits[0], GridEncoder(), 1)
    source.stored(0, 3)
    assert len(set(multiprocessing.active_children()) - before) == 1
    source.stored(3, len(source))
    assert set(multiprocessing.active_children()) <= before


def test_an_import_continues_after_a_kill(tmp_path: Path, arguments: list[object]) -> None:
    images, captions, store = tmp_path / "pictures", tmp_path / "captions.csv", tmp_path / "store"
    splits = collect(images, captions).splits
    import_features(splits, captions, tmp_path / "whole", GridEncoder(), shard_bytes=400, min_count=1)
    expected = contents(tmp_path / "whole")
    assert len([name for name in expected if "-0" in name]) == 10
    command = [sys.executable, "-c", IMPORTING, images, captions, store]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(b"\n" * 6)
        child.stdin.flush()
        while child.poll() is None and len(list(store.glob("[!.]*-0*.safetensors"))) < 5:
            time.sleep(0.01)
        child.kill()
    kept = {path: path.stat().st_mtime_ns for path in store.glob("[!.]*-0*.safetensors")}
    # The content of the captions counts, not the time of writing.
    captions.touch()
    assert 5 <= len(kept) < 10
    import_features(splits, captions, store, GridEncoder(), shard_bytes=400, min_count=1)
    assert contents(store) == expected
    assert sum(path.stat().st_mtime_ns == modified for path, modified in kept.items()) >= 4


def test_more_shards_of_pictures_than_may_be_open_are_read(
    tmp_path: Path, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = collect(tmp_path / "pictures", tmp_path / "captions.csv", shares=(1, 0, 0)).splits
    manifest = import_pictures(splits, tmp_path / "captions.csv", tmp_path / "store", Preprocessing(16), grid=2,
                               min_count=1, shard_bytes=1)  # fmt: skip
    record = manifest.splits[0]
    assert len(record.shards) == record.images == 40
    expected = [StoredPictures(tmp_path / "store", "jpeg", record).picture(image) for image in range(40)]
    monkeypatch.setattr(picture_shards, "_MOST_MAPPED", 3)
    stored = StoredPictures(tmp_path / "store", "jpeg", record)
    mapped, real = [], np.memmap
    monkeypatch.setattr(np, "memmap", lambda path, **options: mapped.append(path) or real(path, **options))
    for image in (*range(40), *range(39, -1, -1)):
        np.testing.assert_array_equal(stored.picture(image), expected[image])
        assert len(stored._maps) <= 3
    # At the turn, the last three are still open.
    assert len(mapped) == 40 + 37


def test_paths_of_windows_are_read(tmp_path: Path) -> None:
    names = write_pictures(tmp_path / "pictures" / "dogs", 4)
    captions = tmp_path / "captions.csv"
    captions.write_text("image,caption\n" + "".join(f"dogs\\{name},a dog\n" for name in names))
    found = collect(tmp_path / "pictures", captions, shares=(1, 0, 0))
    assert sorted(found.splits[0].names) == [f"dogs/{name}" for name in sorted(names)]
    captions.write_text("image,caption\n..\\..\\secret.png,a dog\n")
    with pytest.raises(ValueError, match="no such picture"):
        collect(tmp_path / "pictures", captions)


def test_an_encoder_whose_path_is_not_utf_8_is_refused_before_it_runs(tmp_path: Path, arguments: list[object]) -> None:
    splits = collect(tmp_path / "pictures", tmp_path / "captions.csv").splits
    encoder = GridEncoder()
    encoder.kind = f"encoder -1 patches {'0' * 64} /models/b\udce9b x/vit"
    message = r"encoder: /models/b\udce9b x/vit: a store cannot name a path that is not UTF-8; rename it"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        import_features(splits, tmp_path / "captions.csv", tmp_path / "store", encoder, min_count=1)
    assert not list((tmp_path / "store").glob("*.safetensors"))


def test_a_picture_that_changes_during_the_import_is_one_line(tmp_path: Path, arguments: list[object]) -> None:
    images, captions = tmp_path / "pictures", tmp_path / "captions.csv"
    splits = collect(images, captions).splits
    path = splits[0].paths[5]
    Image.new("RGB", (8, 8)).save(path)
    advice = "changed while it was imported; restore it, or remove the unfinished store and import again"
    with pytest.raises(ValueError, match=re.escape(f"{path}: {advice}")):
        import_features(splits, captions, tmp_path / "store", GridEncoder(), min_count=1)
    path.unlink()
    with pytest.raises(ValueError, match=re.escape(f"{path}: cannot be read: No such file or directory")):
        import_features(splits, captions, tmp_path / "store", GridEncoder(), min_count=1)
    assert not (tmp_path / "store" / "store.json").exists()


def test_bad_pictures_and_captions_are_named_or_left_out(
    tmp_path: Path, arguments: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    images, captions = tmp_path / "pictures", tmp_path / "captions.csv"
    content = captions.read_text(encoding="utf-8").replace("image,caption\n", "image,caption\nnone.png,nothing\n")
    captions.write_text(content, encoding="utf-8")
    hint = "; --skip-bad leaves such pictures and captions out and lists them"
    status, message = error(capsys, *arguments)
    assert (status, message) == (1, f"{captions}: line 2: no such picture: {images}/none.png{hint}")
    Image.new("RGB", (4, 4)).save(images / "extra.webp")
    captions.write_text(content.replace("none.png,nothing\n", ""), encoding="utf-8")
    status, message = error(capsys, *arguments)
    assert (status, message) == (1, f"{images}/extra.webp: a picture without captions in {captions}{hint}")
    (images / "extra.webp").unlink()
    first, second = (line.split(",")[0] for line in content.splitlines()[2:6:2])
    (images / first).write_bytes(b"")
    (images / second).write_bytes((images / second).read_bytes()[:300])
    status, message = error(capsys, *arguments)
    assert (status, message) == (
        1, f"{captions}: line 2: {images / first}: an empty file, not a picture (1 more problem){hint}"
    )  # fmt: skip
    assert not (tmp_path / "store").exists()
    assert run([*arguments, "--skip-bad"]) == 0
    printed = capsys.readouterr().out
    assert f"2 pictures or captions left out (full list: {tmp_path}/store/skipped.txt):" in printed
    listed = (tmp_path / "store" / "skipped.txt").read_text().splitlines()
    assert listed[0] == f"{captions}: line 2: {images / first}: an empty file, not a picture"
    assert listed[1].startswith(f"{captions}: line 4: {images / second}: the picture cannot be decoded (")
    found = collect(images, captions, skip_bad=True)
    assert sum(len(split.names) for split in found.splits) == 38
    assert run([*arguments, "--skip-bad"]) == 0
    assert run(["data", "check", tmp_path / "store"]) == 0


def test_captions_of_too_many_tokens_are_named_or_left_out(
    tmp_path: Path, arguments: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of words, of a BERT's pieces and of a CLIP's byte pairs, each with two tokens around the caption."""
    captions = tmp_path / "captions.csv"
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    lines = [f"{name},red sun" for name in names]
    captions.write_text("\n".join(["image,caption", *lines, f"{names[0]},red boat sun", ""]))
    del arguments[6:8]
    assert arguments[-2:] == ["--min-count", 1]
    arguments[-2:] = ["--size", 8, "--grid", 1]
    bert, clip = write_bert(tmp_path / "bert"), tmp_path / "clip"
    write_clip(clip)
    # "boat" is two pieces of the BERT.
    for vocab, most, count in ((None, 4, 5), (bert, 5, 6), (bert / "vocab.txt", 5, 6)):
        given = ["--min-count", 1] if vocab is None else ["--vocab", vocab]
        assert error(capsys, *arguments, *given, "--max-tokens", most) == (
            1, f"{captions}: line 42: expected at most {most} tokens in a caption, got {count}; --skip-bad leaves such "
            "pictures and captions out and lists them"
        )  # fmt: skip
    counts = [len(TokenizerVocabulary.from_folder(clip).encode(text)) for text in ("red sun", "red boat sun")]
    assert counts[0] < counts[1]
    assert run([*arguments, "--vocab", clip, "--max-tokens", counts[0], "--skip-bad"]) == 0
    line = f"{captions}: line 42: expected at most {counts[0]} tokens in a caption, got {counts[1]}"
    assert (tmp_path / "store" / "skipped.txt").read_text() == f"{line}\n"
    title = f"1 picture or caption left out (full list: {tmp_path}/store/skipped.txt)"
    assert f"{title}:\n  {line}\n" in capsys.readouterr().out
    stored = Vocabulary.from_file(tmp_path / "store" / "vocab.json")
    assert stored == TokenizerVocabulary.from_folder(clip)
    splits = [open_split(tmp_path / "store", split, stored) for split in ("train", "dev", "test")]
    assert sum(len(split) for split in splits) == 40
    # A picture whose captions are all too long is listed, too.
    captions.write_text("\n".join(["image,caption", *lines[:-1], f"{names[-1]},red boat sun", ""]))
    found = collect(tmp_path / "pictures", captions, skip_bad=True, max_tokens=4)
    assert found.skipped == [
        f"{captions}: line 41: expected at most 4 tokens in a caption, got 5",
        f"{tmp_path}/pictures/{names[-1]}: no caption of the picture has at most 4 tokens",
    ]
    assert sum(len(split.names) for split in found.splits) == 39


def test_emoji_are_written_as_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emoji, "SPLITS", ("dev",))
    out = tmp_path / "emoji"
    assert run(["data", "emoji", "--pictures", "--out", out]) == 0
    command = (
        f"itm-fast data import --images {out}/pictures --captions {out}/captions.csv --size 72 --grid 6 --out STORE"
    )
    assert capsys.readouterr().out == f"import them with: {command}\n"
    (dev,) = collect(out / "pictures", out / "captions.csv").splits
    assert (dev.name, dev.captions) == ("dev", emoji.captions("dev"))
    assert dev.caption_image == [number // 5 for number in range(1500)]
    for path, pixels in zip(dev.paths, emoji.pictures("dev"), strict=True):
        assert np.array_equal(np.asarray(open_picture(path)), pixels)
    assert error(capsys, "data", "emoji", "--pictures", "--out", out) == (
        1, f"{out}: expected a new or empty folder"
    )  # fmt: skip
    assert error(capsys, "data", "emoji", "--pictures", "--overwrite", "--out", out) == (
        1, "--overwrite: expected without --pictures, which needs a new or empty folder"
    )  # fmt: skip


@pytest.mark.parametrize("shares", [(0.8, 0.2, float("nan")), (0.8, 0.1, 0.2), (0.0, 0.5, 0.5)])
def test_shares_that_are_no_division_are_refused(tmp_path: Path, shares: tuple[float, float, float]) -> None:
    given = re.escape(",".join(f"{share:g}" for share in shares))
    with pytest.raises(ValueError, match=f"^split: expected three shares with a sum of 1, .* got {given}$"):
        collect(tmp_path, tmp_path / "captions.csv", shares=shares)


def test_splits_of_the_captions_are_kept(tmp_path: Path) -> None:
    names = write_pictures(tmp_path / "pictures", 4)
    splits = dict(zip(names, ("test", "train", "dev", "train"), strict=True))
    table = "".join(f"{name},a thing,{split}\n" for name, split in splits.items())
    (tmp_path / "a.csv").write_text(f"image,caption,split\n{table}")
    found = collect(tmp_path / "pictures", tmp_path / "a.csv").splits
    assert {name: split.name for split in found for name in split.names} == splits
    assert [split.name for split in found] == ["train", "dev", "test"]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("{0},again,dev\n", "line 4: {0} is in the split dev, but in the split train on {file}: line 2"),
        ("{1},again,\n", "line 4: {1} is in no split, but in the split dev on {file}: line 3"),
        ("{2},again,\n", "line 4: no split, but other rows name one; name one in each row, or in none"),
    ],
)
def test_splits_that_disagree_are_one_line(tmp_path: Path, last: str, message: str) -> None:
    names = write_pictures(tmp_path / "pictures", 3)
    file = tmp_path / "a.csv"
    file.write_text(f"image,caption,split\n{names[0]},a,train\n{names[1]},b,dev\n" + last.format(*names))
    with pytest.raises(ValueError, match="split") as raised:
        collect(tmp_path / "pictures", file, skip_bad=True)
    assert str(raised.value) == f"{file}: {message.format(*names, file=file)}"


def test_rare_words_are_reported_with_the_file_of_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pictures of this store are all in train: there is nothing to report on."""
    names = write_pictures(tmp_path / "pictures", 12)
    captions = tmp_path / "a.csv"
    captions.write_text("image,caption\n" + "".join(f"{name},sun\n" for name in names) + f"{names[0]},zebra\n")
    folders = ["--images", tmp_path / "pictures", "--captions", captions, "--out", tmp_path / "store"]
    with pytest.warns(
        UserWarning, match=rf"^{captions}: the vocabulary leaves out 8% of the words in the captions of "
    ):
        assert run(["data", "import", *folders, "--workers", 0, "--split", "1,0,0", "--size", 8, "--grid", 1]) == 0
    store = tmp_path / "store"
    assert capsys.readouterr().out.endswith(f"--data {store} --model scan --validation-split train --out RUN\n")
    assert error(capsys, "train", "--data", store, "--out", tmp_path / "run", "--report") == (
        1, f"--report: {store}: there is no split 'test' (splits in this feature store: train)"
    )  # fmt: skip


def test_a_folder_that_copies_of_the_pictures_lack(tmp_path: Path) -> None:
    """Published captions name folders such as val2014. No other picture may stand in for one that is missing."""
    images, captions = tmp_path / "pictures", tmp_path / "captions.csv"
    one, two, _, four = sorted(write_pictures(images, 4))
    (images / "dogs").mkdir()
    (images / four).rename(images / "dogs" / four)

    def found(*rows: str) -> tuple[dict[str, str], list[str]]:
        captions.write_text("\n".join(["image,caption,split", *(f"{name},a caption,train" for name in rows)]) + "\n")
        collection = collect(images, captions, skip_bad=True)
        (split,) = collection.splits
        paths = {name: str(path.relative_to(images)) for name, path in zip(split.names, split.paths, strict=True)}
        return paths, [line for line in collection.skipped if "no such picture" in line or "is the file of" in line]

    assert found(f"val2014/{one}", f"dogs/{four}") == ({f"val2014/{one}": one, f"dogs/{four}": f"dogs/{four}"}, [])
    # Two pictures of one name; a folder that is there; a picture that another row names.
    for rows, missing in (
        ([f"cats/{one}", f"birds/{one}", two], (f"cats/{one}", f"birds/{one}")),
        ([f"dogs/{one}", two], (f"dogs/{one}",)),
        ([f"val2014/{one}", one], (f"val2014/{one}",)),
    ):
        paths, skipped = found(*rows)
        assert list(paths) == [name for name in rows if name not in missing]
        assert skipped == [
            f"{captions}: line {rows.index(name) + 2}: no such picture: {images / name}" for name in missing
        ]
    (images / "link.png").symlink_to(images / two)
    assert found(two, "link.png")[1] == [f"{captions}: line 3: link.png is the file of {two}: {images / 'link.png'}"]


def test_accents_of_names_may_be_written_in_two_ways(tmp_path: Path) -> None:
    """A file system of macOS separates letters from accents; a file of captions mostly does not."""
    images, captions = tmp_path / "pictures", tmp_path / "captions.csv"
    first, second = write_pictures(images, 2)
    parted, joined = (unicodedata.normalize(form, "\u00e9.png") for form in ("NFD", "NFC"))
    (images / first).rename(images / parted)
    captions.write_text(f"image,caption,split\n{joined},a cup,train\n{second},a plate,train\n")
    (split,) = collect(images, captions).splits
    assert [path.name for path in split.paths] == [parted, second]
    # With both, each name is that of its own file.
    (images / second).rename(images / joined)
    captions.write_text(f"image,caption,split\n{joined},a cup,train\n{parted},a plate,train\n")
    (split,) = collect(images, captions).splits
    assert [path.name for path in split.paths] == [joined, parted]


def test_near_duplicates_of_two_splits_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    (tmp_path / "pictures").mkdir()
    for name, side in (("a.png", 80), ("b.png", 64)):
        Image.fromarray(pixels).resize((side, side)).save(tmp_path / "pictures" / name)
    (tmp_path / "a.csv").write_text("image,caption,split\na.png,one,train\nb.png,two,test\n")
    found = collect(tmp_path / "pictures", tmp_path / "a.csv")
    line = f"{tmp_path}/pictures/b.png of test looks like {tmp_path}/pictures/a.png of train"
    assert found.duplicates == [line]
    folders = ["--images", tmp_path / "pictures", "--captions", tmp_path / "a.csv", "--out", tmp_path / "store"]
    assert run(["data", "import", *folders, "--workers", 0, "--min-count", 1, "--size", 64, "--grid", 4]) == 0
    assert (tmp_path / "store" / "duplicates.txt").read_text() == f"{line}\n"
    assert capsys.readouterr().out.startswith(
        "1 pair of near-identical pictures in different splits (full list after the import: "
        f"{tmp_path}/store/duplicates.txt):\n  {line}\n"
    )


def test_a_folder_that_cannot_become_a_store_is_refused_before_pictures_are_read(
    tmp_path: Path, arguments: list[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*_given: object, **_options: object) -> None:
        raise AssertionError("pictures are read")

    monkeypatch.setattr(picture_folder, "collect", unexpected)
    store = tmp_path / "store"
    arguments += ["--out", store / "new"]
    store.write_text("")
    assert error(capsys, *arguments) == (1, f"{store}/new: expected a folder at {store}, found a file")
    arguments[-1] = store
    store.unlink()
    store.mkdir()
    (store / "notes.txt").write_text("")
    assert error(capsys, *arguments) == (
        1, f"{store}: expected an empty folder or a feature store, found 'notes.txt'; choose another --out"
    )  # fmt: skip
    (store / "notes.txt").unlink()
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    assert error(capsys, *arguments) == (1, f"{store}: the folder {store} is not writable")


@pytest.mark.parametrize("name", ["packing.lock", "detections", ".unfinished.abcd1234.tmp.json", "unfinished.json"])
def test_a_folder_of_an_interrupted_import_passes_the_first_check(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    check_target(tmp_path)


def test_options_that_do_not_fit_are_one_line(
    tmp_path: Path, arguments: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(capsys, *arguments, "--split", "0.5,0.4") == (
        1, "split: expected three shares with a sum of 1, such as 0.8,0.1,0.1, got 0.5,0.4"
    )  # fmt: skip
    assert error(capsys, *arguments, "--split", "most") == (
        1, "--split: expected three shares such as 0.8,0.1,0.1, got most"
    )  # fmt: skip
    assert error(capsys, *arguments, "--pool", "some")[1].startswith("pool: expected patches, class, mean, or a grid")
    for given in (["--stretch"], ["--size", 32], ["--grid", 4]):
        assert error(capsys, *arguments, *given) == (
            1, "--size, --stretch, --grid: expected only without --encoder, whose folder says how pictures are scaled"
        )  # fmt: skip
    assert error(capsys, *arguments, "--device", "no") == (
        1, "device: expected a device such as cpu or cuda, got 'no'"
    )  # fmt: skip
    del arguments[6:8]
    for given in (["--layer", 1], ["--pool", "mean"], ["--dtype", "fp32"]):
        assert error(capsys, *arguments, *given) == (1, "--layer, --pool, --dtype: expected only with --encoder")
    assert error(capsys, *arguments, "--size", 4097)[0] == 2
    assert error(capsys, *arguments, "--grid", 257)[0] == 2
    assert error(capsys, *arguments, "--grid", 5) == (1, "--grid: expected a divisor of --size 224, got 5")
    arguments[arguments.index("--images") + 1] = tmp_path / "none"
    assert error(capsys, *arguments) == (1, f"{tmp_path}/none: no such folder")
