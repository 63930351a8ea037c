"""`itm-fast features`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itm_fast.cli.models import dataset_of, load_run
from itm_fast.cli.targets import check_targets


def features(
    checkpoint: Annotated[
        list[Path], typer.Option(metavar="RUN", help="Run directory of a trained model; repeatable, a panel for each.")
    ],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Data folder or feature store.")],
    split: Annotated[str, typer.Option(metavar="NAME", help="Split to draw.")] = "test",
    first_images: Annotated[
        int, typer.Option(metavar="N", min=2, max=2000, help="Draw the first N images and a caption of each.")
    ] = 200,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Figure to write: .svg, .png or .pdf.")] = Path(
        "features.svg"
    ),
) -> None:
    """Plot the embeddings of images and captions in a plane by t-SNE.

    Points that are close have similar embeddings. Of models with fragments, the figure shows the mean of an item's
    fragments. Needs scikit-learn: pip install 'itm_fast[tsne]'.
    """
    import torch

    from itm_fast.report.comparison import check_suffix
    from itm_fast.report.features import check_tsne, pooled_features, write_features

    check_targets({"--out": out}, {}, [*(("--checkpoint", run) for run in checkpoint), ("--data", data)])
    check_suffix(out)
    check_tsne()
    found = {}
    for run in checkpoint:
        model, vocabulary, _ = load_run(run, torch.device("cpu"), None)
        found[str(run)] = pooled_features(model, dataset_of(data, split, vocabulary, model, run), first_images)
    write_features(out, found, by_model=True)
    typer.echo(f"figure: {out}")
