"""Training: settings, schedule, trainer, run directory. `train(TrainConfig(...))` runs a whole training.

The trainer is imported on first use, so that `itm-fast train --help` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from itm_fast.training.config import TrainConfig

if TYPE_CHECKING:
    from itm_fast.training.progress import TrainResult
    from itm_fast.training.run import train
    from itm_fast.training.trainer import Trainer

__all__ = ["TrainConfig", "TrainResult", "Trainer", "train"]


def __getattr__(name: str) -> Any:
    if name == "TrainResult":
        from itm_fast.training.progress import TrainResult

        return TrainResult
    if name == "Trainer":
        from itm_fast.training.trainer import Trainer

        return Trainer
    if name == "train":
        from itm_fast.training.run import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
