"""`itm-fast explain`: the page shows the weights behind the scores, over the picture or as tables."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import itm_fast.functional as F_itm
from itm_fast import cli, evaluation, models, reference
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji, open_split, pack
from itm_fast.nn import RegulatedSimilarity
from itm_fast.report.heat import heat
from itm_fast.report.pair import WHOLE
from python_tests.helpers.commands import error
from python_tests.helpers.precomputed import VOCABULARY, write_split
from python_tests.report.pages import Page

SIZES = {"embed_dim": 12, "word_dim": 8}
HOSTILE = 'red <img src=x onerror=alert(1)> {{ 7 * 7 }} "heart" & xyzzy \0nul\x1b'
RCAR = {"regulator": "rcar", "steps": 3, "alignment_dim": 6}
CASES = {
    "scan": ("scan", {}),
    "scan rcr": ("scan", {**RCAR, "regulator": "rcr", "steps": 2}),
    "scan rar": ("scan", {**RCAR, "regulator": "rar"}),
    "scan rcar": ("scan", RCAR),
    "scan i2t": ("scan", {"direction": "i2t"}),
    "scan i2t rcr": ("scan", {**RCAR, "direction": "i2t", "regulator": "rcr", "steps": 2}),
    "scan i2t rcar": ("scan", {**RCAR, "direction": "i2t"}),
    "scan mean rcar": ("scan", {**RCAR, "direction": "mean"}),
    "bfan": ("bfan", {}),
    "bfan rar": ("bfan", {**RCAR, "regulator": "rar", "focal": "prob"}),
    "sgr": ("sgraf", {"alignment_dim": 6}),
    "saf": ("sgraf", {"alignment_dim": 6, "module": "saf", "regulator": "rcr", "steps": 1}),
    "sgraf": ("sgraf", {"alignment_dim": 6, "module": "mean", "regulator": "rcr"}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three pictures of the bundled data with a hostile caption, and three images of other features."""
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
    """Save a model with random weights, scaled so that its attention weights differ."""
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
    """Run `itm-fast explain`; return the page and the JSON."""
    content = out.with_suffix(".json")
    arguments = ["explain", "--checkpoint", run, "--data", data, "--out", out, "--json", content, *more]
    assert cli.run([str(argument) for argument in arguments]) == 0
    return out.read_text(), json.loads(content.read_text())


def encoded(run: Path, data: Path, split: str, caption: int, image: int) -> tuple:
    """Return the model, the regions and the words of the pair, without using `evaluation.explain`."""
    model = models.load(run)
    dataset = PrecomputedDataset(data, split, Vocabulary.from_file(run / "vocab.json"))
    with torch.no_grad():
        return (
            model,
            model.encode_images(dataset.image_batch([image])),
            model.encode_captions(*dataset.caption_batch([caption])),
        )


def tables(html: str, kind: str) -> list[list[list[str]]]:
    """Return the cell texts of each table of a class, row by row, without the row headings."""
    found = re.findall(rf'<table class="{kind}">.*?<tbody>(.*?)</tbody>', html, re.DOTALL)
    rows = [re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL) for body in found]
    return [[re.findall(r"<td[^>]*>([\d.]+)", row) for row in body] for body in rows]


def percent(weights: torch.Tensor) -> list[list[str]]:
    return [[f"{100 * weight:.1f}" for weight in row] for row in weights.tolist()]


def reference_steps(similarity: torch.nn.Module, queries: torch.Tensor, contexts: torch.Tensor) -> tuple[list, ...]:
    """Return attention, temperatures and RAR weights of the float64 reference, from the weights of a similarity."""
    options = {"negative_slope": similarity.negative_slope, "focal": similarity.focal}
    if not isinstance(similarity, RegulatedSimilarity):
        steps = getattr(similarity, "correspondence", None)
        if steps is None or not steps.weights():
            weights = reference.cross_attention_weights(
                queries[None].double(), contexts[None].double(), similarity.temperature, **options
            )
            return [weights[0]], [weights.new_full((len(queries),), similarity.temperature)], []
        layers = [(layer.weight, layer.bias) for layer in similarity.alignments][:-1]
        parameters = F_itm.RegulatorParameters(layers, steps.weights())
    else:
        parameters = similarity.regulator_parameters()
    return reference.regulation_steps(
        queries.double(), contexts.double(), parameters.to(torch.float64), temperature=similarity.temperature, **options
    )


