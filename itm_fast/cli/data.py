"""`itm-fast data`: data sets on disk."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from itm_fast.cli.printing import printable

if TYPE_CHECKING:
    from itm_fast.data.check import Report

app = typer.Typer(help="Write and check data sets in the precomputed layout.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Write and check data sets in the precomputed layout."""


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


@app.command("check")
def check_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to check.")],
    split: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Split to check, may be given again; by default all.")
    ] = None,
    vocab: Annotated[Path | None, typer.Option(metavar="FILE", help="Vocabulary JSON; by default as in train.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Reads a whole data folder and lists everything that is wrong with it; exit status 1 where anything is."""
    import attrs

    from itm_fast import files
    from itm_fast.data.check import check_folder

    if json_file is not None:
        files.check_target(json_file)
    report = check_folder(directory, split or (), vocabulary_file=vocab, progress=True)
    if json_file is not None:
        files.write_text(json_file, json.dumps(attrs.asdict(report), indent=2) + "\n")
    _print(report)
    if report.problems:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def shown(text: str) -> str:
        return escape(printable(text))

    console = Console(highlight=False)
    if report.vocabulary is not None:
        size = "" if report.vocabulary_size is None else f", {report.vocabulary_size:,} words"
        typer.echo(f"vocabulary: {printable(report.vocabulary)}{size}")
    if report.splits:
        table = Table("split", "images", "captions", "regions", "width", "type", "words per caption", "unknown")
        for one in report.splits:
            words = one.words and f"{one.words['min']:g} to {one.words['max']:g}, median {one.words['median']:g}"
            cells = [one.images, one.captions, one.regions, one.channels, one.dtype, words]
            unknown = None if one.unknown_share is None else f"{one.unknown_share:.1%}"
            texts = [f"{cell:,}" if isinstance(cell, int) else cell or "?" for cell in [*cells, unknown]]
            table.add_row(*map(shown, (one.split, *texts)))
        console.print(table)
    if not report.problems:
        typer.echo(f"{report.folder}: no problems found")
        return
    table = Table("file", "problem", "count", "where")
    for problem in report.problems:
        more = ", ..." if problem.count > len(problem.places) > 0 else ""
        where = ", ".join(problem.places) + more
        table.add_row(*map(shown, (problem.file, problem.what, f"{problem.count:,}", where)))
    console.print(table)
    n = len(report.problems)
    typer.echo(f"{report.folder}: {n} problem{'s' if n > 1 else ''}")
