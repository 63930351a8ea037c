"""One training at a time in a RUN folder.

Inside: `lock`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from itm_fast.files.lock import hold

__all__ = ["LOCK_FILE", "lock"]

LOCK_FILE = Path("last") / "lock"


@contextlib.contextmanager
def lock(run: str | os.PathLike[str]) -> Iterator[None]:
    """Lock the run directory `run` against other trainings; it is created if it is missing. Readers need no lock.

    The lock file stays. Without flock (Windows, some network file systems), there is no protection.

    Raises:
        ValueError: another training holds the lock; its process is named.
    """
    with hold(
        Path(run) / LOCK_FILE,
        run,
        refusal=lambda holder: f"{run}: {holder} is training there; wait for its end, or choose another --out",
        warning=lambda said: f"{run}: its file system knows no locks ({said}); start no second training there",
    ):
        yield
