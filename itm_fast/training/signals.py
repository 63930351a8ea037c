"""Stop a run cleanly at SIGINT or SIGTERM."""

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
    """Call `action` on the first SIGINT or SIGTERM; a second one acts as usual. Works only in a main thread.

    With `repeated`, `action` is called on each signal, because a launcher forwards a signal to processes that may
    already have received it. After an error, processes that met by `itm_fast.distributed.joined` ignore SIGTERM: the
    launcher sends it to those that have yet to report why they end.
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
