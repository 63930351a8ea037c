"""Measure indexes of synthetic images: building, opening, searching, memory and recall.

    python -m benchmarks.search --run runs/demo --json benchmarks/results/search.json

An item has regions of two real emoji, drawn at random, with noise, so that norms and similarities are like those of
real embeddings. Queries are captions of unseen pictures. Every size is opened and searched in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from itm_fast import build_info
from itm_fast.benchmarking.measure import status_bytes
from itm_fast.benchmarking.table import table
from itm_fast.data import emoji
from itm_fast.files.environment import environment
from itm_fast.fragments import Fragments
from itm_fast.search import Index, Item
from itm_fast.search.learning import learned_pooling
from itm_fast.search.manifest import Manifest
from itm_fast.search.members import Members
from itm_fast.search.pooling import Pooling
from itm_fast.search.segments import write_tensors
from itm_fast.search.writing import Builder, commit, locked

K, CANDIDATES = 10, 200
_BATCH = 256


def synthetic(real: Fragments, count: int) -> Iterator[Fragments]:
    """Yield `count` images in batches: regions of two real images, with noise, and the norm 1."""
    generator = torch.Generator().manual_seed(0)
    regions = real.values.view(len(real), -1, real.values.shape[1])
    for first in range(0, count, _BATCH):
        size = min(_BATCH, count - first)
        left, right = (regions[torch.randint(len(regions), (size,), generator=generator)] for _ in range(2))
        mixed = torch.where(torch.rand(size, regions.shape[1], 1, generator=generator) < 0.5, left, right)
        mixed = mixed + 0.02 * torch.randn(mixed.shape, generator=generator)
        yield Fragments.from_padded(torch.nn.functional.normalize(mixed, dim=2))


def build(checkpoint: Path, path: Path, count: int, dtype: str, weights_file: Path) -> dict[str, float]:
    """Write an index of synthetic images; return processor seconds of pooling and writing, without the encoder."""
    members = Members(checkpoint)
    pictures = torch.from_numpy(emoji.patches(emoji.pictures("test")))
    start = time.process_time()
    real = Fragments.cat([members.encode_images(part)[0] for part in pictures.split(_BATCH)])
    encoding = (time.process_time() - start) / len(pictures)
    pooling = Pooling.of_tensors(load_file(weights_file), 1)
    seconds = 0.0
    with locked(path):
        builder = Builder(path, pooling, dtype)
        first = 0
        for batch in synthetic(real, count):
            items = [
                Item(str(first + number), "images", (f"synthetic {first + number}",)) for number in range(len(batch))
            ]
            start = time.process_time()
            builder.add("images", items, [b""] * len(items), [batch])
            seconds += time.process_time() - start
            first += len(items)
        start = time.process_time()
        builder.flush("images")
        weights = write_tensors(path, "pooling", pooling.tensors())
        manifest = Manifest(
            1,
            members.fingerprints,
            members.checkpoints,
            dtype,
            "learned",
            weights,
            "",
            CANDIDATES,
            tuple(builder.records),
        )
        commit(path, manifest)
        seconds += time.process_time() - start
    return {"encode_cpu_s_per_item": encoding, "write_cpu_s_per_item": seconds / count}


def search(path: Path, queries: int, exact: int) -> dict[str, float]:
    """Open and search an index in this process."""
    start = time.perf_counter()
    index = Index.open(path)
    opened = time.perf_counter() - start
    texts = emoji.captions("dev") + emoji.captions("test")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1))[:queries].tolist()
    chosen = [texts[number] for number in order]
    members = index.members
    known = [text for text in chosen if {*members.main.tokenizer.encode(text)[1:-1]} - {members.main.tokenizer.unk}]
    start = time.perf_counter()
    index.search(known[0], K)
    first = time.perf_counter() - start
    index.search(known[: len(known) // 2], K)
    cpu, wall = [], []
    found = []
    for text in known:
        used, start = time.process_time(), time.perf_counter()
        found += index.search(text, K)
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - start)
    used = time.process_time()
    index.search(known, K)
    together = (time.process_time() - used) / len(known)
    resident = status_bytes("VmRSS")
    used = time.process_time()
    whole = index.search(known[:exact], K, exact=True)
    brute = (time.process_time() - used) / exact
    hits = [
        len({hit.item.id for hit in one.hits} & {hit.item.id for hit in other.hits})
        for one, other in zip(whole, found, strict=False)
    ]
    # The place among the candidates of each of the best items.
    side = index.snapshot.sides["images"]
    ranks = []
    for text, one in zip(known[:exact], whole, strict=True):
        products = side.products(index.snapshot.pooling("captions", members.encode_captions([text])))[0]
        best = products[torch.tensor([side.find(hit.item.id) for hit in one.hits])]
        ranks.append((products > best[:, None]).sum(1))
    needed = int(torch.cat(ranks).sort().values[int(0.95 * K * exact) - 1]) + 1
    return {
        "candidates_for_95_percent": needed,
        "open_s": opened,
        "first_query_s": first,
        "query_cpu_p50_s": float(np.quantile(cpu, 0.5)),
        "query_cpu_p99_s": float(np.quantile(cpu, 0.99)),
        "query_wall_p50_s": float(np.quantile(wall, 0.5)),
        "queries": len(known),
        "batch_cpu_s_per_query": together,
        "exact_cpu_s_per_query": brute,
        "exact_queries": exact,
        "recall": sum(hits) / (K * exact),
        "resident_bytes": resident,
        "disk_bytes": sum(file.stat().st_size for file in path.iterdir()),
    }


def _in_process(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.search", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(results: dict[str, Any]) -> str:
    """Render one row per size and type of the stored rows."""
    rows = [
        [
            "images",
            "rows",
            "one query, p50",
            "p99",
            "in batches",
            "all scored",
            "recall@10",
            "for 0.95",
            "open",
            "disk per item",
        ]
    ]
    for case in results["cases"]:
        rows.append(
            [
                f"{case['items']:,}",
                case["dtype"],
                f"{1e3 * case['query_cpu_p50_s']:.1f} ms",
                f"{1e3 * case['query_cpu_p99_s']:.1f} ms",
                f"{1 / case['batch_cpu_s_per_query']:.0f} queries/s",
                f"{1e3 * case['exact_cpu_s_per_query']:,.0f} ms",
                f"{case['recall']:.3f}",
                f"{case['candidates_for_95_percent']:,}",
                f"{1e3 * case['open_s']:.0f} ms",
                f"{case['disk_bytes'] / case['items'] / 1e3:.1f} kB",
            ]
        )
    where, case = results["environment"], results["cases"][-1]
    return (
        f"{table(rows)}\n\nProcessor time of one thread, with {CANDIDATES} candidates and {K} results, "
        f"{case['queries']} captions as queries; recall against the exact search of {case['exact_queries']}. "
        '"for 0.95" is the number of candidates that this recall needs, "all scored" the exact '
        f'search in a batch, per query; "open" is wall time. SCAN, d = 256, 36 regions per image, the model of '
        f"`itm-fast demo` after a short training. Encoding takes {1e3 * case['encode_cpu_s_per_item']:.1f} ms per "
        f"image, pooling and writing {1e3 * case['write_cpu_s_per_item']:.2f} ms. Measured on {where['date'][:10]} "
        f"with `python -m benchmarks.search` at {where['commit'][:12]}: {where['processor']}, torch "
        f"{where['torch']}; load of the machine {results['load']:.0f}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run directory of a model of the emoji, as demo writes it")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "int8"], help="type of the rows of each of --items")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--exact", type=int, default=40, help="queries that are searched exactly, too")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pooling", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.build:
        print(json.dumps(build(options.run, options.build, options.items[0], options.dtypes[0], options.pooling)))
        return
    if options.search:
        print(json.dumps(search(options.search, options.queries, options.exact)))
        return
    cases = []
    with tempfile.TemporaryDirectory() as place:
        members = Members(options.run)
        weights = Path(place) / "pooling.safetensors"
        learned = learned_pooling(members, emoji.load("train", members.main.tokenizer))
        save_file({name: tensor.contiguous() for name, tensor in learned.tensors().items()}, weights)
        for items, dtype in zip(options.items, options.dtypes, strict=True):
            path = Path(place) / "index"
            of_build = ("--build", path, "--items", items, "--dtypes", dtype, "--pooling", weights)
            built = _in_process("--run", options.run, *of_build)
            found = _in_process("--search", path, "--queries", options.queries, "--exact", options.exact)
            shutil.rmtree(path)
            cases.append({"items": items, "dtype": dtype, **built, **found})
            print(cases[-1], file=sys.stderr, flush=True)
    results = {
        "environment": {
            **environment(1, build_info()),
            "command": " ".join(["python", "-m", "benchmarks.search", *sys.argv[1:]]),
        },
        "load": os.getloadavg()[0],
        "cases": cases,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
