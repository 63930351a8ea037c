"""`itm-fast score --report`: the page shows the measures and the queries with the worst ranks, with their pictures."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from itm_fast import cli
from itm_fast.data import emoji
from python_tests.helpers.commands import error
from python_tests.report.pages import Page

HOSTILE = "red <img src=x onerror=alert(1)> {{ 7 * 7 }} & heart"


def scores(n: int = 6) -> np.ndarray:
    random = np.random.default_rng(3)
    table = random.standard_normal((n, 5 * n))
    # The hostile caption ranks lowest.
    table[n - 1, 5 * n - 1] = -9
    return table


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six pictures of the bundled data, a hostile caption among theirs, and two score matrices."""
    np.save(tmp_path / "test_ims.npy", emoji.patches(emoji.pictures("test")[:6]))
    captions = [*emoji.captions("test")[:29], HOSTILE]
    (tmp_path / "test_caps.txt").write_text("".join(f"{caption}\n" for caption in captions))
    np.save(tmp_path / "one.npy", scores())
    np.save(tmp_path / "two.npy", scores() + 0.1 * np.random.default_rng(4).standard_normal((6, 30)))
    return tmp_path


def page_of(folder: Path, *more: object) -> tuple[str, Page, dict]:
    out, content = folder / "page.html", folder / "r.json"
    arguments = ["score", folder / "one.npy", "--report", out, "--json", content, "--bootstrap", 10, *more]
    assert cli.run([str(word) for word in arguments]) == 0
    html = out.read_text()
    return html, Page(html), json.loads(content.read_text())


def picture(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))))


