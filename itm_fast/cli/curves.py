"""`itm-fast curves`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Figure to write: .svg, .png or .pdf.")] = Path(
        "curves.svg"
    ),
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Name of a run in the legend, one for each RUN; by default its folder's."),
    ] = None,
) -> None:
    """Draws training runs over each other: what their losses do to gradients, and where they mine.

    Gradient of the first image layer, distance of the hardest negatives from the positives, share of the anchors that
    took their hardest negative, and the validation's sum of recalls, as far as the logs of the runs have them.
    """
    from itm_fast.files import atomic
    from itm_fast.files.run_files import METRICS
    from itm_fast.report.comparison import write_comparison
    from itm_fast.training.metrics_log import read_metrics

    names = label or [run.resolve().name for run in runs]
    if len(names) != len(runs):
        raise ValueError(f"--label: expected one for each of the {len(runs)} runs, got {len(names)}")
    doubled = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if doubled is not None:
        raise ValueError(f"--label: expected a name of its own for each run, got {doubled!r} twice")
    atomic.check_target(out)
    logs = {}
    for name, run in zip(names, runs, strict=True):
        if not (run / METRICS).is_file():
            raise ValueError(f"{run}: holds no {METRICS}; it is no training run")
        logs[name] = read_metrics(run / METRICS, ("kind", "step"))
    write_comparison(out, logs)
    typer.echo(f"figure: {out}")
