"""Which of several processes reports why they end, in every order of events."""

from __future__ import annotations

import itertools
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

from itm_fast.distributed import ending
from itm_fast.distributed.launch import Launch

OWN, LOST = ValueError("a row cannot be read"), RuntimeError("Connection closed by peer")


class _LeavingStore:
    """The store of a first process that leaves as soon as all have announced their end."""

    def __init__(self, size: int) -> None:
        self._store, self._left = HashStore(), size

    def __getattr__(self, name: str) -> Any:
        if self._left == 0:
            raise DistNetworkError("Connection reset by peer")
        return getattr(self._store, name)

    def add(self, key: str, value: int) -> int:
        if self._left == 0:
            raise DistNetworkError("Connection reset by peer")
        self._left -= key == ending._ENDED and value
        return self._store.add(key, value)


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An address that answers, without a process group. At the end, the process obeys SIGTERM again."""
    monkeypatch.setattr(ending.dist, "get_backend", lambda: "none")
    monkeypatch.setattr(ending, "_ENDING", 0.0)
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        heeded = signal.getsignal(signal.SIGTERM)
        yield
        signal.signal(signal.SIGTERM, heeded)


@pytest.mark.parametrize("errors", list(itertools.product((OWN, LOST), repeat=3)))
def test_one_process_tells_and_none_asks_a_store_that_has_gone(listening: None, errors: tuple[Exception, ...]) -> None:
    store = _LeavingStore(len(errors))
    # The first process, which owns the store, has nothing to report.
    raised = [ending.ended(error, store, Launch(rank, 4), 9.0) for rank, error in enumerate(errors, 1)]
    told = [error for error in raised if not isinstance(error, SystemExit)]
    own = [error for error in errors if error is OWN]
    # A process that ends by its own error reports it even if another one has announced an end before.
    assert [error for error in told if error is OWN] == own[:1]
    assert len(told) == 1 + (bool(own) and errors[0] is LOST)
    assert all(error.code == 1 for error in raised if isinstance(error, SystemExit))
    for error in told:
        assert error is OWN or str(error).startswith("another of the 4 processes of this run has ended")
