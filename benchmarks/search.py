"""Measure indexes of synthetic images: building, opening, searching, memory and recall.

    python -m benchmarks.search --run RUN --json benchmarks/results/search.json

The images are drawn from a normal distribution with the means and covariances of the embeddings of all emoji, within
and between pictures (`benchmarks.search_images`). The pooling is learned from other images of the same distribution.
Queries are captions of unseen pictures. Every size is opened and searched in a process of its own. With `--keep DIR`,
indexes stay in DIR, and a later run measures their searches only.
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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.search_images import ImageModel, real_images
from benchmarks.search_measures import CANDIDATES, K, changes, search
from benchmarks.units import commit_of
from itm_fast import build_info
from itm_fast.benchmarking.table import table
from itm_fast.data import emoji
from itm_fast.files.environment import environment
from itm_fast.search import Item
from itm_fast.search.learning import pooling_of
from itm_fast.search.manifest import Manifest
from itm_fast.search.members import Members
from itm_fast.search.pooling import Pooling
from itm_fast.search.segments import write_tensors
from itm_fast.search.writing import Builder, commit, locked

_BATCH = 256


def training(members: Members) -> Pooling:
    """Learn a pooling from 2,800 synthetic images and 2,200 captions of the training split, 200 of them held out."""
    images = ImageModel(real_images(members)).drawn(2800, seed=1)
    texts = emoji.captions("train")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(2))[:2200]
    others, *fitted = [[texts[one] for one in part.tolist()] for part in order.split([200, *[250] * 8])]
    captions = [members.encode_captions(part) for part in fitted]
    return pooling_of(members, [[part] for part in images], captions, members.encode_captions(others))


def build(checkpoint: Path, path: Path, count: int, dtype: str, weights_file: Path) -> dict[str, float]:
    """Write an index of synthetic images; return processor seconds of pooling and writing, without the encoder."""
    members = Members(checkpoint)
    pictures = torch.from_numpy(emoji.patches(emoji.pictures("test")))
    start = time.process_time()
    for part in pictures.split(_BATCH):
        members.encode_images(part)
    encoding = (time.process_time() - start) / len(pictures)
    model = ImageModel(real_images(members))
    pooling = Pooling.of_tensors(load_file(weights_file), 1)
    seconds = 0.0
    with locked(path):
        builder = Builder(path, pooling, dtype)
        first = 0
        for batch in model.drawn(count, seed=0):
            numbers = range(first, first + len(batch))
            items = [Item(str(number), "images", (f"synthetic {number}",)) for number in numbers]
            start = time.process_time()
            builder.add("images", items, [b""] * len(items), [batch])
            seconds += time.process_time() - start
            first += len(items)
        start = time.process_time()
        builder.flush("images")
        weights = write_tensors(path, "pooling", pooling.tensors())
        segments = tuple(builder.records)
        found = (members.fingerprints, members.checkpoints)
        commit(path, Manifest(1, *found, dtype, "learned", weights, "", CANDIDATES, segments))
        seconds += time.process_time() - start
    return {"encode_cpu_s_per_item": encoding, "write_cpu_s_per_item": seconds / count}


def _in_process(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.search", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(results: dict[str, Any]) -> str:
    """Render one row per size and type of the stored rows."""
    titles = ["images", "rows", "p50", "p99", "processor time", "in batches", "all scored", "in PyTorch"]
    rows = [[*titles, "recall@10", "for 0.95", "open", "disk per item", "memory"]]
    for case in results["cases"]:
        needed = case["candidates_for_95_percent"]
        rows.append(
            [
                f"{case['items']:,}",
                case["dtype"],
                f"{1e3 * case['query_wall_p50_s']:.1f} ms",
                f"{1e3 * case['query_wall_p99_s']:.1f} ms",
                f"{1e3 * case['query_cpu_p50_s']:.1f} ms",
                f"{1 / case['batch_wall_s_per_query']:.0f} queries/s",
                f"{1e3 * case['exact_cpu_s_per_query']:,.0f} ms",
                f"{1e3 * case['torch_cpu_s_per_query']:,.0f} ms",
                f"{case['recall']:.3f}",
                f"{needed:,}",
                f"{1e3 * case['cold_open_s']:.0f} ms",
                f"{case['disk_bytes'] / case['items'] / 1e3:.1f} kB",
                f"{case['peak_bytes'] / 1e9:.2f} GB",
            ]
        )
    where, cases = results["environment"], results["cases"]
    changed = ", ".join(f"{name} {cases[-1][f'{name}_s']:.1f} s" for name in ("add", "delete", "compact", "check"))
    exact = ", ".join(f"{case['exact_queries']}" for case in cases)
    return (
        f"{table(rows)}\n\nOne query with {results['candidates']} candidates and {K} results, "
        f"{where['threads']} threads; "
        f"{cases[0]['queries']} captions are queries, of which {exact} are searched exactly, for recall. "
        '"in batches" is the wall-clock rate of all queries in one call. The following two are processor time of one '
        "query: of an exact search, and of the same scores in PyTorch without the native kernels. "
        '"for 0.95" is the number of candidates that is enough for this recall. "open" is wall time after the files '
        "left the page cache. Memory is the peak of the process before the exact searches, with the mapped files. "
        f"Changes of ten among {cases[-1]['items']:,} images: {changed}, by the clock. "
        "SCAN, d = 256, 36 regions per image. Encoding takes "
        f"{1e3 * results['encode_cpu_s_per_item']:.1f} ms of processor time per image, pooling and writing "
        f"{1e3 * results['write_cpu_s_per_item']:.2f} ms. Measured on {where['date'][:10]} with "
        f"`{where['command']}` at {commit_of(where)}: {where['processor']}, torch {where['torch']}; load of the "
        f"machine {results['load']:.0f}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run directory of a SCAN trained on the emoji")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "bf16"], help="type of the rows of each of --items")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--exact", type=int, nargs="+", default=[40, 40], help="exact searches, for each of --items")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep indexes in DIR, and search those that are there")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--change", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pooling", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.build:
        built = build(options.run, options.build, options.items[0], options.dtypes[0], options.pooling)
        print(json.dumps(built))
        return
    if options.search:
        print(json.dumps(search(options.search, options.queries, options.exact[0])))
        return
    if options.change:
        print(json.dumps(changes(options.change)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        results = measured(options, Path(temporary) if options.keep is None else options.keep)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


def measured(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Build the indexes that are not in `place` yet, and search all; return the content of the JSON file."""
    cases: list[dict[str, Any]] = []
    place.mkdir(parents=True, exist_ok=True)
    weights = place / "pooling.safetensors"
    if not weights.exists():
        learned = training(Members(options.run))
        save_file({name: tensor.contiguous() for name, tensor in learned.tensors().items()}, weights)
    threads = ("--threads", options.threads)
    for items, dtype, exact in zip(options.items, options.dtypes, options.exact, strict=True):
        path, notes = place / f"{items}-{dtype}", place / f"{items}-{dtype}.json"
        if not notes.exists():
            of_build = ("--build", path, "--items", items, "--dtypes", dtype, "--pooling", weights)
            notes.write_text(json.dumps(_in_process("--run", options.run, *of_build)))
        built = json.loads(notes.read_text())
        found = _in_process("--search", path, "--queries", options.queries, "--exact", exact, *threads)
        changed = _in_process("--change", path, *threads)
        if options.keep is None:
            shutil.rmtree(path)
        cases.append({"items": items, "dtype": dtype, **built, **found, **changed})
        print(cases[-1], file=sys.stderr, flush=True)
    return {
        "environment": environment(options.threads, build_info()),
        "load": os.getloadavg()[0],
        "candidates": CANDIDATES,
        "encode_cpu_s_per_item": cases[-1]["encode_cpu_s_per_item"],
        "write_cpu_s_per_item": cases[-1]["write_cpu_s_per_item"],
        "cases": cases,
    }


if __name__ == "__main__":
    main()
