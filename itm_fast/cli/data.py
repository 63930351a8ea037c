"""`itm-fast data`: data sets on disk."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from itm_fast.cli.options import Command, Group
from itm_fast.cli.targets import check_targets
from itm_fast.files.messages import printable

if TYPE_CHECKING:
    from rich.console import Console

    from itm_fast.data.check import Problem, Report
    from itm_fast.data.check_store import StoreReport

app = typer.Typer(cls=Group, help="Write, pack and check data sets.", no_args_is_help=True)


class _Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


@app.callback()
def _root() -> None:
    """Write, pack and check data sets."""


@app.command("emoji", cls=Command)
def emoji_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; created if missing.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files with other content.")] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Write PNG files and captions.csv for data import, not features (11 MB).")
    ] = False,
) -> None:
    """Write the bundled emoji pictures and captions: train, dev, test and the vocabulary (226 MB)."""
    from itm_fast.data import emoji

    if pictures:
        if overwrite:
            raise ValueError("--overwrite: expected without --pictures, which needs a new or empty folder")
        folder = emoji.write_pictures(out)
        images, captions = (shlex.quote(str(folder / name)) for name in ("pictures", "captions.csv"))
        command = f"itm-fast data import --images {images} --captions {captions} --size 72 --grid 6 --out STORE"
        typer.echo(f"import them with: {command}")
        return
    emoji.write_dataset(out, overwrite=overwrite)
    for split in emoji.SPLITS:
        n_images, n_captions = len(emoji.image_ids(split)), len(emoji.captions(split))
        typer.echo(f"{split}: {n_images:,} pictures, {n_captions:,} captions")
    # The features are pixels, which need the patch encoder. The guide's first training has the same options.
    options = "--epochs 2 --lr 1e-3 --model-option image_encoder=patches --model-option embed_dim=128"
    typer.echo(f"train on them with: itm-fast train --data {shlex.quote(str(out))} --out runs/first {options}")


@app.command("pack", cls=Command)
def pack_command(
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Data folder in the layout of SCAN's precomputed features.")
    ],
    out: Annotated[Path, typer.Option(metavar="STORE", help="Folder of the feature store; created if missing.")],
    dtype: Annotated[_Dtype, typer.Option(metavar="NAME", help="Number format of the stored features.")] = _Dtype.bf16,
    split: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Split to pack; repeatable. Default: all.")
    ] = None,
    vocab: Annotated[Path | None, typer.Option(metavar="FILE", help="Vocabulary JSON; default: as in train.")] = None,
    min_count: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Minimum occurrences of a word in a vocabulary built from train_caps.txt. Default: 4.",
        ),
    ] = None,
) -> None:
    """Pack a data folder into a feature store: checksummed feature shards and tokenised captions.

    Every command that takes the folder takes the store. Memory use does not grow with the folder. Run the same command
    again to continue an interrupted one.
    """
    from itm_fast.cli.next_command import next_command
    from itm_fast.data import open_split
    from itm_fast.data.pack import pack
    from itm_fast.data.vocabulary import MIN_COUNT, check_min_count, find_vocabulary, load_vocabulary
    from itm_fast.search.pictures import kind_of

    if min_count is not None:
        check_min_count(min_count, vocab or find_vocabulary(data))
    manifest = pack(
        data,
        out,
        dtype=dtype.value,
        splits=split or (),
        vocabulary_file=vocab,
        min_count=min_count or MIN_COUNT,
        progress=True,
    )
    for record in manifest.splits:
        size = sum(shard.bytes for shard in record.shards)
        typer.echo(
            f"{record.name}: {record.images:,} images, {record.captions:,} captions, {size / 1e9:.2f} GB in "
            f"{len(record.shards):,} shards"
        )
    # The pixels of the emoji need the patch encoder.
    pixels = kind_of(open_split(out, manifest.splits[0].name, load_vocabulary(out))) == "emoji"
    names = [record.name for record in manifest.splits]
    typer.echo(next_command(names, out, " --model-option image_encoder=patches" * pixels))


@app.command("synthesize", cls=Command)
def synthesize_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; created if missing.")],
    scale: Annotated[float, typer.Option(metavar="X", help="Fraction of COCO's images in each split.")] = 1.0,
    regions: Annotated[int, typer.Option(metavar="N", help="Regions per image.")] = 36,
    width: Annotated[int, typer.Option(metavar="N", help="Feature width of a region.")] = 2048,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Leave most features zero, so that most file systems store little.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files in a folder that is not empty.")
    ] = False,
) -> None:
    """Write random data with COCO's image counts, caption lengths and vocabulary size, to rehearse long runs.

    At full size the features take 36.7 GB on disk, or about 0.5 GB with --sparse.
    """
    from itm_fast.data.synthetic import COCO_IMAGES, write_synthetic

    if not overwrite and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out}: expected a new or empty folder; --overwrite replaces its files")
    write_synthetic(out, scale=scale, regions=regions, width=width, seed=seed, sparse=sparse, progress=True)
    sizes = (f"{split} {max(round(images * scale), 1):,}" for split, images in COCO_IMAGES.items())
    typer.echo(f"{out}: images: {', '.join(sizes)}; five captions each")
    typer.echo(f"pack them with: itm-fast data pack --data {shlex.quote(str(out))} --out STORE")


@app.command("check", cls=Command)
def check_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Data folder or feature store to check.")],
    split: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Split to check; repeatable. Default: all.")
    ] = None,
    vocab: Annotated[Path | None, typer.Option(metavar="FILE", help="Vocabulary JSON; default: as in train.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Read a whole data folder or store and list its problems; the exit status is 1 if there are any.

    The files of a feature store are compared with their checksums, which detects flipped bits.
    """
    import attrs

    from itm_fast.data.check import check_folder
    from itm_fast.data.check_store import check_store
    from itm_fast.data.store_format import is_store
    from itm_fast.files import atomic
    from itm_fast.files.documents import json_text

    check_targets({"--json": json_file}, {"--vocab": vocab}, [("DIR", directory)])
    report: Report | StoreReport
    if is_store(directory):
        if vocab is not None:
            raise ValueError(f"--vocab: the feature store {directory} contains its own vocabulary")
        report = check_store(directory, split or (), progress=True)
    else:
        report = check_folder(directory, split or (), vocabulary_file=vocab, progress=True)
    if json_file is not None:
        atomic.write_text(json_file, json_text(attrs.asdict(report)))
    _print(report)
    if report.problems:
        raise typer.Exit(1)


