"""Counters of the service in the text format of Prometheus.

Inside: `Metrics`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The metrics of one application; several applications in a process do not share them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = Counter("itm_fast_requests", "Answered requests.", ["path", "status"], registry=self._registry)
        self.seconds = Histogram(
            "itm_fast_request_seconds", "Time of a request.", ["path"], buckets=_SECONDS, registry=self._registry
        )
        self.batches = Histogram(
            "itm_fast_batch_queries", "Queries computed together.", buckets=_SIZES, registry=self._registry
        )
        self.running = Gauge("itm_fast_running_requests", "Requests that compute or wait.", registry=self._registry)
        self.items = Gauge("itm_fast_items", "Items of the open index.", ["side"], registry=self._registry)
        self.reloads = Counter(
            "itm_fast_reloads", "Replaced or changed indexes that were opened.", registry=self._registry
        )
        self.failed_reloads = Counter(
            "itm_fast_failed_reloads", "Attempts to open a changed index that failed.", registry=self._registry
        )

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)
