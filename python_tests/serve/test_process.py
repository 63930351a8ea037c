"""The service as a process: how it starts, stops, and stands bad requests among good ones."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from itm_fast import cli
from itm_fast.data import emoji
from itm_fast.search import Index
from itm_fast.serve import Limits
from python_tests.helpers.commands import error
from python_tests.helpers.emoji_index import emoji_model
from python_tests.helpers.processes import HANGS
from python_tests.helpers.service import Service, running_service


def raw(service: Service, content: bytes) -> tuple[bytes, bytes]:
    """Send bytes, and return the status line and the body of the answer."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=HANGS) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], body


@pytest.mark.thorough
def test_it_answers_what_is_in_progress_and_stops(served_index: Path) -> None:
    png = emoji.picture_png("test", 3)
    head = (
        f"POST /search?k=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\nContent-Length: {len(png)}\r\n"
        "Connection: close\r\n\r\n"
    )
    with running_service(served_index, "--max-seconds", str(HANGS)) as service:
        (expected,) = Index.open(served_index).search("dark face", 1)
        status, found = service.get("/search?q=dark+face&k=1")
        assert (status, found["hits"][0]["id"]) == (200, expected.hits[0].item.id)

        for request in (b"nonsense\r\n\r\n", b"GET /search?q=" + 10_000_000 * b"a" + b" HTTP/1.1\r\n"):
            line, body = raw(service, request)
            assert line == b"HTTP/1.1 400 Bad Request"
            assert list(json.loads(body)) == ["error"]
        assert service.get("/search", bytes(11 * 2**20), content_type="image/png") == (
            413,
            {"error": "body: expected at most 10,485,760 bytes"},
        )

        with socket.create_connection(("127.0.0.1", service.port), timeout=HANGS) as connection:
            connection.sendall(head.encode() + png[:100])
            # The request is in progress when it is counted.
            while b"itm_fast_running_requests 1.0" not in service.get("/metrics")[1]:
                pass
            stopping = threading.Thread(target=lambda: stopped.append(service.stop()))
            stopped: list[tuple[int, str, str]] = []
            stopping.start()
            while True:
                try:
                    socket.create_connection(("127.0.0.1", service.port), timeout=HANGS).close()
                except ConnectionRefusedError:
                    break
            connection.sendall(png[100:])
            answer = b""
            while part := connection.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["hits"][0]["rank"] == 1
        stopping.join(HANGS)
        assert stopped == [(0, "stopped\n", "")]


