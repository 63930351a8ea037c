"""`itm-fast index`: encode images and captions once, to be searched."""

from __future__ import annotations

import json
import shlex
import warnings
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from itm_fast.cli.index_options import (
    Checkpoints,
    Data,
    Device,
    IdPrefix,
    IndexArgument,
    Pictures,
    SkipBad,
    Split,
    Threads,
    Thumbnails,
)
from itm_fast.cli.index_sources import source_of, split_of, split_to_learn_from, training_data
from itm_fast.cli.models import check_run
from itm_fast.cli.options import Command, Group

if TYPE_CHECKING:
    from itm_fast.search import Index

app = typer.Typer(cls=Group, help="Build, change and check search indexes.", no_args_is_help=True)


class _Dtype(str, Enum):
    bf16 = "bf16"
    int8 = "int8"


class _Pooling(str, Enum):
    mean = "mean"
    learned = "learned"


@app.callback()
def _root() -> None:
    """Build, change and check search indexes."""


@app.command("build", cls=Command)
def build_command(
    checkpoint: Annotated[
        list[Path],
        typer.Option(metavar="RUN", help="Run directory of a trained model; repeat it for an ensemble by mean score."),
    ],
    out: Annotated[Path, typer.Option(metavar="INDEX", help="Folder of the index; created if missing.")],
    data: Data = None,
    split: Split = "test",
    pictures: Pictures = None,
    preprocessing: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How pictures become features: emoji, or SIDExGRID such as 224x14, for models trained on a store of "
            "pictures; '224x14 stretched' if it was imported with --stretch. Default: as in --data, or in the training "
            "data of RUN.",
        ),
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Vision model that made the features, as data import got it; pictures then become features with it.",
        ),
    ] = None,
    layer: Annotated[int, typer.Option(metavar="N", help="Hidden state of --encoder, as in data import.")] = -1,
    pool: Annotated[str, typer.Option(metavar="NAME", help="Regions of --encoder, as in data import.")] = "patches",
    dtype: Annotated[
        _Dtype, typer.Option(metavar="NAME", help="Type of the stored embeddings: bf16, or int8 in half the space.")
    ] = _Dtype.bf16,
    pooling: Annotated[
        _Pooling | None,
        typer.Option(
            metavar="NAME",
            help="How candidates are found: mean of the embeddings, or learned from the model's scores. Default: "
            "learned, but mean for --pictures if the training data of RUN are not found, with a warning.",
        ),
    ] = None,
    training_split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Split that a learned pooling is trained on, of --data or of the training data of RUN. Default: "
            "train.",
        ),
    ] = None,
    candidates: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of items that the model scores per query.")
    ] = 500,
    calibrate: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Choose the number of candidates for this recall of the exact best 10, such as 0.95."
        ),
    ] = None,
    calibrate_split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Split of --data whose captions are the queries; default: --split."),
    ] = None,
    calibrate_queries: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of captions to calibrate with, drawn at random. Default: 200."),
    ] = None,
    id_prefix: IdPrefix = "",
    skip_bad: SkipBad = False,
    thumbnails: Thumbnails = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the index in INDEX in one step.")] = False,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Encode the images and captions of a split, or a folder of pictures, and write an index."""
    from itm_fast.files.processors import device_of, set_threads
    from itm_fast.search import Index, encoder_kind
    from itm_fast.search import calibrate as choose
    from itm_fast.search.encoders import check_same_kind
    from itm_fast.search.members import Members
    from itm_fast.search.pictures import check_kind, kind_of

    check_kind(preprocessing or "")
    if calibrate is not None and not 0 < calibrate <= 1:
        raise ValueError(f"--calibrate: expected a number above 0 and at most 1, got {calibrate:g}")
    if calibrate is None and (calibrate_split, calibrate_queries) != (None, None):
        raise ValueError("--calibrate-split, --calibrate-queries: expected only with --calibrate")
    if pooling is _Pooling.mean and training_split is not None:
        raise ValueError("--training-split: expected none with --pooling mean, which learns nothing")
    if data is None and calibrate is not None:
        raise ValueError("--data: expected a data folder, for the captions that --calibrate needs")
    if encoder is not None and preprocessing is not None:
        raise ValueError("--encoder: expected either --encoder or --preprocessing")
    if encoder is None and (layer, pool) != (-1, "patches"):
        raise ValueError("--layer, --pool: expected only with --encoder")
    if skip_bad and pictures is None:
        raise ValueError("--skip-bad: expected only with --pictures")
    set_threads(threads)
    if encoder is not None:
        preprocessing = encoder_kind(encoder, layer, pool)
    for run in checkpoint:
        check_run(run)
    members = Members(checkpoint, device_of(device))
    source = source_of(members, checkpoint, data, split, pictures)
    queries: list[str] = []
    if calibrate is not None and data is not None:
        queries = split_of(members, checkpoint, data, calibrate_split or split).captions
    training = None
    if data is not None:
        if pooling is not _Pooling.mean:
            training = split_to_learn_from(members, checkpoint, data, training_split or "train")
    else:
        cause = ""
        try:
            training = training_data(members, checkpoint[0], training_split or "train")
        except ValueError as error:
            cause = str(error)
        if training is not None:
            made_by = kind_of(training)
            preprocessing = made_by if preprocessing is None else preprocessing
            check_same_kind(made_by, preprocessing)
        if not preprocessing:
            advice = "add --preprocessing, such as 224x14, or --encoder DIR"
            if cause:
                raise ValueError(f"{cause}; without these data, {advice}")
            raise ValueError(f"the training data of {checkpoint[0]} do not tell how pictures become features; {advice}")
        if training is None and (pooling is _Pooling.learned or training_split is not None):
            raise ValueError(f"{cause}; --pooling mean needs no training data")
        if training is None and pooling is None and members.have_sets():
            warnings.warn(f"{cause}; candidates are found by --pooling mean instead of learned", stacklevel=2)
    index = Index.build(
        members,
        source,
        out,
        preprocessing=preprocessing,
        dtype=dtype.value,
        pooling=None if pooling is None else pooling.value,
        training=None if pooling is _Pooling.mean else training,
        candidates=candidates,
        thumbnails=thumbnails,
        overwrite=overwrite,
        id_prefix=id_prefix,
        skip_bad=skip_bad,
        progress=True,
    )
    _print_sizes(index)
    if calibrate is not None:
        import torch

        order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(0)).tolist()
        chosen = [queries[one] for one in order[: calibrate_queries or 200]]
        number, recall = choose(index, chosen, calibrate, progress=True)
        typer.echo(f"candidates: {number}, recall of the exact best 10: {recall:.3f} over {len(chosen)} captions")
    typer.echo(f'search it with: itm-fast search {shlex.quote(str(out))} "a dog"')


