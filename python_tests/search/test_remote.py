"""Searches of several services, compared with one index of all items."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from itm_fast.data import emoji
from itm_fast.search import Index, Results
from itm_fast.search.remote import Shards, addresses_in
from python_tests.helpers.commands import error, output
from python_tests.helpers.emoji_index import PICTURES, emoji_dataset, emoji_model
from python_tests.helpers.service import service_in_thread

# Services round scores, and captions that are encoded together differ by rounding.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def whole(served_index: Path) -> Index:
    return Index.open(served_index)


@pytest.fixture(scope="module")
def addresses(whole: Index, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two services, with 4 and with 8 of the 12 images."""
    names = [item.id for item in whole.items()]
    with ExitStack() as running:
        found = []
        for part in (names[:4], names[4:]):
            path = tmp_path_factory.mktemp("part") / "index"
            Index.build(whole.path.parent / "run", emoji_dataset(), path, pooling="mean").delete(
                [name for name in names if name not in part]
            )
            found.append(running.enter_context(service_in_thread(path)))
        yield found


def check_same(found: Results, expected: Results, every: Results) -> None:
    """Compare results of services with those of one index; `every` has the scores of all its items."""
    scores = {hit.item.id: hit.score for hit in every.hits}
    ids = [hit.item.id for hit in found.hits]
    assert len(set(ids)) == len(ids) == len(expected.hits)
    for hit, wanted in zip(found.hits, expected.hits, strict=True):
        assert hit.rank == wanted.rank
        assert hit.score == pytest.approx(wanted.score, abs=CLOSE)
        # Items whose scores are as close may change places.
        assert scores[hit.item.id] == pytest.approx(wanted.score, abs=CLOSE)


