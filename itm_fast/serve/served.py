"""The index that the service answers from, which is replaced when the one on disk changes.

Inside: `Served`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from itm_fast.data import tokenize
from itm_fast.search import Index
from itm_fast.search.encoders import is_encoder_kind, preprocessing_of
from itm_fast.search.members import Members, Models
from itm_fast.serve.metrics import Metrics

__all__ = ["Served"]

_log = logging.getLogger("itm_fast.serve")

# Its apostrophe needs the full word tokenizer, which imports nltk.
_UNUSUAL = "it's"
# A changed index that cannot be opened is tried again after this many checks, and then half as often each time.
_MOST_SKIPPED = 16


class Served:
    """An open index, with its models loaded.

    Args:
        path: the folder of the index.
        checkpoints: run directories of its models, or None for those that the index names.
        device: where the models run.
        metrics: counts reloads and items.

    Attributes:
        index: the open index; it is replaced, never reloaded. Requests take it once and keep it.
        failed: whether the index on disk has changed and cannot be opened. The earlier one is served.

    Raises:
        ValueError: as `Index.open`.
    """

    def __init__(self, path: Path, checkpoints: Models | None, device: torch.device | str, metrics: Metrics) -> None:
        self._open: Callable[[Models | Members | None], Index] = lambda model: Index.open(path, model, device=device)
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._failures = self._skipped = 0
        self._logged = self._warned = ""
        self.index = self._prepared(checkpoints)
        self._count()

    @property
    def failed(self) -> bool:
        return self._failures > 0

    def _prepared(self, model: Models | Members | None) -> Index:
        """Open the index on disk, and do now what the first request would wait for."""
        index = self._open(model)
        index.members  # noqa: B018 - loads the models.
        # The table of ids takes 0.2 s per million items.
        index.snapshot.sides["images"].ids  # noqa: B018
        self._load_packages(index)
        return index

    def _load_packages(self, index: Index) -> None:
        """Load what some queries need, which takes seconds. All others would wait, because one thread computes."""
        tokenize(_UNUSUAL)
        try:
            for model in index.members.models:
                if model.tokenizer is not None:
                    model.tokenizer.encode(_UNUSUAL)
            if is_encoder_kind(index.manifest.pictures):
                preprocessing_of(index.manifest.pictures)
        except (ValueError, OSError) as error:
            # Other queries are answered.
            if str(error) != self._warned:
                _log.warning("some queries cannot be answered: %s", error)
                self._warned = str(error)

    def refresh(self) -> bool:
        """Open the index on disk if it has changed; return whether it was opened.

        One of another model is opened with that model. If it cannot be opened, the log tells why once, and requests
        are answered from the earlier one.
        """
        if not self.index.is_stale():
            self._failures = 0
            return False
        if self._skipped < min(2**self._failures, _MOST_SKIPPED) - 1:
            self._skipped += 1
            return False
        self._skipped = 0
        try:
            self._reload()
        except (ValueError, OSError) as error:
            self._metrics.failed_reloads.inc()
            if str(error) != self._logged:
                _log.error("the index on disk cannot be opened, the earlier one is served: %s", error)
                self._logged = str(error)
            self._failures += 1
            return False
        self._failures, self._logged = 0, ""
        self._metrics.reloads.inc()
        self._count()
        _log.info("opened generation %d of the index", self.index.manifest.generation)
        return True

    def _reload(self) -> None:
        try:
            self.index = self._prepared(self.index.members)
        except ValueError:
            self.index = self._prepared(self._checkpoints)

    def _count(self) -> None:
        for side in ("images", "captions"):
            self._metrics.items.labels(side).set(self.index.size(side))
