"""Measure how many image-text pairs the models score a second, on the CPU: Figure 8 of SelHN and RVSE++.

The models have the settings of their recipes for Flickr30K, and random weights. Images have 36 regions, captions 13
words on average. "Scores" start from embeddings; "all" encodes images and captions first, once each. Times are
processor time, which other work on the machine affects less than wall-clock time.

Inside: `RECIPES`, `run`, `markdown`.

python -m benchmarks.matching_speed --json matching_speed.json   # a quarter of an hour
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import processor_time
from benchmarks.scenarios import Setup, make_batch
from benchmarks.units import commit_of
from itm_fast import models
from itm_fast.benchmarking.measure import interleave
from itm_fast.benchmarking.run import FORMAT_VERSION
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info
from itm_fast.training import recipes

__all__ = ["RECIPES", "markdown", "run"]

# The paper's models that are here, and RCAR beside them. SGRAF is two models, whose scores are averaged.
RECIPES: Mapping[str, str] = {
    "SCAN": "scan-t2i-f30k",
    "CAMP": "camp-f30k",
    "BFAN": "bfan-equal-f30k",
    "VSRN": "vsrn-f30k",
    "SGR of SGRAF": "sgr-f30k",
    "SAF of SGRAF": "saf-f30k",
    "VSE-infinity": "vse-infty-f30k",
    "NAAF": "naaf-f30k",
    "RCAR": "rcar-t2i-f30k",
    "RVSE++": "rvsepp-f30k",
}
_RUNS = 3


def _model(recipe: str, options: Mapping[str, Any]) -> models.MatchingModel:
    settings = recipes.load(recipe).settings
    torch.manual_seed(0)
    return models.create(settings["model"], **{**settings["model_options"], **options}).eval()


@torch.no_grad()
def run(
    names: Sequence[str] = tuple(RECIPES),
    pairs: int = 100,
    threads: int = 1,
    *,
    features: int = 2048,
    words: int = 10_000,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Score `pairs` images with as many captions by each model; return the content of the JSON file.

    `options` replace settings of the models.
    """
    torch.set_num_threads(threads)
    measured = {}
    for name in names:
        setup = Setup(RECIPES[name], batch=pairs, features=features, words=words)
        batch = make_batch(setup)
        model = _model(RECIPES[name], {"vocab_size": words, "feature_dim": features, **(options or {})})
        images, captions = model.encode(batch.features, batch.token_ids, batch.lengths)
        variants: dict[str, Callable[[], Any]] = {
            "scores": lambda model=model, images=images, captions=captions: model.score(images, captions),
            "all": lambda model=model, batch=batch: model(batch.features, batch.token_ids, batch.lengths),
        }
        progress(name)
        timings = interleave(variants, dict.fromkeys(variants, _RUNS), processor_time, progress)
        measured[name] = {
            "recipe": RECIPES[name],
            "parameters": sum(weight.numel() for weight in model.parameters()),
            **{kind: timing.as_dict() for kind, timing in timings.items()},
        }
    where = environment(threads, build_info())
    return {"format_version": FORMAT_VERSION, "environment": where, "pairs": pairs**2, "models": measured}


def markdown(results: Mapping[str, Any]) -> str:
    """Render the table, the fastest model first: thousands of pairs a second."""
    where, pairs = results["environment"], results["pairs"]

    def speed(row: Mapping[str, Any], kind: str) -> float:
        return pairs / row[kind]["median_s"] / 1e3

    rows = sorted(results["models"].items(), key=lambda item: -speed(item[1], "scores"))
    lines = [
        "| model | parameters | thousand pairs a second from embeddings | with encoding |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {name} | {row['parameters'] / 1e6:.1f} M | {speed(row, 'scores'):,.4g} | {speed(row, 'all'):,.4g} |"
            for name, row in rows
        ),
        "",
        f"Processor time, median of {_RUNS} runs of {pairs:,} pairs. {where['processor']}, {where['threads']} "
        f"thread(s), {where['date'][:10]}, commit {commit_of(where)}; made by `{where['command']}`.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the pairs a second of the models.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--model", action="append", choices=list(RECIPES), help="only this model; may be repeated")
    parser.add_argument("--pairs", type=int, default=100, help="number of images and of captions (default 100)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    options = parser.parse_args()
    results = run(
        options.model or tuple(RECIPES),
        options.pairs,
        options.threads,
        progress=lambda what: print(what, flush=True),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
