"""`itm-fast train`."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from itm_fast import config as settings
from itm_fast.cli.options import Command, given_options, with_config_options
from itm_fast.training.config import GROUPS, LOSS, MODEL, OUTPUT, RCAR, TrainConfig, read_yaml

# The split of a report: no setting was chosen by it.
REPORTED = "test"
# The options of --help, in its order; --help-all prints all.
COMMON = (
    "data", "out", "recipe", "config", "model", "model_option", "bert", "image_backbone", "clip", "start",
    "loss", "mining", "epochs",
    "batch_size", "lr", "seed", "workers", "device", "precision", "report", "resume", "help_all", "help",
)  # fmt: skip


class TrainCommand(Command):
    """A command with a short help of `COMMON` and a long one of all options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the common options in one panel, without what --help-all says about them all."""
        parameters: list[Any] = self.params
        for parameter in parameters:
            parameter.hidden = parameter.hidden or parameter.name not in COMMON
            parameter.rich_help_panel = None
        parameters.sort(key=lambda parameter: COMMON.index(parameter.name) if parameter.name in COMMON else -1)
        self.help = (self.help or "").split("\n\n")[0]
        self.epilog = (
            "--help-all adds the options of RCAR, SelHN, DBL, ADDR and FDF, schedules, data augmentation, large "
            "batches and several processes. itm-fast models NAME lists the settings of a model."
        )
        super().format_help(ctx, formatter)

    def format_all_help(self, ctx: Any, formatter: Any) -> None:
        """Print all options in panels by task; the --no- form of a flag is left to the text."""
        parameters: list[Any] = self.params
        for parameter in parameters:
            parameter.secondary_opts = []
        order = {name: number for number, name in enumerate(GROUPS)}
        parameters.sort(key=lambda parameter: order.get(parameter.rich_help_panel, -1))
        super().format_help(ctx, formatter)


def _print_all_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        assert isinstance(context.command, TrainCommand)
        context.command.format_all_help(context, context.make_formatter())
        raise typer.Exit


@with_config_options(TrainConfig, replaced=("model_options", "loss_options", "recipe"))
def train(
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V",
            help="Model setting, for example direction=i2t; repeatable.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    loss_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set an option of a registered loss, for example gamma=64. Repeat for more.",
            rich_help_panel=LOSS,
        ),
    ] = None,
    regulator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="RCAR regulator: rcr, rar or rcar (scan, bfan, camp, pfan, sgraf); default: none.",
            rich_help_panel=RCAR,
        ),
    ] = None,
    regulator_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of the regulator. (default 2)", rich_help_panel=RCAR)
    ] = None,
    steps: Annotated[int | None, typer.Option(hidden=True)] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Recipe of a paper that the settings start from; see itm-fast recipes.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file of settings; overrides --recipe.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out.", rich_help_panel=OUTPUT)
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Then write RUN/report.html: recalls, searches and attention on the split test, and training curves. "
            "Needs pictures.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    help_all: Annotated[
        bool,
        typer.Option("--help-all", callback=_print_all_help, is_eager=True, help="Show all options and exit."),
    ] = False,
    **values: Any,
) -> None:
    """Train a model on region features or pictures and write the best one to --out.

    Several processes share each batch of --batch-size: torchrun --nproc-per-node N -m itm_fast train ...

    A flag such as --drop-last also has the form --no-drop-last, which overrides a recipe or a file.

    --resume takes the settings from the run; other options must match them. These may change without an effect on the
    result: --data, --bert, --image-backbone, --clip and --start (the same content in another folder), --recipe (another
    one with the same settings), --workers, --features, --image-checkpointing, --text-checkpointing,
    --discriminators-on-disk, --save-every, --tensorboard, --tracker and --tracker-online. --device and --threads change
    the rounding.
    --micro-batch changes the rounding, dropout and batch normalisation. --epochs may not drop below the epochs already
    done; with a cosine schedule, the learning rate follows the new length from the resume point on.
    """
    from itm_fast.distributed import launched
    from itm_fast.training import recipes, run_folder
    from itm_fast.training.loss_rules import without_idle
    from itm_fast.training.run import train as run_training
    from itm_fast.training.start import recipe_for_start, start_model

    if steps is not None:
        if regulator_steps is not None:
            raise ValueError("--steps: the former name of --regulator-steps; give the new name alone")
        warnings.warn(settings.renamed("--steps", "--regulator-steps"), FutureWarning, stacklevel=2)
        regulator_steps = steps
    regulation = given_options({"regulator": regulator, "steps": regulator_steps})
    options = {
        "model_options": _named_options("--model-option", model_option or []) | regulation,
        "loss_options": _named_options("--loss-option", loss_option or []),
    }
    options = {name: values for name, values in options.items() if values}
    values = settings.with_present_names(TrainConfig, given_options(values), "--")
    named = given_options({"recipe": recipe})
    given = recipes.merge(read_yaml(config) if config is not None else {}, named, values, options)
    recipe = given.get("recipe")
    published = recipes.load(recipe).settings if isinstance(recipe, str) else {}
    saved = {}
    if resume:
        if "out" not in given:
            raise ValueError("out: --resume needs the RUN folder to continue: --out RUN, or out in the --config file")
        before = run_folder.saved_config(str(given["out"]))
        run_folder.check_paths(str(given["out"]), before, given)
        saved = settings.to_dict(before.resolved())
    start = given.get("start", saved.get("start"))
    if isinstance(start, str):
        published = recipe_for_start(published, start)
    merged = recipes.merge(without_idle(published, given), given)
    if published and merged["model"] != published["model"]:
        raise ValueError(f"recipe: {recipe} is of the model {published['model']}, but {merged['model']} was asked for")
    if "model" not in merged and isinstance(merged.get("start"), str) and not resume:
        merged["model"] = start_model(merged["start"])
    chosen = settings.build(TrainConfig, recipes.merge(saved, merged))
    if report and chosen.data is not None:
        from itm_fast.report.of_run import check_pictures

        check_pictures(chosen.data, REPORTED)
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
    if report and chosen.data is not None:
        from itm_fast.report.of_run import write_run_report

        page = Path(out) / "report.html"
        write_run_report(page, out, chosen.data, REPORTED)
        typer.echo(f"report: {page}")


def train_command() -> Any:
    """Return the command `train` with all its options."""
    made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    made.command(cls=TrainCommand)(train)
    return typer.main.get_command(made)


def _named_options(option: str, texts: list[str]) -> dict[str, Any]:
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{option}: expected NAME=VALUE, got {text!r}")
        options[name.strip().replace("-", "_")] = settings.from_text(value)
    return options
