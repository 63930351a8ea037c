"""A stand-in for the server of Weights & Biases, which takes what `wandb sync` sends.

Inside: `WandbServer`.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OWNER = {"id": "1", "name": "anna", "username": "anna", "entity": "anna", "flags": "{}", "teams": {"edges": []}}


class WandbServer(ThreadingHTTPServer):
    """Keeps the lines of a run: those of an upload replace the lines from its offset on.

    Attributes:
        rows: step and numbers of each line, as JSON.
        ids: names of the runs in the order of their first upload.
        uploads: names of uploaded files.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.uploads: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def running(self) -> Iterator[WandbServer]:
        thread = threading.Thread(target=self.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_POST(self) -> None:
        content = json.loads(self._body())
        if self.path.startswith("/graphql"):
            self._reply({"data": self._answer(content["query"], content.get("variables") or {})})
            return
        history = content.get("files", {}).get("wandb-history.jsonl")
        if history is not None:
            self.server.rows[history["offset"] :] = map(json.loads, history["content"])
        self._reply({"limits": {}})

    def do_PUT(self) -> None:
        self._body()
        self.server.uploads.append(self.path.removeprefix("/upload/"))
        self._reply({})

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            self.server.ids.append(given["name"])
            project = {"id": "2", "name": given["project"], "entity": OWNER}
            bucket = {
                "id": "3",
                "name": given["name"],
                "displayName": given["name"],
                "config": "{}",
                "project": project,
            }
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.server.address}/upload/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
        return {"viewer": OWNER, "serverInfo": {"cliVersionInfo": {}, "features": []}, "__type": {"fields": []}}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def _reply(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
