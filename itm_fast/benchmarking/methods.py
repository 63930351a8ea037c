"""What FDF and ADDR cost beside the training of their hosts, and how exact what they minimise is, on the CPU.

Whole optimiser steps of the published settings, the recipes of the hosts: augmentation, encoders, scores, losses,
backward, clipping, Adam, and all that a method adds. Times are processor time. The accuracy is that of the same step in
float64, for FDF of fewer pairs, and for ADDR that of `itm_fast.reference`.

Inside: `Host`, `FDF_HOSTS`, `ADDR_HOSTS`, `of_batch`, `quick`, `run`, and what they are made of.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import itm_fast.functional as F_itm
from itm_fast import models, reference
from itm_fast.benchmarking.measure import interleave
from itm_fast.benchmarking.run import FORMAT_VERSION, environment
from itm_fast.benchmarking.scenarios import Setup, make_batch, make_vocabulary, processor_time
from itm_fast.models import FDF
from itm_fast.ops.library import build_info
from itm_fast.training import TrainConfig, recipes
from itm_fast.training.scenarios.feature_queue import QueuedBatch
from itm_fast.training.step import Stepper

__all__ = ["ADDR_HOSTS", "FDF_HOSTS", "PUBLISHED", "Host", "measure_addr", "measure_fdf", "of_batch", "quick", "run"]

# What FDF's paper reports of two conversions on CHAN with BERT, in percent: a training step, and the features of pairs.
PUBLISHED = {"host": "CHAN with BERT", "conversions": 2, "step": 14.0, "features": 4.9}
# Training images of Flickr30K, each with its discriminator.
_IMAGES, _STEPS_PER_EPOCH, _BATCHES = 29_000, 1000, 3
# Pairs of the batches on which a step is compared with float64.
_COMPARED = 8


@attrs.frozen
class Host:
    """A model that a method is put around.

    Attributes:
        recipe: the settings of its training, without the method.
        setup: its sizes; `dim` is that of the recipe.
        runs: measured runs by the number of conversions, 0 for the host alone; of ADDR, all under 0.
        options: settings of the model beside those of the recipe.
    """

    recipe: str
    setup: Setup
    runs: Mapping[int, int]
    options: Mapping[str, Any] = attrs.field(factory=dict)


FDF_HOSTS: Mapping[str, Host] = {
    "SCAN": Host("scan-t2i-f30k", Setup("scan"), {0: 2, 1: 2, 2: 2, 4: 1, 8: 1}),
    "VSE-infinity": Host("vse-infty-f30k", Setup("vse_infty"), {0: 2, 1: 2, 2: 2, 4: 2, 8: 2}),
    "CHAN with BERT": Host("chan-bert-coco", Setup("chan", words=30_522), {0: 2, 2: 2, 1: 1, 4: 1, 8: 1}),
}
ADDR_HOSTS: Mapping[str, Host] = {
    "SCAN": Host("addr-scan-f30k", Setup("scan"), {0: 2}),
    "BFAN": Host("addr-bfan-f30k", Setup("bfan"), {0: 2}),
    "VSRN": Host("addr-vsrn-f30k", Setup("vsrn", dim=2048), {0: 2}),
}


def of_batch(host: Host, batch: int) -> Host:
    """The same with so many pairs in a batch."""
    return attrs.evolve(host, setup=attrs.evolve(host.setup, batch=batch))


def quick(host: Host) -> Host:
    """The same at a size that takes seconds."""
    bert = {"bert_dim": 32, "bert_layers": 1, "bert_heads": 2, "bert_hidden_dim": 64}
    with_bert = recipes.load(host.recipe).settings["model_options"].get("text_encoder") == "bert"
    return attrs.evolve(
        host,
        setup=attrs.evolve(host.setup, batch=10, dim=32, features=32, words=100),
        runs=dict.fromkeys(host.runs, 1),
        options={"word_dim": 16} if not with_bert else bert,
    )


def _config(host: Host, **changes: Any) -> TrainConfig:
    options = {"embed_dim": host.setup.dim, **host.options}
    layers = (recipes.load(host.recipe).settings, {"model_options": options}, changes)
    return TrainConfig(data="", out="", **recipes.merge(*layers))


def _model(config: TrainConfig, setup: Setup) -> models.MatchingModel:
    torch.manual_seed(0)
    options = {**config.model_options, "vocab_size": setup.words, "feature_dim": setup.features}
    if config.conversions is None:
        return models.create(config.model, **options)
    return models.create("fdf", host=config.model, host_options=options, conversions=config.conversions)


def _stepper(config: TrainConfig, setup: Setup, model: models.MatchingModel) -> Stepper:
    vocabulary = make_vocabulary(setup)
    return Stepper(config, model, vocabulary, torch.device("cpu"), _STEPS_PER_EPOCH, n_images=_IMAGES)


def make_step(config: TrainConfig, setup: Setup, model: models.MatchingModel) -> Callable[[], dict[str, float]]:
    """One optimiser step after another, of batches of other images in turn.

    From the first on an optimiser has its moments, and a queue is full.
    """
    stepper = _stepper(config, setup, model)
    few = make_batch(attrs.evolve(setup, batch=min(_COMPARED, setup.batch)), _BATCHES)
    for number in range(2 if config.trains_discriminators else 1):
        stepper(few, "hardest", number)
    batches = [make_batch(setup, number) for number in range(_BATCHES)]
    if isinstance(model, FDF):
        _fill_queue(stepper, batches[-1])
    numbers = itertools.count()

    def step() -> dict[str, float]:
        number = next(numbers)
        return stepper(batches[number % _BATCHES], "hardest", number)

    return step


def _fill_queue(stepper: Stepper, batch: Any) -> None:
    """As if the batch had been that of all steps before."""
    scenario: Any = stepper.scenario
    with torch.no_grad():
        images = scenario.model.base_images(batch.features)
        captions = scenario.model.base_captions(batch.token_ids, batch.lengths)
    scenario.queue.extend([QueuedBatch(images, captions, batch.image_index, False)] * (scenario.queue.maxlen or 0))


def _features(model: models.MatchingModel, setup: Setup) -> dict[str, Callable[[], Any]]:
    """The embeddings of a batch of images, and of one of captions, without gradient, in evaluation mode."""
    batch = make_batch(setup)

    def images() -> None:
        with torch.no_grad():
            model.eval().encode_images(batch.features)

    def captions() -> None:
        with torch.no_grad():
            model.eval().encode_captions(batch.token_ids, batch.lengths)

    return {"images": images, "captions": captions}


def _multiply_adds(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops()) // 2


def measure_fdf(host: Host, progress: Callable[[str], None]) -> dict[str, Any]:
    """Times of steps and features by the number of conversions, with the accuracy of each.

    Those of several runs are interleaved; the others come after them, one by one, so that fewer models lie in memory.
    """
    rows: dict[str, dict[str, Any]] = {}
    for count in host.runs:
        progress(f"{count} conversions, accuracy")
        rows[str(count)] = {"accuracy": step_accuracy(host, count)}
    once = [count for count, runs in host.runs.items() if runs == 1]
    for counts in ([count for count in host.runs if count not in once], *([count] for count in once)):
        calls: dict[str, Callable[[], Any]] = {}
        for count in counts:
            config = _config(host, **_conversions(count))
            model = _model(config, host.setup)
            calls |= {f"{count} {name}": call for name, call in _features(model, host.setup).items()}
            calls[f"{count} step"] = make_step(config, host.setup, model)
            rows[str(count)] |= _sizes(model, host.setup)
        repeats = {name: host.runs[int(name.split()[0])] for name in calls}
        for name, timing in interleave(calls, repeats, processor_time, progress).items() if calls else ():
            number, what = name.split()
            rows[number][what] = timing.as_dict()
    return {"recipe": host.recipe, "setup": host.setup.as_dict(), "rows": rows}


def _conversions(count: int) -> dict[str, int]:
    return {"conversions": count} if count else {}


def _sizes(model: models.MatchingModel, setup: Setup) -> dict[str, Any]:
    """Multiply-adds of the features of a pair, of few, and the weights of a conversion of regions."""
    few = attrs.evolve(setup, batch=min(_COMPARED, setup.batch))
    counted = {name: _multiply_adds(call) // few.batch for name, call in _features(model, few).items()}
    if not isinstance(model, FDF):
        return {"multiply_adds": counted}
    weights = sum(parameter.numel() for parameter in model.images.conversions.parameters())
    return {"multiply_adds": counted, "weights": weights // model.images.count}


def step_accuracy(host: Host, count: int) -> dict[str, float]:
    """The relative error of the loss and of the gradient of all weights of a step in float32, against float64.

    Of `_COMPARED` pairs, without what is random (dropout, augmentation) and without clipping.
    """
    setup = attrs.evolve(host.setup, batch=min(_COMPARED, host.setup.batch))
    still: dict[str, Any] = {"text_augmentation": 0.0, "region_augmentation": 0.0, "grad_clip": 0.0}
    options: dict[str, Any] = {}
    if recipes.load(host.recipe).settings["model_options"].get("text_encoder") == "bert":
        options = {"bert_dropout": 0.0}
    config = _config(attrs.evolve(host, options={**host.options, **options}), **still, **_conversions(count))
    model = _model(config, setup)
    found = [_loss_and_gradients(config, setup, one) for one in (model, copy.deepcopy(model).double())]
    (loss, gradients), (exact_loss, exact) = found
    return {
        "loss_error": abs(loss - exact_loss) / abs(exact_loss),
        "gradient_error": _relative_error(gradients, exact),
    }


def _loss_and_gradients(config: TrainConfig, setup: Setup, model: models.MatchingModel) -> tuple[float, list[Tensor]]:
    dtype = next(model.parameters()).dtype
    batch, other = (
        attrs.evolve(one, features=one.features.to(dtype)) for one in (make_batch(setup), make_batch(setup, 1))
    )
    stepper = _stepper(config, setup, model)
    if isinstance(model, FDF):
        _fill_queue(stepper, other)
    loss = stepper(batch, "hardest", 0)["loss"]
    return loss, [one.grad for one in model.parameters() if one.grad is not None]


def _relative_error(found: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The norm of the difference of all numbers over the norm of the exact ones."""
    pairs = list(zip(found, exact, strict=True))
    difference = sum(float((one.detach().double() - other.detach()).square().sum()) for one, other in pairs)
    return float((difference / sum(float(other.detach().square().sum()) for _, other in pairs)) ** 0.5)