@app.command("add", cls=Command)
def add_command(
    index: IndexArgument,
    data: Data = None,
    split: Split = "test",
    pictures: Pictures = None,
    new_only: Annotated[
        bool,
        typer.Option(
            "--new-only",
            help="Skip files of --pictures that the index has already, by their path below the folder. A file with "
            "other content is skipped, too.",
        ),
    ] = False,
    checkpoint: Checkpoints = None,
    encoder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Vision model that encodes --pictures, if it was moved since the build."),
    ] = None,
    id_prefix: IdPrefix = "",
    skip_bad: SkipBad = False,
    thumbnails: Thumbnails = True,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Encode more images and captions, and add them to an index: all, or none if there is an error."""
    from itm_fast.files.processors import device_of, set_threads
    from itm_fast.search import Index

    if new_only and pictures is None:
        raise ValueError("--new-only: expected only with --pictures")
    if skip_bad and pictures is None:
        raise ValueError("--skip-bad: expected only with --pictures")
    set_threads(threads)
    opened = Index.open(index, checkpoint, device=device_of(device))
    source = source_of(opened.members, checkpoint or [index], data, split, pictures)
    added, skipped = opened.add(
        source, id_prefix=id_prefix, encoder=encoder, thumbnails=thumbnails, new_only=new_only, skip_bad=skip_bad,
        progress=True,
    )  # fmt: skip
    if new_only:
        typer.echo(f"{added:,} added, {skipped:,} skipped, which the index has already")
    _print_sizes(opened)


@app.command("delete", cls=Command)
def delete_command(
    index: IndexArgument,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Items to delete.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option("--ids", metavar="FILE", help="Text file with one id per line.")] = None,
) -> None:
    """Delete images with their captions, or captions, by id: all, or none if there is an error.

    The files keep the deleted items until itm-fast index compact.
    """
    from itm_fast.search import Index
    from itm_fast.search.query_file import read_lines

    wanted = [*(ids or ()), *(read_lines(file).values() if file is not None else ())]
    if not wanted:
        raise ValueError("ID: expected at least one id, or --ids FILE")
    opened = Index.open(index)
    count = opened.delete(wanted)
    typer.echo(f"{count:,} deleted")
    _print_sizes(opened)


@app.command("compact", cls=Command)
def compact_command(index: IndexArgument) -> None:
    """Remove deleted items from the disk, and join small files."""
    from itm_fast.search import Index

    opened = Index.open(index)
    opened.compact()
    _print_sizes(opened)


@app.command("relocate", cls=Command)
def relocate_command(
    index: IndexArgument,
    checkpoint: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Run directory of the model; repeat it for an ensemble.")
    ] = None,
    encoder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Vision model that turns pictures into features.")
    ] = None,
) -> None:
    """Record where the models of an index are, after they were moved. Other models are refused."""
    from itm_fast.search import Index

    if checkpoint is None and encoder is None:
        raise ValueError("--checkpoint: expected --checkpoint RUN, --encoder DIR, or both")
    for run in checkpoint or ():
        check_run(run)
    opened = Index.open(index)
    opened.relocate(checkpoint, encoder=encoder)
    _print_sizes(opened)


@app.command("info", cls=Command)
def info_command(
    index: IndexArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Print what an index holds."""
    from itm_fast.search import Index

    facts = Index.open(index).info()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        typer.echo(f"{name}: {f'{value:,}' if type(value) is int else shown}")


@app.command("check", cls=Command)
def check_command(index: IndexArgument) -> None:
    """Read a whole index and compare it with its checksums; the exit status is 1 if there are problems."""
    from itm_fast.search import check

    problems = check(index, progress=True)
    for problem in problems:
        typer.echo(problem)
    typer.echo(f"{index}: {len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'} found")
    if problems:
        raise typer.Exit(1)


def _print_sizes(index: Index) -> None:
    facts = index.info()
    typer.echo(
        f"{index.path}: {facts['images']:,} images, {facts['captions']:,} captions, {facts['bytes'] / 1e6:,.1f} MB"
    )
