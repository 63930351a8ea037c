"""Measure the costs of FDF and ADDR compared with training their hosts, and the accuracy of their losses, on the CPU.

Whole optimiser steps with published settings, the recipes of the hosts: augmentation, encoders, scores, losses,
backward, clipping, Adam, and everything that a method adds. Times are processor time; memory is that of separate
processes. Accuracy is relative to the same step in float64: for FDF with fewer pairs, for ADDR `itm_fast.reference`.

Inside: `measure_fdf`, `measure_addr`, `run`, and what they are made of; the steps are those of `method_steps.py`.

python -m benchmarks.methods --json benchmarks/results/methods.json   # 35 minutes, 10 GB of memory
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import itm_fast.functional as F_itm
from benchmarks.method_steps import (
    ADDR_HOSTS,
    COMPARED,
    FDF_HOSTS,
    IMAGES,
    Host,
    fill_queue,
    make_config,
    make_features,
    make_model,
    make_start,
    make_step,
    make_stepper,
    of_batch,
    quick,
)
from benchmarks.methods_table import markdown
from benchmarks.scenarios import Setup, make_batch, memory_given_back, processor_time
from itm_fast import models, reference
from itm_fast.benchmarking.measure import interleave, peak_memory
from itm_fast.benchmarking.run import FORMAT_VERSION
from itm_fast.files.environment import environment
from itm_fast.models import FDF
from itm_fast.ops.library import build_info
from itm_fast.training import TrainConfig, recipes

__all__ = ["PUBLISHED", "measure_addr", "measure_fdf", "run"]

# The FDF paper's costs of two conversions on CHAN with BERT, in percent: a training step, and the features of pairs.
PUBLISHED = {"host": "CHAN with BERT", "conversions": 2, "step": 14.0, "features": 4.9}
# Rows with the other batches encoded again.
_AGAIN = ("fresh", "trained")


def _multiply_adds(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops()) // 2


def measure_fdf(host: Host, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure times of steps and features by the number of conversions, with their accuracy, and steps of `host.again`.

    Rows with several runs are interleaved. The others follow one by one, so that fewer models are in memory, as do the
    processes that measure memory.
    """
    changes = {str(count): _conversions(count, "kept") for count in host.runs}
    repeats = {str(count): runs for count, runs in host.runs.items()}
    rows: dict[str, dict[str, Any]] = {}
    again = () if host.again is None else _AGAIN
    for name in again:
        changes[name] = _conversions(host.again, name)
        repeats[name] = host.runs[host.again]
    for name, changed in changes.items():
        progress(f"{name if name in _AGAIN else f'{name} conversions'}, accuracy")
        rows[name] = {"accuracy": step_accuracy(host, changed)}
    groups = [[name for name, runs in repeats.items() if runs > 1]]
    groups += [[name] for name, runs in repeats.items() if runs == 1]
    for group in filter(None, groups):
        for name, measured in _timed(host, {name: changes[name] for name in group}, repeats, progress).items():
            rows[name] |= measured
    for name in ("0", str(host.again), *again) if again else ():
        progress(f"{name}, memory")
        with memory_given_back():
            rows[name]["peak_bytes"] = peak_memory(make_start, host, changes[name], threads=1)
    anew = {str(host.again): {name: rows.pop(name) for name in again}} if again else {}
    return {"recipe": host.recipe, "setup": host.setup.as_dict(), "rows": rows, "again": anew}


def _conversions(count: int, other_batches: str) -> dict[str, Any]:
    """Return the settings of training with `count` conversions, 0 for the host alone."""
    if count < 2:
        return {"conversions": count or None}  # A single conversion sees no other batch.
    return {"conversions": count, "other_batches": other_batches}


