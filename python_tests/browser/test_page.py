"""The page of the service in Chromium: what a person types, drops and clicks, and what the page then shows."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from itm_fast.data import emoji
from itm_fast.search import Index
from python_tests.helpers.service import Service

pytestmark = pytest.mark.browser

# Seconds after which the page counts as hanging, even on a busy machine.
HANGS = 300
Found = TypeVar("Found")


class Page:
    """The page in the browser, with what tests read from it."""

    def __init__(self, driver: WebDriver, service: Service) -> None:
        self.driver, self.service = driver, service

    def open(self, path: str = "", width: int = 1400, height: int = 900, scheme: str = "light") -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)
        self.driver.get("about:blank")
        self.driver.get(self.service.url + path)

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def id(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [one.text for one in self.all(selector)]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, done: Callable[[], Found]) -> Found:
        end = time.monotonic() + HANGS
        while time.monotonic() < end:
            try:
                if found := done():
                    return found
            except StaleElementReferenceException:
                pass
            time.sleep(0.02)
        raise AssertionError(f"the page hangs: {self.id('status').text}")

    def names(self, count: int) -> list[str]:
        """Return the captions of `count` results, when they are shown."""
        self.wait(lambda: not self.all(".results.old") and len(self.all(".hit .score")) == count)
        return self.texts(".hit .name")

    def focused(self) -> Any:
        return self.driver.switch_to.active_element


@pytest.fixture
def page(chromium: WebDriver, service: Service) -> Iterator[Page]:
    yield Page(chromium, service)
    # Among them are requests that the Content-Security-Policy refuses.
    assert [entry for entry in chromium.get_log("browser") if "/search?" not in entry["message"]] == []


def captions(index: Index, **query: Any) -> list[str]:
    (found,) = index.search(**query)
    return [hit.item.captions[0] for hit in found.hits]


def test_results_appear_while_typing(page: Page, served_index: Path) -> None:
    index = Index.open(served_index)
    page.open()
    page.wait(lambda: len(page.all(".hit")) == 12)
    assert page.focused() == page.id("query")
    assert page.id("holds").text == "12 pictures, 60 captions · scan"
    page.id("query").send_keys("dark face")
    assert page.names(12) == captions(index, texts="dark face", k=12)
    assert page.driver.current_url.endswith("/?q=dark+face")
    assert page.id("status").text.startswith("Best 12 of 12 pictures in ")
    loaded = (
        "return [...document.querySelectorAll('.hit img')].every(image => image.complete && image.naturalWidth === 72)"
    )
    page.wait(lambda: page.run(loaded))
    addresses = page.run("return [...document.querySelectorAll('.hit img')].map(image => image.src)")
    assert {one.partition("?v=")[2] for one in addresses} == {index.snapshot.revision}
    page.all("#sides button")[1].click()
    assert page.names(24) == captions(index, texts="dark face", of="captions", k=24)
    page.id("more").click()
    assert page.names(48) == captions(index, texts="dark face", of="captions", k=48)
    # The address has the whole query.
    page.driver.refresh()
    assert page.names(24) == captions(index, texts="dark face", of="captions", k=24)

    # A person may type before the page knows what the index holds.
    page.open()
    page.id("query").send_keys("dark xyzzy")
    page.wait(lambda: "Not known to the model: xyzzy." in page.id("status").text)
    page.id("query").clear()
    page.id("query").send_keys("xyzzy")
    page.wait(lambda: page.id("status").text == "query: the model knows none of the words of 'xyzzy'")


def test_answers_to_earlier_texts_are_dropped(page: Page, served_index: Path) -> None:
    page.open()
    page.wait(lambda: page.all(".hit"))
    # The answer to the first text comes after that to the second.
    page.run(
        """
        const fetched = window.fetch;
        window.fetch = async (url, options) => {
          const answer = await fetched(url, { ...options, signal: undefined });
          if (String(url).includes("q=woman")) await new Promise((done) => (window.release = done));
          return answer;
        };
        """
    )
    page.id("query").send_keys("woman")
    page.wait(lambda: page.run("return Boolean(window.release)"))
    page.id("query").clear()
    page.id("query").send_keys("dark face")
    expected = captions(Index.open(served_index), texts="dark face", k=12)
    assert page.names(12) == expected
    page.run("window.release()")
    page.run("return new Promise((done) => setTimeout(done, 50))")
    assert page.names(12) == expected


def test_a_click_shows_the_attention_of_each_word(page: Page, served_index: Path) -> None:
    index = Index.open(served_index)
    page.open("?q=dark+face")
    page.names(12)
    page.all(".hit")[1].click()
    page.wait(lambda: len(page.all("#words button")) == 3)
    assert page.texts("#words .word") == ["all", "dark", "face"]
    hit = index.search("dark face", 2)[0].hits[1]
    assert page.id("pair-title").text == hit.item.captions[0]
    assert page.id("pair-facts").text == f"{hit.item.id} · score {hit.score:.4f}"
    assert page.texts("#captions li") == list(hit.item.captions[1:])
    whole = canvas(page)
    page.all("#words button")[1].click()
    weights = index.explain("dark face", hit.item.id).directions["t2i"].attention[0][1].numpy()
    row, column = divmod(int(weights.argmax()), 6)
    spot = f"of the attention in row {row + 1}, column {column + 1} of 6 \u00d7 6"
    assert page.id("where").text.endswith(spot)
    # The patch with the most attention keeps its colours; the others are darker by their share of it.
    lit = canvas(page)
    assert np.abs(cells(whole)[row, column] - cells(lit)[row, column]).max() < 1
    grey = cells(whole) @ [0.299, 0.587, 0.114]
    light = np.sqrt(weights / weights.max()).reshape(6, 6)
    unlit = 0.4 * grey[:, :, None] * [0.92, 0.98, 1.15]
    expected = cells(whole) * light[:, :, None] + unlit * (1 - light[:, :, None])
    assert np.abs(cells(lit) - expected).max() < 1.5

    page.id("similar").click()
    expected_names = captions(index, items=[hit.item.id], of="images", k=11)
    assert page.names(11) == expected_names
    assert page.id("chosen-name").text == f"Like {hit.item.id}"
    page.driver.back()
    assert page.names(12) == captions(index, texts="dark face", k=12)


def canvas(page: Page) -> np.ndarray:
    """Return the pixels of the large picture, (480, 480, 3)."""
    script = "return Array.from(document.getElementById('large').getContext('2d').getImageData(0, 0, 480, 480).data)"
    return np.array(page.run(script), dtype=np.float64).reshape(480, 480, 4)[:, :, :3]


def cells(pixels: np.ndarray) -> np.ndarray:
    """Return the mean colour of each patch, (6, 6, 3)."""
    return pixels.reshape(6, 80, 6, 80, 3).mean((1, 3))


def test_a_picture_is_a_query(page: Page, served_index: Path, tmp_path: Path) -> None:
    index = Index.open(served_index)
    file = tmp_path / "a picture.png"
    file.write_bytes(emoji.picture_png("test", 5))
    page.open()
    page.wait(lambda: page.all(".hit"))
    page.id("file").send_keys(str(file))
    assert page.names(24) == captions(index, pictures=[file], k=24)
    assert page.id("chosen-name").text == "a picture.png"
    page.all("#sides button")[0].click()
    assert page.names(12) == captions(index, pictures=[file], of="images", k=12)
    page.id("drop-chosen").click()
    page.wait(lambda: page.id("status").text.startswith("Type what you look for"))

    # A dropped picture with more pixels than the service takes is scaled down by the page.
    buffer = io.BytesIO()
    Image.open(file).convert("RGB").resize((6000, 6000)).save(buffer, "JPEG", quality=95)
    page.run(
        """
        const bytes = Uint8Array.from(atob(arguments[0]), (letter) => letter.charCodeAt(0));
        const carried = new DataTransfer();
        carried.items.add(new File([bytes], "large.jpg", { type: "image/jpeg" }));
        dispatchEvent(new DragEvent("dragenter", { dataTransfer: carried }));
        window.offered = !document.getElementById("drop").hidden;
        dispatchEvent(new DragEvent("drop", { dataTransfer: carried, cancelable: true }));
        """,
        base64.b64encode(buffer.getvalue()).decode(),
    )
    assert page.run("return window.offered")
    assert not page.id("drop").is_displayed()
    assert set(page.names(24)[:5]) <= set(index.item("set/5.png").captions) | set(
        captions(index, pictures=[file], k=12)
    )
    assert page.id("chosen-name").text == "large.jpg"

    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    page.id("file").send_keys(str(broken))
    page.wait(lambda: page.id("status").text == "picture: expected a file of AVIF, BMP, GIF, JPEG, PNG or WEBP")


def test_the_keyboard_is_enough(page: Page) -> None:
    page.open("?q=dark+face")
    names = page.names(12)
    page.id("query").send_keys(Keys.ARROW_DOWN)
    columns = page.run(
        "const hits = [...document.querySelectorAll('.hit')];"
        "return hits.filter((hit) => hit.offsetTop === hits[0].offsetTop).length"
    )
    assert 5 <= columns <= 9
    for key, place in ((Keys.ARROW_RIGHT, 1), (Keys.ARROW_DOWN, 1 + columns), (Keys.ARROW_LEFT, columns)):
        page.focused().send_keys(key)
        assert page.focused() == page.all(".hit")[place]
    page.focused().send_keys(Keys.ENTER)
    page.wait(lambda: page.id("pair-title").text == names[columns] and len(page.all("#words button")) == 3)
    page.focused().send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.wait(lambda: page.texts("#words button[aria-pressed=true] .word") != ["all"])
    page.focused().send_keys(Keys.PAGE_UP)
    page.wait(lambda: page.id("pair-title").text == names[columns - 1])
    page.focused().send_keys(Keys.ESCAPE)
    page.wait(lambda: page.focused() == page.all(".hit")[columns - 1])
    page.focused().send_keys("/")
    assert page.focused() == page.id("query")
    page.focused().send_keys("woman")
    page.wait(lambda: page.driver.current_url.endswith("?q=woman"))


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_it_fits_the_screen(page: Page, width: int, scheme: str) -> None:
    page.open("?q=dark+face", width, 800, scheme)
    page.names(12)
    fits = "return document.documentElement.scrollWidth <= innerWidth"
    assert page.run(fits)
    first = "return document.querySelectorAll('.hit')[0].getBoundingClientRect().toJSON()"
    assert page.run(first)["top"] < 260
    assert page.run("return document.querySelectorAll('.hit')[1].getBoundingClientRect().right") <= width
    shown = np.asarray(Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("L"))
    assert (shown[4, 4] < 60) == (scheme == "dark")
    page.all(".hit")[0].click()
    page.wait(lambda: len(page.all("#words button")) == 3)
    dialog = page.run("return document.getElementById('pair').getBoundingClientRect().toJSON()")
    assert dialog["left"] >= 0
    assert dialog["right"] <= width
    assert page.run("const pair = document.getElementById('pair'); return pair.scrollWidth <= pair.clientWidth")
    page.id("close").click()
    page.open("api", width, 800, scheme)
    page.wait(lambda: len(page.all(".calls section")) == 8)
    assert page.run(fits)
    assert "GET /explain" in page.texts(".calls h2")