@pytest.mark.parametrize("split", ["test", "other"])
@pytest.mark.parametrize("case", CASES)
def test_the_page_holds_the_weights_of_the_scores(data: Path, tmp_path: Path, case: str, split: str) -> None:
    name, options = CASES[case]
    run = make_run(tmp_path / "run", data, name, options, 36 if split == "test" else 7)
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 4, "--image", 2, "--split", split)
    model, images, captions = encoded(run, data, split, 4, 2)
    similarities = (
        {"t2i": model.similarity.local_alignments}
        if name == "sgraf"
        else {"t2i": model.text_to_image, "i2t": model.image_to_text}
    )
    similarities = {direction: similarity for direction, similarity in similarities.items() if similarity is not None}
    assert list(content["directions"]) == list(similarities)
    drawn, shares = [], []
    for direction, similarity in similarities.items():
        found = content["directions"][direction]
        sets = (captions, images) if direction == "t2i" else (images, captions)
        with torch.no_grad():
            attention, temperatures, aggregation = reference_steps(similarity, sets[0][0], sets[1][0])
        assert len(attention) == {"rcr": 3, "rcar": 3}.get(options.get("regulator"), 1) - (case == "saf")
        for ours, expected in (("attention", attention), ("temperatures", temperatures)):
            torch.testing.assert_close(
                torch.tensor(found[ours]).double(), torch.stack(expected).double(), rtol=1e-4, atol=1e-5
            )
        if name != "sgraf":
            assert list(found["aggregation"]) == ["RAR"] * bool(aggregation)
            for weights in found["aggregation"].values():
                torch.testing.assert_close(
                    torch.tensor(weights).double(), torch.stack(aggregation), rtol=1e-4, atol=1e-5
                )
            with torch.no_grad():
                assert found["score"] == pytest.approx(similarity(*sets).item(), abs=1e-6)
        drawn += [percent(torch.tensor(step)) for step in found["attention"]]
        shares += [percent(torch.tensor(value).t()) for value in found["aggregation"].values()]
    if "t2i" in similarities:
        with torch.no_grad():
            (weights,) = model.word_attention(images, captions)
        torch.testing.assert_close(torch.tensor(content["directions"]["t2i"]["attention"][-1]), weights)
    assert len(content["words"]) == len(captions[0])
    assert tables(html, "attention") == drawn
    assert tables(html, "shares") == shares
    with torch.no_grad():
        score = model.score(images, captions).item()
    assert content["score"] == pytest.approx(score, abs=1e-6)
    parts = [found["score"] for found in content["directions"].values()]
    assert score == pytest.approx(sum(parts) / (1 if name == "bfan" else len(parts)), abs=1e-6)
    assert re.findall(r"<dt>Score of the (\w+)</dt><dd>(.*)</dd>", html) == [
        ("pair", f"{score:.4f}"),
        *zip(("words", "regions") if len(parts) == 2 else (), (f"{part:.4f}" for part in parts), strict=False),
    ]
    assert html.count("There are no learned aggregation weights") == sum(
        not found["aggregation"] for found in content["directions"].values()
    )
    assert (WHOLE in html) == (name == "sgraf")
    for direction, heading in (("t2i", "Words attend to regions"), ("i2t", "Regions attend to words")):
        assert (f"<h2>{heading}</h2>" in html) == (direction in similarities)


@pytest.mark.parametrize("regulator", [None, "rcar"])
def test_the_page_of_messages_holds_their_attention_and_pooling(
    data: Path, tmp_path: Path, regulator: str | None
) -> None:
    options = {"regulator": regulator, "alignment_dim": 6}
    run = make_run(tmp_path / "run", data, "camp", options)
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 4, "--image", 2)
    model, images, captions = encoded(run, data, "test", 4, 2)
    with torch.no_grad():
        steps, score = model.pair_steps(images, captions), model.score(images, captions).item()
    assert content["score"] == pytest.approx(score, abs=1e-6)
    parts = content["directions"]
    name = "RAR" if regulator else "Pooling"
    for direction, part in parts.items():
        for ours, theirs in ((part["attention"], steps[direction].attention),
                             (part["aggregation"][name], steps[direction].aggregation[name])):  # fmt: skip
            assert len(ours) == len(theirs) == (2 if regulator else 1)
            torch.testing.assert_close(torch.tensor(ours), torch.stack(theirs))
    assert tables(html, "attention") == [percent(torch.tensor(s)) for part in parts.values() for s in part["attention"]]
    shares = [percent(torch.tensor(part["aggregation"][name]).t()) for part in parts.values()]
    assert tables(html, "shares") == shares


