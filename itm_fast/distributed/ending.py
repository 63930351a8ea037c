"""End several processes after an error: one of them reports it, and names the cause if another process has it.

Inside: `ended`.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import torch.distributed as dist

from itm_fast.distributed.launch import Launch
from itm_fast.files.messages import shortened

__all__ = ["ended"]

# Parts of gloo's error messages for a process that has ended or does not answer.
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "timeout")
# Keys of the store: number of ended processes, number of those with their own error, and the error of each rank.
_ENDED, _OWN, _CAUSE = "itm_fast/ended", "itm_fast/own", "itm_fast/cause"
# Seconds that rank 0 keeps the store for the others, and seconds that a process may take to end.
_LOOKING, _ENDING = 3.0, 0.5
_LONGEST = 500


def ended(error: BaseException, store: Any, launch: Launch, seconds: float) -> BaseException:
    """Return the exception that this process raises after `error`, so that one process reports to the user.

    A process ends with its own error, or because another process was lost: it ended or does not answer. Every own error
    is stored for the other processes, and the first process with one raises it. A process that lost another raises a
    ValueError with the stored error as the cause, unless a process has reported before. All others exit with status 1
    without a message.

    SIGTERM is ignored from here on, because a launcher sends it to all processes after the first one ends.

    Args:
        error: the exception raised in this process.
        store: the store of the rendezvous.
        launch: rank and size of this process.
        seconds: timeout of the processes.
    """
    # Not restored: the error is reported later. Python sets signal handlers only in the main thread.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return _ended(error, store, launch, seconds)


def _ended(error: BaseException, store: Any, launch: Launch, seconds: float) -> BaseException:
    lost = isinstance(error, Exception) and _is_lost(error)
    if lost:
        # The lost process may still store its error or close its sockets.
        time.sleep(_ENDING)
    try:
        # Test the connection first: torch prints to stderr if the store is gone.
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _LOOKING).close()
        if not lost:
            store.set(f"{_CAUSE}/{launch.rank}", _word(error))
        if not isinstance(error, Exception):
            # An interrupted process must not wait.
            return error
        # Read the cause before the others learn that this process ends: one of them may own the store.
        cause = _cause(store, launch)
        tells = _tells(store, launch, own=not lost)
    except (OSError, RuntimeError):
        # The store is gone, so it is unknown whether a process has reported.
        tells, cause = True, ""
    if not tells:
        return SystemExit(1)
    if not lost:
        return error
    silent = f" ({cause})" if cause else f", or did not answer within {seconds:g} s"
    return ValueError(
        f"another of {launch.everyone} has ended{silent}; the last saved state is complete, continue a training run "
        "with --resume"
    )


def _is_lost(error: Exception) -> bool:
    own = isinstance(error, dist.DistError)
    return own or (isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST))


def _word(error: BaseException) -> str:
    """Return the first line of an error, with the class name for errors other than ValueError and OSError."""
    line = shortened(next(iter(str(error).splitlines()), ""), _LONGEST)
    name = type(error).__name__
    if isinstance(error, ValueError | OSError):
        return line or name
    return f"{name}: {line}" if line else name


def _cause(store: Any, launch: Launch) -> str:
    """Return the stored error of the lowest other rank that has one, else an empty string."""
    for rank in range(launch.size):
        key = f"{_CAUSE}/{rank}"
        if rank != launch.rank and store.check([key]):
            return f"process {rank}: {store.get(key).decode(errors='replace')}"
    return ""


def _tells(store: Any, launch: Launch, *, own: bool) -> bool:
    """Return whether this process reports to the user.

    Rank 0 may own the store, so it waits until the others have read it, for a few seconds at most.
    """
    # Count this process as ended last: the store may be gone afterwards.
    first = store.add(_OWN, int(own)) == int(own)
    if store.add(_ENDED, 1) > 1 and not own:
        first = False
    if dist.get_backend() == "gloo":
        # Processes that wait for this one fail at once instead of at the timeout.
        dist.destroy_process_group()
    end = time.monotonic() + _LOOKING
    while launch.rank == 0 and store.add(_ENDED, 0) < launch.size and time.monotonic() < end:
        time.sleep(0.05)
    return first
