"""Ending a run in good order when the user or the system asks for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from itm_fast.distributed.world import joined_before

__all__ = ["on_stop_signals"]


@contextlib.contextmanager
def on_stop_signals(action: Callable[[], None], *, repeated: bool = False) -> Iterator[None]:
    """Calls `action` on the first SIGINT or SIGTERM; a second one acts as usual. Only a main thread can do this.

    With `repeated` it is called on each: a launcher hands on to its processes what some of them had already. Where
    these met by `itm_fast.distributed.joined` an error then leaves SIGTERM without effect, as a launcher sends it to
    those that have yet to say why they end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(_number: int, _frame: FrameType | None) -> None:
        if not repeated:
            restore()
        action()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    except BaseException:
        if repeated and joined_before():
            before[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        restore()
