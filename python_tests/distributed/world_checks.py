"""All that several processes do together in the tests, and the bytes that each receives in a step: by `helpers.worlds`.

Inside: `TRAVELS`, `bytes_of_a_step`, `check_worlds`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from itm_fast import Fragments, models
from itm_fast.data import Batch
from itm_fast.distributed import Launch, World, joined
from itm_fast.models import FDF, MatchingModel
from itm_fast.training.replicas import Replicas
from itm_fast.training.shared_norms import shared_norms
from python_tests.distributed.collectives import RECEIVED, counted
from python_tests.distributed.world_cases import (
    SCENARIOS,
    SIZES,
    STEPS,
    evaluation_case,
    few_steps,
    made_batch,
    made_stepper,
    mean_statistics,
    one_step,
    part_of,
)  # fmt: skip

# For the first cases, the steps of a plain model are counted; for the others, those of a scenario.
TRAVELS = (
    "scan", "vsepp", "saf", "normalised", "scan in micro-batches", "normalised in micro-batches", "addr", "realigned",
    "realigned, kept", "realigned, none",
)  # fmt: skip
# Two and four processes share these captions evenly, with equal numbers of tokens.
EVEN, LENGTH = 8, 5


def bytes_of_a_step(name: str, world: World) -> dict[str, Any]:
    """What the second step of a model in float32 receives, (collective, bytes) in their order, and of how many numbers.

    Before it stands the word on errors and stops. Numbers are those of docs/performance/scaling.md: `B` captions, `P`
    weights, of the whole batch `n` in the embeddings of images, `m` in words, `b` and `t` in the base features of
    images and captions, `l` token ids; `c` columns of batch normalisation, `r` running statistics that each process has
    apart, `s` bytes a number.
    """
    whole = made_batch(EVEN, False, SIZES["feature_dim"])
    whole = attrs.evolve(
        whole,
        features=whole.features.float(),
        token_ids=whole.token_ids[:, :LENGTH],
        lengths=torch.full_like(whole.lengths, LENGTH),
    )
    batch = part_of(whole, world)
    model, step = (_of_a_scenario if name in SCENARIOS else _of_a_model)(name, world, batch)
    # Steps of ADDR's model take turns with those of the discriminators.
    for _ in range(4 if name == "addr" else 2):
        RECEIVED.clear()
        world.agree()
        step()
    received = list(RECEIVED)
    apart = [key for key, _ in model.named_buffers() if "running" in key and not _is_shared(model, key)]
    with torch.no_grad():
        images, captions = model.eval().encode(whole.features, whole.token_ids, whole.lengths, None)
        bases: tuple[Any, ...] = ()
        if isinstance(model, FDF):
            bases = (model.base_images(whole.features), model.base_captions(whole.token_ids, whole.lengths))
    return {
        "received": received,
        "B": EVEN,
        "P": sum(one.numel() for one in model.parameters()),
        "n": _numbers(images),
        "m": _numbers(captions),
        **{key: _numbers(base) for key, base in zip("bt", bases, strict=False)},
        "l": whole.token_ids.numel(),
        "c": sum(norm.num_features for norm in shared_norms(model)),
        "r": sum(model.get_buffer(key).numel() for key in apart),
        "s": 4,
    }


def _of_a_model(name: str, world: World, batch: Batch) -> tuple[MatchingModel, Callable[[], object]]:
    model_name, options, *_ = STEPS[name.removesuffix(" in micro-batches")]
    torch.manual_seed(0)
    model = models.create(model_name, **options).train()
    replicas = Replicas(world, [model], 2 if "micro" in name else None)
    return model, lambda: replicas.scores(model, batch).sum().backward()


def _of_a_scenario(name: str, world: World, batch: Batch) -> tuple[MatchingModel, Callable[[], object]]:
    stepper, model = made_stepper(name, world, torch.float32)
    return model, lambda: stepper(batch, "hardest", 0)


def _numbers(sets: Fragments | Tensor) -> int:
    return (sets.values if isinstance(sets, Fragments) else sets).numel()


def _is_shared(model: MatchingModel, buffer: str) -> bool:
    return any(model.get_submodule(buffer.rpartition(".")[0]) is norm for norm in shared_norms(model))


def check_worlds(rank: int, value: dict[str, str]) -> None:
    """Run all cases with four processes and with the first two; every process writes its results."""
    for name in ("all_gather", "all_to_all_single", "all_reduce"):
        setattr(dist, name, counted(name, getattr(dist, name)))
    with joined("cpu") as four:
        pair = World(Launch(rank, 2, rank, 2), dist.new_group([0, 1]))
        found = {}
        for world in (four, pair):
            if rank < world.size:
                found[world.size] = {name: one_step(name, world) for name in STEPS}
                found[world.size] |= {name: few_steps(name, world) for name in SCENARIOS}
                found[world.size]["bytes"] = {name: bytes_of_a_step(name, world) for name in TRAVELS}
                found[world.size]["statistics"] = mean_statistics(world)
                found[world.size]["evaluation"] = evaluation_case(world, Path(value["data"]), Path(value["run"]))
        torch.save(found, Path(value["out"]) / f"{rank}.pt")
