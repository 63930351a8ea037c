"""`itm-fast recipes`."""

from __future__ import annotations

from typing import Annotated

import typer


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this recipe as YAML for train --config.")
    ] = None,
) -> None:
    """List the recipes of train --recipe, which are the settings of papers, or print one."""
    from itm_fast.training import recipes as known

    if name is not None:
        typer.echo(known.load(name).to_yaml(), nl=False)
        return
    rows = [("recipe", "epochs", "batch", "lr", "")]
    for recipe in map(known.load, known.names()):
        settings = recipe.settings
        numbers = (str(settings.get("epochs", "-")), str(settings["batch_size"]), f"{settings['lr']:g}")
        rows.append((recipe.name, *numbers, recipe.description))
    width = max(len(row[0]) for row in rows)
    for first, epochs, batch, lr, description in rows:
        typer.echo(f"{first:<{width}}  {epochs:>6}  {batch:>5}  {lr:>6}  {description}".rstrip())
