"""The application: endpoints for programs, and the page.

Inside: `create_app`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from itm_fast.files.messages import shown
from itm_fast.search.encoders import EncoderError
from itm_fast.search.members import Models
from itm_fast.serve.endpoints import Problem, endpoints
from itm_fast.serve.errors import Refused, problem
from itm_fast.serve.guard import Guard
from itm_fast.serve.limits import Limits
from itm_fast.serve.metrics import Metrics
from itm_fast.serve.served import Served
from itm_fast.serve.service import Service
from itm_fast.version import __version__

__all__ = ["create_app"]

_log = logging.getLogger("itm_fast.serve")

_PAGE = Path(__file__).parent / "page"
_REFUSALS = {400: "A parameter is wrong.", 404: "There is no such item.", 422: "A parameter cannot be read."}


def create_app(
    index: Path,
    checkpoints: Models | None = None,
    *,
    device: torch.device | str = "cpu",
    limits: Limits | None = None,
    hosts: Collection[str] = (),
) -> FastAPI:
    """Open an index and return an ASGI application that answers from it.

    Args:
        index: the folder of the index.
        checkpoints: run directories of its models; None: those that the index names.
        device: where the models run.
        limits: bounds of requests; default: those of `Limits`.
        hosts: names by which clients may call the service, besides `localhost` and IP addresses.

    Raises:
        ValueError: as `Index.open`.
    """
    limits, metrics = limits or Limits(), Metrics()
    service = Service(Served(index, checkpoints, device, metrics), limits, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="itm_fast search",
        description="Search images by text, and captions by picture. The model's own score ranks the results.",
        version=__version__,
        lifespan=lifespan,
        # The pages that come with FastAPI load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        responses={status: {"model": Problem, "description": text} for status, text in _REFUSALS.items()},
    )
    app.include_router(endpoints(service))

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(_PAGE / "index.html", headers={"cache-control": "no-cache"})

    @app.get("/api", include_in_schema=False)
    def api() -> FileResponse:
        return FileResponse(_PAGE / "api.html", headers={"cache-control": "no-cache"})

    app.mount("/static", StaticFiles(directory=_PAGE))
    _handle_errors(app)
    app.add_middleware(Guard, limits=limits, hosts=hosts, metrics=metrics)
    return app


def _handle_errors(app: FastAPI) -> None:
    """Answer the expected errors with one line of JSON; `Guard` answers the others."""

    async def refused(_: Request, error: Any) -> JSONResponse:
        return problem(error.status, str(error), error.headers)

    async def of_value(_: Request, error: Any) -> JSONResponse:
        message = str(error)
        return problem(404 if message.startswith("id: ") else 400, message)

    async def of_encoder(_: Request, error: Any) -> JSONResponse:
        # Its message names a folder of the server.
        _log.error(str(error))
        return problem(500, "the encoder of pictures is missing or has changed; the log of the service has details")

    async def of_parameter(_: Request, error: Any) -> JSONResponse:
        first = error.errors()[0]
        value = "" if first["type"] == "missing" else f", got {shown(first.get('input'))}"
        return problem(422, f"{first['loc'][-1]}: {first['msg']}{value}")

    async def of_http(_: Request, error: Any) -> JSONResponse:
        return problem(error.status_code, str(error.detail), error.headers)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(ValueError, of_value)
    app.add_exception_handler(EncoderError, of_encoder)
    app.add_exception_handler(RequestValidationError, of_parameter)
    app.add_exception_handler(HTTPException, of_http)
