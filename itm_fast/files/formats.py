"""Versions of the files that the package writes: old versions are migrated, newer ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from itm_fast.files.messages import shown

__all__ = ["Format"]

Content = dict[str, Any]


@attrs.frozen
class Format:
    """The versions of one kind of file. Its content is a mapping with the key `format_version`.

    Attributes:
        migrations: one function per version step, in order; the first converts version 1 to version 2. Add a function
            for each change that current readers would misunderstand. This also raises the version number.
    """

    migrations: tuple[Callable[[Content], Content], ...] = ()

    @property
    def newest(self) -> int:
        """The version that is written. Files without `format_version` count as version 1."""
        return 1 + len(self.migrations)

    def upgrade(self, content: Mapping[str, Any], source: str | Path) -> Content:
        """Return `content` migrated to the newest version.

        Raises:
            ValueError: the version is newer or invalid, or a migration fails. The message names `source`.
        """
        version = content.get("format_version", 1)
        if type(version) is not int or version < 1:
            raise ValueError(f"{source}: format_version: expected a whole number from 1, got {shown(version)}")
        if version > self.newest:
            raise ValueError(
                f"{source}: format_version {shown(version)} is newer than {self.newest}, the newest that this itm_fast "
                "reads; upgrade itm_fast"
            )
        migrated = dict(content)
        for number, migrate in enumerate(self.migrations[version - 1 :], version):
            try:
                migrated = migrate(dict(migrated))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{source}: cannot be read as format_version {number}: {error!r:.80}") from None
        return {**migrated, "format_version": self.newest}
