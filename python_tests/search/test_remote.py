"""Searches of several services, compared with one index of all items."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from itm_fast.data import CaptionDataset
from itm_fast.search import Index
from itm_fast.search.remote import Shards, addresses_in
from python_tests.helpers.commands import error
from python_tests.helpers.search import concepts, scan


@contextmanager
def serving(answer: Any) -> Iterator[str]:
    """Serve `answer(path, parameters, body)`, which returns the status and the content; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = urllib.parse.urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, content = answer(place.path, dict(urllib.parse.parse_qsl(place.query)), body)
            self.send_response(status)
            if status == 302:
                self.send_header("location", "http://127.0.0.1:9/")
            self.end_headers()
            self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

        do_POST = do_GET  # noqa: N815 - the names of the standard library.

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


def service(index: Index, **facts: object) -> Any:
    """Answer as the service of an index does; the body of a picture is an array of features here."""

    def answer(path: str, asked: dict[str, str], body: bytes) -> tuple[int, Any]:
        if path == "/info":
            sizes = {side: index.size(side) for side in ("images", "captions")}
            return 200, {"models": ["scan"], **sizes, **facts}
        query = (
            {"features": np.frombuffer(bytearray(body), np.float32).reshape(1, -1, 8)}
            if body
            else {"texts": asked["q"]}
        )
        options = {"k": int(asked["k"]), "of": asked["of"], "exact": "exact" in asked}
        try:
            (found,) = index.search(**query, **options)  # type: ignore[arg-type]
        except ValueError as problem:
            return 400, {"error": str(problem)}
        hits = [
            {"rank": hit.rank, "score": hit.score, "id": hit.item.id, "side": hit.item.side,
             "captions": hit.item.captions, "image": hit.item.image or hit.item.id, "picture": False}
            for hit in found.hits
        ]  # fmt: skip
        return 200, {"query": found.query, "scored": found.scored, "hits": hits}

    return answer


@pytest.fixture(scope="module")
def train(data: Path) -> CaptionDataset:
    return concepts(data)


@pytest.fixture(scope="module")
def whole(train: CaptionDataset, tmp_path_factory: pytest.TempPathFactory) -> Index:
    return Index.build(scan(), train, tmp_path_factory.mktemp("whole") / "index", pooling="mean")


@pytest.fixture(scope="module")
def parts(whole: Index, train: CaptionDataset, tmp_path_factory: pytest.TempPathFactory) -> list[Index]:
    """Two indexes with 4 and 20 of the images."""
    found = []
    for part in ({f"train{number}" for number in range(4)}, {f"train{number}" for number in range(4, 24)}):
        index = Index.build(scan(), train, tmp_path_factory.mktemp("part") / "index", pooling="mean")
        index.delete(sorted({item.id for item in whole.items()} - part))
        found.append(index)
    return found


def test_the_best_of_all_services_are_those_of_one_index(
    whole: Index, parts: list[Index], train: CaptionDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture"
    picture.write_bytes(np.asarray(train.features)[3].astype(np.float32).tobytes())
    with serving(service(parts[0])) as first, serving(service(parts[1])) as second:
        shards = Shards([first, f"{second}/"])
        assert (shards.size(), shards.size("captions")) == (24, 120)
        for text, k in (("red ball", 9), ("dog", 24), ("sun cup", None)):
            assert shards.search(text, k) == whole.search(text, k)[0]
        found, expected = (
            shards.search(picture=picture, k=7),
            whole.search(features=rows_in(picture.read_bytes()), k=7)[0],
        )
        assert (found.hits, found.query) == (expected.hits, str(picture))
        assert shards.search(picture=picture, k=3, of="images").hits[0].item.id == "train3"
        for k in (0, 25):
            with pytest.raises(ValueError, match=f"k: expected 1 to 24, the number of images, got {k}"):
                shards.search("red", k)
        refused = f"{first}/search: query: the model knows none of the words of 'xyzzy'"
        assert error(capsys, "search", f"{first},{second}", "xyzzy") == (1, refused)
        assert error(capsys, "search", first, "--like", "train0")[1].startswith("--like, --html, --encoder")
        other_model = pytest.raises(ValueError, match=f"serves another model than {first}; scores do not compare")
        with serving(service(parts[1], models=["rcar"])) as other, other_model:
            Shards([first, other])


def rows_in(content: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(content), np.float32).reshape(1, -1, 8)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"<html>"), "expected an answer of itm-fast serve, got something else"),
        ((200, {"models": ["scan"], "images": "many", "captions": 0}), "expected an answer of itm-fast serve"),
        ((200, {"models": ["scan"], "images": 4, "captions": 0, "hits": [{}]}), "expected an answer of itm-fast serve"),
        ((302, b""), "HTTP 302"),
        ((503, {"error": "too many requests; try again"}), "too many requests; try again"),
    ],
)
def test_what_no_service_answers_is_one_line(answer: tuple[int, Any], message: str) -> None:
    with serving(lambda *_asked: answer) as address:
        with pytest.raises(ValueError, match=message) as raised:
            Shards([address]).search("red")
        assert str(raised.value).startswith(f"{address}/")


def test_addresses() -> None:
    assert addresses_in("http://a:1,https://b:2") == ["http://a:1", "https://b:2"]
    assert addresses_in("runs/index") == addresses_in("runs,http://a:1") == []
    with serving(lambda *_asked: (200, {})) as address:
        pass
    with pytest.raises(ValueError, match=f"{address}/info: does not answer .* start itm-fast serve there"):
        Shards([address])
    for wrong in (["http://"], ["http://a:1/?q=2"], ["http://a:1", "http://a:1/"], []):
        with pytest.raises(ValueError, match="address: expected"):
            Shards(wrong)