@pytest.mark.thorough
def test_bad_requests_among_good_ones_do_no_harm(served_index: Path) -> None:
    """Each request has one outcome whatever runs beside it; none fails in the server, and memory does not grow."""
    png = emoji.picture_png("test", 3)
    picture = {"content_type": "image/png"}
    calls: list[tuple[int, Callable[[Service], tuple[int, Any]]]] = [
        (200, lambda service: service.get("/search?q=dark+face&k=5")),
        (200, lambda service: service.get("/search?q=woman&of=captions&k=5")),
        (200, lambda service: service.get("/search?like=set%2F2.png&of=images&k=5")),
        (200, lambda service: service.get("/search?k=3", png, **picture)),
        (200, lambda service: service.get("/explain?q=dark+face&image=set%2F2.png")),
        (200, lambda service: service.get("/pictures/set%2F2.png")),
        (400, lambda service: service.get("/search?q=xyzzy")),
        (400, lambda service: service.get("/search?q=face&k=0")),
        (400, lambda service: service.get("/search?k=3", png[:150], **picture)),
        (413, lambda service: service.get("/search", bytes(2**21), **picture)),
        (421, lambda service: service.get("/health", host="other.site")),
        (404, lambda service: service.get("/search?like=none")),
    ]

    def load(service: Service, rounds: int) -> list[str]:
        wrong: list[str] = []

        def client(first: int) -> None:
            for number in range(rounds * len(calls)):
                expected, call = calls[(first + number) % len(calls)]
                status, content = call(service)
                if status != expected or (status >= 400 and list(content) != ["error"]):
                    wrong.append(f"{expected}: {status} {content}")

        threads = [threading.Thread(target=client, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS)
        return wrong

    arguments = ("--max-megabytes", "1", "--max-seconds", str(HANGS))
    with running_service(served_index, *arguments) as service:
        assert load(service, 4) == []
        before = service.memory()
        assert load(service, 8) == []
        # 768 requests, of which 64 upload two megabytes each.
        assert service.memory() - before < 24 * 2**20
        assert service.get("/health")[0] == 200
        assert b'status="5' not in service.get("/metrics")[1]
        assert service.stop()[::2] == (0, "")


def test_what_prevents_a_start_is_one_line(
    served_index: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(capsys, "serve", data) == (
        1, f"{data}/index.json: no such file, so {data} is not an index; itm-fast index build writes one"
    )  # fmt: skip
    emoji_model(5).save(tmp_path / "other")
    message = f"{served_index}: the index was built with another model than {tmp_path / 'other'}; build it again to use"
    assert error(capsys, "serve", served_index, "--checkpoint", tmp_path / "other") == (1, f"{message} this one")
    damaged = tmp_path / "damaged"
    shutil.copytree(served_index, damaged)
    manifest = (damaged / "index.json").read_text()
    (damaged / "index.json").write_text(manifest.replace('"generation": 1', '"generation": 2'))
    message = f"{damaged}/index.json: damaged: its content does not match its checksum"
    assert error(capsys, "serve", damaged) == (1, message)
    (damaged / "index.json").write_text(manifest.replace('"format_version": 1', '"format_version": 99'))
    status, message = error(capsys, "serve", damaged)
    assert (status, "99" in message) == (1, True)
    (damaged / "index.json").write_text(manifest)
    (segment,) = damaged.glob("images-*")
    segment.write_bytes(segment.read_bytes()[:-1])
    assert error(capsys, "serve", damaged)[1].startswith(f"{segment}: the index wrote ")
    nameless = Index.build(emoji_model(), np.ones((2, 36, 432), dtype=np.float32), tmp_path / "nameless")
    message = f"{nameless.path}: the index names no run directory; name the model that it was built with"
    assert error(capsys, "serve", nameless.path) == (1, message)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"--port: cannot listen on 127.0.0.1:{port} (Address already in use); choose another --host or --port"
        assert error(capsys, "serve", served_index, "--port", port) == (1, message)
    with monkeypatch.context() as patch:  # Some networks answer for every name.
        patch.setattr(socket, "getaddrinfo", _no_address)
        message = "--host: no such address: nowhere.invalid (Name or service not known)"
        assert error(capsys, "serve", served_index, "--host", "nowhere.invalid") == (1, message)
    message = "device: expected a device such as cpu or cuda, got 'gpu'"
    assert error(capsys, "serve", served_index, "--device", "gpu") == (1, message)
    message = "--max-seconds: expected a finite number above 0, got 0"
    assert error(capsys, "serve", served_index, "--max-seconds", "0") == (1, message)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    message = "serve: the package uvicorn is not installed; install it with pip install 'itm_fast[serve]'"
    assert error(capsys, "serve", served_index) == (1, message)
    assert error(capsys, "demo", "--serve") == (1, message)


def _no_address(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_each_option_of_the_command_reaches_the_service(
    served_index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, Any]] = []
    opened = threading.Event()
    pages: list[str] = []

    def serve(index: Path, checkpoints: Any, *, ready: Callable[[str], None], **options: Any) -> None:
        given.append({"index": index, "checkpoints": checkpoints, **options})
        ready("http://there")

    monkeypatch.setattr("itm_fast.serve.serve", serve)
    monkeypatch.setattr(webbrowser, "open", lambda url: (pages.append(url), opened.set()))
    sizes = ["--max-k", 11, "--max-candidates", 12, "--max-requests", 13, "--max-seconds", 1.5, "--max-megabytes", 14]
    sizes += ["--max-megapixels", 15, "--batch", 16]
    names = ["--host", "0.0.0.0", "--port", 17, "--allow-host", "a.example", "--allow-host", "b.example"]
    arguments = ["serve", served_index, *sizes, *names, "--access-log", "--open", "--device", "cpu"]
    assert cli.run([str(one) for one in arguments]) == 0
    assert opened.wait(HANGS)
    assert pages == ["http://there"]
    assert capsys.readouterr().out == f"serving {served_index} at http://there (Ctrl-C stops)\nstopped\n"
    limits = Limits(
        k=11, candidates=12, concurrency=13, batch=16, seconds=1.5, body=14 * 2**20, pixels=15 * 10**6
    )  # fmt: skip
    assert given == [
        {
            "index": served_index, "checkpoints": None, "host": "0.0.0.0", "port": 17, "device": torch.device("cpu"),
            "limits": limits, "hosts": ["a.example", "b.example"], "access_log": True,
        }
    ]  # fmt: skip
