"""`itm-fast realign`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itm_fast.cli.models import check_run, dataset_of, load_run
from itm_fast.cli.targets import check_targets


def realign(
    extractor: Annotated[Path, typer.Option(metavar="RUN", help="Run with the feature extractor, which stays frozen.")],
    heads: Annotated[
        Path, typer.Option(metavar="RUN", help="Run with the encoder heads to train, and their settings.")
    ],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Data folder or feature store.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Run directory to write: realigned model and log.")],
    epochs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Passes over the training captions; default: as in the run of --heads."),
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Split to compare the models on.")] = "test",
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a figure of all features: .svg, .png or .pdf.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="Device, such as cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(metavar="N", min=0, help="CPU threads; 0 uses PyTorch's default.")] = 0,
) -> None:
    """Train one model's encoder heads on another's feature extractor and compare all three models.

    This is the cross-model realignment of FDF. Use two runs that differ only in the seed. The heads train on with the
    settings of their run, including its warm-up. The table has rsum for the images of each model with the captions of
    each; the figure shows the features of all models in a plane, by t-SNE.
    """
    from itm_fast import models
    from itm_fast.files import atomic
    from itm_fast.files.documents import json_text
    from itm_fast.files.processors import device_of
    from itm_fast.report.comparison import check_suffix
    from itm_fast.report.features import check_tsne, pooled_features, write_features
    from itm_fast.training.fdf.cross_model import cross_table
    from itm_fast.training.fdf.cross_model import realign as train_heads

    check_targets(
        {"--figure": figure, "--json": json_file},
        {},
        [("--extractor", extractor), ("--heads", heads), ("--data", data), ("--out", out)],
    )
    if figure is not None:
        check_suffix(figure)
        check_tsne()
    for run in (extractor, heads):
        check_run(run)
    where = device_of(device)
    model, vocabulary, _ = load_run(heads, where, None)
    dataset = dataset_of(data, split, vocabulary, model, heads)
    result = train_heads(
        str(extractor),
        str(heads),
        str(out),
        data=str(data),
        epochs=epochs,
        resume=resume,
        device=device,
        threads=threads,
    )
    if not result.finished:
        typer.echo("stopped; the same command with --resume goes on from there", err=True)
        raise typer.Exit(130)
    members = {
        name: models.load(run, where) for name, run in (("model 1", extractor), ("model 2", heads), ("realigned", out))
    }
    table = cross_table(members, dataset)
    width = max(map(len, members)) + 2
    typer.echo(f"sum of recalls on {split}, images (rows) with captions (columns)")
    typer.echo(" " * (width + 10) + "".join(f"{name:>{width}}" for name in members))
    for name, row in table.items():
        typer.echo(f"images of {name:<{width}}" + "".join(f"{value:>{width}.1f}" for value in row.values()))
    if json_file is not None:
        atomic.write_text(json_file, json_text({"split": split, "rsum": table}))
    if figure is not None:
        write_features(figure, {name: pooled_features(model, dataset) for name, model in members.items()})
