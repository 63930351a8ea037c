"""`itm-fast train`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from itm_fast import config as settings
from itm_fast.cli.options import given_options, with_config_options
from itm_fast.training.config import TrainConfig, read_yaml


@with_config_options(TrainConfig, replaced=("model_options", "loss_options"))
def train(
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A setting of the model, for example direction=i2t; may be given again.",
            rich_help_panel="Model",
        ),
    ] = None,
    loss_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set an option of a registered loss, for example gamma=64. Repeat for more.",
            rich_help_panel="Loss",
        ),
    ] = None,
    regulator: Annotated[
        str | None,
        typer.Option(
            metavar="rcr|rar|rcar",
            help="RCAR's regulators in a model that takes them: short for --model-option regulator=...",
            rich_help_panel="Model",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Steps of the regulator: short for --model-option steps=N. (default 2)",
            rich_help_panel="Model",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Published settings of a model on a data set; itm-fast recipes lists them."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML file with any settings; they override the recipe's, options override both."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its last state.")] = False,
    **values: Any,
) -> None:
    """Trains a model on precomputed region features and leaves the best one in --out.

    torchrun --nproc-per-node N -m itm_fast train ... trains in N processes, which share each batch of --batch-size.

    With --resume the settings are those of the run, and what is given beside must agree with them. What may change:
    --data and --bert where the same lie in another folder; --workers, --features, --discriminators-on-disk,
    --save-every and --tensorboard, which the result does not depend on; --device and --threads, which change its
    rounding, and --micro-batch, which changes what dropout draws and batch normalisation sees, too; --epochs, but to
    no fewer than were done, and with the cosine schedule the learning rate then is that of the new length from here on.
    """
    from itm_fast.distributed import launched
    from itm_fast.training import recipes, run_folder
    from itm_fast.training.loss_rules import without_idle
    from itm_fast.training.run import train as run_training

    published = recipes.load(recipe).settings if recipe is not None else {}
    own = given_options({"regulator": regulator, "steps": steps})
    options = {
        "model_options": _named_options("--model-option", model_option or []) | own,
        "loss_options": _named_options("--loss-option", loss_option or []),
    }
    options = {name: values for name, values in options.items() if values}
    given = recipes.merge(read_yaml(config) if config is not None else {}, given_options(values), options)
    merged = recipes.merge(without_idle(published, given), given)
    if published and merged["model"] != published["model"]:
        raise ValueError(f"--recipe {recipe} is of the model {published['model']}, but {merged['model']} was asked for")
    if resume:
        if "out" not in merged:
            raise ValueError("out: --resume needs the RUN folder to continue: --out RUN, or out in the --config file")
        merged = recipes.merge(settings.to_dict(run_folder.saved_config(str(merged["out"]))), merged)
    chosen = settings.build(TrainConfig, merged)
    result = run_training(chosen, resume=resume)

    out, launch = chosen.out, launched()
    if not result.finished:
        if launch.rank == 0:
            command = "itm-fast" if launch.size == 1 else f"torchrun --nproc-per-node {launch.local_size} -m itm_fast"
            again = f"{command} train --out {shlex.quote(out)} --resume"
            typer.echo(f"stopped after step {result.steps}; continue with: {again}", err=True)
        raise typer.Exit(130)
    if launch.rank > 0:
        return
    typer.echo(
        f"best model: {out} (step {result.best_step}, rsum {result.best['rsum']:.1f} on the validation split); "
        f"{result.steps} steps in {result.seconds:.0f} s"
    )


def _named_options(option: str, texts: list[str]) -> dict[str, Any]:
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{option}: expected NAME=VALUE, got {text!r}")
        options[name.strip().replace("-", "_")] = settings.from_text(value)
    return options
