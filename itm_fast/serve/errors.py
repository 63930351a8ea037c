"""Errors that a client sees.

Inside: `Refused`, `problem`.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from itm_fast.files.messages import printable, shortened

__all__ = ["Refused", "problem"]

_MOST_CHARACTERS = 500


class Refused(Exception):  # noqa: N818 - the request is at fault, not the program.
    """A request that is answered with an error.

    Args:
        status: the HTTP status.
        message: one line for the client.
        headers: further headers of the answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the answer to a request that failed: `{"error": message}`, in one line of bounded length."""
    text = printable(shortened(" ".join(message.split()), _MOST_CHARACTERS))
    return JSONResponse({"error": text}, status, None if headers is None else dict(headers))
