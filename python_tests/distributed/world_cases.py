"""Steps and evaluations that several processes do together, and one alone: run by `helpers.worlds`.

Inside: `STEPS`, `SCENARIOS`, `SINGLE_PRECISION`, `one_step`, `made_stepper`, `few_steps`, `mean_statistics`,
`evaluation_case`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import itm_fast.functional as F_itm
from itm_fast import Fragments, models
from itm_fast.data import Batch, PrecomputedDataset, Vocabulary
from itm_fast.distributed import World
from itm_fast.evaluation import evaluate_ensemble, score_matrix
from itm_fast.evaluation.stored_scores import scores_on_disk
from itm_fast.models import MatchingModel
from itm_fast.nn.grouped import GroupedRowNorm
from itm_fast.training import TrainConfig
from itm_fast.training.replicas import Replicas
from itm_fast.training.shares import SharedBatch
from itm_fast.training.step import Stepper
from python_tests.distributed.collectives import COUNTED

SIZES = {"vocab_size": 20, "feature_dim": 10, "embed_dim": 12, "word_dim": 6}
ALIGNED = {**SIZES, "alignment_dim": 8}
BERT = {
    "vocab_size": 20, "feature_dim": 10, "embed_dim": 12, "text_encoder": "bert", "bert_dim": 8, "bert_layers": 2,
    "bert_heads": 2, "bert_hidden_dim": 12, "bert_max_length": 8, "bert_dropout": 0.0,
}  # fmt: skip
REASONING = {**SIZES, "graph_layers": 2, "image_batch_norm": True}
SAEM = {"attention_hidden_dim": 8, "phrase_channels": 6, "attention_dropout": 0.0, "phrase_dropout": 0.0}
GLOBAL = {**ALIGNED, "word_dropout": 0.0, "attention_dropout": 0.0, "n_regions": 4}
# Name, model, settings, captions per batch, and whether images differ in their number of regions.
STEPS: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "scan": ("scan", SIZES, 7, True),
    "scan, i2t, fewer captions than processes": ("scan", {**SIZES, "direction": "i2t"}, 3, False),
    "scan, one caption": ("scan", SIZES, 1, False),
    "rcar": ("scan", {**ALIGNED, "regulator": "rcar", "regulator_dropout": 0.0}, 6, True),
    "saf": ("sgraf", {**GLOBAL, "module": "saf"}, 6, False),
    "saf, fewer captions than processes": ("sgraf", {**GLOBAL, "module": "saf"}, 3, False),
    "sgr": ("sgraf", {**GLOBAL, "module": "sgr"}, 5, False),
    "chan": ("chan", SIZES, 5, False),
    "vsepp": ("vsepp", SIZES, 7, True),
    "vse_infty": ("vse_infty", {**SIZES, "image_encoder": "linear"}, 6, False),
    "scan in micro-batches": ("scan", SIZES, 7, True),
    "saf in micro-batches": ("sgraf", {**GLOBAL, "module": "saf"}, 3, False),
    "bfan": ("bfan", SIZES, 5, True),
    "bert": ("chan", BERT, 5, False),
    "bert, fewer captions than processes": ("chan", BERT, 3, False),
    "fused conversions": ("fdf", {"host": "scan", "host_options": SIZES, "conversions": 3}, 5, True),
    "normalised": ("vse_infty", {**SIZES, "image_encoder": "residual"}, 7, True),
    "normalised, fewer captions than processes": ("vse_infty", {**SIZES, "image_encoder": "residual"}, 3, False),
    "messages": ("camp", {**ALIGNED, "regulator": "rcar", "regulator_dropout": 0.0}, 5, True),
    "elementwise attention": ("esa", {**SIZES, "image_encoder": "linear", "word_dropout": 0.0}, 5, True),
    "patches for a caption": ("laps", {**SIZES, "n_regions": 4}, 7, False),
    "patches for a caption, fewer than processes": ("laps", {**SIZES, "n_regions": 4}, 3, False),
    "learned thresholds": ("naaf", {**SIZES, "threshold_words": 2}, 7, True),
    "learned thresholds, fewer than processes": ("naaf", {**SIZES, "threshold_words": 2}, 3, False),
    "self-attention over regions": ("saem", {**SIZES, **SAEM}, 7, True),
    "self-attention over regions, fewer than processes": ("saem", {**SIZES, **SAEM}, 3, False),
    "normalised regions that reason": ("vsrn", REASONING, 7, True),
    "normalised regions that reason, fewer than processes": ("vsrn", REASONING, 3, False),
    "normalised patches": ("vsepp", {**SIZES, "feature_dim": 12, "image_encoder": "patches"}, 3, False),
    "normalised conversions": (
        "fdf",
        {"host": "vse_infty", "host_options": {**SIZES, "image_encoder": "residual"}, "conversions": 3}, 3, False,
    ),
}  # fmt: skip

# The encoders have batch normalisation, whose statistics each process computes for itself in micro-batches.
NORMALIZED: tuple[str, dict[str, Any], int] = ("vse_infty", {**SIZES, "image_encoder": "residual"}, 7)
SELECTIVE = {"mining": "selective", "epsilon": 0.3, "selective_divisor": "negatives", "mean_loss": True}
# Discriminators and model take turns.
ADVERSARIAL = {"scenario": "addr", "alternation": "step", "model_regularization_weight": 0.3}
# Model, its settings, settings of the training.
SCENARIOS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "single": ("scan", SIZES, {}),
    "oas": ("scan", SIZES, {"scenario": "oas"}),
    "oss": ("scan", SIZES, {"scenario": "oss"}),
    "mss": ("scan", SIZES, {"scenario": "mss"}),
    "addr": ("scan", SIZES, ADVERSARIAL),
    "addr, regions that reason": ("vsrn", {**SIZES, "graph_layers": 2}, ADVERSARIAL),
    "addr, conversions": ("scan", SIZES, {**ADVERSARIAL, "conversions": 3, "realignment": False}),
    "rvsepp, selective": ("rvsepp", SIZES, {**SELECTIVE, "halve_loss": True}),
    "dbl, mss, relative": (
        "dbl", {**ALIGNED, "word_dropout": 0.0}, {"scenario": "mss", "boosting": "relative", "ema_decay": 0.9},
    ),
    "mss, both, soft": ("scan", SIZES, {"scenario": "mss", "boosting": "both", "soft": True, "ema_decay": 0.9}),
    "mss, soft_rank": ("scan", SIZES, {"scenario": "mss", "boosting": "soft_rank"}),
    "oss, dml": ("scan", SIZES, {"scenario": "oss", "boosting": "dml", "branches": 3}),
    "naaf": ("naaf", {**SIZES, "threshold_words": 2}, {"mining": "all"}),
    "laps, mss": ("laps", {**SIZES, "n_regions": 4}, {"scenario": "mss"}),
    "infonce": ("scan", SIZES, {"loss": "infonce", "mining": "all"}),
    "siglip, mss": ("vsepp", SIZES, {"loss": "siglip", "mining": "all", "mean_loss": True, "scenario": "mss"}),
    "conversions": ("scan", SIZES, {"conversions": 3, "realignment": False}),
    "realigned": ("scan", SIZES, {"conversions": 3}),
    "realigned, kept": ("scan", SIZES, {"conversions": 3, "other_batches": "kept"}),
    "realigned, none": ("scan", SIZES, {"conversions": 3, "other_batches": "none"}),
    "realigned patches, fresh": (
        "scan", {**SIZES, "feature_dim": 12, "image_encoder": "patches"},
        {"conversions": 3, "other_batches": "fresh"},
    ),
    "realigned patches, trained": (
        "scan", {**SIZES, "feature_dim": 12, "image_encoder": "patches"},
        {"conversions": 3, "other_batches": "trained"},
    ),
    "realigned, selective": (
        "vse_infty", {**SIZES, "image_encoder": "residual"}, {"conversions": 3, "other_batches": "kept", **SELECTIVE},
    ),
    # Adam's first steps take the sign of a gradient, which rounding turns where that is near zero: small ones, by which
    # the losses of the steps behind them hardly change.
    "bfloat16": ("scan", SIZES, {"precision": "bfloat16", "mining": "all", "lr": 1e-4}),
}  # fmt: skip
# Discriminators are float32; in float64, autocast casts nothing.
SINGLE_PRECISION = ("addr", "addr, regions that reason", "addr, conversions", "bfloat16")


def made_batch(size: int, ragged: bool, feature_dim: int = SIZES["feature_dim"]) -> Batch:
    """Return random captions and images, including two captions of one image."""
    draw = torch.Generator().manual_seed(size)
    features = torch.randn(size, 4, feature_dim, generator=draw, dtype=torch.float64)
    lengths = torch.randint(3, 7, (size,), generator=draw)
    token_ids = torch.randint(4, SIZES["vocab_size"], (size, 6), generator=draw)
    images = torch.arange(size) // 2
    counts = torch.randint(1, 5, (size,), generator=draw)
    sets = Fragments.from_padded(features, counts) if ragged else features
    return Batch(sets, token_ids, lengths, images, torch.arange(size))


def part_of(batch: Batch, world: World) -> Batch:
    """Return the share of a process as a training reads it."""
    if world.size == 1:
        return batch
    own = torch.arange(len(batch))[world.share(len(batch))]
    own = own if len(own) else torch.zeros(1, dtype=torch.int64)
    features = batch.features.index_select(own) if isinstance(batch.features, Fragments) else batch.features[own]
    part = (features, batch.token_ids[own], batch.lengths[own], batch.image_index[own], batch.caption_index[own])
    return SharedBatch(*part, batch.image_index, tuple(world.counts(len(batch))))


def one_step(name: str, world: World) -> dict[str, Any]:
    """Scores, loss, gradients and running statistics of a step, and the collectives of a second one, in float64."""
    model_name, options, size, ragged = STEPS[name]
    micro_batch = 2 if "micro" in name else None
    torch.manual_seed(0)
    model = models.create(model_name, **options).double().train()
    for part in model.modules():
        if isinstance(part, _BatchNorm | GroupedRowNorm) and part.weight is not None:
            # VSRN's weights start at zero, which would hide what they normalise.
            torch.nn.init.uniform_(part.weight, 0.5, 1.5)
    replicas = Replicas(world, [model], micro_batch)
    batch = part_of(made_batch(size, ragged, options.get("feature_dim", SIZES["feature_dim"])), world)
    images = batch.all_images if isinstance(batch, SharedBatch) else batch.image_index
    result: dict[str, Any] = {}
    for number in range(2):
        model.zero_grad()
        COUNTED.clear()
        scores = replicas.scores(model, batch)
        loss = F_itm.triplet_loss(scores, margin=0.4, positives=images[:, None] == images)
        loss.backward()
        if number == 0:
            kept = ("running", "image_encoder")
            statistics = {key: one.clone() for key, one in model.named_buffers() if any(part in key for part in kept)}
            result |= {"scores": scores.detach(), "loss": loss.detach(), "statistics": statistics}
            result["gradients"] = {key: one.grad.clone() for key, one in model.named_parameters()}
    result["calls"] = dict(COUNTED)
    return result


def made_stepper(scenario: str, world: World, dtype: torch.dtype) -> tuple[Stepper, MatchingModel]:
    """Return the steps of a scenario with all models in `dtype`, and the model that they change."""
    torch.manual_seed(0)
    name, options, changes = SCENARIOS[scenario]
    settings = TrainConfig(**{"data": "", "out": "", "model": name, "lr": 1e-2, "grad_clip": 0.5, **changes})
    model = create_model(settings, options).to(dtype)
    anchor = copy.deepcopy(model)
    with torch.no_grad():
        for weight in anchor.parameters():
            weight.mul_(1.1)
    words = Vocabulary(["<pad>", "<start>", "<end>", "<unk>", *(f"w{number}" for number in range(16))])
    stepper = Stepper(
        settings, model, words, torch.device("cpu"), 4, anchor if settings.scenario == "oas" else None, n_images=4,
        world=world,
    )  # fmt: skip
    stepper.losses.to(dtype)
    for branch in stepper.scenario.branches:
        branch.model.to(dtype)
    return stepper, model


def few_steps(scenario: str, world: World) -> dict[str, Any]:
    """Some steps of Adam in float64, the third on fewer captions than four processes.

    Numbers of each step, gradients of the first one that changes the model, and all weights after the last. In bfloat16
    every step starts from the same weights: a first step of Adam, lr times the sign of a gradient, turns where rounding
    turns that sign.
    """
    dtype = torch.float32 if scenario in SINGLE_PRECISION else torch.float64
    stepper, model = made_stepper(scenario, world, dtype)
    _, options, _ = SCENARIOS[scenario]
    ragged = options.get("image_encoder") != "patches" and "n_regions" not in options
    batches = [part_of(made_batch(size, ragged, options["feature_dim"]), world) for size in (7, 5, 2, 6)]
    batches = [attrs.evolve(batch, features=batch.features.to(dtype)) for batch in batches]
    numbers, gradients = [], {}
    start = copy.deepcopy(model.state_dict())
    for step, batch in enumerate(batches):
        if stepper.config.precision == "bfloat16":
            model.load_state_dict(start)
        numbers.append(stepper(batch, stepper.config.mining, step, diagnose=True))
        if not gradients:
            gradients = {key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None}
    kept = [stepper.scenario.target.model, *stepper.scenario.companions()]
    return {"numbers": numbers, "gradients": gradients, "weights": [one.state_dict() for one in kept]}


def create_model(settings: TrainConfig, options: dict[str, Any]) -> MatchingModel:
    """Return the model of `settings`, with conversions around it if there are any."""
    if settings.conversions is None:
        return models.create(settings.model, **options)
    return models.create("fdf", host=settings.model, host_options=options, conversions=settings.conversions)


def mean_statistics(world: World) -> dict[str, Tensor]:
    """Return the running statistics after a step whose encoders normalise micro-batches."""
    name, options, size = NORMALIZED
    torch.manual_seed(0)
    model = models.create(name, **options).double().train()
    with torch.no_grad():
        Replicas(world, [model], size).scores(model, part_of(made_batch(size, False), world))
    return {key: one.clone() for key, one in model.named_buffers() if "running" in key}


def evaluation_case(world: World, data: Path, run: Path) -> dict[str, Any]:
    """Scores and recalls of a trained model, alone and beside another, with a score matrix and without."""
    words = Vocabulary.from_file(run / "vocab.json")
    dataset = PrecomputedDataset(data, "dev", words)
    model = models.load(run)
    torch.manual_seed(1)
    other = models.create("vsepp", **{**SIZES, "vocab_size": len(words), "feature_dim": 8})
    members = [(model, dataset), (other, dataset)]
    tiles = {"tile_images": 3, "tile_captions": 7, "world": world}
    result: dict[str, Any] = {"scores": score_matrix(model, dataset, **tiles)}
    result["few"] = score_matrix(model, dataset, images=torch.tensor([4]), captions=torch.tensor([3, 9]), world=world)
    with scores_on_disk(members, **tiles, chunk_captions=20) as source:
        assert (source is not None) == world.first
        if source is not None:
            result["on disk"] = source.tile(torch.arange(dataset.n_images), torch.arange(len(dataset)))
            result["sum"] = result["scores"] + score_matrix(other, dataset)
    for streaming in (False, True):
        alone, together = evaluate_ensemble(members, folds=2, streaming=streaming, **tiles)
        result[f"recalls, streaming {streaming}"] = [*alone, together]
    return result
