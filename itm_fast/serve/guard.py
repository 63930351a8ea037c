"""Check requests before the endpoints see them: host, origin, size, time and number. ASGI middleware.

Inside: `Guard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from itm_fast.files.messages import shown
from itm_fast.serve.errors import Refused, problem
from itm_fast.serve.limits import Limits
from itm_fast.serve.metrics import Metrics

__all__ = ["Guard"]

_log = logging.getLogger("itm_fast.serve")

# Requests that compute. Others are answered from memory.
_COMPUTING = ("/search", "/explain")
# Of a body that is too large, this multiple of the allowed size is read before the connection is closed.
_DROPPED = 4
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """The outermost layer of the application.

    A page of another site may make a browser send requests here. Its name is refused as a host, which ends DNS
    rebinding, and so are requests that the browser marks as those of another site.

    Args:
        app: the application.
        limits: bounds of requests.
        hosts: names of this service besides `localhost` and all IP addresses.
        metrics: counts requests.
    """

    def __init__(self, app: ASGIApp, limits: Limits, hosts: Collection[str], metrics: Metrics) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        # Other services of a machine share its addresses, and have pages of their own.
        self._named = {host for host in self._hosts - {"localhost"} if not _is_address(host)}
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        # Taken now, because a mounted application changes the scope.
        path = _route_path(scope)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            self._check(Headers(scope=scope))
            if path in _COMPUTING:
                await self._compute(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except Refused as refused:
            # After the start of an answer, only the connection can be closed.
            if not status:
                await problem(refused.status, str(refused), refused.headers)(scope, receive, sending)
        except Exception:
            # A handler of the application for these would answer outside of this layer: uncounted, without its headers.
            _log.exception("a request failed")
            if not status:
                await problem(500, "internal error; the log of the service has details")(scope, receive, sending)
        finally:
            name = getattr(scope.get("route"), "path", path if path in _COMPUTING else "other")
            self._metrics.requests.labels(name, str(status or 499)).inc()
            self._metrics.seconds.labels(name).observe(time.perf_counter() - started)

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._is_own(_name_of(host)):
            raise Refused(421, f"host: the service is not known as {shown(host)}; --allow-host NAME allows a name")
        origin = headers.get("origin")
        source = None if origin is None else origin.lower().partition("://")[2]
        # Behind a proxy the host may be the address of this service, or lack the port of the page.
        foreign = source is not None and source != host.lower() and _name_of(source) not in self._named
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            foreign = True
        if foreign:
            raise Refused(403, "origin: pages of other sites may not use this service")

    def _is_own(self, name: str) -> bool:
        # A rebinding attack needs a name: an address in the host is the one that the browser has connected to.
        return name in self._hosts or _is_address(name)

    async def _compute(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._running >= self._limits.concurrency:
            raise Refused(429, "too many requests at a time; try again", {"retry-after": "1"})
        self._running += 1
        self._metrics.running.set(self._running)
        try:
            await asyncio.wait_for(self._answer(scope, receive, send), self._limits.seconds)
        except asyncio.TimeoutError:
            raise Refused(
                503, f"the request took longer than {self._limits.seconds:g} s", {"retry-after": "1"}
            ) from None
        finally:
            self._running -= 1
            self._metrics.running.set(self._running)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then run the application until it has answered or the client has left."""
        body = await self._body(receive)
        if body is None:
            return
        pending = [body]

        async def replay() -> Message:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        answer = asyncio.ensure_future(self._app(scope, replay, send))
        left = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            for task in (answer, left):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body, or None if the client has left."""
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= self._limits.body:
                body += part
            # The rest is read and dropped, because a client that still sends may not see an answer.
            elif not more or size > _DROPPED * self._limits.body:
                raise Refused(413, f"body: expected at most {self._limits.body:,} bytes", {"connection": "close"})
        return bytes(body)


def _route_path(scope: Scope) -> str:
    """Return the path that routes are compared with: below the root path, if the service has one.

    Routes also match with a newline at the end of the path, so it is left out.
    """
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", ""))
    return (below if below.startswith("/") else path).removesuffix("\n")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Return the lower-case name in a Host header, without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdecimal() or not port) and not name.endswith(":") else host).lower()
