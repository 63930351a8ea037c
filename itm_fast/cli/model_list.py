"""`itm-fast models`."""

from __future__ import annotations

from typing import Annotated

import typer

from itm_fast import config as settings
from itm_fast.cli.options import default_text, meaning


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print the settings of this model.", show_default=False)
    ] = None,
) -> None:
    """List the models that train --model takes, or print the settings of one.

    --model-option NAME=VALUE sets a model's setting in train. The data give vocab_size, feature_dim and n_regions,
    --bert gives the sizes of BERT, and --clip those of a CLIP or SigLIP.
    """
    from rich.console import Console
    from rich.table import Table

    from itm_fast import models as known
    from itm_fast.models.base import model_class

    console = Console(highlight=False)
    table = Table(box=None, show_header=name is not None, pad_edge=False, padding=(0, 2, 0, 0))
    if name is None:
        table.add_column(no_wrap=True)
        table.add_column()
        for each in known.names():
            table.add_row(each, model_class(each).summary)
    else:
        console.print(f"{model_class(name).summary}\n", markup=False)
        table.add_column("setting", no_wrap=True)
        table.add_column("default", overflow="fold")
        table.add_column("meaning")
        for field in settings.fields_of(known.config_class(name)).values():
            table.add_row(field.name, default_text(field).removeprefix("default "), meaning(field))
    console.print(table, markup=False)
