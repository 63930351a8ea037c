"""The ``itm-fast`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from itm_fast.version import __version__

app = typer.Typer(name="itm-fast", no_args_is_help=True, help="Image-text matching: train, evaluate, benchmark.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"itm-fast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Image-text matching: train, evaluate, benchmark."""


def main() -> None:
    """Runs the command; the entry point of ``itm-fast`` and of ``python -m itm_fast``."""
    app()