def test_weights_of_the_regions_give_the_score(data: Path, tmp_path: Path) -> None:
    """The region alignments, weighted by the weights in the JSON, give the model's score."""
    run = make_run(tmp_path / "run", data, "scan", {**RCAR, "direction": "i2t", "regulator": "rar", "steps": 1})
    _, content = explain(run, data, tmp_path / "page.html", "--caption", 4)
    model, images, captions = encoded(run, data, "test", 4, 0)
    (shares,) = content["directions"]["i2t"]["aggregation"]["RAR"]
    assert len(shares) == 36
    similarity = model.image_to_text
    (layer,) = similarity.alignments
    with torch.no_grad():
        alignments = F_itm.cross_attention_alignments(images, captions, layer.weight, layer.bias, temperature=3.0)[0]
        gathered = torch.nn.functional.normalize(torch.tensor(shares) @ alignments, dim=0)
        score = torch.sigmoid(similarity.score(gathered))
    assert content["score"] == pytest.approx(score.item(), abs=1e-6)
    assert sum(shares) == pytest.approx(1, abs=1e-6)
    assert max(shares) > 1.02 * min(shares), "weights that differ"


@pytest.mark.parametrize("module", ["sgr", "saf"])
def test_shares_of_sgraf_give_its_score(data: Path, tmp_path: Path, module: str) -> None:
    """The nodes of the pair, weighted by the weights in the JSON, give the model's score."""
    options = {"alignment_dim": 6, "module": module, "graph_steps": 1}
    run = make_run(tmp_path / "run", data, "sgraf", options)
    _, content = explain(run, data, tmp_path / "page.html", "--caption", 4)
    model, images, captions = encoded(run, data, "test", 4, 0)
    ((shares,),) = content["directions"]["t2i"]["aggregation"].values()
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


def pictures_in(html: str) -> tuple[list[dict], list[np.ndarray]]:
    """Return the attributes and the pixels of each picture of a page."""
    images = [attributes for tag, attributes in Page(html).elements if tag == "img"]
    return images, [np.asarray(Image.open(io.BytesIO(base64.b64decode(i["src"].partition(",")[2])))) for i in images]


def test_words_are_drawn_over_the_picture(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", data, *CASES["scan rcar"])
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 6)
    images, pixels = pictures_in(html)
    picture = emoji.pictures("test")[1]
    assert np.array_equal(pixels[0], picture), "the caption's own"
    attention = np.array(content["directions"]["t2i"]["attention"], dtype=np.float32)
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


def test_regions_are_drawn_on_the_picture(data: Path, tmp_path: Path) -> None:
    """The page draws how the regions attend to each word, each region next to its attention, and the weight of each
    region.
    """
    run = make_run(tmp_path / "run", data, *CASES["scan i2t rcar"])
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 6)
    images, pixels = pictures_in(html)
    picture = emoji.pictures("test")[1]
    found = content["directions"]["i2t"]
    attention = np.array(found["attention"], dtype=np.float32)
    weights = np.array(found["aggregation"]["RAR"], dtype=np.float32)
    (n_steps, _, n_words), n_maps = attention.shape, len(weights)
    patches = [picture[12 * row : 12 * row + 12, 12 * column : 12 * column + 12] for row, column in np.ndindex(6, 6)]
    expected = [picture]
    expected += [
        heat(picture, step[:, word].reshape(6, 6), largest=step.max(), power=1.0)
        for word in range(n_words)
        for step in attention
    ]
    expected += n_steps * patches
    first_map = len(expected)
    expected += [heat(picture, step.reshape(6, 6)) for step in weights]
    expected += patches
    assert (n_steps, n_maps, len(images)) == (3, 3, len(expected))
    for number, (ours, wanted) in enumerate(zip(pixels, expected, strict=True)):
        assert np.array_equal(ours, wanted), number
    row, column = np.argwhere(attention[1, :, 2].reshape(6, 6) == attention[1, :, 2].max())[0] + 1
    where = f"{content['words'][2]}: looked at most in row {row}, column {column} of 6 x 6"
    assert images[1 + 2 * n_steps + 1]["alt"] == where
    row, column = np.argwhere(weights[2].reshape(6, 6) == weights[2].max())[0] + 1
    assert images[first_map + 2]["alt"] == f"largest weight in row {row}, column {column} of 6 x 6"
    assert f"brightest: {100 * weights[2].max():.1f} %" in html
    temperature = found["temperatures"][2][35]
    assert f'row 6, column 6 <span class="share">λ {temperature:.1f}</span>' in html


