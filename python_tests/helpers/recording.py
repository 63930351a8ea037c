"""Record how a class is used."""

from __future__ import annotations

__all__ = ["recording"]


def recording(cls: type, calls: list[tuple[object, ...]]) -> type:
    """Return a subclass of `cls` that appends the arguments of each construction to `calls`."""

    class Recording(cls):
        def __init__(self, *given: object) -> None:
            calls.append(given)
            super().__init__(*given)

    return Recording
