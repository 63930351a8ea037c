"""Concurrent requests: batches, limits, clients that leave, and an index that changes."""

from __future__ import annotations

import asyncio
import gc
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.routing import Mount

from itm_fast.files import atomic
from itm_fast.search import Index
from itm_fast.serve import Limits, create_app
from itm_fast.serve import service as service_module
from itm_fast.serve.metrics import Metrics
from itm_fast.serve.queue import Query, Queue
from itm_fast.serve.served import Served
from itm_fast.serve.service import Service
from python_tests.helpers.emoji_index import emoji_dataset, emoji_model, write_emoji_index
from python_tests.helpers.processes import HANGS


class Held:
    """Searches wait until `release`; `calls` has the texts of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[str]] = []
        self.started, self._released = threading.Event(), threading.Event()
        search = Index.search

        def held(index: Index, texts: Any = None, *given: Any, **options: Any) -> Any:
            self.calls.append(texts)
            self.started.set()
            assert self._released.wait(HANGS)
            return search(index, texts, *given, **options)

        monkeypatch.setattr(Index, "search", held)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.release()


def opened(index: Path, **limits: Any) -> TestClient:
    app = create_app(index, limits=Limits(**{"seconds": HANGS, **limits}))
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + HANGS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def running(client: TestClient) -> int:
    text = client.get("/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith("itm_fast_running_requests "))
    return int(float(line.split()[1]))


def test_queries_that_wait_are_computed_together(served_index: Path, held: Held) -> None:
    texts = ["dark face", "woman", "xyzzy", "man with hat", "red heart", "cat"]
    with opened(served_index, batch=3) as client, ThreadPoolExecutor(9) as threads:

        def ask(text: str, k: int = 3) -> Any:
            return client.get("/search", params={"q": text, "k": k})

        first = threads.submit(ask, "face")
        assert held.started.wait(HANGS)
        answers = []
        for number, text in enumerate([*texts, "sun"], 2):
            answers.append(threads.submit(ask, text, 4 if text == "sun" else 3))
            wait_for(lambda number=number: running(client) == number)
        held.release()
        statuses = [answer.result(HANGS).status_code for answer in [first, *answers]]
        found = {
            answer.result().json()["query"]: answer.result().json() for answer in answers if answer.result().is_success
        }
        sizes = client.get("/metrics").text
    # The second batch has a query that is refused, so the texts of this batch are computed one by one.
    assert held.calls == [["face"], texts[:3], *([text] for text in texts[:3]), texts[3:], ["sun"]]
    assert statuses == [200, 200, 200, 400, 200, 200, 200, 200]
    assert "itm_fast_batch_queries_count 4.0" in sizes
    assert "itm_fast_batch_queries_sum 8.0" in sizes
    index = Index.open(served_index)
    for text in ("dark face", "woman", "man with hat", "red heart", "cat"):
        (alone,) = index.search(text, 3)
        assert [hit["id"] for hit in found[text]["hits"]] == [hit.item.id for hit in alone.hits]
        # Captions that are encoded together may differ by rounding from one alone.
        scores = [hit["score"] for hit in found[text]["hits"]]
        assert scores == pytest.approx([hit.score for hit in alone.hits], abs=2e-5)


def test_a_mounted_application_answers_without_its_lifespan(served_index: Path) -> None:
    outer = Starlette(routes=[Mount("/find", create_app(served_index))])
    with TestClient(outer, base_url="http://localhost") as client:
        assert [client.get("/find/search?q=face&k=2").status_code for _ in range(2)] == [200, 200]


def test_an_index_is_released_after_its_last_query(served_index: Path) -> None:
    async def after_a_query() -> bool:
        queue, index = Queue(4, Metrics()), Index.open(served_index)
        await queue.search(index, Query("texts", "face", k=1))
        kept = weakref.ref(index)
        del index
        # The worker goes on to wait for the next query.
        await asyncio.sleep(0.1)
        gc.collect()
        gone = kept() is None
        await queue.close()
        with pytest.raises(RuntimeError, match="after shutdown"):
            await asyncio.wait_for(queue.run(lambda: None), HANGS)
        return gone

    assert asyncio.run(after_a_query())


def test_more_requests_than_allowed_are_refused(served_index: Path, held: Held) -> None:
    with opened(served_index, concurrency=2) as client, ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(client.get, f"/search?q=face&k={k}") for k in (1, 2)]
        wait_for(lambda: running(client) == 2)
        refused = client.get("/search?q=face")
        assert (refused.status_code, refused.json()) == (429, {"error": "too many requests at a time; try again"})
        assert refused.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200
        held.release()
        assert [one.result(HANGS).status_code for one in slow] == [200, 200]
        assert client.get("/search?q=face").status_code == 200


def test_a_request_that_takes_too_long_ends(served_index: Path, held: Held) -> None:
    with opened(served_index, seconds=0.5) as client:
        late = client.get("/search?q=face")
        assert (late.status_code, late.json()) == (503, {"error": "the request took longer than 0.5 s"})
        assert held.started.wait(HANGS)
        assert running(client) == 0
        # A query that no one waits for any more is not computed.
        assert client.get("/search?q=woman").status_code == 503
        held.release()
        client.get("/search?q=cat")
    assert held.calls[0] == ["face"]
    assert not any("woman" in texts for texts in held.calls)


def test_a_query_of_a_client_that_left_is_not_computed(served_index: Path, held: Held) -> None:
    """Typing goes on while an answer is computed: the page closes the requests of earlier texts."""
    app = create_app(served_index, limits=Limits(seconds=HANGS))
    sent: list[Any] = []

    async def request(text: str, left: asyncio.Event) -> None:
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": "/search", "raw_path": b"/search", "query_string": f"q={text}".encode(), "root_path": "",
            "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        await app(scope, receive, send)

    async def scenario() -> None:
        async with app.router.lifespan_context(app):
            stays, left = asyncio.Event(), asyncio.Event()
            first = asyncio.create_task(request("face", stays))
            while not held.started.is_set():
                await asyncio.sleep(0.01)
            second = asyncio.create_task(request("woman", left))
            await asyncio.sleep(0.05)
            left.set()
            await second
            assert sent == []
            held.release()
            await first

    asyncio.run(scenario())
    assert held.calls == [["face"]]
    assert [message["status"] for message in sent if message["type"] == "http.response.start"] == [200]


def test_an_answer_names_the_index_that_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, metrics = write_emoji_index(tmp_path), Metrics()
    service = Service(Served(path, None, "cpu", metrics), Limits(), metrics)
    before, members = weakref.ref(service.served.index), service.served.index.members
    search = Queue.search

    async def then_changed(queue: Queue, index: Index, query: Query) -> Any:
        results = await search(queue, index, query)
        monkeypatch.undo()
        Index.open(path).delete([results.hits[0].item.id])
        assert service.served.refresh()
        return results

    monkeypatch.setattr(Queue, "search", then_changed)

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        async with service.running():
            query = Query("texts", "dark face", 5)
            return await service.search(query), await service.search(query)

    first, second = asyncio.run(scenario())
    assert (first["generation"], second["generation"]) == (1, 2)
    assert first["revision"] != second["revision"] == service.facts()["revision"]
    best = first["hits"][0]
    assert best["picture"]
    assert best["id"] not in [hit["id"] for hit in second["hits"]]
    # The models are not loaded again, and the earlier index is released.
    assert service.served.index.members is members
    gc.collect()
    assert before() is None


def test_a_changed_index_is_opened_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "LOOK_EVERY", 0.01)
    index = write_emoji_index(tmp_path)
    with opened(index) as client:

        def health() -> Any:
            return client.get("/health").json()

        def ids() -> list[tuple[str, float]]:
            hits = client.get("/search?q=dark+face&k=5").json()["hits"]
            return [(hit["id"], hit["score"]) for hit in hits]

        def expected(of: Index) -> list[tuple[str, float]]:
            return [(hit.item.id, round(hit.score, 5)) for hit in of.search("dark face", 5)[0].hits]

        best = ids()[0][0]
        other = Index.open(index)
        other.delete([best])
        wait_for(lambda: health()["generation"] == 2)
        assert ids() == expected(other)
        assert best not in dict(ids())
        assert client.get(f"/pictures/{best}").status_code == 404

        # An index of another model in its place is opened with that model.
        emoji_model(1).save(tmp_path / "second")
        replaced = Index.build(tmp_path / "second", emoji_dataset(7), index, pooling="mean", overwrite=True)
        wait_for(lambda: health()["images"] == 7)
        assert ids() == expected(replaced)

        # A damaged one is not; the log tells why, once, and the client only that the answers are old.
        manifest = (index / "index.json").read_text()
        atomic.write_text(index / "index.json", manifest.replace('"generation": 3', '"generation": 4'))
        wait_for(lambda: health()["status"] == "stale")
        failures = re.compile(r"^itm_fast_failed_reloads_total [3-9]", re.MULTILINE)
        wait_for(lambda: failures.search(client.get("/metrics").text) is not None)
        assert ids() == expected(replaced)
        message = f"{index / 'index.json'}: damaged: its content does not match its checksum"
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
            f"the index on disk cannot be opened, the earlier one is served: {message}"
        ]
        atomic.write_text(index / "index.json", manifest)
        wait_for(lambda: health() == {"status": "ok", "generation": 3, "images": 7, "captions": 35})
        shutil.rmtree(index)
        wait_for(lambda: health()["status"] == "stale")
        assert ids() == expected(replaced)
