"""The `itm-fast` command: one file per command, put together in `app`."""

from itm_fast.cli.app import app, main, run

__all__ = ["app", "main", "run"]
