"""`itm-fast index` and `itm-fast search`: what they print, and one line for each kind of bad input."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from itm_fast import cli, models
from itm_fast.data import emoji
from itm_fast.search import Index, sources
from itm_fast.search import pictures as pictures_module
from itm_fast.search.searching import CANDIDATES
from itm_fast.training.config import TrainConfig, to_yaml
from python_tests.helpers.commands import error, output
from python_tests.helpers.search import scan, vsepp


@pytest.fixture(scope="module")
def index(data: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands") / "index"
    assert cli.run(["index", "build", "--checkpoint", str(trained), "--data", str(data), "--out", str(path)]) == 0
    return path


def test_an_index_is_built_and_searched(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "index"
    build = ["index", "build", "--checkpoint", trained, "--data", data, "--out", path, "--calibrate", "0.9"]
    printed = output(capsys, *build, "--calibrate-queries", 9)
    sizes = rf"{path}: 10 images, 50 captions, [12]\.\d MB\n"
    assert re.match(sizes + "candidates: 10, recall of the exact best 10: 1.000 over 9 captions\n", printed)
    assert printed.endswith(f'search it with: itm-fast search {path} "a dog"\n')
    caption = (data / "test_caps.txt").read_text().splitlines()[0]
    printed = output(capsys, "search", path, caption, "red ball", "--json", "-k", 3)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["query"] for line in lines] == [caption, "red ball"]
    opened = Index.open(path)
    for line in lines:
        (found,) = opened.search(line["query"], 3)
        assert [hit["item"]["id"] for hit in line["hits"]] == [hit.item.id for hit in found.hits]
        # Captions that are encoded together may differ by rounding from one alone.
        assert [hit["score"] for hit in line["hits"]] == pytest.approx([hit.score for hit in found.hits], abs=1e-6)
    printed = output(capsys, "search", path, caption, "--of", "captions", "--json", "-k", 3)
    assert [hit["item"]["side"] for hit in json.loads(printed)["hits"]] == ["captions"] * 3
    table = output(capsys, "search", path, caption, "-k", 2)
    (found,) = opened.search(caption, 2)
    for hit in found.hits:
        assert re.search(rf"{hit.rank} +│ +{hit.score:.4f} +│ +{hit.item.id} ", table)


def test_unknown_words_are_named(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "red xyzzy ball plugh xyzzy"
    assert json.loads(output(capsys, "search", index, text, "--json"))["unknown"] == ["xyzzy", "plugh"]
    with pytest.warns(UserWarning, match=f"^query '{text}': the model does not know xyzzy, plugh$") as warned:
        output(capsys, "search", index, text, "sun")
    assert len(warned) == 1


def test_long_ids_are_whole_in_the_table(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [f"train2014/COCO_train2014_{number:012d}.jpg" for number in (391895, 391896)]
    features = np.load(data / "test_ims.npy")[:2]
    scan().save(tmp_path / "run")
    Index.build(tmp_path / "run", features, tmp_path / "index", ids=ids, captions=["red ball " * 20, "dog" * 50])
    monkeypatch.setenv("COLUMNS", "80")
    rows = [line.split("│") for line in output(capsys, "search", tmp_path / "index", "red").splitlines() if "│" in line]
    found = "".join(row[3].strip() for row in rows)
    assert found in ("".join(ids), "".join(reversed(ids)))
    assert "dog" * 50 in "".join(row[4].strip() for row in rows)


def test_pictures_are_added_and_deleted(
    emoji_index: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, built = emoji_index
    path = tmp_path / "index"
    shutil.copytree(built, path)
    (tmp_path / "more").mkdir()
    for number in (20, 21):
        (tmp_path / "more" / f"{number}.png").write_bytes(emoji.picture_png("test", number))
    printed = output(capsys, "index", "add", path, "--pictures", tmp_path / "more")
    assert printed.startswith(f"{path}: 12 images, 0 captions")
    (tmp_path / "more" / "22.png").write_bytes(emoji.picture_png("test", 22))
    grown = ["index", "add", path, "--pictures", tmp_path / "more"]
    message = (
        "ids: '20.png' is in the index already; delete it first, or skip it with --new-only, or name the new ones "
        "apart with --id-prefix"
    )
    assert error(capsys, *grown) == (1, message)
    for added, known in ((1, 2), (0, 3)):
        printed = output(capsys, *grown, "--new-only")
        expected = f"{added} added, {known} skipped, which the index has already\n{path}: 13 images, 0 captions"
        assert printed.startswith(expected)
    opened = Index.open(path)
    (tmp_path / "more" / "23.png").write_bytes(emoji.picture_png("test", 23))
    assert [opened.add(str(tmp_path / "more"), new_only=True) for _ in range(2)] == [(1, 3), (0, 4)]
    assert opened.delete("23.png") == 1
    with pytest.raises(ValueError, match=r"^new_only: expected a folder of pictures as source, without ids and captio"):
        opened.add([tmp_path / "more" / "23.png"], new_only=True)
    # Pictures without captions show their paths.
    head = next(line for line in output(capsys, "search", path, "red heart").splitlines() if "score" in line)
    assert [cell.strip() for cell in head.split("┃")] == ["", "", "score", "id", "picture", ""]
    assert output(capsys, "index", "delete", path, "22.png").startswith("1 deleted\n")
    (tmp_path / "ids").write_text("20.png\n0.png\n")
    printed = output(capsys, "index", "delete", path, "inner/1.png", "--ids", tmp_path / "ids")
    assert printed.startswith(f"3 deleted\n{path}: 9 images, 0 captions")
    before = Index.open(path).search("red heart", 9, exact=True)
    assert output(capsys, "index", "compact", path).startswith(f"{path}: 9 images, 0 captions")
    assert Index.open(path).search("red heart", 9, exact=True) == before
    assert {hit.item.id for hit in before[0].hits} == {
        "21.png", *(f"{number}.png" for number in (2, 4, 6, 8)), *(f"inner/{number}.png" for number in (3, 5, 7, 9))
    }  # fmt: skip


def test_items_of_two_splits_are_named_apart(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images of data without names are numbered, so those of two splits have the same names."""
    path = tmp_path / "index"
    build = ["index", "build", "--checkpoint", trained, "--data", data, "--out", path, "--pooling", "mean"]
    output(capsys, *build, "--split", "dev")
    add = ["index", "add", path, "--data", data]
    message = "ids: '0' is in the index already; delete it first, or name the new ones apart with --id-prefix"
    assert error(capsys, *add) == (1, message)
    output(capsys, *add, "--id-prefix", "test-")
    names = [item.id for item in Index.open(path).items()]
    images = [name for name in names if "#" not in name]
    assert images[:10] == [str(number) for number in range(10)]
    assert images[10:] == [f"test-{number}" for number in range(10)]
    assert {"0#0", "test-0#0"} <= {item.id for item in Index.open(path).items("captions")}


