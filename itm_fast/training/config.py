"""The settings of a training run. The command line, YAML files and documentation are generated from them.

Inside: `TrainConfig`, `GROUPS`, `read_yaml`, `to_yaml`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs
import yaml

from itm_fast import config as settings
from itm_fast import losses, models
from itm_fast.config import setting
from itm_fast.data.placement import PLACEMENTS
from itm_fast.files.documents import MAX_SETTINGS_BYTES, parse_yaml, read_text
from itm_fast.files.messages import shown
from itm_fast.losses.rectified_loss import SOFT_MARGINS
from itm_fast.training.loss_rules import (
    BOOSTING,
    BOOSTING_FORMS,
    MINING,
    RIVALS,
    check_loss,
    mining_of,
    present_defaults,
    warmup_of,
)
from itm_fast.training.rivals.mixture import MIXTURES

__all__ = ["GROUPS", "RCAR", "TrainConfig", "read_yaml", "to_yaml"]


DATA, MODEL, LOSS, OPTIMIZER = "Data", "Model", "Loss and negatives", "Optimisation"
MACHINE, OUTPUT = "Device, large batches and several processes", "Output and resuming"
RCAR, SELHN, DBL, ADDR, FDF = (f"Method: {name}" for name in ("RCAR", "SelHN", "DBL", "ADDR", "FDF"))
AOQ, NCR, META_SPN, SAM = (f"Method: {name}" for name in ("AOQ", "NCR", "Meta-SPN", "SAM"))
# The headings of the settings in the order in which `train --help-all` prints them.
GROUPS = (DATA, MODEL, LOSS, OPTIMIZER, MACHINE, RCAR, SELHN, DBL, ADDR, FDF, AOQ, NCR, META_SPN, SAM, OUTPUT)

MAX_SEED = 2**64 - 1  # the largest that torch takes


@settings.takes_former_names
@attrs.frozen(kw_only=True)
class TrainConfig:
    """All settings of a training run. Steps are optimiser steps."""

    data: str | None = setting(
        None, group=DATA, metavar="DIR", help="Data folder or feature store (required).", free_on_resume=True
    )
    out: str = setting(group=OUTPUT, metavar="RUN", help="Run directory: model, state, log.", free_on_resume=True)
    vocab: str | None = setting(
        None,
        group=DATA,
        metavar="FILE",
        help="Vocabulary JSON; default: the one beside the data, else built from train_caps.txt.",
    )
    min_count: int = setting(
        4, group=DATA, minimum=1, help="Minimum occurrences of a word in a vocabulary built from train_caps.txt."
    )
    validation_split: str = setting("dev", group=DATA, help="Split that selects the best model.")
    validation_images: int | None = setting(
        None, group=DATA, minimum=1, help="Validate on the first N images; default: all."
    )
    workers: int = setting(
        0,
        group=MACHINE,
        minimum=0,
        help="Data loader processes; 0: none.",
        free_on_resume=True,
    )
    features: str = setting(
        "auto",
        group=MACHINE,
        help="Where to keep the training features. auto: GPU memory if the features fit, else host memory, else disk; "
        "on the CPU: disk.",
        choices=PLACEMENTS,
        free_on_resume=True,
    )
    bucket_batches: int = setting(
        0,
        group=DATA,
        minimum=0,
        help="Sort captions by length within groups of N batches, then shuffle the batches (length bucketing); 0 "
        "turns it off.",
    )
    noise: float = setting(
        0.0,
        group=DATA,
        minimum=0,
        below=1,
        help="Share of the training captions to shuffle among their images, by the seed. NCR's code uses 0.2 and 0.5.",
    )
    text_augmentation: float = setting(
        0.0,
        group=DATA,
        minimum=0,
        maximum=1,
        help="Probability of changing each word of a training caption: half are masked, a tenth replaced by a random "
        "word, the rest deleted. The papers use 0.2.",
    )
    region_augmentation: float = setting(
        0.0,
        group=DATA,
        minimum=0,
        below=1,
        help="Probability of dropping each region of a training image. The papers use 0.2.",
    )
    picture_augmentation: str = setting(
        "none",
        group=DATA,
        help="Change the pictures of training: none, a random crop scaled to full size (crop), or a crop and a random "
        "horizontal flip (crop_flip). Do not flip if captions speak of left and right.",
        choices=("none", "crop", "crop_flip"),
    )
    crop_area: float = setting(
        0.5,
        group=DATA,
        above=0,
        maximum=1,
        help="Smallest share of the picture's area in a crop. ALBEF uses 0.5, VSE++ 0.08.",
    )

    model: str = setting(
        "scan",
        group=MODEL,
        help=f"Model: {', '.join(name for name in models.names(plugins=False) if name != 'fdf')}, or your own.",
    )
    # The command applies it. The name is kept for the model card.
    recipe: str | None = setting(
        None,
        group=MODEL,
        help="Recipe of a paper that the settings start from; see itm-fast recipes.",
        free_on_resume=True,
    )
    model_options: Mapping[str, Any] = setting(factory=dict, group=MODEL, help="Settings of the model by name.")
    start: str | None = setting(
        None,
        group=MODEL,
        metavar="RUN",
        help="Trained model to start from.",
        free_on_resume=True,
    )
    bert: str | None = setting(
        None,
        group=MODEL,
        metavar="DIR",
        help="Local BERT folder; default: a GRU.",
        free_on_resume=True,
    )
    clip: str | None = setting(
        None,
        group=MODEL,
        metavar="DIR",
        help="Local CLIP or SigLIP folder (--model clip).",
        free_on_resume=True,
    )
    image_backbone: str | None = setting(
        None,
        group=MODEL,
        metavar="DIR",
        help="Local ViT, Swin, CLIP or timm folder.",
        free_on_resume=True,
    )
    image_class_token: bool = setting(
        False, group=MODEL, help="Keep the class token of the vision model as the first region."
    )
    image_frozen_epochs: int = setting(
        0, group=OPTIMIZER, minimum=0, help="Initial epochs in which the vision model does not learn."
    )
    text_frozen_epochs: int = setting(
        0, group=OPTIMIZER, minimum=0, help="Initial epochs in which the text tower of --clip does not learn."
    )
    image_checkpointing: bool = setting(
        False,
        group=MACHINE,
        help="Compute the layers of the vision model again in the backward pass, to save memory.",
        free_on_resume=True,
    )
    text_checkpointing: bool = setting(
        False,
        group=MACHINE,
        help="Compute the layers of the text tower of --clip again in the backward pass.",
        free_on_resume=True,
    )

    epochs: int = setting(30, group=OPTIMIZER, minimum=1, help="Passes over the training set.", free_on_resume=True)
    batch_size: int = setting(128, group=OPTIMIZER, minimum=1, help="Caption-image pairs per step.")
    micro_batch: int | None = setting(
        None,
        group=MACHINE,
        minimum=1,
        help="Encode N pairs at a time to save memory; negatives still come from the whole batch. Default: all pairs.",
        free_on_resume=True,
    )
    drop_last: bool = setting(False, group=DATA, help="Drop the last batch of an epoch if it is not full.")
    seed: int = setting(0, group=OPTIMIZER, minimum=0, maximum=MAX_SEED, help="Seed of weights, order, dropout.")

    optimizer: str = setting("adam", group=OPTIMIZER, help="Optimiser.", choices=("adam", "adamw"))
    lr: float = setting(2e-4, group=OPTIMIZER, above=0, help="Learning rate.")
    beta1: float = setting(0.9, group=OPTIMIZER, minimum=0, below=1, help="Decay rate of Adam's first moment.")
    beta2: float = setting(0.999, group=OPTIMIZER, minimum=0, below=1, help="Decay rate of Adam's second moment.")
    image_lr_factor: float = setting(
        0.1, group=OPTIMIZER, above=0, help="Factor on the learning rate of the vision model."
    )
    text_lr_factor: float = setting(
        0.1,
        group=OPTIMIZER,
        above=0,
        help="Factor on the learning rate of BERT, or of the text tower of --clip.",
        former="bert_lr_factor",
    )
    weight_decay: float = setting(0.0, group=OPTIMIZER, minimum=0, help="Weight decay; decoupled with adamw.")
    decay_biases: bool = setting(
        True, group=OPTIMIZER, help="Apply weight decay to biases and normalisation layers, too."
    )
    grad_clip: float = setting(2.0, group=OPTIMIZER, minimum=0, help="Maximum gradient norm; 0 turns clipping off.")
    lr_schedule: str = setting(
        "step",
        group=OPTIMIZER,
        help="Learning rate schedule: decay in steps, along a cosine, along a line to 0 (linear), or not at all.",
        choices=("step", "cosine", "linear", "constant"),
    )
    lr_decay_every: int = setting(
        15, group=OPTIMIZER, minimum=1, help="Epochs or steps between two decays (step schedule)."
    )
    lr_decay_unit: str = setting("epoch", group=OPTIMIZER, help="Unit of --lr-decay-every.", choices=("epoch", "step"))
    lr_decay_factor: float = setting(
        0.1, group=OPTIMIZER, above=0, maximum=1, help="Factor of each decay (step schedule)."
    )
    lr_floor: float = setting(0.0, group=OPTIMIZER, minimum=0, help="Lower limit of the learning rate during decay.")
    lr_warmup_steps: int = setting(
        0, group=OPTIMIZER, minimum=0, help="Number of steps over which the learning rate rises linearly from 0."
    )

    loss: str = setting(
        "triplet",
        group=LOSS,
        help=f"Loss: {', '.join(losses.names(plugins=False))}, or your own.",
    )
    loss_options: Mapping[str, Any] = setting(
        factory=dict, group=LOSS, help="Further settings of the loss by name, for registered losses."
    )
    margin: float = setting(
        0.2, group=LOSS, minimum=0, help="Margin of the triplet, self_expanding and polynomial losses."
    )
    mining: str | None = setting(
        None,
        group=LOSS,
        help="Negatives: hardest, all; with triplet also selective, semi_hard, sct. Default: hardest, or all if the "
        "loss takes no others.",
        choices=MINING,
        former_choices={"contrastive": "sct"},
    )
    epsilon: float = setting(
        0.01,
        group=SELHN,
        minimum=0,
        help="Threshold of --mining selective: use the hardest negative of an anchor if its score differs from the "
        "positive's by more than this, else all negatives.",
    )
    selective_divisor: str = setting(
        "batch",
        group=SELHN,
        help="Divisor of the sum over all negatives with --mining selective: the batch size B (batch; paper), or "
        "B - 1 (negatives; authors' code).",
        choices=("batch", "negatives"),
    )
    halve_loss: bool = setting(
        False,
        group=LOSS,
        help="Average the two directions of the triplet loss or infonce, or the two terms of matching_bce, instead of "
        "adding them (authors' code of SelHN, CLIP and OSCAR).",
    )
    mean_loss: bool = setting(
        False,
        group=LOSS,
        help="Average the loss over the batch instead of adding it up (authors' code of SelHN, polynomial loss, cmpm, "
        "infonce, siglip and matching_bce).",
    )
    softmax_scale: float = setting(
        1.0,
        group=LOSS,
        above=0,
        help="Factor on the scores before the softmax of cmpm. The DBL authors' code uses 10.",
    )
    warmup_epochs: int | None = setting(
        None,
        group=LOSS,
        minimum=0,
        help="Initial epochs with all negatives, so that scores do not collapse. Default: 1 with the triplet loss or "
        "bce, --mining hardest and several epochs, unless all weights are trained already; else 0.",
    )
    exclude_same_image: bool = setting(
        True, group=LOSS, help="Do not use captions of the same image as negatives of each other."
    )

    conversions: int | None = setting(
        None,
        group=FDF,
        minimum=1,
        maximum=64,
        help="Number of feature conversions (paper: 8) that replace the encoder heads of chan, scan or vse_infty; "
        "default: no FDF.",
    )
    conversion_layer: str = setting(
        "ffn",
        group=FDF,
        help="Layer of each conversion above the encoder head: a feed-forward network, an adapter, or none.",
        choices=("ffn", "adapter", "none"),
        former="conversion",
    )
    conversion_residual: bool = setting(
        True, group=FDF, help="Add the input of the feed-forward network to its output; Eq 4 of the paper does not."
    )
    reweighting: bool = setting(
        True, group=FDF, help="Learn the weights of the conversions for each feature, instead of averaging them."
    )
    normalize_fused: bool = setting(True, group=FDF, help="L2-normalise the weighted sum of the conversions.")
    realignment: bool = setting(
        True,
        group=FDF,
        help="Also train each conversion, with negatives of --other-batches; else only the fused feature is trained.",
    )
    other_batches: str = setting(
        "trained",
        group=FDF,
        choices=("trained", "kept", "fresh", "none"),
        help="Other batches: encoded again, training the extractors, too (trained) or not (fresh), or as in their own "
        "step (kept); none: negatives of the own batch.",
    )
    online_weight: float = setting(
        0.5, group=FDF, minimum=0, help="Weight of the fused feature's loss beside the realignment."
    )

    scenario: str = setting(
        "single",
        group=DBL,
        help="Train alone (single), with a frozen anchor (oas), other models (oss), a moving average (mss), "
        "discriminators (addr), or by the method aoq, ncr, meta_spn or sam.",
        choices=("single", "oas", "oss", "mss", "addr", *RIVALS),
    )
    boosting: str | None = setting(
        None,
        group=DBL,
        help="Boosting loss with respect to the anchor, added to the model's own loss; default: absolute.",
        choices=BOOSTING,
    )
    boosting_mining: str = setting(
        "hardest", group=DBL, help="Negatives of the boosting loss.", choices=("hardest", "all")
    )
    boosting_form: str = setting(
        "paper",
        group=DBL,
        help="Version of soft_rank, rkd, dml and dino_inverse: that of their papers, or of the DBL authors' code.",
        choices=BOOSTING_FORMS,
    )
    boosting_weight: float = setting(1.0, group=DBL, minimum=0, help="Weight of the boosting loss.")
    boosting_margin: float | None = setting(
        None, group=DBL, minimum=0, help="Margin of the boosting loss; default: --margin."
    )
    boosting_alpha: float = setting(
        0.5, group=DBL, minimum=0, maximum=1, help="Share of the margin on the positives (absolute)."
    )
    soft: bool = setting(False, group=DBL, help="Use smaller margins where the anchor already separates a pair.")
    anchor: str | None = setting(
        None, group=DBL, metavar="RUN", help="Run directory of the trained model that is the frozen anchor (oas)."
    )
    anchor_start: bool = setting(
        True, group=DBL, help="Start the model from the weights of the anchor, not from fresh ones (oas)."
    )
    branches: int = setting(2, group=DBL, minimum=2, maximum=64, help="Number of models that train together (oss).")
    ema_decay: float = setting(
        0.99995,
        group=DBL,
        minimum=0,
        maximum=1,
        help="Decay of the exponential moving average at the first step; it rises to 1 (mss).",
        former="momentum",
    )

    addr: str | None = setting(
        None,
        group=ADDR,
        help="Discriminators: none (base), one (united), one per image without regularisation (multiple), or one per "
        "image with it (full); default: full.",
        choices=("base", "united", "multiple", "full"),
    )
    adversarial_weight: float = setting(
        0.1, group=ADDR, minimum=0, help="Weight beta of the discriminators' risk in the model's loss."
    )
    regularization_weight: float = setting(
        0.4, group=ADDR, minimum=0, help="Weight gamma of the regularisation in the discriminators' loss (full)."
    )
    model_regularization_weight: float = setting(
        0.0,
        group=ADDR,
        minimum=0,
        help="Weight of the regularisation in the model's loss (full). Equation 11 of the paper has no such term, "
        "but its text mentions one.",
    )
    domain_margin: float = setting(0.05, group=ADDR, minimum=0, help="Margin alpha of the regularisation.")
    risk_aggregation: str = setting(
        "mean",
        group=ADDR,
        help="Aggregation of a risk over the regions and words of a pair; the paper uses the sum.",
        choices=("sum", "mean"),
    )
    alternation: str = setting(
        "epoch",
        group=ADDR,
        help="Alternate between discriminators and model after each epoch (paper) or after each step.",
        choices=("epoch", "step"),
    )
    discriminator_captions: str = setting(
        "pair",
        group=ADDR,
        help="Captions beside an image in a step of the discriminators: that of the pair (pair), or all captions of "
        "the image (image), each image once, as section V of the paper says.",
        choices=("pair", "image"),
    )
    discriminator_lr: float | None = setting(
        None, group=ADDR, above=0, help="Learning rate of the discriminators; default: --lr."
    )
    discriminator_precision: str = setting(
        "float32",
        group=ADDR,
        help="Storage precision of the discriminators in host memory: 12 bytes per parameter with Adam's moments "
        "(float32), or 5 bytes (low).",
        choices=("float32", "low"),
    )
    discriminators_on_disk: bool = setting(
        False,
        group=ADDR,
        help="Map the discriminators from files in the run directory even if they fit into memory.",
        free_on_resume=True,
    )

    offline_candidates: int = setting(
        300, group=AOQ, minimum=1, help="Best captions per image that an offline hard negative is drawn from."
    )
    offline_margin: float = setting(0.0, group=AOQ, minimum=0, help="Margin of offline negatives.")
    offline_alpha: float = setting(
        0.3, group=AOQ, above=0, help="Distance of the offline from the online score that changes the weight by 1."
    )
    offline_beta: float = setting(
        1.5, group=AOQ, minimum=0, help="Weight of an online negative that scores as high as the offline one."
    )
    offline_every: int = setting(
        1, group=AOQ, minimum=1, maximum=1000, help="Epochs between two searches for offline negatives."
    )

    ncr_threshold: float = setting(
        0.5, group=NCR, minimum=0, below=1, help="Probability above which a pair counts as clean."
    )
    ncr_mixture: str = setting(
        "beta",
        group=NCR,
        help="Mixture of the losses of clean and noisy pairs: of beta or of normal distributions (authors' code).",
        choices=MIXTURES,
    )
    ncr_margin: str = setting(
        "exponential",
        group=NCR,
        help="Margin of a pair as a function of its label.",
        choices=SOFT_MARGINS,
    )

    meta_lr: float = setting(1e-3, group=META_SPN, above=0, help="Learning rate of the network of weights.")
    meta_hidden: int = setting(100, group=META_SPN, minimum=1, help="Width of the network of weights.")

    sam_weight: float = setting(5.0, group=SAM, minimum=0, help="Weight of the hinges with adaptive margins.")
    sam_divisor: float = setting(10.0, group=SAM, above=0, help="Difference in CIDEr-D that gives a margin of 1.")
    sam_samples: str = setting(
        "hardest",
        group=SAM,
        help="Negatives with adaptive margins: the hardest of the batch (soft in the authors' code), or random ones.",
        choices=("hardest", "random"),
    )

    validate_every: int = setting(1, group=OUTPUT, minimum=1, help="Epochs or steps between two validations.")
    validate_unit: str = setting("epoch", group=OUTPUT, help="Unit of --validate-every.", choices=("epoch", "step"))
    log_every: int = setting(10, group=OUTPUT, minimum=1, help="Steps between two log lines.")
    save_every: int = setting(
        1000,
        group=OUTPUT,
        minimum=1,
        help="Steps between two saves of the last state, which is also saved after epochs and before validations.",
        free_on_resume=True,
    )
    tensorboard: bool = setting(False, group=OUTPUT, help="Write the log for TensorBoard as well.", free_on_resume=True)
    tracker: str | None = setting(
        None,
        group=OUTPUT,
        help="Write the log for a tracker as well, into a folder of RUN; nothing is sent.",
        choices=("tensorboard", "wandb", "mlflow"),
        free_on_resume=True,
    )
    tracker_online: bool = setting(
        False,
        group=OUTPUT,
        help="Send the log to the server of --tracker wandb or mlflow, which their environment variables name.",
        free_on_resume=True,
    )

    device: str = setting("cpu", group=MACHINE, help="Device, such as cpu or cuda.", free_on_resume=True)
    precision: str = setting(
        "float32", group=MACHINE, help="Forward pass in float32 or bfloat16.", choices=("float32", "bfloat16")
    )
    threads: int = setting(
        0, group=MACHINE, minimum=0, help="CPU threads; 0 uses PyTorch's default.", free_on_resume=True
    )

    def __attrs_post_init__(self) -> None:
        for name, value in present_defaults(settings.to_dict(self)).items():
            object.__setattr__(self, name, value)
        check_loss(self)

    def resolved(self) -> TrainConfig:
        """Return the settings with the negatives and the warm-up of a training in place of None."""
        return attrs.evolve(self, mining=mining_of(self), warmup_epochs=warmup_of(self))

    @property
    def trains_discriminators(self) -> bool:
        """Return whether some of the steps train discriminators instead of the model."""
        return self.scenario == "addr" and self.addr != "base"


def read_yaml(path: str | os.PathLike[str], *, quiet: bool = False) -> dict[str, Any]:
    """Read the names and values of a YAML configuration; only plain data is read.

    Former names become the present ones, with a `FutureWarning` unless `quiet`.

    Raises:
        ValueError: the file is missing, is not a YAML mapping, or has a name that `TrainConfig` does not have.
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
        raise ValueError(f"{path}: expected a YAML mapping of names to values, got {shown(content)}")
    try:
        content = settings.with_present_names(TrainConfig, content, quiet=quiet)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    known = list(settings.fields_of(TrainConfig))
    for name in content:
        if name not in known:
            raise ValueError(f"{path}: {settings.unknown_name('setting', str(name), known)}")
    return content


def to_yaml(config: TrainConfig) -> str:
    """Return the configuration as YAML for `read_yaml`."""
    return yaml.safe_dump(settings.to_dict(config), sort_keys=False)
