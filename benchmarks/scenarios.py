"""Measure the training scenarios of Deep Boosting Learning compared with ordinary training, on the CPU.

Whole optimiser steps at published sizes: encoders, scores, losses, backward, clipping, Adam, and what a scenario adds.
Times are processor time, which other work on the machine affects less than wall-clock time.

Inside: `Setup`, `make_batch`, `make_vocabulary`, `make_step`, `make_forward`, `make_start`, `run`, `markdown`;
`percent`, `processor_time` and `memory_given_back`, which measure.

python -m benchmarks.scenarios --json benchmarks/results/scenarios.json   # a quarter of an hour
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.units import commit_of
from itm_fast import models
from itm_fast.benchmarking.measure import interleave, peak_memory
from itm_fast.benchmarking.run import FORMAT_VERSION
from itm_fast.data import Batch, Vocabulary
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info
from itm_fast.training import TrainConfig
from itm_fast.training.scenarios import BatchFunctions
from itm_fast.training.step import Stepper

__all__ = [
    "SCENARIOS",
    "Setup",
    "make_batch",
    "make_forward",
    "make_start",
    "make_step",
    "make_vocabulary",
    "markdown",
    "memory_given_back",
    "percent",
    "processor_time",
    "run",
]

# The settings of each row of the table.
SCENARIOS: Mapping[str, dict[str, Any]] = {
    "single": {},
    "oas": {"scenario": "oas", "anchor": "a trained model"},
    "mss": {"scenario": "mss"},
    "oss, 2 branches": {"scenario": "oss", "branches": 2},
    "oss, 3 branches": {"scenario": "oss", "branches": 3},
}
# The paper's costs with its own code, which scores caption by caption and keeps everything: additional time and memory
# compared with one branch, in percent (Table II).
PUBLISHED = {"oas": (120, 12), "mss": (18, 11), "oss, 2 branches": (73, 100)}
# Limits: forwards of the same model without gradient that a scenario may add, or the factor on all its branches' steps.
FORWARDS, PER_BRANCH, ROOM_BYTES = 1.1, 1.05, 10e6
# The peak memory of two processes with the same work differs by some megabytes.
MEMORY_RUNS = 3
_STEPS_PER_EPOCH, _REGIONS, _SPECIAL = 1000, 36, ("<pad>", "<start>", "<end>", "<unk>", "<mask>")


@attrs.frozen
class Setup:
    """A model by name and the sizes of a step."""

    model: str
    batch: int = 128
    dim: int = 1024
    features: int = 2048
    words: int = 10_000
    micro_batch: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return names and values of the settings that are set."""
        return attrs.asdict(self, filter=lambda _, value: value is not None)


def _config(setup: Setup, scenario: str) -> TrainConfig:
    return TrainConfig(data="", out="", model=setup.model, micro_batch=setup.micro_batch, **SCENARIOS[scenario])


def _model(setup: Setup) -> models.MatchingModel:
    torch.manual_seed(0)
    return models.create(setup.model, vocab_size=setup.words, feature_dim=setup.features, embed_dim=setup.dim)


def make_batch(setup: Setup, number: int = 0) -> Batch:
    """Return captions of COCO's lengths, 8 to 24 words with start and end, 13 on average; other images per `number`."""
    random = torch.Generator().manual_seed(number)
    # A gamma distribution of shape 5, as a sum of five exponential ones.
    lengths = 8 - torch.rand(setup.batch, 5, generator=random).log().sum(1)
    lengths = lengths.round().long().clamp(8, 24)
    token_ids = torch.randint(len(_SPECIAL), setup.words, (setup.batch, int(lengths.max())), generator=random)
    token_ids[torch.arange(token_ids.shape[1]) >= lengths[:, None]] = 0
    features = torch.randn(setup.batch, _REGIONS, setup.features, generator=random)
    images = torch.arange(setup.batch) + number * setup.batch
    return Batch(features, token_ids, lengths, images, images)


def make_vocabulary(setup: Setup) -> Vocabulary:
    """Return as many words as the model reads."""
    return Vocabulary([*_SPECIAL, *(f"w{index}" for index in range(setup.words - len(_SPECIAL)))])


def _stepper(setup: Setup, scenario: str, kind: Callable[..., Stepper] = Stepper) -> Stepper:
    model = _model(setup)
    anchor = copy.deepcopy(model) if scenario == "oas" else None
    config = _config(setup, scenario)
    return kind(config, model, make_vocabulary(setup), torch.device("cpu"), _STEPS_PER_EPOCH, anchor)


