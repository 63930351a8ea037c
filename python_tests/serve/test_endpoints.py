"""The endpoints answer as the index does, and refuse bad requests with one line of JSON."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from itm_fast.data import emoji
from itm_fast.search import Hit, Index, encoders
from itm_fast.serve import Limits, create_app

PICTURE = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def client(served_index: Path) -> Iterator[TestClient]:
    app = create_app(
        served_index,
        limits=Limits(k=50, candidates=100, body=200_000, pixels=1_000_000),
        hosts=["127.0.0.1", "localhost", "my.site"],
    )
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def hits_of(hits: tuple[Hit, ...]) -> list[dict[str, object]]:
    return [
        {
            "rank": hit.rank,
            "score": round(hit.score, 5),
            "id": hit.item.id,
            "side": hit.item.side,
            "captions": list(hit.item.captions),
            "image": hit.item.image or hit.item.id,
            "picture": True,
        }
        for hit in hits
    ]


def test_a_search_finds_what_the_index_finds(client: TestClient, served_index: Path) -> None:
    index = Index.open(served_index)
    png = emoji.picture_png("test", 3)
    for found, (expected,) in (
        (client.get("/search", params={"q": "dark face", "k": 4}), index.search("dark face", 4)),
        (client.get("/search", params={"q": "face", "of": "captions"}), index.search("face", of="captions")),
        (client.get("/search?q=face&exact=true&k=12"), index.search("face", 12, exact=True)),
        (client.get("/search?q=face&candidates=3&k=2"), index.search("face", 2, candidates=3)),
        (client.get("/search?like=set/3.png&of=images&k=11"), index.search(items=["set/3.png"], of="images", k=11)),
        (client.post("/search?k=6", content=png, headers=PICTURE), index.search(pictures=[png], k=6)),
        (client.post("/search?of=images", content=png, headers=PICTURE), index.search(pictures=[png], of="images")),
    ):
        assert found.status_code == 200
        answer = found.json()
        assert (answer["query"], answer["scored"], answer["generation"]) == (expected.query, expected.scored, 1)
        assert answer["hits"] == hits_of(expected.hits)
    answer = client.get("/search?q=dark+xyzzy+face").json()
    assert answer["unknown"] == ["xyzzy"]


def test_an_explanation_has_the_attention_of_each_word(client: TestClient, served_index: Path) -> None:
    answer = client.get("/explain", params={"q": "dark xyzzy face", "image": "set/3.png"}).json()
    expected = Index.open(served_index).explain("dark xyzzy face", "set/3.png")
    assert answer["words"] == ["<start>", "dark", "xyzzy", "face", "<end>"]
    assert answer["known"] == [True, True, False, True, True]
    assert answer["special"] == [True, False, False, False, True]
    assert (answer["regions"], answer["grid"], answer["before"]) == (36, [6, 6], 0)
    assert answer["score"] == pytest.approx(expected.score, abs=1e-5)
    assert list(answer["directions"]) == ["t2i"]
    (rows,) = answer["directions"]["t2i"]
    (weights,) = expected.directions["t2i"].attention
    assert [len(row) for row in rows] == [36] * 5
    for row, exact in zip(rows, weights.tolist(), strict=True):
        assert row == pytest.approx(exact, abs=1e-5)
        assert sum(row) == pytest.approx(1, abs=36e-5)


@pytest.fixture
def encoder_client(encoder_index: Path) -> Iterator[TestClient]:
    with TestClient(create_app(encoder_index), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def test_regions_of_an_encoder_have_no_places(encoder_client: TestClient) -> None:
    (hit,) = encoder_client.get("/search?q=red+ball&k=1").json()["hits"]
    answer = encoder_client.get("/explain", params={"q": "red ball", "image": hit["id"]})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["grid"], answer.json()["before"]) == (None, None)
    assert answer.json()["score"] == pytest.approx(hit["score"], abs=1e-4)


def test_a_lost_encoder_is_an_error_without_a_path(
    encoder_client: TestClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vit").rename(tmp_path / "moved")
    encoders._loaded.cache_clear()
    answer = encoder_client.post("/search?k=2", content=emoji.picture_png("test", 3), headers=PICTURE)
    message = "the encoder of pictures is missing or has changed; the log of the service has details"
    assert (answer.status_code, answer.json()) == (500, {"error": message})
    assert str(tmp_path / "vit") in caplog.text


def test_pictures_are_sent_once(client: TestClient, served_index: Path) -> None:
    answer = client.get("/pictures/" + quote("set/3.png", safe=""))
    assert answer.content == Index.open(served_index).thumbnail("set/3.png")
    assert answer.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(answer.content)).size == (72, 72)
    tag = answer.headers["etag"]
    again = client.get("/pictures/set/3.png", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/pictures/set/4.png", headers={"if-none-match": tag}).status_code == 200
    assert client.get("/pictures/set/3.png?v=0123456789abcdef").headers["cache-control"] == "private, max-age=3600"


def test_the_state_of_the_service(client: TestClient) -> None:
    health = {"status": "ok", "generation": 1, "images": 12, "captions": 60}
    assert client.get("/health").json() == health
    assert (client.head("/health").status_code, client.head("/health").content) == (200, b"")
    facts = client.get("/info").json()
    assert (facts["models"], facts["accepts_pictures"], facts["explains"]) == (["scan"], True, True)
    assert facts["limits"] == {"k": 50, "candidates": 100, "body": 200_000, "pixels": 1_000_000}
    assert facts["revision"] == client.get("/search?q=face").json()["revision"]
    assert [item["id"] for item in facts["samples"]] == [f"set/{number}.png" for number in range(12)]
    client.get("/search?q=face")
    client.get("/search?q=")
    text = client.get("/metrics").text
    assert re.search(r'^itm_fast_requests_total{path="/search",status="200"} [1-9]', text, re.MULTILINE)
    assert re.search(r'^itm_fast_requests_total{path="/search",status="400"} [1-9]', text, re.MULTILINE)
    assert 'itm_fast_items{side="captions"} 60.0' in text
    assert "itm_fast_running_requests 0.0" in text


def test_pages_load_nothing_from_other_hosts(client: TestClient) -> None:
    seen, waiting = set(), ["/", "/api"]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = client.get(path)
        assert answer.status_code == 200, path
        text = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(^|\s)// .*", "", text), path
        if path.endswith((".html", "/", "/api")):
            assert "<style" not in text
            assert "style=" not in text
            assert not re.search(r"<script(?![^>]*src=)", text)
        waiting += re.findall(r'(?:href|src)="(/[^"]*)"', text)
        waiting += [f"/static/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {"/static/search.js", "/static/pair.js", "/static/api.js", "/static/style.css"} <= seen
    headers = client.get("/").headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert headers["x-content-type-options"] == "nosniff"
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/search", "/explain", "/pictures/{id}", "/health", "/metrics", "/info"} == set(paths)
    assert set(paths["/search"]) == {"get", "post"}


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("1" if kind == "PNG" else "RGB", (width, height)).save(buffer, kind)
    return buffer.getvalue()


BAD = [
    ("/search?q=", 400, "query: expected words, got an empty text"),
    ("/search?q=%20%09", 400, "query: expected words, got an empty text"),
    ("/search?q=xyzzy+plugh", 400, "query: the model knows none of the words of 'xyzzy plugh'"),
    ("/search?q=" + 2001 * "a", 400, "query: expected at most 2,000 characters, got 2,001"),
    ("/search?q=" + 60_000 * "a", 400, "query: expected at most 2,000 characters, got 60,000"),
    ("/search", 400, "q: expected a text in q, or the id of an image in like"),
    ("/search?q=face&like=set/3.png", 400, "q: expected a text in q, or the id of an image in like"),
    ("/search?q=face&k=0", 400, "k: expected 1 to 12, the number of images, got 0"),
    ("/search?q=face&k=13", 400, "k: expected 1 to 12, the number of images, got 13"),
    ("/search?q=face&k=51", 400, "k: expected at most 50, got 51"),
    (
        "/search?q=face&k=1e3",
        422,
        "k: Input should be a valid integer, unable to parse string as an integer, got '1e3'",
    ),
    ("/search?q=face&candidates=0", 400, "candidates: expected at least 1, got 0"),
    ("/search?q=face&candidates=101", 400, "candidates: expected at most 100, got 101"),
    ("/search?q=face&of=words", 422, "of: Input should be 'images' or 'captions', got 'words'"),
    ("/search?q=face&n=3", 422, "n: Extra inputs are not permitted, got '3'"),
    ("/search?like=set/99.png", 404, "id: the index holds no item 'set/99.png'"),
    ("/search?like=set/3.png&of=images&k=12", 400, "k: expected 1 to 11, the number of images, got 12"),
    ("/explain?q=face&image=none", 404, "id: the index holds no item 'none'"),
    ("/explain?q=xyzzy&image=set/3.png", 400, "query: the model knows none of the words of 'xyzzy'"),
    ("/explain?q=face&image=set/3.png&member=1", 400, "member: expected 0 to 0, got 1"),
    ("/explain?q=face", 422, "image: Field required"),
    ("/pictures/none", 404, "id: the index holds no item 'none'"),
    ("/pictures/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404, "id: the index holds no item '../../etc/passwd'"),
    ("/static/%2e%2e/app.py", 404, "Not Found"),
    ("/nothing", 404, "Not Found"),
]
BAD_PICTURES = [
    (b"", "image/png", 400, "picture: expected a file of AVIF, BMP, GIF, JPEG, PNG or WEBP"),
    (b"no picture", "image/png", 400, "picture: expected a file of AVIF, BMP, GIF, JPEG, PNG or WEBP"),
    (picture(9, 9, "TIFF"), "image/tiff", 400, "picture: expected a file of AVIF, BMP, GIF, JPEG, PNG or WEBP"),
    (emoji.picture_png("test", 0)[:200], "image/png", 400, r"picture: the picture cannot be decoded \(.*\)"),
    # A file of some kilobytes that claims to have 400 million pixels.
    (picture(20_000, 20_000), "image/png", 400, "picture: expected at most 1,000,000 pixels; scale it down first"),
    (picture(1001, 1000), "image/png", 400, "picture: expected at most 1,000,000 pixels; scale it down first"),
    (picture(9, 9), "text/plain", 415, "body: expected a picture, with a Content-Type such as image/jpeg"),
    (200_001 * b"a", "image/png", 413, "body: expected at most 200,000 bytes"),
    (10_000_000 * b"a", "image/png", 413, "body: expected at most 200,000 bytes"),
]


def check_refused(answer: object, status: int, message: str, *, pattern: bool = False) -> None:
    assert answer.status_code == status, answer.text  # type: ignore[attr-defined]
    content = answer.json()  # type: ignore[attr-defined]
    assert list(content) == ["error"]
    assert re.fullmatch(message if pattern else re.escape(message), content["error"])


@pytest.mark.parametrize(("path", "status", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_bad_requests_are_refused_in_one_line(client: TestClient, path: str, status: int, message: str) -> None:
    check_refused(client.get(path), status, message)


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"), BAD_PICTURES, ids=[str(number) for number in range(len(BAD_PICTURES))]
)
def test_bad_pictures_are_refused_in_one_line(
    client: TestClient, content: bytes, kind: str, status: int, message: str
) -> None:
    answer = client.post("/search", content=content, headers={"content-type": kind})
    check_refused(answer, status, message, pattern="\\" in message)


@pytest.mark.parametrize(("root_path", "path"), [("/x", "/x/search"), ("/x", "/search"), ("", "/search%0A")])
def test_every_path_of_a_route_has_its_limits(served_index: Path, root_path: str, path: str) -> None:
    app = create_app(served_index, limits=Limits(body=1_000))
    with TestClient(app, base_url="http://127.0.0.1", root_path=root_path) as client:
        check_refused(
            client.post(path, content=1_001 * b"a", headers=PICTURE), 413, "body: expected at most 1,000 bytes"
        )
        text = client.get("/metrics").text
    assert 'itm_fast_requests_total{path="/search",status="413"} 1.0' in text


def test_internal_errors_are_counted_and_have_the_headers(
    served_index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_given: object, **_options: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(Index, "search", broken)
    monkeypatch.setattr(Index, "thumbnail", broken)
    app = create_app(served_index)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for path in ("/search?q=face", "/pictures/set/3.png"):
            caplog.clear()
            answer = client.get(path)
            check_refused(answer, 500, "internal error; the log of the service has details")
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
            (record,) = (record for record in caplog.records if record.levelname == "ERROR")
            assert record.exc_info is not None
            assert str(record.exc_info[1]) == "secret"
        text = client.get("/metrics").text
    for path in ("/search", "/pictures/{id:path}"):
        assert f'itm_fast_requests_total{{path="{path}",status="500"}} 1.0' in text
    assert 'status="499"' not in text


def test_only_own_pages_may_call(client: TestClient) -> None:
    for host, status in (
        ("127.0.0.1", 200), ("127.0.0.1:99", 200), ("localhost:8080", 200), ("LOCALHOST", 200), ("[::1]:80", 200),
        ("192.168.1.7:80", 200), ("my.site", 200), ("my.site:80", 200), ("other.site", 421), ("my.site.other", 421),
        ("localhost.other:80", 421), ("127.0.0.1.other", 421), ("", 421),
    ):  # fmt: skip
        assert client.get("/health", headers={"host": host}).status_code == status, host
    foreign = {"error": "origin: pages of other sites may not use this service"}
    for headers, status in (
        ({"origin": "http://127.0.0.1"}, 200),
        ({"origin": "http://127.0.0.1:99"}, 403),
        ({"origin": "http://other.site"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://my.site:8443"}, 200),
        ({"origin": "https://my.site.other"}, 403),
        ({"origin": "http://localhost"}, 403),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ):
        answer = client.get("/search?q=face&k=1", headers=headers)
        assert answer.status_code == status, headers
        assert status == 200 or answer.json() == foreign
        assert "access-control-allow-origin" not in answer.headers


def test_limits_bind_queries_that_name_none(served_index: Path) -> None:
    with TestClient(create_app(served_index, limits=Limits(k=4, candidates=11)), base_url="http://localhost") as client:
        found = client.get("/search?q=face").json()
        assert (found["scored"], len(found["hits"])) == (11, 4)
        (expected,) = Index.open(served_index).search("face", 4, candidates=11)
        assert [hit["id"] for hit in found["hits"]] == [hit.item.id for hit in expected.hits]
        assert client.get("/info").json()["candidates"] == 11
        check_refused(client.get("/search?q=face&candidates=12"), 400, "candidates: expected at most 11, got 12")
        message = "exact: allowed for an index of at most 11 items; this one has 72"
        check_refused(client.get("/search?q=face&exact=true"), 400, message)


def test_limits_are_above_zero() -> None:
    for name, value, shown in (("k", 0, "0"), ("seconds", float("nan"), "nan"), ("body", 1.5, "1.5")):
        with pytest.raises(ValueError, match=f"^{name}: expected a number above 0, got {shown}$"):
            Limits(**{name: value})
