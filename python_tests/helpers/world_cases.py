"""Steps and evaluations that several processes do together, and one alone: run by `helpers.worlds`.

Inside: `STEPS`, `SCENARIOS`, `one_step`, `few_steps`, `mean_statistics`, `evaluation_case`, `check_worlds`.
"""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, models
from itm_fast.data import Batch, PrecomputedDataset, Vocabulary
from itm_fast.distributed import Launch, World, joined
from itm_fast.evaluation import evaluate_ensemble, score_matrix
from itm_fast.training import TrainConfig
from itm_fast.training.replicas import Replicas
from itm_fast.training.shares import SharedBatch
from itm_fast.training.step import Stepper

SIZES = {"vocab_size": 20, "feature_dim": 10, "embed_dim": 12, "word_dim": 6}
ALIGNED = {**SIZES, "alignment_dim": 8}
GLOBAL = {**ALIGNED, "word_dropout": 0.0, "attention_dropout": 0.0, "n_regions": 4}
# Name, model, settings, captions of a batch, whether images differ in regions.
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
}  # fmt: skip


# With batch normalisation in the encoders, whose statistics each process takes for itself.
NORMALIZED: tuple[str, dict[str, Any], int] = ("vse_infty", {**SIZES, "image_encoder": "residual"}, 7)
SCENARIOS = ("single", "oas", "oss", "mss", "addr")


def made_batch(size: int, ragged: bool) -> Batch:
    """Captions and images of random numbers, two captions of one image among them."""
    draw = torch.Generator().manual_seed(size)
    features = torch.randn(size, 4, SIZES["feature_dim"], generator=draw, dtype=torch.float64)
    lengths = torch.randint(3, 7, (size,), generator=draw)
    token_ids = torch.randint(4, SIZES["vocab_size"], (size, 6), generator=draw)
    images = torch.arange(size) // 2
    counts = torch.randint(1, 5, (size,), generator=draw)
    sets = Fragments.from_padded(features, counts) if ragged else features
    return Batch(sets, token_ids, lengths, images, torch.arange(size))


def part_of(batch: Batch, world: World) -> Batch:
    """The share of a process, as a training reads it."""
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
    replicas = Replicas(world, [model], micro_batch)
    batch = part_of(made_batch(size, ragged), world)
    images = batch.all_images if isinstance(batch, SharedBatch) else batch.image_index
    result: dict[str, Any] = {}
    for number in range(2):
        model.zero_grad()
        _COUNTED.clear()
        scores = replicas.scores(model, batch)
        loss = F_itm.triplet_loss(scores, margin=0.4, positives=images[:, None] == images)
        loss.backward()
        if number == 0:
            statistics = {key: one.clone() for key, one in model.named_buffers() if "running" in key}
            result |= {"scores": scores.detach(), "loss": loss.detach(), "statistics": statistics}
            result["gradients"] = {key: one.grad.clone() for key, one in model.named_parameters()}
    result["calls"] = dict(_COUNTED)
    return result


def few_steps(scenario: str, world: World) -> dict[str, Any]:
    """Some steps of Adam in float64, the third on fewer captions than four processes: numbers, and all weights.

    In the scenario addr discriminators and model take turns, in float32.
    """
    torch.manual_seed(0)
    # Discriminators are float32.
    dtype = torch.float32 if scenario == "addr" else torch.float64
    model = models.create("scan", **SIZES).to(dtype)
    anchor = copy.deepcopy(model)
    with torch.no_grad():
        for weight in anchor.parameters():
            weight.mul_(1.1)
    turns = {"alternation": "step", "model_regularization_weight": 0.3} if scenario == "addr" else {}
    settings = TrainConfig(data="", out="", model="scan", scenario=scenario, lr=1e-2, grad_clip=0.5, **turns)
    words = Vocabulary(["<pad>", "<start>", "<end>", "<unk>", *(f"w{number}" for number in range(16))])
    stepper = Stepper(
        settings, model, words, torch.device("cpu"), 4, anchor if scenario == "oas" else None, n_images=4, world=world
    )
    for branch in stepper.scenario.branches:
        branch.model.to(dtype)
    batches = [part_of(made_batch(size, True), world) for size in (7, 5, 2, 6)]
    batches = [attrs.evolve(batch, features=batch.features.to(dtype)) for batch in batches]
    numbers = [stepper(batch, "hardest", step, diagnose=True) for step, batch in enumerate(batches)]
    kept = [stepper.scenario.target.model, *stepper.scenario.companions()]
    return {"numbers": numbers, "weights": [one.state_dict() for one in kept]}


def mean_statistics(world: World) -> dict[str, Tensor]:
    """The running statistics that a step leaves where encoders normalise batches."""
    name, options, size = NORMALIZED
    torch.manual_seed(0)
    model = models.create(name, **options).double().train()
    with torch.no_grad():
        Replicas(world, [model]).scores(model, part_of(made_batch(size, False), world))
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
    for streaming in (False, True):
        alone, together = evaluate_ensemble(members, folds=2, streaming=streaming, **tiles)
        result[f"recalls, streaming {streaming}"] = [*alone, together]
    return result


_COUNTED: Counter[str] = Counter()


def check_worlds(rank: int, value: dict[str, str]) -> None:
    """All cases in the worlds of four processes and of the first two; every process writes what it found."""
    for name in ("all_gather", "all_to_all_single", "all_reduce"):
        setattr(dist, name, _counting(name, getattr(dist, name)))
    with joined("cpu") as four:
        pair = World(Launch(rank, 2, rank, 2), dist.new_group([0, 1]))
        found = {}
        for world in (four, pair):
            if rank < world.size:
                found[world.size] = {name: one_step(name, world) for name in STEPS}
                found[world.size] |= {name: few_steps(name, world) for name in SCENARIOS}
                found[world.size]["statistics"] = mean_statistics(world)
                found[world.size]["evaluation"] = evaluation_case(world, Path(value["data"]), Path(value["run"]))
        torch.save(found, Path(value["out"]) / f"{rank}.pt")


def _counting(name: str, function: Any) -> Any:
    def counting(*arguments: Any, **options: Any) -> Any:
        # What processes agree on is no tensor of theirs.
        if not (isinstance(arguments[0], Tensor) and arguments[0].dtype == torch.int32):
            _COUNTED[name] += 1
        return function(*arguments, **options)

    return counting
