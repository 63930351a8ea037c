"""`itm-fast convert`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint of published code (.pth.tar).")],
    source: Annotated[
        str,
        typer.Option(metavar="NAME", help="Code that wrote the checkpoint: scan, sgraf, rcar, dbl, vse_infty, rvsepp."),
    ],
    vocab: Annotated[Path, typer.Option(metavar="FILE", help="Vocabulary JSON that it was trained with.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder to write; it must not hold a model yet.")],
    ignore_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Unknown option of the checkpoint that changes no scores; repeatable."),
    ] = None,
    bert_heads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Attention heads of its BERT. (default: a head for 64 channels, as published)"),
    ] = None,
) -> None:
    """Converts a checkpoint of published code into a RUN folder that evaluate takes.

    Nothing in the checkpoint is executed: a file that holds more than tensors, plain values and the options of the
    command line is refused.
    """
    from itm_fast import compat

    official = compat.convert(
        source, checkpoint, vocab, out, ignored_options=ignore_option or (), bert_heads=bert_heads
    )
    facts = [str(checkpoint), f"source {source}"]
    facts += [f"epoch {official.epoch}"] if official.epoch is not None else []
    facts += [f"its own best sum of recalls {official.best_rsum:.1f}"] if official.best_rsum is not None else []
    typer.echo(f"converted: {', '.join(facts)}")
    typer.echo(f"evaluate it with: itm-fast evaluate --checkpoint {shlex.quote(str(out))} --data DIR")