def test_pictures_that_cannot_be_decoded(
    emoji_index: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run_folder, pictures, _ = emoji_index
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    whole = (folder / "0.png").read_bytes()
    for name, content in (("w.png", whole[:-40]), ("x.png", whole[:-30]), ("y.png", b""), ("z.jpg", b"<html>")):
        (folder / name).write_bytes(content)
    path = tmp_path / "index"
    build = ["index", "build", "--checkpoint", run_folder, "--pictures", folder, "--preprocessing", "emoji",
             "--pooling", "mean", "--out", path]  # fmt: skip
    advice = "--skip-bad leaves such pictures out and lists them"
    empty = f"{folder}/y.png: an empty file, not a picture"
    encoded: list[int] = []
    monkeypatch.setattr(
        sources, "features_of_squares",
        lambda squares, *rest: encoded.append(len(squares)) or pictures_module.features_of_squares(squares, *rest),
    )  # fmt: skip
    assert error(capsys, *build) == (1, f"{empty} (1 more problem); {advice}")
    assert encoded == []
    for name in ("y.png", "z.jpg"):
        (folder / name).unlink()
    status, message = error(capsys, *build)
    assert (status, message.startswith(f"{folder}/w.png: the picture cannot be decoded (")) == (1, True)
    assert message.endswith(f"); {advice}")
    (folder / "y.png").touch()
    with pytest.warns(UserWarning, match="^left out: ") as warned:
        output(capsys, *build, "--skip-bad")
    assert [str(one.message).split(":")[1] for one in warned] == [f" {folder}/{name}.png" for name in "ywx"]
    assert [item.id for item in Index.open(path).items()] == [item.id for item in Index.open(emoji_index[2]).items()]
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "y.png").touch()
    with pytest.warns(UserWarning, match="^left out: "):
        assert error(capsys, *build[:5], bad, *build[6:-1], tmp_path / "none", "--skip-bad") == (
            1, "source: no picture can be decoded",
        )  # fmt: skip
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"^left out: {re.escape(str(bad))}/y.png: an empty file, not a picture$"):
            printed = output(capsys, "index", "add", path, "--pictures", bad, "--skip-bad", "--new-only")
        assert printed.startswith("0 added, 0 skipped, which the index has already\n")
    refused = (1, "--skip-bad: expected only with --pictures")
    assert error(capsys, "index", "add", path, "--data", bad, "--skip-bad") == refused


