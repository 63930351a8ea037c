"""The HTML report: escaping, no external resources, pictures, marks and numbers."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
from PIL import Image

from itm_fast.report import Hit, ImageQuery, Report, TextQuery, WordAttention, render_report, write_report
from itm_fast.report.curves import curves_svg
from itm_fast.report.heat import heat, peak
from python_tests.report.pages import Page

HOSTILE = '<script>alert("1")</script> & \'"><img src=x onerror=alert(1)> {{ 7 * 7 }} </style>'


def summary(first: float) -> dict[str, float]:
    values = {}
    for offset, prefix in enumerate(("i2t", "t2i")):
        values |= {f"{prefix}_r{k}": first + offset + k for k in (1, 5, 10)}
        values |= {f"{prefix}_medr": 3.0 + offset, f"{prefix}_meanr": 7.5}
    return {**values, "rsum": sum(values[f"{prefix}_r{k}"] for prefix in ("i2t", "t2i") for k in (1, 5, 10))}


@pytest.fixture
def report() -> Report:
    random = np.random.default_rng(0)
    metrics = [
        {"kind": "train", "step": step, "epoch": 1 + step // 50, "mining": "all" if step < 50 else "hardest",
         "loss": 900.0 if step < 50 else 40.0 - 0.1 * step, "lr": 1e-3}
        for step in range(10, 101, 10)
    ]  # fmt: skip
    metrics += [{"kind": "validation", "split": "dev", "step": 50 * e, "epoch": e, "rsum": 90.0 * e} for e in (1, 2)]
    return Report(
        title=f"Title {HOSTILE}",
        lead="A lead.",
        pictures={3: random.integers(0, 256, (72, 72, 3), dtype=np.uint8), 5: np.zeros((72, 72, 3), np.uint8)},
        names={3: f"name {HOSTILE}", 5: "black square"},
        captions=[f"caption {HOSTILE}", "plain caption", "third"],
        text_queries=[
            TextQuery(f"query {HOSTILE}", [Hit(5, 1, False), Hit(3, 2, True)]),
            TextQuery("low", [Hit(5, 1, False)] * 5 + [Hit(3, 37, True)]),
        ],
        image_queries=[ImageQuery(3, [Hit(0, 1, True), Hit(1, 2, False)])],
        attention=[
            WordAttention(f"caption {HOSTILE}", 3, [f"word {HOSTILE}", "red"], random.random((2, 6, 6)) / 36),
        ],
        trained=summary(40.0),
        untrained=summary(0.25),
        metrics=metrics,
        facts=[("Model", "SCAN"), ("Note", HOSTILE)],
        n_images=500,
        n_captions=2500,
        split="test",
        top=5,
        credits=f"Pictures by {HOSTILE}",
    )


def test_every_text_is_escaped(report: Report) -> None:
    html = render_report(report)
    page = Page(html)
    tags = [tag for tag, _ in page.elements]
    assert "script" not in tags
    assert tags.count("style") == 1
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert html.count("{{ 7 * 7 }}") == html.count("onerror")
    plain = " ".join(HOSTILE.split())
    assert f"caption {plain}" in page.texts["p"]
    assert f"word {plain}" in page.texts["li"]
    assert page.texts["title"] == [f"Title {plain}"]
    assert f"query {plain}" in page.texts["p"]
    assert f"caption {plain}" in page.texts["span"]
    assert plain in page.texts["dd"]
    assert page.texts["footer"] == [f"Pictures by {plain}"]
    alternatives = {attributes["alt"].partition(": most")[0] for tag, attributes in page.elements if tag == "img"}
    assert alternatives == {f"name {HOSTILE}", "black square", f"word {HOSTILE}", "red"}


def test_the_page_needs_nothing_beside_it(report: Report) -> None:
    html = render_report(report)
    page = Page(html)
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/png;base64,", "#")), (tag, value)
    assert "@import" not in html
    assert re.findall(r"url\((?!#)", html) == []


def test_pictures_are_the_given_pixels(report: Report) -> None:
    images = [attributes for tag, attributes in Page(render_report(report)).elements if tag == "img"]
    by_name = {image["alt"]: image["src"] for image in images}
    for index, name in report.names.items():
        content = base64.b64decode(by_name[name].partition(",")[2])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), report.pictures[index])


def test_attention_is_drawn_as_light() -> None:
    """The brightest patch keeps its colours, one without attention is dark grey, one with a quarter is halfway."""
    picture = np.random.default_rng(1).integers(0, 256, (72, 72, 3), dtype=np.uint8)
    weights = np.zeros((6, 6))
    weights[1, 4], weights[5, 0] = 0.4, 0.1
    drawn = heat(picture, weights)
    assert (drawn.shape, drawn.dtype) == ((72, 72, 3), np.uint8)
    bright, half, dark = (slice(12, 24), slice(48, 60)), (slice(60, 72), slice(0, 12)), (slice(36, 48), slice(36, 48))
    assert np.array_equal(drawn[bright], picture[bright])
    grey = (picture @ np.array([0.299, 0.587, 0.114]))[:, :, None] * np.array([0.368, 0.392, 0.46])
    assert np.array_equal(drawn[dark], np.rint(grey[dark]))
    assert np.array_equal(drawn[half], np.rint((picture[half] + grey[half]) / 2))
    brightness = [float((image[dark] @ [0.299, 0.587, 0.114]).mean()) for image in (drawn, picture)]
    assert 0.35 < brightness[0] / brightness[1] < 0.45
    assert peak(weights) == (2, 5, 0.4)
    assert np.array_equal(heat(picture, np.ones((3, 2))), picture)
    for beside in (heat(picture, weights, largest=1.6), heat(picture, weights, largest=0.8, power=1.0)):
        assert np.array_equal(beside[bright], np.rint((picture[bright] + grey[bright]) / 2)), "of another scale"
    with pytest.raises(
        ValueError, match=r"^picture: expected multiples of 5 x 5 pixels of 3 colours, got \(72, 72, 3\)$"
    ):
        heat(picture, np.ones((5, 5)))


def test_each_word_has_its_picture_and_says_where_it_looks(report: Report) -> None:
    html = render_report(report)
    (example,) = report.attention
    images = [attributes for tag, attributes in Page(html).elements if tag == "img"]
    shown = {image["alt"]: image["src"] for image in images if ": most attention in " in image["alt"]}
    expected = {}
    for word, weights in zip(example.words, example.weights, strict=True):
        row, column = np.argwhere(weights == weights.max())[0] + 1
        expected[f"{word}: most attention in row {row}, column {column} of 6 x 6"] = (word, weights)
    assert shown.keys() == expected.keys()
    for alt, (_, weights) in expected.items():
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown[alt].partition(",")[2]))))
        assert np.array_equal(pixels, heat(report.pictures[3], weights))
    shares = re.findall(r'<span class="share">(\d+) %</span>', html)
    assert shares == [f"{100 * weights.max():.0f}" for _, weights in expected.values()]
    assert "What the words attend to" in html
    assert "What the words attend to" not in render_report(attrs.evolve(report, attention=[]))


def test_right_and_wrong_are_marked_by_more_than_colour(report: Report) -> None:
    html = render_report(report)
    mark = r'<span class="mark"><span aria-hidden="true">(.)</span><span class="unseen">(right|wrong),</span></span>'
    tiles = re.findall(rf'<li class="(right|)( later|)"><span class="tile">.*?</span>{mark} (\d+)</li>', html)
    wrong = ("", "", "✗", "wrong", "1")
    assert tiles == [
        wrong, ("right", "", "✓", "right", "2"), *[wrong] * 5, ("right", " later", "✓", "right", "37"),
    ]  # fmt: skip
    found = re.findall(rf'<li class="(right|)">{mark}<span class="rank">(\d+)</span>', html)
    assert found == [("right", "✓", "right", "1"), ("", "✗", "wrong", "2")]


def test_number_of_hits_follows_the_report(report: Report) -> None:
    html = render_report(attrs.evolve(report, top=1, split="dev"))
    assert html.count(' later"') == 3
    assert "repeat(2, minmax(0, 1fr)); gap: .5rem" in html
    assert "Captions of the dev split, drawn at random, and the 1 pictures that score highest among 500." in html
    assert "the 1 captions that score highest among 2,500." in html


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` (WCAG 2.2)."""
    channels = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_stands_out_from_its_ground_in_both_schemes(report: Report) -> None:
    schemes = re.findall(r":root \{(.*?)\}", render_report(report), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", scheme))
        pairs = [(text, ground) for text in ("ink", "soft", "wrong", "right") for ground in ("page", "card")]
        for text, ground in [*pairs, ("right", "right-fill"), ("ink", "right-fill"), ("soft", "right-fill")]:
            high, low = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_table_holds_both_summaries(report: Report) -> None:
    page = Page(render_report(report))
    assert page.texts["td"] == [
        "41.0", "45.0", "50.0", "3", "1.2", "5.2", "10.2", "3", "42.0", "46.0", "51.0", "4", "2.2", "6.2", "11.2", "4",
    ]  # fmt: skip
    headings = [(attributes["scope"], text) for (tag, attributes), text in zip(
        [element for element in page.elements if element[0] == "th"], page.texts["th"], strict=True
    )]  # fmt: skip
    assert headings == [
        *[("col", text) for text in ("search", "weights", "R@1", "R@5", "R@10", "median rank")],
        ("rowgroup", "Image to text"), ("row", "trained"), ("row", "untrained"),
        ("rowgroup", "Text to image"), ("row", "trained"), ("row", "untrained"),
    ]  # fmt: skip
    assert page.texts["caption"] == ["Recall at 1, 5 and 10 in percent on the test split; the best median rank is 1."]
    assert page.texts["b"] == ["275.0"]
    assert "of 600; untrained 36.5" in page.texts["span"]


def test_curves_show_the_log_in_the_colours_of_the_page(report: Report) -> None:
    html = render_report(report)
    captions = Page(html).texts["figcaption"]
    assert captions == ["Loss with the hardest negatives", "Sum of recalls on dev"]
    assert html.count("<svg ") == 2
    assert "var(--accent)" in html
    assert not re.search("#01020[3]|#04050[6]|#07080[9]", html)
    # The curve starts at step 50, with the hardest negatives: the warm-up value of 900 would flatten it.
    assert "900" not in re.sub(r'base64,[^"]*|<path[^>]*>', "", html[html.index("<svg") : html.index("</svg>")])
    assert render_report(attrs.evolve(report, metrics=[])).count("<svg ") == 0


def test_a_last_line_of_a_few_steps_is_no_point_of_the_curve(report: Report) -> None:
    train = [line for line in report.metrics if line["kind"] == "train"]
    [(_, whole)] = curves_svg(train)
    [(_, with_rest)] = curves_svg([*train, {**train[-1], "step": 101, "loss": 0.5}])
    [(_, longer)] = curves_svg([*train, {**train[-1], "step": 110, "loss": 0.5}])
    assert whole == with_rest != longer


def test_curves_are_parts_of_the_page(report: Report) -> None:
    page = Page(render_report(report))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 20
    used = {name for _, attributes in page.elements for value in attributes.values()
            for name in re.findall(r"url\(#(.*?)\)|^#(.*)", value or "")}  # fmt: skip
    assert {first or second for first, second in used} <= set(ids)
    assert "metadata" not in {tag for tag, _ in page.elements}
    labels = [attributes["aria-label"] for tag, attributes in page.elements if tag == "svg"]
    assert labels == [
        "Loss with the hardest negatives: first 35 at step 50; best 30 at step 100; last 30 at step 100",
        "Sum of recalls on dev: first 90 at epoch 1; best 180 at epoch 2; last 180 at epoch 2",
    ]


def test_of_equal_validations_the_last_is_named_the_best(report: Report) -> None:
    validation = [line for line in report.metrics if line["kind"] == "validation"]
    lines = [{**validation[-1], "epoch": epoch, "rsum": rsum} for epoch, rsum in ((1, 180), (2, 180), (3, 90))]
    [(_, svg)] = curves_svg(lines)
    assert "first 180 at epoch 1; best 180 at epoch 2; last 90 at epoch 3" in svg


def test_one_validation_is_drawn_on_an_axis_of_whole_epochs(report: Report) -> None:
    html = render_report(attrs.evolve(report, metrics=[report.metrics[-1] | {"epoch": 1}]))
    numbers = re.findall(r"<text[^>]*>([\d.]+)</text>", html)
    assert numbers[:2] == ["0", "1"]
    assert float(numbers[-1]) <= 180.0 * 1.05


def test_report_is_the_same_for_the_same_content(report: Report, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", report)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render_report(report)
