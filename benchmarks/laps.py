"""Benchmark training steps of LAPS on patch tokens: a loop over captions, all pairs at once, and gradient sparsity.

python -m benchmarks.laps --json benchmarks/results/laps.json                       # some minutes and up to 12 GB
python -m benchmarks.laps --encoders --json benchmarks/results/laps_encoders.json   # 25 CPU minutes, 16 GB
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import itm_fast.functional as F_itm
from benchmarks.machine import processor_time
from benchmarks.units import commit_of
from itm_fast import Fragments
from itm_fast.benchmarking.measure import interleave, peak_memory
from itm_fast.benchmarking.table import megabytes, table
from itm_fast.benchmarking.table import time as described_time
from itm_fast.files import atomic
from itm_fast.files.environment import environment
from itm_fast.nn.patch_slimming import PatchSlimming
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "loop_scores", "markdown", "run"]

FORMAT_VERSION = 1
PATCHES, DIM, WORDS = 196, 512, range(8, 25)


def loop_scores(module: PatchSlimming, images: Fragments, captions: Fragments) -> Tensor:
    """Score as the authors' code does: one caption at a time, with kept patches copied for each."""
    words = captions.values.split(captions.lengths.tolist())
    return loop_over(module, images.values.view(len(images), module.n_regions, -1), words)


def loop_over(module: PatchSlimming, patches: Tensor, captions: Sequence[Tensor]) -> Tensor:
    """Score patches (n, k, d) and captions of rows (w, d), as `loop_scores`."""
    units = functional.normalize(patches, dim=2)
    with torch.no_grad():
        own = (functional.normalize(patches.mean(1), dim=1)[:, None] * units).sum(2)
    columns = []
    for words in captions:
        with torch.no_grad():
            significance = own + units @ functional.normalize(words.mean(0), dim=0)
        values, order = significance.sort(dim=1, descending=True)
        sorted_patches = patches.gather(1, order[:, :, None].expand_as(patches))
        kept, others = sorted_patches[:, : module.n_kept], sorted_patches[:, module.n_kept :]
        weights = (module.scale * module.weigh(kept)).transpose(1, 2).softmax(2)
        extra = (values[:, module.n_kept :].softmax(1)[:, :, None] * others).sum(1, keepdim=True)
        tokens = functional.normalize(torch.cat([weights @ kept, extra], dim=1), dim=2)
        cosines = functional.leaky_relu(tokens @ functional.normalize(words, dim=1).t(), 0.1)
        columns.append(cosines.max(1).values.mean(1) + cosines.max(2).values.mean(1))
    return torch.stack(columns, dim=1)


FORMS: dict[str, Callable[[PatchSlimming, Fragments, Fragments], Tensor]] = {
    "loop over captions": loop_scores,
    "all pairs at once": lambda module, images, captions: module(images, captions),
    "itm_fast": partial(F_itm.gradient_sparse_scores, chunk_pairs=512),
}


def make_step(form: str, batch: int, small: bool = False) -> Callable[[], Tensor]:
    """Return a call that computes scores, the hardest-negative loss and all gradients; it returns the scores."""
    batch = 2 if small else batch
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    module = PatchSlimming(DIM, PATCHES)
    lengths = torch.randint(WORDS.start, WORDS.stop, (batch,), generator=generator)
    rows = torch.randn(batch, PATCHES, DIM, generator=generator).requires_grad_()
    words = torch.randn(batch, WORDS.stop - 1, DIM, generator=generator).requires_grad_()

    def step() -> Tensor:
        captions = Fragments.from_padded(words, lengths)
        scores = FORMS[form](module, Fragments.from_padded(rows), captions)
        F_itm.triplet_loss(scores, margin=0.2, mining="hardest").backward()
        return scores.detach()

    return step


def run(
    batches: Sequence[int],
    *,
    rounds: int,
    threads: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the forms interleaved, and the peak memory of each in its own process."""
    torch.set_num_threads(threads)
    load_before = os.getloadavg()[0]
    measured = []
    for batch in batches:
        progress(f"batches of {batch}")
        exact = make_step("loop over captions", batch)()
        timings = interleave(
            {form: make_step(form, batch) for form in FORMS}, dict.fromkeys(FORMS, rounds), processor_time
        )
        forms = {form: timing.as_dict() for form, timing in timings.items()}
        for form, found in forms.items():
            found["peak_bytes"] = peak_memory(make_step, form, batch, threads=threads)
            found["largest_difference"] = float((make_step(form, batch)() - exact).abs().max())
        measured.append({"batch": batch, "forms": forms})
    return {
        "format_version": FORMAT_VERSION,
        "environment": environment(threads, build_info()),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "measured": measured,
    }


def markdown(results: dict[str, Any]) -> str:
    """Render time, memory, and the difference of the scores from those of the loop."""
    rows = [["batch", "form", "step", "speed", "peak memory", "difference of the scores"]]
    for case in results["measured"]:
        base = case["forms"]["loop over captions"]["median_s"]
        rows += [
            [
                str(case["batch"]),
                form,
                described_time(found),
                f"{base / found['median_s']:.2f}x",
                megabytes(found),
                f"{found['largest_difference']:.1e}",
            ]
            for form, found in case["forms"].items()
        ]
    where = results["environment"]
    runs = len(next(iter(results["measured"][0]["forms"].values()))["runs_s"])
    return (
        f"{table(rows)}\n\nMeasured on {where['date'][:10]} with `{where['command']}` at {commit_of(where)}: "
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}; scores, hardest negatives and "
        f"gradients for {PATCHES} patches and {WORDS.start} to {WORDS.stop - 1} words, d = {DIM}, without encoders. "
        f"Medians of {runs} interleaved runs in processor time, smallest and largest in brackets; peak memory above "
        f"the inputs, each in a separate process. Load of the machine: {results['load_before']:.1f} before, "
        f"{results['load_after']:.1f} after.\n"
    )


def _write(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        atomic.write_text(path, json.dumps(results, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark training steps of LAPS on patch tokens.")
    parser.add_argument("--encoders", action="store_true", help="include a ViT base and a BERT base (float32)")
    parser.add_argument("--small-batch", type=int, default=8, help="pairs per step that all variants take (default 8)")
    parser.add_argument(
        "--measured", type=int, nargs="*", default=[64, 108],
        help="with --encoders: batches in which variants take a step (default 64 108)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=float, default=14.0,
        help="with --encoders: gigabytes that may be counted for such a step (default 14)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write all figures to this file; with --encoders, continue it")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 108], help="pairs per step (default 64 108)")
    options = parser.parse_args()
    common: dict[str, Any] = {
        "rounds": options.rounds,
        "threads": options.threads,
        "progress": lambda what: print(what, file=sys.stderr, flush=True),
    }
    if options.encoders:
        from benchmarks import laps_steps

        path: Path | None = options.json
        results = laps_steps.run(
            options.small_batch,
            options.batches,
            measured=options.measured,
            most_bytes=1e9 * options.memory,
            before=json.loads(path.read_text()) if path is not None and path.is_file() else None,
            save=lambda found: _write(path, found),
            **common,
        )
    else:
        results = run(options.batches, **common)
    _write(options.json, results)
    print(laps_steps.markdown(results) if options.encoders else markdown(results))


if __name__ == "__main__":
    main()
