"""Compute queries in one thread. Queries that wait at the same time are computed together.

Inside: `Query`, `Queue`.
"""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from itm_fast.search import Index, Results
from itm_fast.serve.metrics import Metrics

__all__ = ["Query", "Queue"]

Answer = TypeVar("Answer")


@attrs.frozen
class Query:
    """A text or the id of an image, and the options of `Index.search`. Queries that differ in `value` alone are
    computed together.
    """

    kind: str
    value: str
    k: int | None = None
    of: str | None = None
    candidates: int | None = None
    exact: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"k": self.k, "of": self.of, "candidates": self.candidates, "exact": self.exact}


@attrs.frozen(eq=False)
class _Job:
    """A call that runs alone, or a query of an index; and who waits for the result."""

    work: Callable[[], Any] | tuple[Index, Query]
    future: asyncio.Future[Any]

    def fits(self, other: _Job) -> bool:
        """Return whether both are queries that one search answers."""
        if not isinstance(self.work, tuple) or not isinstance(other.work, tuple):
            return False
        (index, query), (others, second) = self.work, other.work
        return index is others and attrs.evolve(query, value="") == attrs.evolve(second, value="")


class Queue:
    """Work of the service, in the order of arrival. All methods run in the event loop.

    Nothing waits for a batch to fill: while one is computed, the next ones arrive.

    Args:
        batch: queries that are computed together.
        metrics: records the sizes of batches.
    """

    def __init__(self, batch: int, metrics: Metrics) -> None:
        self._batch, self._metrics = batch, metrics
        self._waiting: collections.deque[_Job] = collections.deque()
        self._arrived = asyncio.Event()
        # PyTorch uses several threads for one computation; a second one at the same time would slow down both.
        self._thread = ThreadPoolExecutor(1, "itm_fast.serve")
        self._worker: asyncio.Task[None] | None = None

    async def search(self, index: Index, query: Query) -> Results:
        """Return the results of a query; raise as `Index.search`."""
        found: Results = await self._add((index, query))
        return found

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """Return the result of a call in the thread."""
        answer: Answer = await self._add(work)
        return answer

    async def _add(self, work: Callable[[], Any] | tuple[Index, Query]) -> Any:
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._arrived.set()
        # An application that mounts this one may not run its lifespan, so the first job starts the worker.
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await job.future

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            await self._compute_next()

    async def _compute_next(self) -> None:
        jobs = self._next()
        if not jobs:
            self._arrived.clear()
            return
        loop = asyncio.get_running_loop()
        try:
            outcomes = await loop.run_in_executor(self._thread, _computed, [job.work for job in jobs])
        except Exception as error:  # The thread has ended; those who wait must learn of it.
            outcomes = [error] * len(jobs)
        if isinstance(jobs[0].work, tuple):
            self._metrics.batches.observe(len(jobs))
        for job, outcome in zip(jobs, outcomes, strict=True):
            # A client may have left, or its time may be over.
            if job.future.done():
                continue
            if isinstance(outcome, Exception):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)

    async def close(self) -> None:
        """End the thread after its present work."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> list[_Job]:
        """Take the oldest job, and the queries that one search answers with it."""
        waiting = [job for job in self._waiting if not job.future.done()]
        if not waiting:
            self._waiting.clear()
            return []
        chosen = [waiting[0], *(job for job in waiting[1:] if waiting[0].fits(job))][: self._batch]
        taken = set(map(id, chosen))
        self._waiting = collections.deque(job for job in waiting if id(job) not in taken)
        return chosen


def _computed(works: list[Callable[[], Any] | tuple[Index, Query]]) -> list[Any]:
    """Return the result of each work, or its exception."""
    queries = [work for work in works if isinstance(work, tuple)]
    if not queries:
        return [_outcome(work) for work in works if not isinstance(work, tuple)]
    found = _outcome(lambda: _found(queries))
    if not isinstance(found, Exception):
        return list(found)
    # One that is refused must not fail the others.
    return [found] if len(queries) == 1 else [_outcome(functools.partial(_first, query)) for query in queries]


def _found(queries: list[tuple[Index, Query]]) -> list[Results]:
    index, first = queries[0]
    values: Any = {first.kind: [query.value for _, query in queries]}
    return index.search(**values, **first.options)


def _first(query: tuple[Index, Query]) -> Results:
    return _found([query])[0]


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # Raised again where the request waits.
        return error
