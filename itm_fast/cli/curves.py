"""`itm-fast curves`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itm_fast.cli.models import check_run
from itm_fast.files.messages import printable


def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Figure to write: .svg, .png or .pdf.")] = Path(
        "curves.svg"
    ),
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Legend text, one for each RUN; default: the folder names."),
    ] = None,
) -> None:
    """Plot training curves of several runs: loss, recall, learning rate, gradient norm and negative mining.

    The curves are the loss, rsum on the validation split, the learning rate, the gradient norm of the first image
    layer, the score gap between positives and hardest negatives, the distance of their embeddings, the mean cosine
    within each modality, and the share of anchors that use their hardest negative. Curves that no log has are left out.
    """
    from itm_fast.files import atomic, regular
    from itm_fast.files.run_files import METRICS
    from itm_fast.report.comparison import check_suffix, write_comparison
    from itm_fast.training.metrics_log import read_metrics

    names = [printable(name) for name in label or [run.resolve().name for run in runs]]
    if len(names) != len(runs):
        raise ValueError(f"--label: expected one for each of the {len(runs)} runs, got {len(names)}")
    doubled = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if doubled is not None:
        raise ValueError(f"--label: expected a different name for each run, got {doubled!r} twice")
    atomic.check_target(out)
    check_suffix(out)
    logs = {}
    for name, run in zip(names, runs, strict=True):
        check_run(run)
        if not regular.is_file(run / METRICS):
            raise ValueError(f"{run}: contains no {METRICS}, so it is not a training run")
        logs[name] = read_metrics(run / METRICS, ("kind", "step"))
    write_comparison(out, logs)
    typer.echo(f"figure: {out}")
