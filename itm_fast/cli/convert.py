"""`itm-fast convert`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="Checkpoint of the authors' code (.pth.tar; pytorch_model.bin of oscar)."
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Source of the checkpoint: scan, bfan, camp, pfan, sgraf, rcar, dbl, esa, naaf, chan, vse_infty, "
            "rvsepp, oscar or laps.",
        ),
    ],
    vocab: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Vocabulary of its training: JSON, or vocab.txt or tokenizer.json of BERT."),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Run directory to write; it must not hold another model.")],
    ignore_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Do not warn of this unknown option of the checkpoint; repeatable."),
    ] = None,
    bert_heads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Attention heads of its BERT; default: as in config.json of oscar, else one per 64 channels.",
        ),
    ] = None,
) -> None:
    """Convert a checkpoint of the authors' code into a run directory for evaluate.

    Nothing in the checkpoint is executed: a file with anything but tensors, plain values and command-line options is
    refused. An option of the checkpoint that the source does not have gives a warning.
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
