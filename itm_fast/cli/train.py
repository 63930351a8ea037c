"""`itm-fast train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from itm_fast import config as settings
from itm_fast.cli.options import given_options, with_config_options
from itm_fast.training.config import TrainConfig, read_yaml


@with_config_options(TrainConfig, replaced=("model_options",))
def train(
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A setting of the model, for example direction=i2t; may be given again.",
            rich_help_panel="Model",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file with any of these settings; options override it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its last state.")] = False,
    **values: Any,
) -> None:
    """Trains a model on precomputed region features and leaves the best one in --out.

    With --resume the settings are those of the run; what is given beside must agree with them, apart from what does
    not change the result (epochs, threads, workers, device, data, save-every).
    """
    from itm_fast.training import run_folder
    from itm_fast.training.run import train as run_training

    chosen = given_options(values)
    merged: dict[str, Any] = {}
    if resume:
        if "out" not in chosen:
            raise ValueError("out: --resume needs the RUN folder to continue, --out RUN")
        merged = settings.to_dict(run_folder.saved_config(chosen["out"]))
    if config is not None:
        merged.update(read_yaml(config))
    merged.update(chosen)
    if model_option:
        merged["model_options"] = {**merged.get("model_options", {}), **_model_options(model_option)}
    result = run_training(settings.build(TrainConfig, merged), resume=resume)

    out = merged["out"]
    if not result.finished:
        typer.echo(f"stopped after step {result.steps}; continue with: itm-fast train --out {out} --resume", err=True)
        raise typer.Exit(130)
    typer.echo(
        f"best model: {out} (step {result.best_step}, rsum {result.best['rsum']:.1f} on the validation split); "
        f"{result.steps} steps in {result.seconds:.0f} s"
    )


def _model_options(texts: list[str]) -> dict[str, Any]:
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--model-option: expected NAME=VALUE, got {text!r}")
        options[name.strip().replace("-", "_")] = settings.from_text(value)
    return options
