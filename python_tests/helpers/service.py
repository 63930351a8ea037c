"""Run `itm-fast serve` in a process of its own, or its application in a thread.

Inside: `Service`, `running_service`, `service_in_thread`.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from itm_fast.serve import create_app
from python_tests.helpers.processes import HANGS, ROOT


class Service:
    """A running service.

    Attributes:
        process: the process.
        url: the address of the page, which ends in "/".
        port: its port.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:(\d+)/) ", line)
        assert found, line
        self.url, self.port = found[1], int(found[2])

    def get(self, path: str, content: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the content of an answer, parsed if it is JSON."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path.removeprefix("/"), content, named)
        try:
            with urllib.request.urlopen(request, timeout=HANGS) as answer:
                status, kind, body = answer.status, answer.headers["content-type"], answer.read()
        except urllib.error.HTTPError as error:
            status, kind, body = error.code, error.headers["content-type"], error.read()
        return status, json.loads(body) if kind == "application/json" else body

    def memory(self) -> float:
        """Return the resident memory in bytes."""
        text = self.get("/metrics")[1].decode()
        (line,) = (line for line in text.splitlines() if line.startswith("process_resident_memory_bytes "))
        return float(line.split()[1])

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; return the exit status and the rest of stdout and stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=HANGS)
        return self.process.returncode, out, err


@contextlib.contextmanager
def running_service(index: Path, *arguments: str) -> Iterator[Service]:
    """Start the service on a free port, and end it if it still runs."""
    command = [sys.executable, "-m", "itm_fast", "serve", str(index), "--port", "0", "--threads", "1", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    try:
        yield Service(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(HANGS)


@contextlib.contextmanager
def service_in_thread(index: Path) -> Iterator[str]:
    """Serve an index from a thread of this process; yield the address, without a "/" at its end."""
    server = uvicorn.Server(uvicorn.Config(create_app(index), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + HANGS
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < end
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(HANGS)
