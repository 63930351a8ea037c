"""The settings of a training run: the one list that command line, YAML files and documentation are made from.

Inside: `TrainConfig`, `read_yaml`, `to_yaml`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs
import yaml

from itm_fast import config as settings
from itm_fast.config import setting
from itm_fast.data.placement import PLACEMENTS
from itm_fast.files.documents import MAX_SETTINGS_BYTES, parse_yaml, read_text
from itm_fast.training.loss_rules import BOOSTING, BOOSTING_FORMS, MINING, check_loss

__all__ = ["TrainConfig", "read_yaml", "to_yaml"]


DATA, MODEL, STEPS, OPTIMIZER = "Data", "Model", "Steps", "Optimiser"
LOSS, SCENARIO, ADDR, LOG, MACHINE = "Loss", "Deep Boosting Learning", "ADDR", "Validation and log", "Machine"
CONVERSIONS = "Feature diversification"

MAX_SEED = 2**64 - 1  # the largest that torch takes


@attrs.frozen(kw_only=True)
class TrainConfig:
    """Everything that a training run depends on. Numbers of steps are optimiser steps."""

    data: str = setting(group=DATA, help="Folder with the train and validation splits.", free_on_resume=True)
    out: str = setting(group=DATA, help="RUN folder to write: best model, last state, log.", free_on_resume=True)
    vocab: str | None = setting(
        None, group=DATA, help="Vocabulary JSON; by default the one beside the data, else built from train_caps.txt."
    )
    min_count: int = setting(
        4,
        group=DATA,
        minimum=1,
        help="Least occurrences of a word in a vocabulary that is built from train_caps.txt.",
    )
    validation_split: str = setting("dev", group=DATA, help="Split that chooses the best model.")
    validation_images: int | None = setting(
        None, group=DATA, minimum=1, help="Validate on the first images only (published code: 1000 of COCO's 5000)."
    )
    workers: int = setting(
        0,
        group=DATA,
        minimum=0,
        help="Processes that read batches ahead; 0: the training process. A feature store has threads of its own.",
        free_on_resume=True,
    )
    features: str = setting(
        "auto",
        group=DATA,
        help="Where the training features lie: on the disk, in memory of the host or of the device; auto: where they "
        "fit, for a training on the CPU the disk.",
        choices=PLACEMENTS,
        free_on_resume=True,
    )
    bucket_batches: int = setting(
        0,
        group=DATA,
        minimum=0,
        help="Captions of like length share a batch: so many batches of random captions at a time are sorted by "
        "length, and their order is random again; 0: batches are random captions.",
    )
    text_augmentation: float = setting(
        0.0,
        group=DATA,
        minimum=0,
        maximum=1,
        help="Probability of each word of a training caption to be masked (half), replaced by a random word (a tenth) "
        "or deleted (the rest); published: 0.2.",
    )
    region_augmentation: float = setting(
        0.0,
        group=DATA,
        minimum=0,
        below=1,
        help="Probability of each region of a training image to be dropped; published: 0.2.",
    )

    model: str = setting("scan", group=MODEL, help="Name of the model.")
    model_options: Mapping[str, Any] = setting(factory=dict, group=MODEL, help="Settings of the model by name.")
    bert: str | None = setting(
        None,
        group=MODEL,
        help="Folder of a BERT model (config.json, model.safetensors, vocab.txt or tokenizer.json) that reads the "
        "captions.",
        free_on_resume=True,
    )

    epochs: int = setting(30, group=STEPS, minimum=1, help="Passes over the training captions.", free_on_resume=True)
    batch_size: int = setting(128, group=STEPS, minimum=1, help="Captions per step, each with its image.")
    micro_batch: int | None = setting(
        None,
        group=STEPS,
        minimum=1,
        help="Captions that are encoded at a time, each with its image; the negatives are those of the whole batch.",
        free_on_resume=True,
    )
    drop_last: bool = setting(False, group=STEPS, help="Leave out a last batch that is not full.")
    seed: int = setting(
        0, group=STEPS, minimum=0, maximum=MAX_SEED, help="Seed of the weights, the order of the data and dropout."
    )

    optimizer: str = setting("adam", group=OPTIMIZER, help="Optimiser.", choices=("adam", "adamw"))
    lr: float = setting(2e-4, group=OPTIMIZER, above=0, help="Learning rate.")
    beta1: float = setting(0.9, group=OPTIMIZER, minimum=0, below=1, help="Decay of Adam's first moment.")
    beta2: float = setting(0.999, group=OPTIMIZER, minimum=0, below=1, help="Decay of Adam's second moment.")
    bert_lr_factor: float = setting(
        0.1, group=OPTIMIZER, above=0, help="Factor on the learning rate of BERT's own weights."
    )
    weight_decay: float = setting(0.0, group=OPTIMIZER, minimum=0, help="Weight decay; decoupled with adamw.")
    grad_clip: float = setting(2.0, group=OPTIMIZER, minimum=0, help="Largest norm of the gradient; 0: no clipping.")
    lr_schedule: str = setting(
        "step",
        group=OPTIMIZER,
        help="Decay by a factor every so often, along a cosine, or not at all.",
        choices=("step", "cosine", "constant"),
    )
    lr_decay_every: int = setting(15, group=OPTIMIZER, minimum=1, help="Time between two decays (step schedule).")
    lr_decay_unit: str = setting("epoch", group=OPTIMIZER, help="Unit of lr_decay_every.", choices=("epoch", "step"))
    lr_decay_factor: float = setting(
        0.1, group=OPTIMIZER, above=0, maximum=1, help="Factor of each decay (step schedule)."
    )
    lr_floor: float = setting(0.0, group=OPTIMIZER, minimum=0, help="The decay ends at this learning rate.")
    lr_warmup_steps: int = setting(0, group=OPTIMIZER, minimum=0, help="Steps of a linear rise from 0.")

    loss: str = setting(
        "triplet",
        group=LOSS,
        help="Loss of the scores: triplet, polynomial, cmpm, or the name of a registered loss.",
    )
    loss_options: Mapping[str, Any] = setting(
        factory=dict, group=LOSS, help="Further settings of the loss by name, for registered losses."
    )
    margin: float = setting(0.2, group=LOSS, minimum=0, help="Margin of the triplet and polynomial losses.")
    mining: str = setting(
        "hardest",
        group=LOSS,
        help="Negatives of the triplet loss; selective is SelHN, semi_hard SHN, contrastive SCT. The polynomial loss "
        "takes hardest, cmpm takes all.",
        choices=MINING,
    )
    epsilon: float = setting(
        0.01,
        group=LOSS,
        minimum=0,
        help="With mining selective an anchor takes its hardest negative where that scores further than this from the "
        "positive, else all.",
    )
    selective_divisor: str = setting(
        "batch",
        group=LOSS,
        help="What mining selective divides the sum over all negatives by: B (paper) or B - 1 (public code).",
        choices=("batch", "negatives"),
    )
    halve_loss: bool = setting(
        False, group=LOSS, help="The mean of both directions of the triplet loss, not their sum (SelHN's public code)."
    )
    mean_loss: bool = setting(
        False,
        group=LOSS,
        help="The mean of a branch's own loss over the batch, not its sum (public code of SelHN, polynomial loss and "
        "cmpm).",
    )
    softmax_scale: float = setting(
        1.0, group=LOSS, above=0, help="Factor of the scores before the softmax of cmpm (DBL's public code: 10)."
    )
    warmup_epochs: int = setting(
        0, group=LOSS, minimum=0, help="First epochs that use the triplet loss of all negatives."
    )
    exclude_same_image: bool = setting(
        True, group=LOSS, help="Captions of the same image are no negatives of each other."
    )

    conversions: int | None = setting(
        None,
        group=CONVERSIONS,
        minimum=1,
        maximum=64,
        help="Number of feature conversions (published: 8) in the place of the model's encoder heads: chan, scan, "
        "vse_infty.",
    )
    conversion: str = setting(
        "ffn",
        group=CONVERSIONS,
        help="What a conversion has above the encoder head: a feed-forward network, an adapter, or none.",
        choices=("ffn", "adapter", "none"),
    )
    conversion_residual: bool = setting(
        False, group=CONVERSIONS, help="Add what the feed-forward network saw to its result."
    )
    reweighting: bool = setting(
        True, group=CONVERSIONS, help="Learn weights of the conversions for each feature; else their mean."
    )
    normalize_fused: bool = setting(True, group=CONVERSIONS, help="l2-normalise the weighted sum of the conversions.")
    realignment: bool = setting(
        True,
        group=CONVERSIONS,
        help="Train each conversion with the negatives of another batch; else only the fused feature with its own.",
    )
    other_batches: str = setting(
        "kept",
        group=CONVERSIONS,
        choices=("kept", "fresh"),
        help="Base features of other batches in the realignment: as they were, or encoded anew (for quick extractors).",
    )
    online_weight: float = setting(
        0.5, group=CONVERSIONS, minimum=0, help="Weight of the fused feature's loss beside the realignment."
    )

    scenario: str = setting(
        "single",
        group=SCENARIO,
        help="The model alone, beside a frozen one (oas), others (oss) or its moving average (mss), or against "
        "discriminators (addr).",
        choices=("single", "oas", "oss", "mss", "addr"),
    )
    boosting: str | None = setting(
        None,
        group=SCENARIO,
        help="Loss beside an anchor, added to a branch's own; by default absolute.",
        choices=BOOSTING,
    )
    boosting_mining: str = setting(
        "hardest", group=SCENARIO, help="Negatives of the boosting loss.", choices=("hardest", "all")
    )
    boosting_form: str = setting(
        "paper",
        group=SCENARIO,
        help="soft_rank, rkd, dml and dino_inverse as the papers have them, or as DBL's public code.",
        choices=BOOSTING_FORMS,
    )
    boosting_weight: float = setting(1.0, group=SCENARIO, minimum=0, help="Weight of the boosting loss.")
    boosting_margin: float | None = setting(
        None, group=SCENARIO, minimum=0, help="Margin of the boosting loss; by default that of a branch's own loss."
    )
    boosting_alpha: float = setting(
        0.5, group=SCENARIO, minimum=0, maximum=1, help="The positives' share of the margin (absolute)."
    )
    soft: bool = setting(False, group=SCENARIO, help="Soft margins in the boosting loss.")
    anchor: str | None = setting(None, group=SCENARIO, help="RUN folder of the frozen trained model (oas).")
    anchor_start: bool = setting(
        True, group=SCENARIO, help="The model starts with the weights of the anchor, not with fresh ones (oas)."
    )
    branches: int = setting(2, group=SCENARIO, minimum=2, maximum=64, help="Models that train together (oss).")
    momentum: float = setting(
        0.99995,
        group=SCENARIO,
        minimum=0,
        maximum=1,
        help="The share of itself that the moving average keeps at the first step, on its way to 1 (mss).",
    )

    addr: str | None = setting(
        None,
        group=ADDR,
        help="No discriminators (base), one (united), one per image without their regularisation (multiple), or with "
        "it (full, the default).",
        choices=("base", "united", "multiple", "full"),
    )
    adversarial_weight: float = setting(
        0.1, group=ADDR, minimum=0, help="Weight beta of the discriminators' risk in the loss of the model."
    )
    regularization_weight: float = setting(
        0.4, group=ADDR, minimum=0, help="Weight gamma of the regularisation in the loss of the discriminators (full)."
    )
    model_regularization_weight: float = setting(
        0.0,
        group=ADDR,
        minimum=0,
        help="Weight of the regularisation in the loss of the model (full); Eq 11 has none, the text speaks of it.",
    )
    domain_margin: float = setting(0.05, group=ADDR, minimum=0, help="Margin alpha of the regularisation.")
    risk_aggregation: str = setting(
        "sum",
        group=ADDR,
        help="A risk is the sum (paper) or the mean over the regions and words of a pair.",
        choices=("sum", "mean"),
    )
    alternation: str = setting(
        "epoch",
        group=ADDR,
        help="Discriminators and model take turns after each pass over the data (paper), or after each step.",
        choices=("epoch", "step"),
    )
    discriminator_lr: float | None = setting(
        None, group=ADDR, above=0, help="Learning rate of the discriminators; by default that of the model."
    )
    discriminator_precision: str = setting(
        "float32",
        group=ADDR,
        help="The discriminators in host memory: 12 bytes a parameter with Adam's moments, or 5 (low).",
        choices=("float32", "low"),
    )
    discriminators_on_disk: bool = setting(
        False,
        group=ADDR,
        help="Map the discriminators from files in the RUN folder, also where memory has room for them.",
        free_on_resume=True,
    )

    validate_every: int = setting(1, group=LOG, minimum=1, help="Time between two validations.")
    validate_unit: str = setting("epoch", group=LOG, help="Unit of validate_every.", choices=("epoch", "step"))
    log_every: int = setting(10, group=LOG, minimum=1, help="Steps between two log lines.")
    save_every: int = setting(
        1000,
        group=LOG,
        minimum=1,
        help="Steps between two saves of the last state, beside those after epochs and validations.",
        free_on_resume=True,
    )
    tensorboard: bool = setting(
        False, group=LOG, help="Write the numbers of the log for TensorBoard, too.", free_on_resume=True
    )

    device: str = setting("cpu", group=MACHINE, help="Device, for example cpu or cuda.", free_on_resume=True)
    precision: str = setting(
        "float32", group=MACHINE, help="Precision of the forward pass.", choices=("float32", "bfloat16")
    )
    threads: int = setting(0, group=MACHINE, minimum=0, help="CPU threads; 0: torch's choice.", free_on_resume=True)

    def __attrs_post_init__(self) -> None:
        check_loss(self)

    @property
    def trains_discriminators(self) -> bool:
        """Whether some of the steps change discriminators, not the model."""
        return self.scenario == "addr" and self.addr != "base"


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Names and values of a YAML configuration; only plain data is read.

    Raises:
        ValueError: the file is missing, is no YAML mapping, or holds a name that `TrainConfig` does not have.
    """
    try:
        text = read_text(path, MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such configuration file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: expected a YAML file, found a folder") from None
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path}: expected YAML of plain values: {error}") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a YAML mapping of names to values, got a {type(content).__name__}")
    known = list(settings.fields_of(TrainConfig))
    for name in content:
        if name not in known:
            raise ValueError(f"{path}: {settings.unknown_name('setting', str(name), known)}")
    return content


def to_yaml(config: TrainConfig) -> str:
    """The configuration as YAML that `read_yaml` reads back."""
    return yaml.safe_dump(settings.to_dict(config), sort_keys=False)
