"""Find what other installed packages add to itm_fast, by their entry points."""

from __future__ import annotations

import sys
import warnings
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

__all__ = ["Plugins"]


class Plugins:
    """The entry points of one group. A package is imported only when one of its names is used.

    Args:
        group: the group of entry points, such as `itm_fast.losses`. An entry point names the module or the class whose
            import registers the name.
    """

    def __init__(self, group: str) -> None:
        self.group = group

    def names(self) -> list[str]:
        """Return the names that installed packages declare, without importing the packages."""
        return sorted(self._found())

    def load(self, name: str) -> None:
        """Import the package that declares `name`, if there is one. Warn if the import fails."""
        found = self._found().get(name)
        if found is None:
            return
        try:
            found.load()
        except Exception as error:
            package = found.dist.name if found.dist is not None else found.value
            warnings.warn(
                f"{self.group}: {name!r} of the package {package} cannot be imported: {error!r}", stacklevel=2
            )

    def _found(self) -> dict[str, EntryPoint]:
        return _declared(self.group, tuple(sys.path))


@lru_cache(maxsize=8)
def _declared(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name. Reading those of all packages takes long, and each setting asks.

    A package that is installed later, into a folder of the path, is found by the next process.
    """
    return {point.name: point for point in entry_points(group=group)}
