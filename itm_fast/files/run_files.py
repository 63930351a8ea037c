"""Names of the files in a run directory, besides those of a saved model (`itm_fast.models`).

RUN/config.json, RUN/model.safetensors   the best model, which `itm_fast.models.load` reads
RUN/vocab.json                           the vocabulary of its captions
RUN/train.yaml                           the settings of the run
RUN/last/checkpoint.pt                   everything that `--resume` needs besides the log
RUN/last/discriminators-N.safetensors    discriminators of checkpoint.pt after their step N (scenario addr)
RUN/last/lock                            held by the training process
RUN/metrics.jsonl                        one line per logged step and per validation
RUN/branches/1, 2, ...                   other branches (scenarios oss, mss, ncr), each with its vocabulary
RUN/tensorboard/, wandb/, mlflow/        the log for a tracker (`--tracker`)
"""

from __future__ import annotations

__all__ = [
    "BRANCHES", "CHECKPOINT", "CONFIG", "DISCRIMINATORS", "METRICS", "PATHS", "TENSORBOARD", "TRACKERS", "VOCABULARY",
]  # fmt: skip

BRANCHES = "branches"
CHECKPOINT = "last/checkpoint.pt"
CONFIG = "train.yaml"
DISCRIMINATORS = "discriminators-*.safetensors"
METRICS = "metrics.jsonl"
# The settings of CONFIG that are paths.
PATHS = ("data", "out", "vocab", "bert", "clip", "image_backbone", "start", "anchor")
TENSORBOARD = "tensorboard"
TRACKERS = (TENSORBOARD, "wandb", "mlflow")
VOCABULARY = "vocab.json"