def measure_addr(host: Host, progress: Callable[[str], None]) -> dict[str, Any]:
    """Times of ordinary steps, of those of the ablation without discriminators, and of both phases, interleaved."""
    settings = {field.name: field.default for field in attrs.fields(TrainConfig)}
    plain = {name: settings[name] for name in recipes.load(host.recipe).settings if name in _OF_ADDR}
    configs = {"plain": _config(host, **plain), "base": _config(host, **{**plain, "scenario": "addr", "addr": "base"})}
    calls: dict[str, Callable[[], Any]] = {}
    for name, config in configs.items():
        calls[name] = make_step(config, host.setup, _model(config, host.setup))
    full = _config(host, alternation="step")
    both = make_step(full, host.setup, _model(full, host.setup))
    # In turns: the discriminators learn first.
    calls |= {phase: partial(_phase, both, phase) for phase in ("discriminators", "model")}
    timings = interleave(calls, dict.fromkeys(calls, host.runs[0]), processor_time, progress)
    progress("accuracy")
    return {
        "recipe": host.recipe,
        "setup": host.setup.as_dict(),
        "images": _IMAGES,
        "rows": {name: timing.as_dict() for name, timing in timings.items()},
        "accuracy": domain_accuracy(host),
    }


_OF_ADDR = (
    "scenario", "addr", "adversarial_weight", "regularization_weight", "domain_margin", "alternation",
)  # fmt: skip


