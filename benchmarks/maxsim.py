"""Benchmark `maxsim_scores` against maxsim-cpu and plain PyTorch: one query against many documents on a CPU.

Inside: `run`, `markdown`.

pip install maxsim-cpu
python -m benchmarks.maxsim --threads 1 --json benchmarks/results/maxsim.json   # about a minute
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments
from itm_fast.benchmarking.table import table
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "markdown", "run"]

FORMAT_VERSION = 1


def plain(query: Tensor, documents: Tensor) -> Tensor:
    """Score one query `(n, d)` with documents `(m, k, d)` in plain PyTorch."""
    return (documents @ query.t()).amax(dim=1).sum(dim=1)


def run(*, documents: int, tokens: int, query_tokens: int, dim: int, rounds: int, rival: Any) -> dict[str, Any]:
    """Measure all variants in turn: a warm-up round, then `rounds` interleaved ones.

    Args:
        documents: number of documents. tokens: rows of each. query_tokens: rows of the query. dim: width.
        rival: the module `maxsim_cpu`.
    """
    load_before = os.getloadavg()[0]
    generator = torch.Generator().manual_seed(0)
    query = torch.nn.functional.normalize(torch.randn(query_tokens, dim, generator=generator), dim=1)
    rows = torch.nn.functional.normalize(torch.randn(documents, tokens, dim, generator=generator), dim=2)
    queries, contexts = Fragments.from_padded(query[None]), Fragments.from_padded(rows)
    variants: dict[str, Callable[[], Any]] = {
        "itm_fast": lambda: F_itm.maxsim_scores(queries, contexts)[0],
        "maxsim-cpu": lambda: rival.maxsim_scores(query.numpy(), rows.numpy()),
        "plain PyTorch": lambda: plain(query, rows),
    }
    exact = torch.cat([plain(query.double(), part.double()) for part in rows.split(50)])
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    errors: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, score in variants.items():
            start = time.perf_counter()
            scores = score()
            elapsed = time.perf_counter() - start
            if number:
                seconds[name].append(elapsed)
            errors[name] = float((torch.as_tensor(scores).double() - exact).abs().max())
    return {
        "format_version": FORMAT_VERSION,
        "environment": environment(torch.get_num_threads(), build_info()),
        "sizes": {"documents": documents, "tokens": tokens, "query_tokens": query_tokens, "dim": dim},
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "seconds": seconds,
        "largest_error": errors,
    }


def markdown(results: Mapping[str, Any]) -> str:
    """Render the time, the speedup over plain PyTorch and the largest error of each variant."""
    seconds, sizes, where = results["seconds"], results["sizes"], results["environment"]
    rows = [["variant", "time", "speed", "largest error against float64"]]
    for name, own in seconds.items():
        gains = [base / one for base, one in zip(seconds["plain PyTorch"], own, strict=True)]
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(own):.1f} ms",
                f"{statistics.median(gains):.2f}x [{min(gains):.2f}, {max(gains):.2f}]",
                f"{results['largest_error'][name]:.1e}",
            ]
        )
    return (
        f"{table(rows)}\n\nMeasured on {where['date'][:10]} with `{where['command']}` on {where['processor']}, "
        f"{where['threads']} threads, torch {where['torch']}: one query of {sizes['query_tokens']} tokens against "
        f"{sizes['documents']:,} documents of {sizes['tokens']:,} tokens, d = {sizes['dim']}, float32. Times are "
        f"medians of {len(seconds['itm_fast'])} interleaved rounds after a warm-up round. Speed is relative to "
        f"plain PyTorch, smallest and largest in brackets. Load of the machine: {results['load_before']:.1f} before, "
        f"{results['load_after']:.1f} after.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark MaxSim scores.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds (default 15)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # maxsim-cpu reads it on first use.
    try:
        rival = importlib.import_module("maxsim_cpu")
    except ImportError:
        parser.error("this benchmark compares with maxsim-cpu; install it with 'pip install maxsim-cpu'")
    results = run(documents=1000, tokens=1024, query_tokens=32, dim=128, rounds=options.rounds, rival=rival)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
