"""Options that several commands of indexes share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

IndexArgument = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of the index.", show_default=False)]
Checkpoints = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint", metavar="RUN", help="Run directory of the model, if it was moved since the build; repeatable."
    ),
]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Data folder or feature store to take a split from.")]
Split = Annotated[str, typer.Option(metavar="NAME", help="Split of --data.")]
Pictures = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of pictures, and its subfolders.")]
Thumbnails = Annotated[
    bool, typer.Option("--thumbnails/--no-thumbnails", help="Keep a small copy of each picture, for result pages.")
]
IdPrefix = Annotated[
    str, typer.Option("--id-prefix", metavar="TEXT", help="Put this before the id of each new item, such as dev-.")
]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="Leave out pictures that cannot be decoded, and list them, instead of stopping."),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="Device, such as cpu or cuda.")]
Threads = Annotated[int, typer.Option(metavar="N", min=0, help="CPU threads; 0 uses PyTorch's default.")]