def test_colons_in_ids_are_printed_as_they_are(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan().save(tmp_path / "run")
    Index.build(tmp_path / "run", np.load(data / "test_ims.npy")[:1], tmp_path / "index", ids=["scene:100:5.jpg"])
    assert "scene:100:5.jpg" in output(capsys, "search", tmp_path / "index", "red")


def test_moved_models_are_recorded(
    emoji_index: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, _, built = emoji_index
    run_folder = shutil.copytree(run_folder, tmp_path / "run")
    path = shutil.copytree(built, tmp_path / "index")
    Index.open(path).relocate([run_folder])
    moved = run_folder.rename(tmp_path / "moved")
    status, message = error(capsys, "search", path, "red heart")
    advice = "if the run directory was moved, name it with --checkpoint RUN, or record it with itm-fast index relocate"
    assert (status, message.endswith(advice)) == (1, True)
    output(capsys, "index", "relocate", path, "--checkpoint", moved)
    assert Index.open(path).manifest.checkpoints == (str(moved),)
    before, after = (Index.open(one).search("red heart", 3) for one in (built, path))
    assert before == after
    other = models.load(moved)
    torch.nn.init.normal_(next(other.parameters()))
    other.save(tmp_path / "other")
    status, message = error(capsys, "index", "relocate", path, "--checkpoint", tmp_path / "other")
    assert (status, message) == (
        1,
        f"{path}: the index was built with another model than {tmp_path}/other; build it again to use this one",
    )
    with pytest.raises(ValueError, match=r"^relocate: expected run directories, an encoder, or both$"):
        Index.open(path).relocate([])
    nothing = "--checkpoint: expected --checkpoint RUN, --encoder DIR, or both"
    assert error(capsys, "index", "relocate", path) == (1, nothing)
    unknown = "encoder: the index does not know a vision model that made its features; build it again with --encoder"
    assert error(capsys, "index", "relocate", path, "--encoder", moved) == (1, unknown)
    assert Index.open(path).manifest.checkpoints == (str(moved),)


def test_the_facts_of_an_index(index: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, "index", "info", index, "--json"))
    assert {name: facts[name] for name in ("images", "captions", "deleted", "dtype", "pooling", "candidates")} == {
        "images": 10, "captions": 50, "deleted": 0, "dtype": "bf16", "pooling": "learned", "candidates": CANDIDATES,
    }  # fmt: skip
    assert facts["bytes"] == sum(file.stat().st_size for file in index.glob("*.safetensors"))
    assert facts["checkpoints"] == [str(trained.resolve())]
    assert "images: 10\n" in output(capsys, "index", "info", index)
    assert output(capsys, "index", "check", index) == f"{index}: no problems found\n"


def test_queries_come_from_a_file(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "queries.txt"
    file.write_bytes("red ball\n\n  dog tree \r\nred\u2028sun\vball\x85\u2029dog\n".encode() + b"sun\n" * 70)
    lines = output(capsys, "search", index, "--queries", file, "--json", "-k", 1).splitlines()
    expected = ["red ball", "dog tree", "red sun ball dog", *["sun"] * 70]
    assert [json.loads(line)["query"] for line in lines] == expected


def test_a_line_that_is_no_query_is_named_before_any_search(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "queries.txt"
    file.write_text("red ball\n\nxyzzy\n")
    message = f"{file}: line 3: query: the model knows none of the words of 'xyzzy'"
    assert error(capsys, "search", index, "--queries", file, "--json") == (1, message)


def test_a_line_with_too_many_tokens_is_named_before_any_search(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models.MatchingModel, "max_caption_length", 12)
    file = tmp_path / "queries.txt"
    # More lines than are encoded at a time. The start and the end are tokens, too.
    fits, long = "red " * 9 + "ball", "red " * 10 + "ball"
    file.write_text(f"{fits}\n" * 70 + f"{long}\n")
    message = f"query: the model reads at most 12 tokens, got 13: '{long}'"
    assert error(capsys, "search", index, "--queries", file, "--json") == (1, f"{file}: line 71: {message}")
    assert error(capsys, "search", index, fits, long) == (1, message)
    assert output(capsys, "search", index, fits, "--json").count('"query"') == 1


def test_data_without_a_training_split_learn_from_those_of_the_run(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gallery = tmp_path / "gallery"
    gallery.mkdir()
    for file in data.glob("test_*"):
        shutil.copy(file, gallery)
    build = ["index", "build", "--data", gallery, "--out"]
    output(capsys, *build, tmp_path / "whole", "--checkpoint", trained)
    output(capsys, "index", "build", "--data", data, "--out", tmp_path / "expected", "--checkpoint", trained)
    found, expected = (Index.open(tmp_path / name) for name in ("whole", "expected"))
    assert found.manifest.weights is not None
    assert expected.manifest.weights is not None
    assert (found.manifest.pooling, found.manifest.weights.sha256) == ("learned", expected.manifest.weights.sha256)
    moved = shutil.copytree(trained, tmp_path / "moved")
    (moved / "train.yaml").unlink()
    assert error(capsys, *build, tmp_path / "none", "--checkpoint", moved) == (
        1,
        f"{gallery}/train_ims.npy: no such file, so there is no split 'train' (splits in {gallery}: test); "
        f"{moved}/train.yaml: no such file, so the training data of {moved} are unknown; "
        "--pooling mean needs none, --training-split takes another",
    )


@pytest.fixture(scope="module")
def emoji_index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Index ten emoji pictures in a folder with an untrained model; return the run, the pictures and the index."""
    folder = tmp_path_factory.mktemp("emoji")
    torch.manual_seed(0)
    words = emoji.vocabulary()
    model = models.create(
        "scan", vocab_size=len(words), feature_dim=432, embed_dim=16, word_dim=8, image_encoder="patches"
    ).eval()
    model.tokenizer = words
    model.save(folder / "run")
    (folder / "pictures" / "inner").mkdir(parents=True)
    for number in range(10):
        place = folder / "pictures" / ("inner" if number % 2 else "") / f"{number}.png"
        place.write_bytes(emoji.picture_png("test", number))
    arguments = ["--checkpoint", folder / "run", "--pictures", folder / "pictures", "--preprocessing", "emoji"]
    assert cli.run(["index", "build", *map(str, arguments), "--out", str(folder / "index")]) == 0
    return folder / "run", folder / "pictures", folder / "index"


def test_a_folder_of_pictures_gives_the_same_index_as_its_features(
    emoji_index: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, pictures, path = emoji_index
    index = Index.open(path)
    names = sorted(file.relative_to(pictures).as_posix() for file in pictures.rglob("*.png"))
    assert [item.id for item in index.items()] == names
    order = [int(Path(name).stem) for name in names]
    other = Index.build(run_folder, emoji.patches(emoji.pictures("test")[order]), tmp_path / "other", ids=names)
    (found,), (expected,) = (one.search("red heart", 10) for one in (index, other))
    assert [(hit.item.id, hit.score) for hit in found.hits] == [(hit.item.id, hit.score) for hit in expected.hits]
    assert found.hits[0].item.picture == str((pictures / found.hits[0].item.id).absolute())
    out = output(capsys, "search", path, "--image", pictures / "4.png", "-k", 1, "--json")
    hit = json.loads(out)["hits"][0]
    assert (hit["item"]["id"], hit["score"]) == ("4.png", pytest.approx(1, abs=1e-3))
    with Image.open(io.BytesIO(index.thumbnail("4.png") or b"")) as small:
        close = np.asarray(small.convert("RGB")).astype(int) - emoji.pictures("test")[4]
    assert np.abs(close).mean() < 6


def test_pictures_without_training_data_name_the_missing_file(
    emoji_index: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, pictures, path = emoji_index
    moved = shutil.copytree(run_folder, tmp_path / "moved")
    build = ["index", "build", "--checkpoint", moved, "--pictures", pictures, "--out", tmp_path / "index"]
    file = moved / "train.yaml"
    unknown = f"{file}: no such file, so the training data of {moved} are unknown"
    advice = "without these data, add --preprocessing, such as 224x14, or --encoder DIR"
    assert error(capsys, *build) == (1, f"{unknown}; {advice}")
    file.write_text(to_yaml(TrainConfig(data=str(tmp_path / "gone"), out=str(moved))))
    gone = f"{file}: data: {tmp_path}/gone does not exist; if it was moved, correct this entry"
    assert error(capsys, *build) == (1, f"{gone}; {advice}")
    build += ["--preprocessing", "emoji"]
    for option in (["--pooling", "learned"], ["--training-split", "train"]):
        assert error(capsys, *build, *option) == (1, f"{gone}; --pooling mean needs no training data")
    with pytest.warns(UserWarning, match="correct this entry; candidates are found by --pooling mean instead of lea"):
        output(capsys, *build)
    assert Index.open(tmp_path / "index").manifest.pictures == Index.open(path).manifest.pictures == "emoji"


def test_models_with_single_vectors_are_not_warned_of_mean_pooling(
    emoji_index: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = emoji.vocabulary()
    model = models.create("vsepp", vocab_size=len(words), feature_dim=432, embed_dim=16, word_dim=8)
    model.tokenizer = words
    model.save(tmp_path / "run")
    build = ["index", "build", "--checkpoint", tmp_path / "run", "--pictures", emoji_index[1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output(capsys, *build, "--preprocessing", "emoji", "--out", tmp_path / "index")


def test_thumbnails_may_be_left_out(emoji_index: tuple[Path, Path, Path], tmp_path: Path) -> None:
    run_folder, pictures, _ = emoji_index
    arguments = ["--checkpoint", run_folder, "--pictures", pictures, "--preprocessing", "emoji", "--no-thumbnails"]
    assert cli.run(["index", "build", *map(str, arguments), "--out", str(tmp_path / "index")]) == 0
    index = Index.open(tmp_path / "index")
    assert index.size("images") == 10
    assert index.thumbnail("4.png") is None


def test_another_split_calibrates(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint", trained, "--data", data, "--out", tmp_path / "index", "--calibrate", "0.9"]
    printed = output(capsys, "index", "build", *arguments, "--calibrate-split", "train")
    assert re.search(r"candidates: 10, recall of the exact best 10: 1.000 over 120 captions\n", printed)


def test_the_page_shows_pictures_and_escapes_texts(
    emoji_index: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, path = emoji_index
    page = tmp_path / "page.html"
    printed = output(capsys, "search", path, "red <b> heart", "face", "-k", 4, "--html", page)
    assert printed == f"page: {page}\n"
    text = page.read_text()
    assert "<h2>red &lt;b&gt; heart</h2>" in text
    assert text.count("data:image/webp;base64,") == 8
    (found,) = Index.open(path).search("face", 4)
    for hit in found.hits:
        assert f"<b>{hit.rank}. {hit.item.id}</b><span>score {hit.score:.4f}</span>" in text
    assert "http" not in text


BUILD = ["index", "build", "--checkpoint", "RUN", "--data", "DATA", "--out", "NEW"]
BAD = [
    (["search", "INDEX", ""], "query: expected words, got an empty text"),
    (["search", "INDEX", " \t "], "query: expected words, got an empty text"),
    (["search", "INDEX", "xyzzy plugh"], "query: the model knows none of the words of 'xyzzy plugh'"),
    (["search", "INDEX", "red " * 501], "query: expected at most 2,000 characters, got 2,004"),
    (["search", "INDEX", "red x\udce9"], r"query: expected valid UTF-8, got 'red x\udce9'"),
    (["search", "INDEX", "red", "-k", "0"], "k: expected 1 to 10, the number of images, got 0"),
    (["search", "INDEX", "red", "-k", "11"], "k: expected 1 to 10, the number of images, got 11"),
    (["search", "INDEX", "red", "--candidates", "0"], "candidates: expected at least 1, got 0"),
    (["search", "INDEX"], "TEXT: expected texts, --image or --like, and one of these at a time"),
    (["search", "INDEX", "red", "--like", "0"], "TEXT: expected texts, --image or --like, and one of these at a time"),
    (["search", "INDEX", "--like", "nothing"], "id: the index holds no item 'nothing'"),
    (
        ["search", "INDEX", "--image", "DATA/train_caps.txt"],
        "pictures: the index was built from features, and does not know how a picture becomes features; build it "
        "again with the encoder of the features, or pass features or the id of an item",
    ),
    (["search", "INDEX", "--queries", "DATA/none.txt"], "DATA/none.txt: cannot be read: No such file or directory"),
    (
        ["search", "DATA", "red"],
        "DATA/index.json: no such file, so DATA is not an index; itm-fast index build writes one",
    ),
    (
        ["index", "build", "--checkpoint", "RUN", "--data", "DATA", "--out", "INDEX"],
        "INDEX: contains an index; --overwrite replaces it",
    ),
    (
        ["index", "build", "--checkpoint", "RUN", "--data", "DATA", "--out", "DATA"],
        "DATA: expected a new or empty folder, found 'dev_caps.txt'",
    ),
    (["index", "build", "--checkpoint", "RUN", "--out", "NEW"], "--data: expected either --data DIR or --pictures DIR"),
    (
        ["index", "build", "--checkpoint", "RUN", "--pictures", "DATA", "--out", "NEW"],
        "the training data of RUN do not tell how pictures become features; add --preprocessing, such as 224x14, or "
        "--encoder DIR",
    ),
    (
        ["index", "build", "--checkpoint", "RUN", "--pictures", "DATA", "--preprocessing", "emoji", "--out", "NEW"],
        "DATA: contains no pictures that Pillow reads",
    ),
    (
        ["index", "build", "--checkpoint", "RUN", "--data", "DATA", "--out", "NEW", "--calibrate", "2"],
        "--calibrate: expected a number above 0 and at most 1, got 2",
    ),
    (
        [*BUILD, "--calibrate-queries", "9"],
        "--calibrate-split, --calibrate-queries: expected only with --calibrate",
    ),
    (
        [*BUILD, "--calibrate", "0.9", "--calibrate-split", "none"],
        "DATA/none_ims.npy: no such file, so there is no split 'none' (splits in DATA: dev, test, train)",
    ),
    (
        [*BUILD, "--pooling", "mean", "--training-split", "dev"],
        "--training-split: expected none with --pooling mean, which learns nothing",
    ),
    (["index", "build", "--checkpoint", "NEW", "--data", "DATA", "--out", "NEW"], "NEW: no such run directory"),
    (
        ["index", "build", "--checkpoint", "RUN", "--data", "DATA", "--out", "NEW", "--device", "gpu"],
        "device: expected a device such as cpu or cuda, got 'gpu'",
    ),
    (["search", "INDEX", "red", "--device", "gpu"], "device: expected a device such as cpu or cuda, got 'gpu'"),
    (["index", "delete", "INDEX"], "ID: expected at least one id, or --ids FILE"),
    (["index", "delete", "INDEX", "0", "nothing"], "id: the index holds no item 'nothing'"),
    (
        ["index", "add", "INDEX", "--data", "DATA"],
        "ids: '0' is in the index already; delete it first, or name the new ones apart with --id-prefix",
    ),
    (["index", "add", "INDEX", "--data", "DATA", "--new-only"], "--new-only: expected only with --pictures"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_bad_input_is_one_line(
    arguments: list[str], message: str, index: Path, data: Path, trained: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    places = {"INDEX": index, "DATA": data, "RUN": trained, "NEW": tmp_path / "new"}
    before = Index.open(index).manifest

    def named(text: str) -> str:
        return re.sub(r"\b(INDEX|DATA|RUN|NEW)\b", lambda found: str(places[found[0]]), text)

    assert error(capsys, *map(named, arguments)) == (1, named(message))
    assert Index.open(index).manifest == before


def test_a_folder_without_write_permission_is_refused_before_encoding(
    index: Path, data: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda _path, mode: mode != os.W_OK)
    message = f"{index}: the folder {index} is not writable"
    build = ["index", "build", "--checkpoint", trained, "--data", data, "--out", index, "--overwrite"]
    for command in (build, ["index", "delete", index, "0"]):
        assert error(capsys, *command) == (1, message)


def test_a_query_of_ten_megabytes_is_refused_by_its_length(index: Path) -> None:
    with pytest.raises(ValueError, match=r"^query: expected at most 2,000 characters, got 10,000,000$"):
        Index.open(index).search("a" * 10_000_000)


def test_an_index_of_another_model_is_refused(
    index: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    scan(5).save(other)
    message = f"{index}: the index was built with another model than {other}; build it again to use this one"
    assert error(capsys, "search", index, "red", "--checkpoint", other) == (1, message)
    with pytest.raises(ValueError, match="the index was built with another model than this model; build it again"):
        Index.open(index, scan(5))
    moved = tmp_path / "moved"
    shutil.copytree(trained, tmp_path / "run")
    copy = Index.build(str(tmp_path / "run"), np.ones((2, 4, 8), dtype=np.float32), tmp_path / "copy")
    (tmp_path / "run").rename(moved)
    message = (
        f"{tmp_path / 'run' / 'config.json'}: no such file; {tmp_path / 'run'} is not a saved model; if the run "
        "directory was moved, name it with --checkpoint RUN, or record it with itm-fast index relocate"
    )
    assert error(capsys, "search", copy.path, "red") == (1, message)
    assert output(capsys, "search", copy.path, "red", "--checkpoint", moved, "--json").count('"rank"') == 2
    features = np.zeros((2, 4, 8), dtype=np.float32)
    nameless = Index.build(scan(), features + 1, tmp_path / "nameless")
    assert nameless.search("red", 1)[0].hits[0].item.id == "0"
    with pytest.raises(ValueError, match="the index names no run directory; name the model that it was built with"):
        Index.open(nameless.path).search("red")


def test_bad_pictures_and_features_are_one_line(emoji_index: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, _, path = emoji_index
    index = Index.open(path)
    (tmp_path / "text.png").write_text("not a picture")
    with pytest.raises(ValueError, match=r"text.png: not a picture in a format that Pillow reads"):
        index.search(pictures=[tmp_path / "text.png"])
    # A file of some kilobytes that claims to have more pixels than are decoded.
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    with pytest.raises(ValueError, match=r"bomb\.png: a picture of more than 100,000,000 pixels; scale it down first"):
        index.search(pictures=[tmp_path / "bomb.png"])
    with pytest.raises(ValueError, match=r"picture: expected uint8 \(height, width, 3\), got float64 \(2, 2\)"):
        index.search(pictures=[np.zeros((2, 2))])
    with pytest.raises(ValueError, match="features: expected finite values"):
        index.search(features=np.full((1, 36, 432), np.nan, dtype=np.float32))
    with pytest.raises(ValueError, match="query: expected one of texts, pictures, features and items"):
        index.search()
    with pytest.raises(ValueError, match="of: expected images or captions, got 'words'"):
        index.search("red", of="words")
    with pytest.raises(ValueError, match="of: the index holds no captions"):
        index.search("red", of="captions")


def test_bad_sources_are_one_line(tmp_path: Path) -> None:
    features = np.ones((3, 4, 8), dtype=np.float32)
    for source, options, message in (
        (features, {"ids": ["a", "b"]}, r"ids: expected one per image \(3\), got 2"),
        (features, {"ids": ["a", "b", "a"]}, "ids: 'a' occurs twice"),
        (features, {"ids": ["a", "", "b"]}, "ids: expected texts that are not empty, got ''"),
        (features, {"captions": ["a"]}, r"captions: expected one per image \(3\), got 1"),
        (features[0], {}, r"features: expected shape \(images, regions, channels\), got \(4, 8\)"),
        (features * np.nan, {}, "features: row 0 holds values that are not finite"),
        (features, {"dtype": "fp4"}, "dtype: expected bf16 or int8, got 'fp4'"),
        (
            features,
            {"pooling": "learned"},
            "pooling: a learned pooling needs a data set with captions; mean needs none",
        ),
        (features[:0], {}, "source: expected at least one item"),
        ([tmp_path / "x.png"], {}, "pictures: the index was built from features, and does not know"),
    ):
        with pytest.raises(ValueError, match=message):
            Index.build(scan(), source, tmp_path / "index", **options)
    with pytest.raises(ValueError, match="dtype: int8 is for models with several vectors per item"):
        Index.build(vsepp(), features, tmp_path / "index", dtype="int8")
    assert not (tmp_path / "index" / "index.json").exists()
