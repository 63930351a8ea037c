"""Training: settings, schedule, trainer, RUN folder. `train(TrainConfig(...))` does it all.

The trainer is imported on first use, so that listing the settings (`itm-fast train --help`) stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from itm_fast.training.config import TrainConfig

if TYPE_CHECKING:
    from itm_fast.training.run import train
    from itm_fast.training.trainer import Trainer, TrainResult

__all__ = ["TrainConfig", "TrainResult", "Trainer", "train"]


def __getattr__(name: str) -> Any:
    if name in ("TrainResult", "Trainer"):
        from itm_fast.training import trainer

        return getattr(trainer, name)
    if name == "train":
        from itm_fast.training.run import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
