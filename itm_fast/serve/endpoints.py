"""The endpoints for programs, with their parameters as OpenAPI describes them.

Inside: `endpoints`, `Problem`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from itm_fast.serve.errors import Refused
from itm_fast.serve.queue import Query as Asked
from itm_fast.serve.service import Service

__all__ = ["Problem", "endpoints"]

_PICTURE = {
    "requestBody": {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}
}


_Revision = Annotated[str, Field(description="Digest of the content of the index: it differs after any change.")]


class Problem(BaseModel):
    """The answer to a request that failed."""

    error: str


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    k: Annotated[
        int | None, Field(description="Results; default: 10, at most the size of the index and the limit.")
    ] = None
    of: Annotated[
        Literal["images", "captions"] | None,
        Field(description="What to find. Default: images for texts; captions for pictures, if the index has any."),
    ] = None
    candidates: Annotated[
        int | None, Field(description="Items that the model scores; default: that of the index, within the limit.")
    ] = None
    exact: Annotated[bool, Field(description="Score all items.")] = False

    def asked(self, kind: str, value: str) -> Asked:
        return Asked(kind, value, k=self.k, of=self.of, candidates=self.candidates, exact=self.exact)


class _Search(_Options):
    q: Annotated[str | None, Field(description="A text.")] = None
    like: Annotated[str | None, Field(description="The id of an image of the index, instead of a text.")] = None


class _Item(BaseModel):
    id: str
    side: Literal["images", "captions"]
    captions: list[str]
    image: Annotated[str | None, Field(description="The id of the image; for a caption, that of its image.")]
    picture: Annotated[bool, Field(description="Whether /pictures/ has a picture of the image.")]


class _Hit(_Item):
    rank: int
    score: Annotated[float, Field(description="The model's score.")]


class _Found(BaseModel):
    query: str
    unknown: Annotated[list[str], Field(description="Words of the text that the model does not know.")]
    scored: Annotated[int, Field(description="Items that the model scored.")]
    generation: Annotated[int, Field(description="Number of changes of the index so far.")]
    revision: _Revision
    hits: list[_Hit]


class _Explained(BaseModel):
    query: str
    item: _Item
    score: float
    words: list[str]
    known: Annotated[list[bool], Field(description="Whether the model knows each word.")]
    special: Annotated[list[bool], Field(description="Whether a word only marks the start or end.")]
    regions: int
    grid: Annotated[list[int] | None, Field(description="Rows and columns of the regions, if their places are known.")]
    before: Annotated[int | None, Field(description="Regions before those of the grid.")]
    directions: Annotated[
        dict[str, list[list[list[float]]]],
        Field(description="Of t2i, for each step, a row of weights over the regions per word; of i2t, the reverse."),
    ]


class _Health(BaseModel):
    status: Annotated[
        Literal["ok", "stale"],
        Field(description="stale: the index on disk has changed and cannot be opened; the earlier one is served."),
    ]
    generation: int
    images: int
    captions: int


class _Limits(BaseModel):
    k: int
    candidates: int
    body: int
    pixels: int


class _Facts(BaseModel):
    images: int
    captions: int
    generation: int
    revision: _Revision
    models: list[str]
    fingerprints: Annotated[list[str], Field(description="SHA-256 of each model: scores of equal models compare.")]
    accepts_pictures: Annotated[bool, Field(description="Whether a picture can be a query.")]
    explains: Annotated[bool, Field(description="Whether a model has attention between words and regions.")]
    candidates: int
    limits: _Limits
    samples: Annotated[list[_Item], Field(description="Some images of the index.")]
    version: str


def endpoints(service: Service) -> APIRouter:
    """Return the endpoints of a service."""
    router = APIRouter()

    @router.get("/search", summary="Search with a text or an image of the index", response_model=_Found)
    async def search(options: Annotated[_Search, Query()]) -> dict[str, Any]:
        """Find the items with the best scores. Pass `q` or `like`."""
        if (options.q is None) == (options.like is None):
            raise Refused(400, "q: expected a text in q, or the id of an image in like")
        kind, value = ("items", options.like) if options.q is None else ("texts", options.q)
        return await service.search(options.asked(kind, value or ""))

    @router.post("/search", summary="Search with a picture", response_model=_Found, openapi_extra=_PICTURE)
    async def search_picture(request: Request, options: Annotated[_Options, Query()]) -> dict[str, Any]:
        """Find the items with the best scores for a picture file, which is the body."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not kind.startswith("image/") and kind != "application/octet-stream":
            raise Refused(415, "body: expected a picture, with a Content-Type such as image/jpeg")
        return await service.search_picture(await request.body(), options.asked("pictures", ""))

    @router.get("/explain", summary="Attention between words and regions", response_model=_Explained)
    async def explain(
        q: Annotated[str, Query(description="A text.")],
        image: Annotated[str, Query(description="The id of an image of the index.")],
        member: Annotated[int | None, Query(description="Number of the model in an ensemble, from 0.")] = None,
    ) -> dict[str, Any]:
        """Return which regions of an image the words of a text attend to, and the score of the pair."""
        return await service.explain(q, image, member)

    @router.get(
        "/pictures/{id:path}",
        summary="Picture of an image",
        response_class=Response,
        responses={200: {"content": {"image/webp": {}}, "description": "At most 192 pixels per side."}},
    )
    def picture(request: Request, id: str, v: str | None = None) -> Response:
        """Return a small picture. With `v`, which may be the revision of the index, browsers keep it for an hour."""
        content = service.picture(id)
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"etag": tag, "cache-control": "private, no-cache" if v is None else "private, max-age=3600"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="image/webp", headers=headers)

    @router.get("/info", summary="What the index holds", response_model=_Facts)
    def info() -> dict[str, Any]:
        """Return sizes, models and limits, and some images to begin with."""
        return service.facts()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Whether the service answers", response_model=_Health)
    async def health() -> dict[str, Any]:
        """Return the state of the service."""
        return service.health()

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def metrics() -> Response:
        """Return counters and histograms in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
