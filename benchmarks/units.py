"""Format numbers and commits of the benchmarks. Inside: `amount`, `changes_of`, `commit_of`, `seconds`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["amount", "changes_of", "commit_of", "seconds"]


def amount(value: float, unit: str) -> str:
    """Format operations or bytes: 1,500 "B" is 1.5 kB."""
    scales = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    return _scaled(value, [(scale, prefix + unit) for scale, prefix in scales])


def commit_of(environment: Mapping[str, Any], missing: str = "unknown") -> str:
    """Format the commit of a measurement; say so if the sources had uncommitted changes.

    Args:
        missing: what to write if the package ran from no commit.
    """
    return (environment["commit"][:12] if environment["commit"] else missing) + changes_of(environment)


def changes_of(environment: Mapping[str, Any]) -> str:
    """Return what follows the commits of a measurement if the sources had uncommitted changes, else nothing."""
    return ", with uncommitted changes" if environment.get("uncommitted_changes") else ""


def seconds(value: float) -> str:
    """Format a time: 0.0015 is 1.5 ms, 90 is 1.5 min."""
    units = [(86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")]
    return _scaled(value, units)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    # Rounded first: 0.9996 s is 1 s, not 1e+03 ms.
    scale, unit = next((pair for pair in units if float(f"{value / pair[0]:.3g}") >= 1), units[-1])
    return f"{value / scale:.3g} {unit}"