def test_chosen_regions_alone_are_shown(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", data, *CASES["scan mean rcar"])
    chosen = ("--region", 8, "--region", 1, "--region", 8)
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 6, *chosen)
    words, regions = (np.array(content["directions"][direction]["attention"]) for direction in ("t2i", "i2t"))
    assert tables(html, "attention") == [percent(torch.tensor(step)) for step in (*words, *regions[:, [7, 0]])]
    headings = re.findall(r'<th scope="row">(?:<img[^>]*>)?(row \d, column \d) <span', html)
    assert headings == 3 * ["row 2, column 2", "row 1, column 1"]
    out = tmp_path / "none.html"
    for case, number, message in (
        ("scan i2t", 37, "--region: expected a number from 1 to 36, got 37"),
        ("scan i2t", 0, "--region: expected a number from 1 to 36, got 0"),
        ("scan", 1, f"--region: in {tmp_path / 'scan'} regions do not attend to words"),
    ):
        run = make_run(tmp_path / case, data, *CASES[case])
        arguments = ("explain", "--checkpoint", run, "--data", data, "--out", out, "--caption", 0, "--region", number)
        assert error(capsys, *arguments) == (1, message)
    assert not out.exists()


def test_other_features_are_tables(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", data, *CASES["scan"], 7)
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 0, "--image", 1, "--split", "other")
    assert "<img" not in html
    assert "which is not its own; that is image 0." in html
    first = int(np.argmax(content["directions"]["t2i"]["attention"][0][0])) + 1
    assert f"<li>region {first}<" in html
    assert "SIL Open Font License" not in html


def test_texts_of_the_data_are_escaped(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", data, *CASES["scan rar"])
    html, content = explain(run, data, tmp_path / "page.html", "--caption", 14)
    assert "red &lt;img src=x onerror=alert(1)&gt; {{ 7 * 7 }} &#34;heart&#34; &amp; xyzzy \ufffdnul\ufffd" in html
    assert "\0" not in html
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
    whole = make_run(tmp_path / "vsepp", data, "vsepp", {})
    out = tmp_path / "page.html"
    for arguments, message in (
        ((run, "--caption", 15), "--caption: expected a number from 0 to 14 in test, got 15"),
        ((run, "--caption", -1), "--caption: expected a number from 0 to 14 in test, got -1"),
        ((run, "--caption", 0, "--image", 3), "--image: expected a number from 0 to 2 in test, got 3"),
        ((whole, "--caption", 0), f"{whole}: model: VSEPP has no attention between words and regions"),
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


def test_pictures_in_a_store_of_bfloat16_are_recognised(tmp_path: Path) -> None:
    """Every picture is recognised exactly, although bfloat16 rounds dark pixels by up to 0.6 of 255."""
    for split in emoji.SPLITS:
        pictures = emoji.pictures(split)[::7]
        rounded = torch.from_numpy(emoji.patches(pictures)).to(torch.bfloat16).to(torch.float32).numpy()
        assert np.abs(emoji.pictures_of(rounded).astype(int) - pictures).max() == 1
        for picture, regions in zip(pictures, rounded, strict=True):
            assert np.array_equal(emoji.picture_if_patches(regions), picture)
    changed = rounded[0].copy()
    changed[3, 5] = np.nextafter(changed[3, 5], 9, dtype=np.float32)
    assert emoji.picture_if_patches(changed) is None
    folder = tmp_path / "data"
    folder.mkdir()
    write_split(folder, "test", emoji.patches(emoji.pictures("test")[:3]), 15)
    VOCABULARY.save(folder / "vocab.json")
    pack(folder, tmp_path / "store", dtype="bf16")
    stored = open_split(tmp_path / "store", "test", VOCABULARY).image_batch([2])[0]
    assert np.array_equal(emoji.picture_if_patches(stored.numpy()), emoji.pictures("test")[2])


def test_only_bundled_emoji_are_credited(data: Path, tmp_path: Path) -> None:
    """The user's own pictures are drawn, too, but without the credit for the bundled emoji."""
    run = make_run(tmp_path / "run", data, "scan", {})
    pictures = emoji.pictures("dev")[:3]
    for name, shown, credited in (("bundled", pictures, True), ("own", pictures[:, ::-1], False)):
        folder = tmp_path / name
        folder.mkdir()
        write_split(folder, "test", emoji.patches(np.ascontiguousarray(shown)), 15)
        page, _ = explain(run, folder, tmp_path / f"{name}.html", "--caption", 0)
        assert page.count("data:image/png") > 0
        assert ("Noto Color Emoji" in page, "<footer>" in page) == (credited, credited)
