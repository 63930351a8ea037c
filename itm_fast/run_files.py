"""The names of the files in a RUN folder, beside those of a saved model (`itm_fast.models`).

RUN/config.json, RUN/model.safetensors   the best model, what `itm_fast.models.load` takes
RUN/vocab.json                           the vocabulary of its captions
RUN/train.yaml                           the settings of the run
RUN/last/checkpoint.pt                   all that `--resume` needs, beside the log
RUN/last/discriminators-N.safetensors    those of the state in checkpoint.pt, after N steps of theirs (scenario addr)
RUN/last/lock                            held by the process that trains
RUN/metrics.jsonl                        one line per log step and per validation
RUN/branches/1, 2, ...                   models beside the best one (scenarios oss and mss), each with its vocabulary
RUN/tensorboard/                         the log's numbers for TensorBoard, where asked for
"""

from __future__ import annotations

__all__ = ["BRANCHES", "CONFIG", "DISCRIMINATORS", "METRICS", "TENSORBOARD", "VOCABULARY"]

BRANCHES = "branches"
CONFIG = "train.yaml"
DISCRIMINATORS = "discriminators-*.safetensors"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
VOCABULARY = "vocab.json"