def _shrunk(setup: Setup, small: bool) -> Setup:
    if not small:
        return setup
    return attrs.evolve(setup, batch=2, dim=32, features=32, words=50, micro_batch=setup.micro_batch and 1)


def make_step(
    scenario: str, setup: Setup, small: bool = False, batch: Batch | None = None
) -> Callable[[], dict[str, float]]:
    """Return a function that takes one optimiser step of a scenario per call, on `batch` (default: a new one)."""
    setup = _shrunk(setup, small)
    stepper, given = _stepper(setup, scenario), make_batch(setup) if batch is None else batch
    return lambda: stepper(given, "hardest", 0)


class _Counting(Stepper):
    """Record in `pairs` how many entries of each score matrix of a step have a gradient."""

    def __init__(self, pairs: list[int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pairs = pairs

    def _functions(self, *arguments: Any) -> BatchFunctions:
        functions = super()._functions(*arguments)

        def scores(model: models.MatchingModel) -> torch.Tensor:
            found = functions.scores(model)
            if found.requires_grad:
                found.register_hook(lambda gradient: self.pairs.append(int(gradient.count_nonzero())))
            return found

        def scores_and_loss(model: models.MatchingModel) -> tuple[torch.Tensor, torch.Tensor]:
            found = scores(model)
            return found, functions.loss(found)

        return attrs.evolve(functions, scores=scores, scores_and_loss=scores_and_loss)


def pairs_of_a_step(scenario: str, setup: Setup) -> int:
    """Count the pairs with a score gradient in a first step, over all branches."""
    pairs: list[int] = []
    _stepper(setup, scenario, functools.partial(_Counting, pairs))(make_batch(setup), "hardest", 0)
    return sum(pairs)


def make_forward(setup: Setup, small: bool = False) -> Callable[[], torch.Tensor]:
    """Return one forward of the model without gradient, in evaluation mode."""
    setup = _shrunk(setup, small)
    model, batch = _model(setup).eval(), make_batch(setup)

    def run() -> torch.Tensor:
        with torch.no_grad():
            scores: torch.Tensor = model(batch.features, batch.token_ids, batch.lengths)
            return scores

    return run


def make_start(scenario: str, setup: Setup, small: bool = False, steps: int = 3) -> Callable[[], None]:
    """Create what a scenario holds in memory: models, optimisers and some steps; the second one completes it."""
    setup = _shrunk(setup, small)
    batch = make_batch(setup)

    def run() -> None:
        stepper = _stepper(setup, scenario)
        for step in range(steps):
            stepper(batch, "hardest", step)

    return run


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Make processes that start here return freed blocks of at least a megabyte at once (glibc).

    Memory kept for later use would count as memory in use, in amounts that differ from run to run.
    """
    name = "MALLOC_MMAP_THRESHOLD_"
    before = os.environ.get(name)
    os.environ[name] = str(1 << 20)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def processor_time(call: Callable[[], Any]) -> float:
    """Return the seconds of one call, over all threads."""
    start = time.process_time()
    call()
    return time.process_time() - start


def run(
    setups: list[Setup],
    threads: int,
    runs: int,
    *,
    memory: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all scenarios of each setup, interleaved; return the content of the JSON file."""
    torch.set_num_threads(threads)
    where = environment(threads, build_info())
    measured = {}
    for setup in setups:
        variants: dict[str, Callable[[], Any]] = {name: make_step(name, setup) for name in SCENARIOS}
        variants["forward"] = make_forward(setup)
        timings = interleave(variants, dict.fromkeys(variants, runs), processor_time, progress)
        rows: dict[str, dict[str, Any]] = {name: timing.as_dict() for name, timing in timings.items()}
        del variants
        for name in SCENARIOS:
            rows[name]["pairs"] = pairs_of_a_step(name, setup)
        for _ in range(MEMORY_RUNS if memory else 0):
            for name in SCENARIOS:
                progress(f"{name}, memory")
                with memory_given_back():
                    peak = peak_memory(make_start, name, setup, threads=threads)
                if peak is not None:
                    rows[name].setdefault("peak_runs_bytes", []).append(peak)
        for name in SCENARIOS:
            peaks = rows[name].get("peak_runs_bytes")
            rows[name]["peak_bytes"] = None if peaks is None else statistics.median(peaks)
        model = _model(setup)
        held = sum(value.numel() * value.element_size() for value in model.state_dict().values())
        measured[setup.model] = {"setup": setup.as_dict(), "model_bytes": held, "rows": rows}
    return {
        "format_version": FORMAT_VERSION,
        "environment": where,
        "published": {name: {"time": seconds, "memory": room} for name, (seconds, room) in PUBLISHED.items()},
        "models": measured,
    }


def added_forwards(rows: Mapping[str, Mapping[str, Any]], scenario: str) -> float:
    """Return a scenario's added time over a single step, in forwards without gradient: median over the rounds."""
    rounds = zip(*(rows[name]["runs_s"] for name in (scenario, "single", "forward")), strict=True)
    return statistics.median((step - single) / forward for step, single, forward in rounds)


def per_branch(rows: Mapping[str, Mapping[str, Any]], scenario: str) -> float:
    """Return the time of a step of several branches over as many single steps: median over the rounds."""
    branches = SCENARIOS[scenario]["branches"]
    rounds = zip(*(rows[name]["runs_s"] for name in (scenario, "single")), strict=True)
    return statistics.median(step / (branches * single) for step, single in rounds)


def markdown(results: Mapping[str, Any]) -> str:
    """Render the table of each model, with the paper's figures for the per-caption loop."""
    where = results["environment"]
    lines = []
    for name, measured in results["models"].items():
        setup, rows = measured["setup"], measured["rows"]
        single = rows["single"]
        lines += [
            f"{name}, batches of {setup['batch']}, width {setup['dim']}; one step of the model alone takes "
            f"{single['median_s'] * 1e3:.0f} ms, a forward without gradient "
            f"{rows['forward']['median_s'] * 1e3:.0f} ms.",
            "",
            "| scenario | time | the paper's loop: time | memory | the paper's loop: memory | pairs with a gradient "
            "| what it adds | allowed |",
            "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
        ]
        for scenario in SCENARIOS:
            if scenario == "single":
                continue
            row = rows[scenario]
            published = results["published"].get(scenario)
            theirs = ("", "") if published is None else (f"+{published['time']} %", f"+{published['memory']} %")
            room = percent(row["peak_bytes"] / single["peak_bytes"]) if row.get("peak_bytes") else ""
            cells = [
                scenario,
                percent(row["median_s"] / single["median_s"]),
                theirs[0],
                room,
                theirs[1],
                _share(row["pairs"], single["pairs"]),
            ]
            lines.append(f"| {' | '.join([*cells, *_added(measured, scenario)])} |")
        lines.append("")
    lines.append(
        f"Processor time, median of {len(single['runs_s'])} interleaved runs; memory is the peak of fresh processes "
        f"with their models, optimisers and three steps, the median of {MEMORY_RUNS}. Pairs are those of the first "
        f"step over all branches, in brackets as a multiple of one branch. {where['processor']}, "
        f"{where['threads']} thread(s), {where['date'][:10]}, commit {commit_of(where)}; made by "
        f"`{where['command']}`."
    )
    return "\n".join(lines) + "\n"


def percent(ratio: float) -> str:
    """Return by how much a ratio exceeds one."""
    return f"{100 * (ratio - 1):+.0f} %"


def _share(pairs: int, single: int) -> str:
    return f"{pairs:,} ({pairs / single:.1f} x)"


def _added(measured: Mapping[str, Any], scenario: str) -> tuple[str, str]:
    """Render a scenario's added cost and its limit, in the limit's units."""
    rows, held = measured["rows"], measured["model_bytes"]
    if "branches" in SCENARIOS[scenario]:
        branches, ratio = SCENARIOS[scenario]["branches"], per_branch(rows, scenario)
        return f"{ratio:.2f} x {branches} steps", _allowed(f"{PER_BRANCH} x {branches} steps", ratio, PER_BRANCH)
    forwards = added_forwards(rows, scenario)
    added, allowed = f"{forwards:.2f} forwards", _allowed(f"{FORWARDS} forwards", forwards, FORWARDS)
    peak, single = rows[scenario].get("peak_bytes"), rows["single"].get("peak_bytes")
    if peak and single:
        room = held + ROOM_BYTES
        added += f", {(peak - single) / 1e6:.0f} MB"
        allowed += ", " + _allowed(f"{room / 1e6:.0f} MB", peak - single, room)
    return added, allowed


def _allowed(limit: str, reached: float, most: float) -> str:
    """Render a limit, and by how much it is missed."""
    return limit if reached <= most else f"{limit}, missed by {100 * (reached / most - 1):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training scenarios compared with ordinary training.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--runs", type=int, default=7, help="measured steps of each scenario (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    parser.add_argument("--quick", action="store_true", help="use small sizes for a trial of seconds")
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    options = parser.parse_args()
    small = {"batch": 16, "dim": 64, "features": 64, "words": 500} if options.quick else {}
    setups = [Setup("dbl", **small), Setup("scan", **small)]
    results = run(
        setups,
        options.threads,
        options.runs,
        memory=not options.no_memory,
        progress=lambda what: print(what, flush=True),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
