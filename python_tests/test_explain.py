"""`itm-fast explain`: the weights in the page are those of the scores, drawn over the picture or as tables."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import error
from helpers.pages import Page
from PIL import Image

from itm_fast import cli, evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji
from itm_fast.report.heat import heat
from itm_fast.report.pair import WHOLE

SIZES = {"embed_dim": 12, "word_dim": 8}
HOSTILE = 'red <img src=x onerror=alert(1)> {{ 7 * 7 }} "heart" & xyzzy'
RCAR = {"regulator": "rcar", "steps": 3, "alignment_dim": 6}
CASES = {
    "scan": ("scan", {}),
    "scan rcr": ("scan", {**RCAR, "regulator": "rcr", "steps": 2}),
    "scan rar": ("scan", {**RCAR, "regulator": "rar"}),
    "scan rcar": ("scan", RCAR),
    "scan mean rcar": ("scan", {**RCAR, "direction": "mean"}),
    "bfan": ("bfan", {}),
    "bfan rar": ("bfan", {**RCAR, "regulator": "rar", "focal": "prob"}),
    "sgr": ("sgraf", {"alignment_dim": 6}),
    "saf": ("sgraf", {"alignment_dim": 6, "module": "saf", "regulator": "rcr", "steps": 1}),
    "sgraf": ("sgraf", {"alignment_dim": 6, "module": "mean", "regulator": "rcr"}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures of the bundled data, with a caption that means harm, and three images of other features."""
    folder = tmp_path_factory.mktemp("data")
    np.save(folder / "test_ims.npy", emoji.patches(emoji.pictures("test")[:3]))
    captions = [*emoji.captions("test")[:14], HOSTILE]
    (folder / "test_caps.txt").write_text("".join(f"{caption}\n" for caption in captions))
    Vocabulary.build([*captions[:14], 'red heart " &'], min_count=1).save(folder / "vocab.json")
    random = np.random.default_rng(0)
    np.save(folder / "other_ims.npy", random.standard_normal((3, 7, 432)).astype(np.float32))
    (folder / "other_caps.txt").write_text("".join(f"{caption}\n" for caption in captions))
    return folder


def make_run(folder: Path, data: Path, name: str, options: dict[str, object], regions: int = 36) -> Path:
    """A model with random weights, large enough that weights differ."""
    torch.manual_seed(3)
    sizes = {"vocab_size": len(Vocabulary.from_file(data / "vocab.json")), "feature_dim": 432, **SIZES}
    more = {"n_regions": regions} if name == "sgraf" else {}
    model = models.create(name, **sizes, **more, **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0)
    model.save(folder)
    Vocabulary.from_file(data / "vocab.json").save(folder / "vocab.json")
    return folder


def explain(run: Path, data: Path, out: Path, *more: object) -> tuple[str, dict]:
    """The page and the JSON."""
    content = out.with_suffix(".json")
    arguments = ["explain", "--checkpoint", run, "--data", data, "--out", out, "--json", content, *more]
    assert cli.run([str(argument) for argument in arguments]) == 0
    return out.read_text(), json.loads(content.read_text())


def encoded(run: Path, data: Path, split: str, caption: int, image: int) -> tuple:
    """The model, and regions and words of the pair, without `evaluation.explain`."""
    model = models.load(run)
    dataset = PrecomputedDataset(data, split, Vocabulary.from_file(run / "vocab.json"))
    with torch.no_grad():
        return (
            model,
            model.encode_images(dataset.image_batch([image])),
            model.encode_captions(*dataset.caption_batch([caption])),
        )


def tables(html: str, kind: str) -> list[list[list[str]]]:
    """The texts of the cells of each table of a class, row by row, without their row's heading."""
    found = re.findall(rf'<table class="{kind}">.*?<tbody>(.*?)</tbody>', html, re.DOTALL)
    rows = [re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL) for body in found]
    return [[re.findall(r"<td[^>]*>([\d.]+)", row) for row in body] for body in rows]