def test_the_best_of_all_services_are_those_of_one_index(
    whole: Index,
    addresses: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = Shards([addresses[0], f"{addresses[1]}/"])
    assert (shards.size(), shards.size("captions")) == (PICTURES, 5 * PICTURES)
    for text, k in (("dark face", 5), ("woman xyzzy", PICTURES), ("red heart", None)):
        found, (expected,) = shards.search(text, k), whole.search(text, k)
        assert (found.query, found.scored, found.unknown) == (text, PICTURES, expected.unknown)
        check_same(found, expected, whole.search(text, PICTURES)[0])
    for text in ("face", "man"):
        (every,) = whole.search(text, 5 * PICTURES, of="captions")
        check_same(shards.search(text, 7, of="captions"), whole.search(text, 7, of="captions")[0], every)
    picture = tmp_path / "picture.png"
    picture.write_bytes(emoji.picture_png("test", 9))
    for side in (None, "images"):
        (expected,) = whole.search(pictures=[picture], k=6, of=side)
        (every,) = whole.search(pictures=[picture], k=whole.size(side or "captions"), of=side)
        check_same(shards.search(picture=picture, k=6, of=side), expected, every)

    place = ",".join(addresses)
    (line,) = output(capsys, "search", place, "dark face", "-k", 3, "--exact", "--json").splitlines()
    listed = [hit["item"]["id"] for hit in json.loads(line)["hits"]]
    assert listed == [hit.item.id for hit in shards.search("dark face", 3, exact=True).hits]
    output(capsys, "search", place, "--image", picture, "-k", 3)

    # Items of two services may have the same id.
    (line,) = output(capsys, "search", place, "face", "-k", PICTURES, "--json").splitlines()
    first = {item.id for item in whole.items()[:4]}
    services = {hit["item"]["id"]: hit["service"] for hit in json.loads(line)["hits"]}
    assert services == {item.id: addresses[item.id not in first] for item in whole.items()}
    monkeypatch.setenv("COLUMNS", "300")
    cells = output(capsys, "search", place, "face", "-k", PICTURES).split()
    assert [cells.count(address) for address in addresses] == [4, 8]
    for one in (addresses[0], whole.path):
        assert '"service"' not in output(capsys, "search", one, "face", "-k", 3, "--json")
        assert "service" not in output(capsys, "search", one, "face", "-k", 3)

    for k in (0, PICTURES + 1):
        with pytest.raises(ValueError, match=f"k: expected 1 to {PICTURES}, the number of images, got {k}"):
            shards.search("face", k)
    refused = f"{addresses[0]}/search: query: the model knows none of the words of 'xyzzy'"
    assert error(capsys, "search", place, "xyzzy") == (1, refused)
    assert error(capsys, "search", place, "red x\udce9") == (1, r"query: expected valid UTF-8, got 'red x\udce9'")
    assert error(capsys, "search", addresses[0], "--like", "set/0.png")[1].startswith("--like, --html, --encoder")


def test_a_service_of_another_model_is_refused(addresses: list[str], tmp_path: Path) -> None:
    """Its model has the same name and settings; only the weights differ."""
    emoji_model(1).save(tmp_path / "run")
    path = Index.build(tmp_path / "run", emoji_dataset(3), tmp_path / "index", pooling="mean").path
    with service_in_thread(path) as other:
        message = f"{other}: serves another model than {addresses[0]}; scores do not compare"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Shards([addresses[0], other])


@contextmanager
def answering(answer: Callable[[], tuple[int, Any]]) -> Iterator[str]:
    """Answer each request with the status and the content that `answer` returns; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer()
            self.send_response(status)
            if status == 302:
                self.send_header("location", "http://127.0.0.1:9/")
            self.end_headers()
            self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"<html>"), "expected an answer of itm-fast serve, got something else"),
        ((200, {"models": ["scan"], "images": 4, "captions": 0}), "expected an answer of itm-fast serve"),
        ((200, {"fingerprints": ["0"], "images": "many", "captions": 0}), "expected an answer of itm-fast serve"),
        ((200, {"fingerprints": ["0"], "images": 4, "captions": 0, "hits": [{}]}), "expected an answer of itm-fast"),
        ((302, b""), "HTTP 302"),
        ((503, {"error": "too many requests; try again"}), "too many requests; try again"),
    ],
)
def test_what_no_service_answers_is_one_line(answer: tuple[int, Any], message: str) -> None:
    with answering(lambda: answer) as address:
        with pytest.raises(ValueError, match=message) as raised:
            Shards([address]).search("red")
        assert str(raised.value).startswith(f"{address}/")


def test_services_that_change_are_asked_again() -> None:
    def hits(name: str, score: float) -> dict[str, Any]:
        hit = {"id": name, "side": "images", "captions": [], "score": score}
        return {"fingerprints": ["0"], "images": 1, "captions": 0, "hits": [hit], "scored": 1}

    first, second = hits("a", 0.5), {**hits("b", 0.7), "images": 0}
    with answering(lambda: (200, first)) as one, answering(lambda: (200, second)) as other:
        shards = Shards([one, other])
        assert [hit.item.id for hit in shards.search("red").hits] == ["a"]
        second["images"] = 1
        assert [hit.item.id for hit in shards.search("red", 2).hits] == ["b", "a"]
        assert shards.size() == 2
        second["fingerprints"] = ["1"]
        with pytest.raises(ValueError, match=f"^{other}: serves another model than {one}; scores do not compare$"):
            shards.search("red")


def test_addresses() -> None:
    assert addresses_in("http://a:1,https://b:2") == ["http://a:1", "https://b:2"]
    assert addresses_in("runs/index") == addresses_in("runs,http://a:1") == []
    with answering(lambda: (200, {})) as address:
        pass
    with pytest.raises(ValueError, match=f"{address}/info: does not answer .* start itm-fast serve there"):
        Shards([address])
    for wrong in (["http://"], ["http://a:1/?q=2"], ["http://a:1", "http://a:1/"], []):
        with pytest.raises(ValueError, match="address: expected"):
            Shards(wrong)
