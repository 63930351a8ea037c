"""Benchmark scores and training steps of SCAN or RCAR with patches: 196 and 576 per picture beside 36 regions.

python -m benchmarks.long_sets --threads 2 --json benchmarks/results/long_sets.json   # a few minutes
python -m benchmarks.long_sets --model rcar --batch 16 --json benchmarks/results/long_sets_rcar.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import processor_time
from benchmarks.units import commit_of
from itm_fast import Fragments, reference
from itm_fast.benchmarking import regulated, workloads
from itm_fast.benchmarking.measure import interleave, peak_memory
from itm_fast.benchmarking.table import table
from itm_fast.benchmarking.workloads import Sizes
from itm_fast.files.environment import environment
from itm_fast.functional import RegulatorParameters
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "PatchSizes", "markdown", "run"]

FORMAT_VERSION = 1
FORMS = {"packed": "packed PyTorch", "native": "itm_fast", "native bf16": "itm_fast, bfloat16"}
MODELS = {"scan": "SCAN t2i", "rcar": "RCAR t2i with 2 RAR and 1 RCR"}


@dataclass(frozen=True)
class PatchSizes:
    """A model, and a batch of pictures and captions, all of equal length."""

    batch: int
    dim: int
    patches: int
    tokens: int
    device: str = "cpu"
    model: str = "scan"

    @property
    def products(self) -> int:
        """Multiply-adds of the raw scores."""
        return self.batch * self.patches * self.batch * self.tokens * self.dim


def sides_of(form: str, sizes: PatchSizes) -> tuple[Fragments, ...]:
    """Return words and patches of unit length."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    both = (
        torch.randn(sizes.batch, n, sizes.dim, generator=generator, device=sizes.device)
        for n in (sizes.tokens, sizes.patches)
    )
    return workloads.in_precision(
        form, [Fragments.from_padded(torch.nn.functional.normalize(rows, dim=2)) for rows in both]
    )


def regulators_of(sizes: PatchSizes) -> RegulatorParameters:
    """Return RCAR's weights, which need a gradient."""
    return regulated.parameters(Sizes(sizes.batch, sizes.batch, sizes.dim, sizes.device))


def make_call(form: str, kind: str, sizes: PatchSizes, small: bool = False) -> Callable[[], Any]:
    """Return the call to measure: "scores" without gradient, or a "step" with hardest negatives."""
    sides = sides_of(form, replace(sizes, batch=2) if small else sizes)
    score: Callable[..., Tensor] = workloads.SCORES[form]
    weights: tuple[Tensor, ...] = ()
    if sizes.model == "rcar":
        regulators = regulators_of(sizes)
        score, weights = partial(_with, regulated.SCORES[form], regulators), regulators.tensors()
    if kind == "scores":
        return workloads.without_gradient(score, *sides)
    return workloads.step_of(form, score, sides, weights)


def _with(score: regulated.Score, regulators: RegulatorParameters, words: Fragments, regions: Fragments) -> Tensor:
    return score(words, regions, regulators)


def accuracy(form: str, sizes: PatchSizes) -> float:
    """Return the largest error of a form's scores against float64."""
    sides = [side.to(torch.float64) for side in sides_of("packed", sizes)]
    with torch.no_grad():
        if sizes.model == "rcar":
            exact = reference.regulated_scores_packed(*sides, regulators_of(sizes).to(torch.float64))
        else:
            exact = reference.cross_attention_scores(*sides)
    scores: Tensor = make_call(form, "scores", sizes)()
    return float((scores - exact).abs().max())


def run(
    cases: Sequence[PatchSizes],
    *,
    rounds: int,
    threads: int,
    memory: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all cases, the forms of each interleaved; with `memory`, also the peak memory of each."""
    torch.set_num_threads(threads)
    load_before = os.getloadavg()[0]
    measured = []
    for sizes in cases:
        progress(f"{sizes.patches} patches, {sizes.tokens} tokens")
        makes = {
            f"{form} {kind}": partial(make_call, form, kind, sizes) for kind in ("scores", "step") for form in FORMS
        }
        timings = interleave(
            {name: make() for name, make in makes.items()}, dict.fromkeys(makes, rounds), processor_time
        )
        found = {name: timing.as_dict() for name, timing in timings.items()}
        for name, make in (makes if memory else {}).items():
            found[name]["peak_bytes"] = peak_memory(make, threads=threads)
        small = replace(sizes, batch=min(8, sizes.batch))
        errors = {form: accuracy(form, small) for form in FORMS}
        measured.append({"sizes": asdict(sizes), "products": sizes.products, "forms": found, "errors": errors})
    return {
        "format_version": FORMAT_VERSION,
        "environment": environment(threads, build_info()),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "measured": measured,
    }


def _milliseconds(timing: Mapping[str, float]) -> str:
    median, least, most = (1e3 * timing[f"{name}_s"] for name in ("median", "min", "max"))
    return f"{median:.0f} ms [{least:.0f}, {most:.0f}]"


def markdown(results: Mapping[str, Any]) -> str:
    """Render time, rate, memory and accuracy of each size and form."""
    rows = [["patches x tokens", "form", "scores", "raw products", "step", "peak memory of the step", "error"]]
    for case in results["measured"]:
        sizes, found = case["sizes"], case["forms"]
        for form, label in FORMS.items():
            scores, step = found[f"{form} scores"], found[f"{form} step"]
            rows.append(
                [
                    f"{sizes['patches']} x {sizes['tokens']}",
                    label,
                    _milliseconds(scores),
                    f"{case['products'] / scores['median_s'] / 1e9:.0f} GMAC/s",
                    _milliseconds(step),
                    f"{step['peak_bytes'] / 1e6:.0f} MB",
                    f"{case['errors'][form]:.1e}",
                ]
            )
    where, sizes = results["environment"], results["measured"][0]["sizes"]
    model = MODELS[sizes.get("model", "scan")]
    runs = len(next(iter(results["measured"][0]["forms"].values()))["runs_s"])
    return (
        f"{table(rows)}\n\nMeasured on {where['date'][:10]} with `{where['command']}` at {commit_of(where)}: "
        f"{where['processor']}, {where['threads']} threads, {where['instruction_set']}, torch {where['torch']}; "
        f"{model}, {sizes['batch']} x {sizes['batch']} pairs, d = {sizes['dim']}, hardest negatives. Medians of "
        f"{runs} interleaved runs in processor time, smallest and largest in brackets; peak memory above the inputs, "
        f"each in a separate process; errors of the scores of 8 x 8 pairs against float64. Load of the machine: "
        f"{results['load_before']:.1f} before, {results['load_after']:.1f} after.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark scores and steps with patches.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--batch", type=int, default=64, help="pictures and captions (default 64)")
    parser.add_argument("--dim", type=int, default=512, help="width of rows (default 512)")
    parser.add_argument("--model", choices=sorted(MODELS), default="scan", help="what scores the pairs (default scan)")
    options = parser.parse_args()
    results = run(
        [PatchSizes(options.batch, options.dim, p, t, model=options.model) for p in (36, 196, 576) for t in (32, 64)],
        rounds=options.rounds,
        threads=options.threads,
        progress=lambda what: print(what, file=sys.stderr, flush=True),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
