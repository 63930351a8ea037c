"""The command that uses a new store.

Inside: `next_command`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

__all__ = ["next_command"]


def next_command(splits: Sequence[str], store: Path, options: str = "") -> str:
    """Return what to do with a store of these splits: train, or evaluate without a split train.

    Args:
        splits: the names of the splits.
        store: the folder.
        options: further options of the training, with a space before each.
    """
    data = f"--data {shlex.quote(str(store))}"
    if "train" not in splits:
        return f"evaluate on them with: itm-fast evaluate --checkpoint RUN {data} --split {shlex.quote(splits[0])}"
    if "dev" in splits:
        return f"train on them with: itm-fast train {data} --model scan --out RUN{options}"
    return (
        f"train on them, without a split dev, with: itm-fast train {data} --model scan --validation-split train "
        f"--out RUN{options}"
    )