def test_confusions_with_pictures(data: Path) -> None:
    html, page, _ = page_of(data, "--data", data)
    captions = (data / "test_caps.txt").read_text().splitlines()
    table = scores()
    ranks = [int((table[:, caption] > table[caption // 5, caption]).sum()) for caption in range(30)]
    worst = sorted((caption for caption in range(30) if ranks[caption]), key=lambda one: (-ranks[one], one))[:12]
    lists = re.findall(r'<p class="query">(.*?)</p>\s*<ol class="tiles">(.*?)</ol>', html, re.DOTALL)
    assert len(lists) == len(worst) == 12
    assert HOSTILE in [captions[caption] for caption in worst]
    for (text, tiles), caption in zip(lists, worst, strict=True):
        assert Page(f"<p>{text}</p>").texts["p"] == [captions[caption]]
        order = sorted(range(6), key=lambda image: -table[image, caption])[:5]
        order += [caption // 5] * (caption // 5 not in order)
        shown = [picture(uri) for uri in re.findall('src="(.*?)"', tiles)]
        assert all(np.array_equal(one, emoji.pictures("test")[image]) for one, image in zip(shown, order, strict=True))
        assert re.findall(r'<li class="(right)?', tiles) == ["right" * (image == caption // 5) for image in order]
        own = ranks[caption] + 1
        assert [int(number) for number in re.findall(r"</span> (\d+)</li>", tiles)] == [1, 2, 3, 4, 5, 6][: max(5, own)]
    assert "onerror=alert(1)&gt;" in html
    assert not [attributes for _, attributes in page.elements if "onerror" in attributes]
    assert emoji.CREDITS.split()[0] in html


def test_ties_are_ordered_as_ranks_count_them(data: Path) -> None:
    """A match that ties with all others has the last rank, so it is not shown as the first."""
    np.save(data / "one.npy", np.zeros((6, 30)))
    with pytest.warns(UserWarning, match="tie with the matching one"):
        html, _, _ = page_of(data, "--data", data)
    lists = re.findall(r'<ol class="tiles">(.*?)</ol>', html, re.DOTALL)
    assert len(lists) == 12
    for caption, tiles in enumerate(lists):
        assert re.findall(r'<li class="(right)?', tiles) == [*[""] * 5, "right"]
        order = [*(image for image in range(6) if image != caption // 5), caption // 5]
        shown = [picture(uri) for uri in re.findall('src="(.*?)"', tiles)]
        assert all(np.array_equal(one, emoji.pictures("test")[image]) for one, image in zip(shown, order, strict=True))
        assert re.findall(r"</span> (\d+)</li>", tiles) == ["1", "2", "3", "4", "5", "6"]
    lists = re.findall(r'<ol class="found">(.*?)</ol>', html, re.DOTALL)
    assert [re.findall(r'<span class="rank">(\d+)</span>', found) for found in lists] == [
        ["1", "2", "3", "4", "5", "26"]
    ] * 6
    table = np.eye(6).repeat(5, 1) * 2
    table[:, 7] = [3, 2, 2, 0, 0, 0]
    np.save(data / "one.npy", table)
    for flags, right in (([], 3), (["--optimistic-ties"], 2)):
        html, _, _ = page_of(data, "--data", data, *flags)
        (tiles,) = re.findall(r'<ol class="tiles">(.*?)</ol>', html, re.DOTALL)
        assert re.findall(r'<li class="(right)?', tiles).index("right") + 1 == right


def test_images_with_the_worst_ranks(data: Path) -> None:
    html, _, _ = page_of(data, "--data", data)
    captions, table = (data / "test_caps.txt").read_text().splitlines(), scores()
    own = [table[image, 5 * image : 5 * image + 5].max() for image in range(6)]
    ranks = [int((table[image] > own[image]).sum()) for image in range(6)]
    worst = sorted((image for image in range(6) if ranks[image]), key=lambda one: (-ranks[one], one))
    lists = re.findall(r'<ol class="found">(.*?)</ol>', html, re.DOTALL)
    assert len(lists) == len(worst) > 1
    for found, image in zip(lists, worst, strict=True):
        order = np.argsort(-table[image]).tolist()
        shown = order[:5]
        if ranks[image] >= 5:
            shown.append(order[ranks[image]])
        texts = re.findall(r'<span class="rank">(\d+)</span><span>(.*?)</span></li>', found)
        assert [(int(rank), Page(f"<p>{text}</p>").texts["p"][0]) for rank, text in texts] == [
            (order.index(caption) + 1, captions[caption]) for caption in shown
        ]


def test_measures_and_warnings_without_data(data: Path) -> None:
    table = scores()
    table[2, 3] = np.nan
    np.save(data / "one.npy", table)
    with pytest.warns(UserWarning, match="scores that are NaN: 1"):
        html, page, content = page_of(data, "--against", data / "two.npy", "--permutations", 9)
    result = content["protocols"]["full"]
    rows = [re.findall("<t[hd].*?>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", html)]
    assert rows[0] == ["measure", "value", "95 % interval", "against", "value minus against", "95 % interval", "p"]
    cells = {row[0]: row[1:] for row in rows[1:]}
    difference = result["against"]["differences"]["rsum"]
    assert cells["rsum"] == [
        f"{result['rsum']:.2f}",
        "{:.2f} to {:.2f}".format(*result["intervals"]["rsum"]),
        f"{result['against']['rsum']:.2f}",
        f"{difference['difference']:+.2f}",
        "{:+.2f} to {:+.2f}".format(*difference["interval"]),
        f"{difference['p']:.4f}",
    ]
    assert cells["i2t_medr"][1:] == ["", f"{result['against']['i2t_medr']:.2f}", "", "", ""]
    assert content["warnings"][0] in page.texts["li"]
    assert "image 3" in page.texts["span"]
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert any(text.startswith("caption ") for text in page.texts["p"])


def test_data_of_another_split(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(data / "test_ims.npy", emoji.patches(emoji.pictures("test")[:5]))
    (data / "test_caps.txt").write_text("".join(f"{caption}\n" for caption in emoji.captions("test")[:25]))
    np.save(data / "one.npy", scores()[:, :25])
    assert error(capsys, "score", data / "one.npy", "--data", data) == (
        1,
        f"{data}: split test has 5 images and 25 captions, the scores have 6 and 25: scores of another split?",
    )
