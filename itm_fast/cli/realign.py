"""`itm-fast realign`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def realign(
    extractor: Annotated[Path, typer.Option(metavar="RUN", help="Training whose feature extractor is frozen.")],
    heads: Annotated[
        Path, typer.Option(metavar="RUN", help="Training whose encoder heads, data order and seed serve.")
    ],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder with the splits.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="RUN folder to write: the realigned model and its log.")],
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training captions; by default as many as the heads had.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split to compare on.")] = "test",
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Figure of all features to write: .svg, .png or .pdf.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its last state.")] = False,
    device: Annotated[str, typer.Option(help="Device, for example cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice.")] = 0,
) -> None:
    """Trains one model's encoder heads above another's feature extractor, and compares all three models.

    The cross-model realignment of FDF: two trainings that differ in the seed alone. The heads are trained on with the
    settings of their own training, warm-up included. The table has the sum of recalls of the images of each model with
    the captions of each, the figure the first principal components of both.
    """
    from itm_fast import models
    from itm_fast.data import Vocabulary, open_split
    from itm_fast.files import atomic
    from itm_fast.files.run_files import VOCABULARY
    from itm_fast.report.features import write_features
    from itm_fast.training.fdf.cross_model import cross_table, pooled_features
    from itm_fast.training.fdf.cross_model import realign as train_heads
    from itm_fast.training.run import device_of

    for file in (figure, json_file):
        if file is not None:
            atomic.check_target(file)
    where = device_of(device)
    dataset = open_split(data, split, Vocabulary.from_file(heads / VOCABULARY))
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
    if figure is not None:
        write_features(figure, pooled_features(members, dataset))
    if json_file is not None:
        atomic.write_text(json_file, json.dumps({"split": split, "rsum": table}, indent=2) + "\n")
