"""The optimiser steps for measuring the costs of FDF and ADDR: published settings of their hosts, synthetic batches.

Inside: `Host`, `FDF_HOSTS`, `ADDR_HOSTS`, `of_batch`, `quick`; `make_config`, `make_model`, `make_stepper`,
`make_step`, `make_start`, `make_features`, `fill_queue`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from benchmarks.scenarios import Setup, make_batch, make_vocabulary
from itm_fast import models
from itm_fast.data import Batch
from itm_fast.models import FDF
from itm_fast.training import TrainConfig, recipes
from itm_fast.training.fdf.feature_queue import QueuedBatch, QueuedInputs
from itm_fast.training.step import Stepper

__all__ = [
    "ADDR_HOSTS",
    "COMPARED",
    "FDF_HOSTS",
    "IMAGES",
    "Host",
    "fill_queue",
    "make_config",
    "make_features",
    "make_model",
    "make_start",
    "make_step",
    "make_stepper",
    "of_batch",
    "quick",
]

# Training images of Flickr30K, each with one discriminator.
IMAGES, _STEPS_PER_EPOCH, _BATCHES = 29_000, 1000, 3
# Pairs in the batches that compare a step with float64.
COMPARED = 8


@attrs.frozen
class Host:
    """A host model for a method.

    Attributes:
        recipe: the settings of its training, without the method.
        setup: its sizes; `dim` is that of the recipe.
        runs: measured runs by the number of conversions, 0 for the host without the method; for ADDR, only 0.
        options: model settings in addition to the recipe's.
        again: a number of conversions, one of `runs`. Its step is measured equally often with the other batches encoded
            again, without and with gradients, and all forms also with memory. None to leave this out.
    """

    recipe: str
    setup: Setup
    runs: Mapping[int, int]
    options: Mapping[str, Any] = attrs.field(factory=dict)
    again: int | None = None


FDF_HOSTS: Mapping[str, Host] = {
    "SCAN": Host("scan-t2i-f30k", Setup("scan"), {0: 3, 1: 3, 2: 3, 4: 1, 8: 1}, again=2),
    "VSE-infinity": Host("vse-infty-f30k", Setup("vse_infty"), {0: 3, 1: 3, 2: 3, 4: 3, 8: 3}),
    "CHAN with BERT": Host("chan-bert-coco", Setup("chan", words=30_522), {0: 5, 2: 5, 1: 1, 4: 1, 8: 1}, again=2),
}
ADDR_HOSTS: Mapping[str, Host] = {
    "SCAN": Host("addr-scan-f30k", Setup("scan"), {0: 2}),
    "BFAN": Host("addr-bfan-f30k", Setup("bfan"), {0: 2}),
    "VSRN": Host("addr-vsrn-f30k", Setup("vsrn", dim=2048), {0: 2}),
}


def of_batch(host: Host, batch: int) -> Host:
    """Return the same host with this many pairs per batch."""
    return attrs.evolve(host, setup=attrs.evolve(host.setup, batch=batch))


def quick(host: Host) -> Host:
    """Return the same host at a size that takes seconds."""
    bert = {"bert_dim": 32, "bert_layers": 1, "bert_heads": 2, "bert_hidden_dim": 64}
    with_bert = recipes.load(host.recipe).settings["model_options"].get("text_encoder") == "bert"
    return attrs.evolve(
        host,
        setup=attrs.evolve(host.setup, batch=10, dim=32, features=32, words=100),
        runs=dict.fromkeys(host.runs, 1),
        options={"word_dim": 16} if not with_bert else bert,
    )


def make_config(host: Host, **changes: Any) -> TrainConfig:
    """Return the recipe's settings with the host's size and `changes`."""
    options = {"embed_dim": host.setup.dim, **host.options}
    layers = (recipes.load(host.recipe).settings, {"model_options": options}, changes)
    return TrainConfig(data="", out="", **recipes.merge(*layers))


def make_model(config: TrainConfig, setup: Setup) -> models.MatchingModel:
    """Create the model with the same weights each time."""
    torch.manual_seed(0)
    options = {**config.model_options, "vocab_size": setup.words, "feature_dim": setup.features}
    if config.conversions is None:
        return models.create(config.model, **options)
    return models.create("fdf", host=config.model, host_options=options, conversions=config.conversions)


def make_stepper(config: TrainConfig, setup: Setup, model: models.MatchingModel) -> Stepper:
    """Create the training step on the CPU, for as many images as Flickr30K has."""
    vocabulary = make_vocabulary(setup)
    return Stepper(config, model, vocabulary, torch.device("cpu"), _STEPS_PER_EPOCH, n_images=IMAGES)


def make_step(config: TrainConfig, setup: Setup, model: models.MatchingModel) -> Callable[[], dict[str, float]]:
    """Return a function that takes one optimiser step per call, on several batches in turn.

    Before it returns, the optimiser has its moments and the queue is full.
    """
    stepper = make_stepper(config, setup, model)
    few = make_batch(attrs.evolve(setup, batch=min(COMPARED, setup.batch)), _BATCHES)
    for number in range(2 if config.trains_discriminators else 1):
        stepper(few, "hardest", number)
    batches = [make_batch(setup, number) for number in range(_BATCHES)]
    if isinstance(model, FDF):
        fill_queue(stepper, batches[-1])
    numbers = itertools.count()

    def step() -> dict[str, float]:
        number = next(numbers)
        return stepper(batches[number % _BATCHES], "hardest", number)

    return step


def make_start(host: Host, changes: Mapping[str, Any], small: bool = False) -> Callable[[], None]:
    """Create what a training holds in memory at a step: batches, model, optimiser, full queue, and the step."""
    host = quick(host) if small else host

    def run() -> None:
        config = make_config(host, **changes)
        make_step(config, host.setup, make_model(config, host.setup))()

    return run


def fill_queue(stepper: Stepper, batch: Batch) -> None:
    """Fill the queue as if all previous steps had used the batch."""
    scenario: Any = stepper.scenario
    kept: QueuedBatch | QueuedInputs
    if scenario.fresh:
        kept = QueuedInputs(batch.features, batch.token_ids, batch.lengths, batch.image_index, False)
    else:
        with torch.no_grad():
            images = scenario.model.base_images(batch.features)
            captions = scenario.model.base_captions(batch.token_ids, batch.lengths)
        kept = QueuedBatch(images, captions, batch.image_index, False)
    scenario.queue.extend([kept] * (scenario.queue.maxlen or 0))


def make_features(model: models.MatchingModel, setup: Setup) -> dict[str, Callable[[], Any]]:
    """Compute the embeddings of a batch of images and of one of captions, without gradient, in evaluation mode."""
    batch = make_batch(setup)

    def images() -> None:
        with torch.no_grad():
            model.eval().encode_images(batch.features)

    def captions() -> None:
        with torch.no_grad():
            model.eval().encode_captions(batch.token_ids, batch.lengths)

    return {"images": images, "captions": captions}