def percent(weights: torch.Tensor) -> list[list[str]]:
    return [[f"{100 * weight:.1f}" for weight in row] for row in weights.tolist()]


@pytest.mark.parametrize("split", ["test", "other"])
@pytest.mark.parametrize("case", CASES)
def test_the_page_holds_the_weights_of_the_scores(data: Path, tmp_path: Path, case: str, split: str) -> None:
    name, options = CASES[case]
    run = make_run(tmp_path / "run", data, name, options, 36 if split == "test" else 7)
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 4, "--image", 2, "--split", split)
    model, images, captions = encoded(run, data, split, 4, 2)
    similarity = model.similarity.local_alignments if name == "sgraf" else model.text_to_image
    with torch.no_grad():
        steps = similarity.steps(captions[0], images[0])
        (weights,) = model.word_attention(images, captions)
        score = model.score(images, captions).item()
    torch.testing.assert_close(steps.attention[-1], weights)
    assert len(content["words"]) == len(weights)
    assert len(steps.attention) == {"rcr": 3, "rcar": 3}.get(options.get("regulator"), 1) - (case == "saf")
    for ours, found in (("attention", steps.attention), ("temperatures", steps.temperatures)):
        torch.testing.assert_close(torch.tensor(content[ours]), torch.stack(found), rtol=1e-6, atol=1e-7)
    assert tables(html, "attention") == [percent(torch.tensor(step)) for step in content["attention"]]
    assert content["score"] == pytest.approx(score, abs=1e-6)
    assert f"<dd>{score:.4f}</dd>" in html
    if name != "sgraf":
        expected = {"RAR": steps.aggregation} if steps.aggregation else {}
        assert {key: len(value) for key, value in content["aggregation"].items()} == {
            key: len(value) for key, value in expected.items()
        }
        for key, value in expected.items():
            torch.testing.assert_close(torch.tensor(content["aggregation"][key]), torch.stack(value))
    shown = tables(html, "shares")
    assert shown == [percent(torch.tensor(value).t()) for value in content["aggregation"].values()]
    assert ("no learned weights of aggregation" in html) == (not content["aggregation"])
    assert (WHOLE in html) == (name == "sgraf")
    assert ("of the regions over the words" in html) == (case in ("scan mean rcar", "bfan", "bfan rar"))


@pytest.mark.parametrize("module", ["sgr", "saf"])
def test_shares_of_sgraf_give_its_score(data: Path, tmp_path: Path, module: str) -> None:
    """The nodes of the pair, summed by the weights of the page, lead to the model's score."""
    options = {"alignment_dim": 6, "module": module, "graph_steps": 1}
    run = make_run(tmp_path / "run", data, "sgraf", options)
    _, content = explain(run, data, tmp_path / "page.html", "--caption", 4)
    model, images, captions = encoded(run, data, "test", 4, 0)
    ((shares,),) = content["aggregation"].values()
    with torch.no_grad():
        similarity = model.similarity
        whole = similarity.global_alignment((model.region_pool(images) - model.word_pool(captions)) ** 2)
        words = similarity.local_alignments(captions, images)[0]
        nodes = torch.cat([torch.nn.functional.normalize(whole), words])
        gathered = torch.tensor(shares) @ nodes
        if module == "sgr":
            gathered = torch.relu(similarity.heads["sgr"].graph[0](gathered))
        else:
            gathered = torch.nn.functional.normalize(gathered, dim=0)
        score = torch.sigmoid(similarity.evaluations[module](gathered))
    assert content["score"] == pytest.approx(score.item(), abs=1e-6)
    assert sum(shares) == pytest.approx(1, abs=1e-6)
    assert max(shares) > 1.2 * min(shares), "weights that differ"