def _phase(step: Callable[[], dict[str, float]], phase: str) -> None:
    if ("loss" in step()) != (phase == "model"):
        raise RuntimeError(f"a step of the other phase than {phase}: each has to be measured as often")


def domain_accuracy(host: Host) -> dict[str, float]:
    """The relative errors of risks and regularisation, and of all gradients, on the host's fragments.

    Against `itm_fast.reference` in float64, for discriminators as after some training.
    """
    config = _config(host)
    model: Any = _model(config, host.setup).eval()
    batch = make_batch(host.setup)
    with torch.no_grad():
        encoded = model.encode_fragments(batch.features, batch.token_ids, batch.lengths)
        rows, columns = F_itm.hardest_negatives(model.score(encoded.images, encoded.captions))
    weights = torch.randn(host.setup.batch, encoded.regions.values.shape[1])
    tensors = (encoded.regions.values, encoded.words.values, weights, torch.randn(host.setup.batch))
    results = []
    for function, dtype in (
        (F_itm.domain_regularization, torch.float32), (reference.domain_regularization, torch.float64),
    ):  # fmt: skip
        leaves = [one.detach().to(dtype).requires_grad_() for one in tensors]
        sides = encoded.regions.with_values(leaves[0]), encoded.words.with_values(leaves[1])
        values = function(sides[0], sides[1], leaves[2], leaves[3], rows[1], columns[1], margin=config.domain_margin)
        total = values[0].sum() + config.regularization_weight * values[1].sum()
        gradients = torch.autograd.grad(total, leaves)
        results.append((values, gradients))
    (values, gradients), (exact, exact_gradients) = results
    return {
        "loss_error": _relative_error(values, exact),
        "gradient_error": _relative_error(gradients, exact_gradients),
    }


def _named(progress: Callable[[str], None], row: str, what: str) -> None:
    progress(f"{row}: {what}")


def run(
    fdf: Mapping[str, Host],
    addr: Mapping[str, Host],
    command: str,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures all hosts on one thread; what the JSON file holds."""
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    measured: dict[str, dict[str, Any]] = {"fdf": {}, "addr": {}}
    for method, hosts, measure in (("addr", addr, measure_addr), ("fdf", fdf, measure_fdf)):
        for name, host in hosts.items():
            measured[method][name] = measure(host, partial(_named, progress, f"{method}, {name}"))
    where = {**environment(1, build_info()), "command": command, "load": [before, os.getloadavg()[0]]}
    return {"format_version": FORMAT_VERSION, "environment": where, "published": PUBLISHED, **measured}