def _timed(
    host: Host,
    changes: Mapping[str, Mapping[str, Any]],
    repeats: Mapping[str, int],
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Measure steps, features and sizes of each row, interleaved; rows `_AGAIN` have the features with kept batches."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in changes}
    calls: dict[str, Callable[[], Any]] = {}
    for name, changed in changes.items():
        config = make_config(host, **changed)
        model = make_model(config, host.setup)
        if name not in _AGAIN:
            calls |= {f"{name} {what}": call for what, call in make_features(model, host.setup).items()}
            rows[name] |= _sizes(model, host.setup)
        calls[f"{name} step"] = make_step(config, host.setup, model)
    runs = {call: repeats[call.split()[0]] for call in calls}
    for call, timing in interleave(calls, runs, processor_time, progress).items():
        name, what = call.split()
        rows[name][what] = timing.as_dict()
    return rows


def _sizes(model: models.MatchingModel, setup: Setup) -> dict[str, Any]:
    """Return multiply-adds of a pair's features, measured on few, and the number of weights of a region conversion."""
    few = attrs.evolve(setup, batch=min(COMPARED, setup.batch))
    counted = {name: _multiply_adds(call) // few.batch for name, call in make_features(model, few).items()}
    if not isinstance(model, FDF):
        return {"multiply_adds": counted}
    weights = sum(parameter.numel() for parameter in model.images.conversions.parameters())
    return {"multiply_adds": counted, "weights": weights // model.images.count}


def step_accuracy(host: Host, changes: Mapping[str, Any]) -> dict[str, float]:
    """Return relative errors of a step's loss and gradient in float32, against float64.

    The step has the host's settings with `changes`, `COMPARED` pairs, no randomness (dropout, augmentation) and no
    clipping.
    """
    setup = attrs.evolve(host.setup, batch=min(COMPARED, host.setup.batch))
    still: dict[str, Any] = {"text_augmentation": 0.0, "region_augmentation": 0.0, "grad_clip": 0.0}
    options: dict[str, Any] = {}
    if recipes.load(host.recipe).settings["model_options"].get("text_encoder") == "bert":
        options = {"bert_dropout": 0.0}
    config = make_config(attrs.evolve(host, options={**host.options, **options}), **still, **changes)
    model = make_model(config, setup)
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
    stepper = make_stepper(config, setup, model)
    if isinstance(model, FDF):
        fill_queue(stepper, other)
    loss = stepper(batch, "hardest", 0)["loss"]
    return loss, [one.grad for one in model.parameters() if one.grad is not None]


def _relative_error(found: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """Return the norm of the difference of all numbers over the norm of the exact ones."""
    pairs = list(zip(found, exact, strict=True))
    difference = sum(float((one.detach().double() - other.detach()).square().sum()) for one, other in pairs)
    return float((difference / sum(float(other.detach().square().sum()) for _, other in pairs)) ** 0.5)


def measure_addr(host: Host, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure ordinary steps, steps of the ablation without discriminators, and steps of both phases, interleaved."""
    settings = {field.name: field.default for field in attrs.fields(TrainConfig)}
    plain = {name: settings[name] for name in recipes.load(host.recipe).settings if name in _OF_ADDR}
    base = {**plain, "scenario": "addr", "addr": "base"}
    configs = {"plain": make_config(host, **plain), "base": make_config(host, **base)}
    calls: dict[str, Callable[[], Any]] = {}
    for name, config in configs.items():
        calls[name] = make_step(config, host.setup, make_model(config, host.setup))
    full = make_config(host, alternation="step")
    both = make_step(full, host.setup, make_model(full, host.setup))
    # Phases alternate; the discriminators learn first.
    calls |= {phase: partial(_phase, both, phase) for phase in ("discriminators", "model")}
    timings = interleave(calls, dict.fromkeys(calls, host.runs[0]), processor_time, progress)
    progress("accuracy")
    return {
        "recipe": host.recipe,
        "setup": host.setup.as_dict(),
        "images": IMAGES,
        "rows": {name: timing.as_dict() for name, timing in timings.items()},
        "accuracy": domain_accuracy(host),
    }


_OF_ADDR = (
    "scenario", "addr", "adversarial_weight", "regularization_weight", "domain_margin",
    "risk_aggregation", "alternation",
)  # fmt: skip


def _phase(step: Callable[[], dict[str, float]], phase: str) -> None:
    if ("loss" in step()) != (phase == "model"):
        raise RuntimeError(f"a step of the other phase than {phase}; both must be measured equally often")


def domain_accuracy(host: Host) -> dict[str, float]:
    """Return the relative errors of risks and regularisation, and of all gradients, on the host's fragments.

    Compared with `itm_fast.reference` in float64; the discriminators have weights as after some training.
    """
    config = make_config(host)
    model: Any = make_model(config, host.setup).eval()
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
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all hosts on one thread; return the content of the JSON file."""
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    measured: dict[str, dict[str, Any]] = {"fdf": {}, "addr": {}}
    for method, hosts, measure in (("addr", addr, measure_addr), ("fdf", fdf, measure_fdf)):
        for name, host in hosts.items():
            measured[method][name] = measure(host, partial(_named, progress, f"{method}, {name}"))
    where = {**environment(1, build_info()), "load": [before, os.getloadavg()[0]]}
    return {"format_version": FORMAT_VERSION, "environment": where, "published": PUBLISHED, **measured}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure FDF and ADDR compared with ordinary training.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--batch", type=int, default=128, help="pairs per batch (default 128)")
    parser.add_argument("--quick", action="store_true", help="use small sizes for a one-minute trial")
    options = parser.parse_args()
    fdf, addr = (
        {name: quick(host) if options.quick else of_batch(host, options.batch) for name, host in hosts.items()}
        for hosts in (FDF_HOSTS, ADDR_HOSTS)
    )
    results = run(fdf, addr, progress=lambda what: print(what, flush=True))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
