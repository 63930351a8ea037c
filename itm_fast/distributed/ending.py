"""How one of several processes ends by an error: which of them tells the user, and what it knows of the others.

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

# What gloo says where a process that it waits for has gone, or says nothing.
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "timeout")
# How many processes have ended, how many of them by an error of their own, and what it was, by rank.
_ENDED, _OWN, _CAUSE = "itm_fast/ended", "itm_fast/own", "itm_fast/cause"
# Seconds that the first process stays for the others to see who reported, and that a process may take to end.
_LOOKING, _ENDING = 3.0, 0.5
_LONGEST = 500


def ended(error: BaseException, store: Any, launch: Launch, seconds: float) -> BaseException:
    """What a process raises that `error` ends, in a run of several.

    Of the processes that end by an error of their own, the first raises it, and leaves a word of it for the others.
    One whose error is that another does not answer tells that, with the word where there is one; but only where no
    other process has told anything before. All others end with status 1, silently. A launcher that has seen one of them
    end sends SIGTERM to the others, which has no effect from here on.

    Args:
        error: what was raised.
        store: by which the processes met.
        launch: which of them this one is.
        seconds: how long they wait for an answer.
    """
    # For good: what this process says comes after this. Only a main thread can do it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return _ended(error, store, launch, seconds)


def _ended(error: BaseException, store: Any, launch: Launch, seconds: float) -> BaseException:
    lost = isinstance(error, Exception) and _is_lost(error)
    if lost:
        # Who ended may be about to say why, or its sockets about to close.
        time.sleep(_ENDING)
    try:
        # torch would print where it fails if the store had gone.
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _LOOKING).close()
        if not lost:
            store.set(f"{_CAUSE}/{launch.rank}", _word(error))
        if not isinstance(error, Exception):
            # An interrupted process is not to wait for anything.
            return error
        # Before others learn that this one ends: the store may be that of one of them.
        cause = _cause(store, launch)
        tells = _tells(store, launch, own=not lost)
    except (OSError, RuntimeError):
        # Nobody can tell any more who has reported.
        tells, cause = True, ""
    if not tells:
        return SystemExit(1)
    if not lost:
        return error
    silent = f" ({cause})" if cause else f", or did not answer within {seconds:g} s"
    return ValueError(
        f"another of {launch.everyone} has ended{silent}; what was saved last is whole, and a training goes on from "
        "there with --resume"
    )


def _is_lost(error: Exception) -> bool:
    own = isinstance(error, dist.DistError)
    return own or (isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST))


def _word(error: BaseException) -> str:
    """The first line of an error, behind the name of its class where that says what kind of error it is."""
    line = shortened(next(iter(str(error).splitlines()), ""), _LONGEST)
    name = type(error).__name__
    if isinstance(error, ValueError | OSError):
        return line or name
    return f"{name}: {line}" if line else name


def _cause(store: Any, launch: Launch) -> str:
    """What the first of the others by rank that has left a word ended by."""
    for rank in range(launch.size):
        key = f"{_CAUSE}/{rank}"
        if rank != launch.rank and store.check([key]):
            return f"process {rank}: {store.get(key).decode(errors='replace')}"
    return ""


def _tells(store: Any, launch: Launch, *, own: bool) -> bool:
    """Whether this process tells the user why it ends.

    The store that knows may be the first process's own: it stays until the others have looked, or for some seconds.
    """
    # That this process has ended comes last: from then on the store may be gone.
    first = store.add(_OWN, int(own)) == int(own)
    if store.add(_ENDED, 1) > 1 and not own:
        first = False
    if dist.get_backend() == "gloo":
        # Who waits for this process learns at once that it ends.
        dist.destroy_process_group()
    end = time.monotonic() + _LOOKING
    while launch.rank == 0 and store.add(_ENDED, 0) < launch.size and time.monotonic() < end:
        time.sleep(0.05)
    return first
