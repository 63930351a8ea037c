"""The bundled pictures, captions and splits, and the tools that create them."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from pathlib import Path

import emoji_captions
import numpy as np
import pytest
import render_emoji
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from itm_fast.cli import run
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji, load_vocabulary, tokenize
from python_tests.helpers.precomputed import features_of
from python_tests.helpers.processes import ROOT

FILES = Path(emoji.__file__).parent / "emoji_files"
INDEX = json.loads((FILES / "index.json").read_text(encoding="utf-8"))
SIZES = {"train": 2821, "dev": 300, "test": 500}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return emoji.write_dataset(tmp_path_factory.mktemp("emoji") / "new" / "data")


@pytest.mark.parametrize("split", emoji.SPLITS)
def test_pictures_match_the_rendered_ones(split):
    pictures = emoji.pictures(split)
    assert pictures.shape == (SIZES[split], 72, 72, 3)
    assert pictures.dtype == np.uint8
    assert hashlib.sha256(pictures.tobytes()).hexdigest() == INDEX["splits"][split]["sha256_of_pixels"]
    assert not pictures.flags.writeable
    assert pictures.reshape(len(pictures), -1).std(axis=1).min() > 5


def test_no_picture_appears_twice():
    pictures = [picture.tobytes() for split in emoji.SPLITS for picture in emoji.pictures(split)]
    assert len(set(pictures)) == len(pictures) == 3621
    ids = [picture_id for split in emoji.SPLITS for picture_id in emoji.image_ids(split)]
    assert len(set(ids)) == 3621


def test_pixels_have_the_expected_colours():
    def middle(name):
        return emoji.pictures("train")[emoji.names("train").index(name)][36, 36].tolist()

    (red, *others), (purple_red, purple_green, purple_blue), (*dark, blue) = (
        middle("red square"),
        middle("purple square"),
        middle("blue circle"),
    )
    assert red > 150 > 100 > max(others)
    assert blue > 150 > max(dark)
    assert purple_green < min(purple_red, purple_blue)


def test_the_first_test_pictures_do_not_change():
    assert emoji.names("test")[:2] == ["BACK arrow", "man playing water polo: dark skin tone"]
    assert emoji.image_ids("test")[:2] == ["1f519", "1f93d_1f3ff_200d_2642"]
    assert emoji.captions("test")[5:10] == [
        "man playing water polo with dark skin tone",
        "picture of man playing water polo with dark skin tone",
        "emoji of man playing water polo with dark skin tone",
        "dark skin tone man playing water polo",
        "man water polo playing dark skin tone",
    ]


@pytest.mark.parametrize("split", emoji.SPLITS)
def test_captions_follow_from_names_and_keywords(split):
    rows = [line.split("\t") for line in (FILES / f"{split}_names.tsv").read_text(encoding="utf-8").splitlines()]
    texts = emoji.captions(split)
    everywhere = [caption for part in emoji.SPLITS for caption in emoji.captions(part)]
    assert len(texts) == 5 * len(rows)
    assert len(set(everywhere)) == len(everywhere)
    raw = Counter(text for row in _all_rows() for text in emoji_captions.captions(row[0], row[1], row[2].split(" | ")))
    shared = {caption for caption, count in raw.items() if count > 1}
    for index, (picture_id, name, keywords) in enumerate(rows):
        own = texts[5 * index : 5 * index + 5]
        assert own == emoji_captions.captions(picture_id, name, keywords.split(" | "), shared)
        assert all(emoji_captions.name_words(name) <= set(caption.split()) for caption in own)


def _all_rows():
    for split in emoji.SPLITS:
        for line in (FILES / f"{split}_names.tsv").read_text(encoding="utf-8").splitlines():
            yield line.split("\t")


def test_captions_are_plain_lower_case_words_without_code_points():
    for split in emoji.SPLITS:
        for caption in emoji.captions(split):
            assert caption == caption.lower() == " ".join(caption.split())
            assert not re.search(r"u\+[0-9a-f]{4}|\b1f[0-9a-f]{3}|\\", caption)


def test_words_of_held_out_names_occur_in_three_training_pictures():
    texts = emoji.captions("train")
    shown = Counter(word for i in range(SIZES["train"]) for word in set(" ".join(texts[5 * i : 5 * i + 5]).split()))
    for split in ("dev", "test"):
        for name in emoji.names(split):
            assert min(shown[word] for word in emoji_captions.name_words(name)) >= 3


def test_no_word_of_a_held_out_name_is_unknown():
    words = emoji.vocabulary()
    for split in ("dev", "test"):
        for name in emoji.captions(split)[::5]:
            assert all(token in words for token in tokenize(name)), name


@pytest.mark.parametrize(
    ("name", "keywords", "expected"),
    [
        ("flag: Côte d\u2019Ivoire", ["flag"], "flag of côte d'ivoire"),
        ("keycap: #", ["keycap"], "keycap #"),
        (
            "kiss: woman, man, dark skin tone, light skin tone",
            [],
            "kiss of woman and man with dark skin tone and light",
        ),
        ("couple with heart: man, man", ["love"], "man and man couple with heart"),
        ("man: medium skin tone, bald", ["adult"], "bald man with medium skin tone"),
        ("woman: light skin tone, red hair", [], "woman with light skin tone and red hair"),
        ("man with veil: dark skin tone", ["veil"], "man with veil and dark skin tone"),
        ("Japanese “here” button", ["ココ", "“here”"], "japanese here button"),
        ("A button (blood type)", ["a", "blood type"], "a button blood type"),
    ],
)
def test_phrases_of_names(name, keywords, expected):
    captions = emoji_captions.captions("id", name, keywords)
    assert captions[0].startswith(expected)
    assert len(set(captions)) == 5
    assert not any("ココ" in caption for caption in captions)


def test_a_shared_caption_is_framed_unless_it_is_the_name():
    def with_shared(name, keyword):
        return emoji_captions.captions("id", name, [keyword], {"video camera"})

    assert "video camera" not in with_shared("camera", "video")
    assert with_shared("video camera", "film")[0] == "video camera"


def test_the_split_rule_keeps_enough_training_pictures():
    blank = np.zeros((72, 72, 3), np.uint8)
    pairs = [(a, b) for a in "abcdefghij" for b in "klmnopqrst"]
    emojis = [render_emoji.Emoji(a + b, f"{a} {b}", (), blank, (f"{a} {b}",)) for a, b in pairs]
    emojis.append(render_emoji.Emoji("rare", "rare a", (), blank, ("rare a",)))
    parts = _split(emojis, {"test": 20, "dev": 10})
    assert {part: len(chosen) for part, chosen in parts.items()} == {"train": 71, "dev": 10, "test": 20}
    assert sorted(e.id for chosen in parts.values() for e in chosen) == sorted(e.id for e in emojis)
    assert "rare" in {e.id for e in parts["train"]}
    shown = Counter(word for e in parts["train"] for word in e.name.split())
    assert all(shown[word] >= 3 for part in ("dev", "test") for e in parts[part] for word in e.name.split())
    with pytest.raises(SystemExit, match=r"only .* of 90 pictures can be held out"):
        _split(emojis, {"test": 90})


def _split(emojis, held_out):
    before = dict(render_emoji.HELD_OUT)
    render_emoji.HELD_OUT.clear()
    render_emoji.HELD_OUT.update(held_out)
    try:
        return render_emoji.split(emojis)
    finally:
        render_emoji.HELD_OUT.clear()
        render_emoji.HELD_OUT.update(before)


def test_sheets_contain_the_pictures_in_the_order_of_names():
    pictures = np.random.default_rng(0).integers(0, 256, (600, 72, 72, 3), dtype=np.uint8)
    emojis = [render_emoji.Emoji(str(i), f"{599 - i:03}", (), picture) for i, picture in enumerate(pictures)]
    first, second = (np.asarray(sheet) for sheet in render_emoji.sheets(emojis))
    assert first.shape == (16 * 72, 32 * 72, 3)
    assert second.shape == (3 * 72, 32 * 72, 3)
    np.testing.assert_array_equal(first[:72, 72:144], pictures[598])
    np.testing.assert_array_equal(second[72:144, :72], pictures[599 - 512 - 32])
    assert (second[144:, 24 * 72 :] == 255).all()


def test_check_names_the_files_that_differ_or_are_missing(tmp_path):
    (tmp_path / "same.txt").write_bytes("é\n".encode())
    (tmp_path / "other.txt").write_bytes(b"one\r\n")
    files = {"same.txt": "é\n", "other.txt": "one\n", "gone.txt": ""}
    assert render_emoji.differing(tmp_path, files) == ["other.txt", "gone.txt (missing)"]
    assert render_emoji.differing(tmp_path / "nowhere", {"a": ""}) == ["a (missing)"]


def test_names_and_keywords_are_read_from_both_files(tmp_path):
    for folder, entries in (
        ("annotations", '<annotation cp="A">one | two</annotation><annotation cp="A" type="tts">name a</annotation>'),
        (
            "annotationsDerived",
            '<annotation cp="B" type="tts">name b</annotation><annotation cp="C">no name</annotation>',
        ),
    ):
        (tmp_path / folder).mkdir()
        text = f"<ldml><annotations>{entries}</annotations></ldml>"
        (tmp_path / folder / "en.xml").write_text(text, encoding="utf-8")
    assert render_emoji.read_annotations(tmp_path) == {"A": ("name a", ("one", "two")), "B": ("name b", ())}


def test_equal_pictures_keep_the_shortest_name(monkeypatch):
    shades = {"a": 1, "b": 1, "c": 2, "d": None, "e": 1}
    names = {"a": "Ceuta", "b": "Spain", "c": "camera", "d": "blank", "e": "Bouvet Island"}
    keywords = {"a": (), "b": ("flag",), "c": ("film",), "d": (), "e": ()}
    annotations = {sequence: (name, keywords[sequence]) for sequence, name in names.items()}
    monkeypatch.setattr(render_emoji, "read_annotations", lambda folder: annotations)
    monkeypatch.setattr(render_emoji.ImageFont, "truetype", lambda *_, **__: None)
    monkeypatch.setattr(
        render_emoji, "render", lambda text, font: shades[text] and np.full((72, 72, 3), shades[text], np.uint8)
    )
    emojis = render_emoji.collect(Path("font"), Path("annotations"))
    assert [(e.id, e.name, e.keywords) for e in emojis] == [("0061", "Ceuta", ()), ("0063", "camera", ("film",))]
    assert emojis[1].captions[1] == "camera film"


@given(arrays(np.uint8, st.tuples(st.integers(0, 3), st.just(72), st.just(72), st.just(3))))
def test_patches_and_their_inverse(pictures):
    patches = emoji.patches(pictures)
    assert patches.dtype == np.float32
    assert patches.shape == (len(pictures), 36, 432)
    np.testing.assert_array_equal(emoji.pictures_of(patches), pictures)


def test_the_position_of_a_pixel_in_the_patches():
    pictures = np.zeros((2, 72, 72, 3), np.uint8)
    pictures[1, 12 * 2 + 5, 12 * 4 + 7, 1] = 200
    patches = emoji.patches(pictures)
    black, pixel = (np.float32(v - emoji.MEAN) / np.float32(emoji.STD) for v in (0, 200))
    assert np.flatnonzero(patches != black).tolist() == [
        np.ravel_multi_index((1, 6 * 2 + 4, (5 * 12 + 7) * 3 + 1), patches.shape)
    ]
    assert patches.max() == pytest.approx(pixel, abs=1e-6)


def test_training_patches_have_zero_mean_and_unit_variance():
    patches = emoji.patches(emoji.pictures("train")).astype(np.float64)
    assert abs(patches.mean()) < 1e-3
    assert abs(patches.std() - 1) < 1e-3


def test_values_outside_the_range_are_clipped():
    shown = emoji.pictures_of(np.array([-100.0, 100.0], np.float32)[:, None, None] * np.ones((2, 36, 432), np.float32))
    assert shown[0].max() == 0
    assert shown[1].min() == 255


def test_a_png_contains_the_picture():
    with Image.open(io.BytesIO(emoji.picture_png("dev", 7))) as image:
        assert image.format == "PNG"
        np.testing.assert_array_equal(np.asarray(image.convert("RGB")), emoji.pictures("dev")[7])


def test_written_data_can_be_loaded(written):
    vocabulary = load_vocabulary(written)
    assert vocabulary == Vocabulary.build(emoji.captions("train")) == emoji.vocabulary()
    for split, n_images in SIZES.items():
        dataset = PrecomputedDataset(written, split, vocabulary)
        assert (dataset.n_images, len(dataset)) == (n_images, 5 * n_images)
        assert dataset.captions == emoji.captions(split)
        assert dataset.image_ids == emoji.image_ids(split)
        np.testing.assert_array_equal(emoji.pictures_of(dataset.features[-3:]), emoji.pictures(split)[-3:])
    in_memory = emoji.load("test")
    asked = [2499, 0, 1234]
    for name in ("features", "token_ids", "lengths", "image_index", "caption_index"):
        assert torch.equal(getattr(in_memory.batch(asked), name), getattr(dataset.batch(asked), name))


def test_writing_again_changes_nothing_and_other_content_is_kept(written):
    times = {path: path.stat().st_mtime_ns for path in written.iterdir()}
    assert len(times) == 10
    emoji.write_dataset(written)
    assert {path: path.stat().st_mtime_ns for path in written.iterdir()} == times
    caps = written / "dev_caps.txt"
    caps.write_text("mine\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"dev_caps\.txt: exists with other content; choose another directory"):
        emoji.write_dataset(written)
    assert caps.read_text(encoding="utf-8") == "mine\n"
    emoji.write_dataset(written, overwrite=True)
    assert caps.read_text(encoding="utf-8").splitlines() == emoji.captions("dev")


def test_other_data_in_the_directory_are_not_changed(tmp_path):
    np.save(tmp_path / "train_ims.npy", features_of(2))
    with pytest.raises(ValueError, match=r"train_ims\.npy: exists with other content"):
        emoji.write_dataset(tmp_path)
    (tmp_path / "test_cap2im.txt").write_text("0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"test_cap2im\.txt: belongs to other data"):
        emoji.write_dataset(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test_cap2im.txt", "train_ims.npy"]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file: expected a directory, found a file"):
        emoji.write_dataset(tmp_path / "file")


def test_an_interrupted_write_leaves_no_half_file(tmp_path, monkeypatch):
    def fail(file, array):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        emoji.write_dataset(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.suffix == ".npy"]


def test_the_command_writes_the_data_and_fails_with_one_line(tmp_path, capsys):
    assert run(["data", "emoji", "--out", str(tmp_path / "emoji")]) == 0
    output = capsys.readouterr().out
    assert "train: 2,821 pictures, 14,105 captions\n" in output
    assert "test: 500 pictures, 2,500 captions\n" in output
    guide = (ROOT / "docs" / "start.md").read_text(encoding="utf-8").replace(" \\\n  ", " ")
    command = output.splitlines()[-1].removeprefix("train on them with: ")
    assert command.replace(str(tmp_path), "data") in guide.splitlines()
    assert len(PrecomputedDataset(tmp_path / "emoji", "dev", load_vocabulary(tmp_path / "emoji"))) == 1500
    (tmp_path / "emoji" / "vocab.json").write_text("{}", encoding="utf-8")
    assert run(["data", "emoji", "--out", str(tmp_path / "emoji")]) == 1
    error = capsys.readouterr().err
    assert error == (
        f"itm-fast: error: {tmp_path / 'emoji' / 'vocab.json'}: exists with other content; choose another directory\n"
    )


@pytest.mark.parametrize(
    ("split", "dtype", "command"),
    [
        ("train", "bf16", "train on them, without a split dev, with: itm-fast train --data {store} --model scan "
         "--validation-split train --out RUN --model-option image_encoder=patches"),
        ("train", "fp32", "train on them, without a split dev, with: itm-fast train --data {store} --model scan "
         "--validation-split train --out RUN --model-option image_encoder=patches"),
        ("dev", "bf16", "evaluate on them with: itm-fast evaluate --checkpoint RUN --data {store} --split dev"),
    ],
)  # fmt: skip
def test_the_command_after_packing_fits_the_splits_and_names_the_patch_encoder(split, dtype, command, tmp_path, capsys):
    np.save(tmp_path / f"{split}_ims.npy", emoji.patches(emoji.pictures("test")[:4]))
    (tmp_path / f"{split}_caps.txt").write_text("".join(f"{text}\n" for text in emoji.captions("test")[:20]))
    emoji.vocabulary().save(tmp_path / "vocab.json")
    store = tmp_path / "store"
    assert run(["data", "pack", "--data", str(tmp_path), "--out", str(store), "--dtype", dtype]) == 0
    assert capsys.readouterr().out.endswith(f"{command.format(store=store)}\n")


@pytest.mark.parametrize("call", [emoji.pictures, emoji.names, emoji.captions, emoji.image_ids, emoji.load])
def test_an_unknown_split_is_refused(call):
    with pytest.raises(ValueError, match="split: expected one of train, dev, test, got 'testall'"):
        call("testall")


def test_bad_pictures_and_indices_are_refused():
    with pytest.raises(
        ValueError, match=r"images: expected uint8 of shape \(n, 72, 72, 3\), got float64 \(1, 72, 72, 3\)"
    ):
        emoji.patches(np.zeros((1, 72, 72, 3)))
    with pytest.raises(ValueError, match=r"features: expected shape \(n, 36, 432\), got \(1, 6, 6\)"):
        emoji.pictures_of(np.zeros((1, 6, 6)))
    with pytest.raises(ValueError, match="index: expected 0 to 499 for the split 'test', got 500"):
        emoji.picture_png("test", 500)


def test_licences_are_included_and_the_data_are_small():
    assert "SIL Open Font License, Version 1.1" in (FILES / "LICENSE-OFL-1.1.txt").read_text(encoding="utf-8")
    assert "UNICODE LICENSE V3" in (FILES / "LICENSE-Unicode-3.0.txt").read_text(encoding="utf-8")
    assert "Unicode, Inc." in (FILES / "LICENSE-Unicode-DFS-2016.txt").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in FILES.iterdir()) < 8e6