def _print(report: Report | StoreReport) -> None:
    from rich.console import Console

    from itm_fast.data.check import Report

    console = Console(highlight=False, emoji=False)
    if isinstance(report, Report):
        _print_splits(report, console)
        _print_found("warning", report.warnings, console)
    else:
        header = ("split", "images", "captions", "regions", "width", "type", "shards")
        rows = [
            (one.name, one.images, one.captions, one.regions, one.width, report.dtype, len(one.shards))
            for one in report.splits
        ]
        _print_table(console, header, [[_cell(value) for value in row] for row in rows])
    boxes = [one.split for one in report.splits if one.boxes] if isinstance(report, Report) else report.boxes
    if boxes:
        typer.echo(f"with boxes of the regions: {printable(', '.join(boxes))}")
    _print_problems(report.problems, report.folder, console)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value or "?")


def _print_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.markup import escape
    from rich.table import Column, Table

    # Folded, because file names that are cut off look the same.
    table = Table(*(Column(name, overflow="fold") for name in header))
    for row in rows:
        table.add_row(*(escape(printable(text)) for text in row))
    console.print(table)


def _print_splits(report: Report, console: Console) -> None:
    if report.vocabulary is not None:
        size = "" if report.vocabulary_size is None else f", {report.vocabulary_size:,} words"
        typer.echo(f"vocabulary: {printable(report.vocabulary)}{size}")
    rows = []
    for one in report.splits:
        words = one.words and f"{one.words['min']:g} to {one.words['max']:g}, median {one.words['median']:g}"
        unknown = None if one.unknown_share is None else f"{one.unknown_share:.1%}"
        cells = [one.split, one.images, one.captions, one.regions, one.channels, one.dtype, words, unknown]
        rows.append([_cell(cell) for cell in cells])
    if rows:
        header = ("split", "images", "captions", "regions", "width", "type", "words per caption", "unknown")
        _print_table(console, header, rows)


def _print_problems(problems: Sequence[Problem], folder: str, console: Console) -> None:
    if not problems:
        typer.echo(f"{folder}: no problems found")
        return
    _print_found("problem", problems, console)
    typer.echo(f"{folder}: {len(problems)} problem{'s' if len(problems) > 1 else ''}")


def _print_found(kind: str, found: Sequence[Problem], console: Console) -> None:
    rows = []
    for problem in found:
        more = ", ..." if problem.count > len(problem.places) > 0 else ""
        rows.append([problem.file, problem.what, f"{problem.count:,}", ", ".join(problem.places) + more])
    if rows:
        _print_table(console, ("file", kind, "count", "where"), rows)
