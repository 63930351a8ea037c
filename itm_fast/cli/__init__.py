"""The `itm-fast` command: one module per command, assembled in `app`."""

from itm_fast.cli.app import app, main, run

__all__ = ["app", "main", "run"]
