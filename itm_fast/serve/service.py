"""What the endpoints compute: searches, explanations and pictures of the open index.

Inside: `Service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import attrs

from itm_fast.search import Index
from itm_fast.serve import answers
from itm_fast.serve.errors import Refused
from itm_fast.serve.limits import Limits
from itm_fast.serve.metrics import Metrics
from itm_fast.serve.queue import Query, Queue
from itm_fast.serve.served import Served
from itm_fast.serve.uploads import check_picture

__all__ = ["Service"]

_log = logging.getLogger("itm_fast.serve")

# Seconds between two looks at the index on disk.
LOOK_EVERY = 1.0


class Service:
    """An open index and the queue of its work.

    Args:
        served: the index.
        limits: bounds of requests.
        metrics: counters.

    Attributes:
        served, limits, metrics: the arguments.
    """

    def __init__(self, served: Served, limits: Limits, metrics: Metrics) -> None:
        self.served, self.limits, self.metrics = served, limits, metrics
        self._queue = Queue(limits.batch, metrics)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for a changed index while the context is open; stop the queue at its end."""
        follower = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
            await self._queue.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                # Beside the queue: models that are loaded must not keep queries waiting.
                await asyncio.to_thread(self.served.refresh)
            except Exception:
                _log.exception("looking for a changed index failed")

    async def search(self, query: Query) -> dict[str, Any]:
        """Return the results of a text or an image of the index, as JSON. Raise as `Index.search`, and `Refused`."""
        index = self.served.index
        results = await self._queue.search(index, self._limited(index, query))
        return answers.found(index, results, self.limits)

    async def search_picture(self, content: bytes, query: Query) -> dict[str, Any]:
        """Return the results of an uploaded picture, as JSON; as `search`."""
        index = self.served.index
        limited = self._limited(index, query)
        check_picture(content, self.limits.pixels)
        (results,) = await self._queue.run(lambda: index.search(pictures=[content], **limited.options))
        return answers.found(index, results, self.limits)

    async def explain(self, text: str, image: str, member: int | None) -> dict[str, Any]:
        """Return the attention between a text and an image, as JSON. Raise as `Index.explain`, and `Refused`."""
        index = self.served.index
        models = index.members.models
        if member is None:
            member = next((number for number, one in enumerate(models) if hasattr(one, "pair_steps")), 0)
        if not 0 <= member < len(models):
            raise Refused(400, f"member: expected 0 to {len(models) - 1}, got {member}")
        number = member

        def work() -> dict[str, Any]:
            explanation = index.explain(text, image, number)
            return answers.explained(index, explanation, models[number], text, index.item(image))

        return await self._queue.run(work)

    def facts(self) -> dict[str, Any]:
        return answers.facts(self.served.index, self.limits)

    def health(self) -> dict[str, Any]:
        index = self.served.index
        return {
            "status": "stale" if self.served.failed else "ok",
            "generation": index.manifest.generation,
            "images": index.size("images"),
            "captions": index.size("captions"),
        }

    def picture(self, name: str) -> bytes:
        """Return the WebP file of an image; `Refused` if there is none."""
        content = self.served.index.thumbnail(name)
        if content is None:
            raise Refused(404, "id: the index holds no picture of this image")
        return content

    def _limited(self, index: Index, query: Query) -> Query:
        """Return the query with candidates within the limits; `Refused` if it asks for more."""
        if query.k is not None and query.k > self.limits.k:
            raise Refused(400, f"k: expected at most {self.limits.k:,}, got {query.k:,}")
        most = self.limits.candidates
        if query.candidates is not None and query.candidates > most:
            raise Refused(400, f"candidates: expected at most {most:,}, got {query.candidates:,}")
        if query.exact and len(index) > most:
            raise Refused(400, f"exact: allowed for an index of at most {most:,} items; this one has {len(index):,}")
        if query.candidates is None and index.manifest.candidates > most:
            return attrs.evolve(query, candidates=most)
        return query
