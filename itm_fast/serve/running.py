"""Run the service: its socket, its log and its end.

Inside: `serve`.
"""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from itm_fast.search.members import Models
from itm_fast.serve.app import create_app
from itm_fast.serve.limits import Limits

__all__ = ["serve"]

# Connections, idle ones included.
_MOST_CONNECTIONS = 1000
_DROP_SECONDS, _DROP_BYTES = 5.0, 64 * 2**20
_ENDING = (signal.SIGINT, signal.SIGTERM)


class _Protocol(H11Protocol):
    """HTTP/1.1 whose answer to a request that cannot be parsed is JSON, as all others are.

    What the client still sends is dropped for a while, because a client that is cut off while it sends may not see the
    answer.
    """

    _dropped: int | None = None

    def send_400_response(self, msg: str) -> None:
        answer = JSONResponse({"error": f"request: {msg}"}, 400)
        lines = [b"HTTP/1.1 400 Bad Request", *(b": ".join(header) for header in answer.raw_headers)]
        self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(answer.body)]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._dropped = 0
        self.loop.call_later(_DROP_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        if self._dropped is None:
            super().data_received(data)
            return
        self._dropped += len(data)
        if self._dropped > _DROP_BYTES:
            self.transport.close()


def serve(
    index: Path,
    checkpoints: Models | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    device: torch.device | str = "cpu",
    limits: Limits | None = None,
    hosts: Collection[str] = (),
    access_log: bool = False,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve an index until SIGINT or SIGTERM. Requests in progress are answered first.

    Args:
        index, checkpoints, device, limits, hosts: as in `create_app`.
        host: the address to listen on; its name is one of `hosts`.
        port: the port; 0: a free one.
        access_log: log each request, with its query.
        ready: is called with the URL of the page when the service listens.

    Raises:
        ValueError: as `create_app`; or the address cannot be used.
    """
    limits = limits or Limits()
    listening = _socket(host, port)
    try:
        app = create_app(index, checkpoints, device=device, limits=limits, hosts=[host, *hosts])
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=_logging(access_log),
            access_log=access_log,
            server_header=False,
            # Nothing here depends on the address of a client, so no header may change it.
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=math.ceil(limits.seconds) + 1,
        )
        server = _Server(config, lambda: ready(_url(listening, host)))

        def end(*_: object) -> None:
            server.should_exit = True

        # The server raises the signal that ended it again; to stop is no error here.
        before = {number: signal.signal(number, end) for number in _ENDING}
        try:
            server.run(sockets=[listening])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    finally:
        listening.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def _socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except socket.gaierror as error:
        raise ValueError(f"--host: no such address: {host} ({error.strerror})") from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ValueError(
            f"--port: cannot listen on {host}:{port} ({reason}); choose another --host or --port"
        ) from None


def _url(listening: socket.socket, host: str) -> str:
    """Return the address for a browser on this machine: an unspecified address is also that of the loopback."""
    address, port = listening.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"


def _logging(access_log: bool) -> dict[str, object]:
    def at(level: str) -> dict[str, object]:
        return {"handlers": ["stderr"], "level": level, "propagate": False}

    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "uvicorn.error": at("ERROR"),
            "uvicorn.access": at("INFO" if access_log else "WARNING"),
            "itm_fast.serve": at("INFO"),
        },
    }
