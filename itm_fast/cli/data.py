"""`itm-fast data`: data sets on disk."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Write data sets in the precomputed layout.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Write data sets in the precomputed layout."""


@app.command("emoji")
def emoji_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; made where it does not exist.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that have other content.")] = False,
) -> None:
    """Writes the bundled emoji pictures and captions: train, dev and test, and their vocabulary (226 MB)."""
    from itm_fast.data import emoji

    emoji.write_dataset(out, overwrite=overwrite)
    for split in emoji.SPLITS:
        n_images, n_captions = len(emoji.image_ids(split)), len(emoji.captions(split))
        typer.echo(f"{split}: {n_images:,} pictures, {n_captions:,} captions")
    typer.echo(f"train on them with: itm-fast train --data {shlex.quote(str(out))} --model scan --out RUN")