def test_words_are_drawn_over_the_picture(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", data, *CASES["scan rcar"])
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 6)
    images = [attributes for tag, attributes in Page(html).elements if tag == "img"]
    pixels = [np.asarray(Image.open(io.BytesIO(base64.b64decode(i["src"].partition(",")[2])))) for i in images]
    picture = emoji.pictures("test")[1]
    assert np.array_equal(pixels[0], picture), "the caption's own"
    attention = np.array(content["attention"], dtype=np.float32)
    n_steps, n_words, _ = attention.shape
    assert (n_steps, len(images)) == (3, 1 + 3 * n_words)
    for index in range(n_words):
        for step in range(n_steps):
            number = 1 + n_steps * index + step
            weights = attention[step, index].reshape(6, 6)
            assert np.array_equal(pixels[number], heat(picture, weights)), (index, step)
            row, column = np.argwhere(weights == weights.max())[0] + 1
            where = f"{content['words'][index]}: most attention in row {row}, column {column} of 6 x 6"
            assert images[number]["alt"] == where
    assert "Caption 6 of test beside image 1, which it belongs to." in html
    assert "SIL Open Font License" in html


def test_other_features_are_tables(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", data, *CASES["scan"], 7)
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 0, "--image", 1, "--split", "other")
    assert "<img" not in html
    assert "which is not its own; that is image 0." in html
    first = int(np.argmax(content["attention"][0][0])) + 1
    assert f"<li>region {first}<" in html
    assert "SIL Open Font License" not in html


def test_texts_of_the_data_are_escaped(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", data, *CASES["scan rar"])
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 14)
    assert "red &lt;img src=x onerror=alert(1)&gt; {{ 7 * 7 }} &#34;heart&#34; &amp; xyzzy" in html
    assert "xyzzy (unknown)" in content["words"]
    assert "heart" in content["words"]
    assert content["words"][0] == "<start>"
    assert "<start>" not in html
    page = Page(html)
    assert not page.open
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.elements}
    addresses = [
        value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert addresses
    assert all(address.startswith("data:image/png;base64,") for address in addresses)


def test_errors_are_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", data, "scan", {})
    regions = make_run(tmp_path / "i2t", data, "scan", {"direction": "i2t"})
    whole = make_run(tmp_path / "vsepp", data, "vsepp", {})
    out = tmp_path / "page.html"
    for arguments, message in (
        ((run, "--caption", 15), "--caption: expected a number from 0 to 14 in test, got 15"),
        ((run, "--caption", -1), "--caption: expected a number from 0 to 14 in test, got -1"),
        ((run, "--caption", 0, "--image", 3), "--image: expected a number from 0 to 2 in test, got 3"),
        ((regions, "--caption", 0), f"{regions}: direction: in this model regions attend to words (i2t), not words to "
         "regions"),
        ((whole, "--caption", 0), f"{whole}: model: the words of VSEPP do not attend to regions"),
        ((run, "--caption", 0, "--split", "dev"), f"{data / 'dev_ims.npy'}: no such file, so there is no split 'dev'"),
        ((tmp_path / "none", "--caption", 0), f"{tmp_path / 'none' / 'config.json'}: no such file"),
    ):  # fmt: skip
        checkpoint, *rest = arguments
        status, text = error(capsys, "explain", "--checkpoint", checkpoint, "--data", data, "--out", out, *rest)
        assert status == 1
        assert message in text
        assert not out.exists()
    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(data / "vocab.json"))
    with pytest.raises(ValueError, match=r"^image: expected a number from 0 to 2, got 3$"):
        evaluation.explain(models.load(run), dataset, 0, 3)
    images = models.load(run).encode_images(dataset.image_batch([0, 1]))
    captions = models.load(run).encode_captions(*dataset.caption_batch([0]))
    with pytest.raises(ValueError, match=r"^images: expected one, and one caption, got 2 and 1$"):
        models.load(run).pair_steps(images, captions)


def test_pictures_of_half_precision_are_recognised() -> None:
    picture = emoji.pictures("dev")[5]
    patches = emoji.patches(picture[None])[0]
    assert np.array_equal(emoji.picture_if_patches(patches.astype(np.float16).astype(np.float32)), picture)
    assert emoji.picture_if_patches(patches + 0.01) is None
    assert emoji.picture_if_patches(patches[:, :-1]) is None
