"""Measure engines for the first stage of a search: nearest neighbours by inner product.

    python -m benchmarks.search_engines --json benchmarks/results/search_engines.json

Each engine that is installed runs in a process of its own: it builds an index of random clustered vectors on disk,
opens it in a new process, and answers single queries with one thread. `--path NAME=DIR` imports an engine from a folder
that `pip install --target DIR` filled, whose size is then that of the engine with its dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from itm_fast import build_info
from itm_fast.benchmarking.measure import status_bytes
from itm_fast.benchmarking.table import table
from itm_fast.files.environment import environment

WIDTH, TOP, QUERIES = 256, 200, 100
Search = Callable[[np.ndarray], np.ndarray]


def vectors(count: int, seed: int) -> np.ndarray:
    """Return unit vectors (count, 256) float32 around 2,000 random centres, the same for every seed."""
    centres = np.random.default_rng(0).standard_normal((2000, WIDTH)).astype(np.float32)
    random = np.random.default_rng(seed)
    found = centres[random.integers(len(centres), size=count)] + 1.5 * random.standard_normal((count, WIDTH))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def _usearch(path: Path, data: np.ndarray | None) -> Search:
    from usearch.index import Index

    file = str(path / "index.usearch")
    if data is not None:
        index = Index(ndim=WIDTH, metric="ip", dtype="f32")
        index.add(np.arange(len(data)), data, threads=1)
        index.save(file)
    opened = Index.restore(file, view=True)
    return lambda query: opened.search(query, TOP, threads=1).keys


def _faiss(path: Path, data: np.ndarray | None) -> Search:
    import faiss

    file = str(path / "index.faiss")
    faiss.omp_set_num_threads(1)
    if data is not None:
        built = faiss.IndexHNSWFlat(WIDTH, 16, faiss.METRIC_INNER_PRODUCT)
        built.hnsw.efConstruction = 100
        built.add(data)
        faiss.write_index(built, file)
    opened = faiss.read_index(file)
    opened.hnsw.efSearch = 2 * TOP
    return lambda query: opened.search(query[None], TOP)[1][0]


def _milvus(path: Path, data: np.ndarray | None) -> Search:
    from pymilvus import MilvusClient

    client = MilvusClient(str(path / "index.db"))
    if data is not None:
        client.create_collection("items", dimension=WIDTH, metric_type="IP", auto_id=False)
        for first in range(0, len(data), 10_000):
            part = data[first : first + 10_000]
            client.insert("items", [{"id": first + row, "vector": one.tolist()} for row, one in enumerate(part)])
        client.flush("items")
    client.load_collection("items")

    def search(query: np.ndarray) -> np.ndarray:
        return np.array([hit["id"] for hit in client.search("items", [query.tolist()], limit=TOP, output_fields=[])[0]])

    return search


def _lancedb(path: Path, data: np.ndarray | None) -> Search:
    import lancedb
    import pyarrow

    database = lancedb.connect(path / "index.lance")
    if data is not None:
        rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(data.ravel()), WIDTH)
        table = database.create_table("items", pyarrow.table({"id": np.arange(len(data)), "vector": rows}))
        table.create_index(metric="dot", num_partitions=256, num_sub_vectors=64)
    table = database.open_table("items")

    def search(query: np.ndarray) -> np.ndarray:
        asked = table.search(query).distance_type("dot").limit(TOP).nprobes(32).refine_factor(2)
        return asked.select(["id"]).to_arrow()["id"].to_numpy()

    return search


def _torch(path: Path, data: np.ndarray | None) -> Search:
    """The exact scan of the package: a product with all vectors in mapped memory."""
    if data is not None:
        np.save(path / "vectors.npy", data)
    torch.set_num_threads(1)
    stored = torch.from_numpy(np.load(path / "vectors.npy", mmap_mode="c"))
    return lambda query: (stored @ torch.from_numpy(query)).topk(TOP).indices.numpy()


ENGINES: dict[str, Callable[[Path, np.ndarray | None], Search]] = {
    "torch": _torch,
    "usearch": _usearch,
    "faiss": _faiss,
    "milvus": _milvus,
    "lancedb": _lancedb,
}


def measure(name: str, path: Path, count: int, phase: str) -> dict[str, float]:
    """Build an index, or open and search it, in this process."""
    if phase == "build":
        data = vectors(count, 1)
        before, start = status_bytes("VmRSS"), time.process_time()
        ENGINES[name](path, data)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return {
            "build_cpu_s": time.process_time() - start,
            "build_bytes": max(status_bytes("VmHWM") - before, 0),
            "disk_bytes": size,
        }
    # The engine's modules are imported before the clock starts.
    asked = vectors(QUERIES, 2)
    start = time.perf_counter()
    search = ENGINES[name](path, None)
    search(asked[0])
    opened = time.perf_counter() - start
    cpu, wall, found = [], [], []
    for query in asked:
        start, used = time.perf_counter(), time.process_time()
        found.append(search(query))
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - start)
    exact = np.argsort(-(asked @ vectors(count, 1).T), axis=1)[:, :TOP]
    hits = [len(set(map(int, one)) & set(row.tolist())) for one, row in zip(found, exact, strict=True)]
    return {
        "open_s": opened,
        "query_cpu_p50_s": float(np.quantile(cpu, 0.5)),
        "query_p50_s": float(np.quantile(wall, 0.5)),
        "query_p99_s": float(np.quantile(wall, 0.99)),
        "recall": sum(hits) / (TOP * QUERIES),
        "resident_bytes": float(status_bytes("VmRSS")),
    }


def _process(name: str, path: Path, count: int, phase: str, folder: str | None) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.search_engines", "--engine", name, "--folder", str(path)]
    command += ["--count", str(count), "--phase", phase]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1],
        env={**os.environ, **({"PYTHONPATH": folder} if folder else {}), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"{name}: {lines[-1] if lines else done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


_NAMES = {
    "torch": "exact product in torch",
    "usearch": "usearch, HNSW",
    "faiss": "faiss-cpu, HNSW",
    "milvus": "Milvus Lite",
    "lancedb": "LanceDB, IVF-PQ",
}


def markdown(results: dict[str, Any]) -> str:
    """Render one row per engine."""
    rows = [["engine", "build", "query, p50", "recall", "first query", "memory", "installed size"]]
    for name, found in results["engines"].items():
        installed = found.get("installed_bytes")
        rows.append(
            [
                _NAMES[name],
                f"{found['build_cpu_s']:.1f} s",
                f"{1e3 * found['query_cpu_p50_s']:.1f} ms",
                f"{found['recall']:.3f}",
                f"{1e3 * found['open_s']:.0f} ms",
                f"{found['resident_bytes'] / 1e6:.0f} MB",
                "-" if installed is None else f"{installed / 1e6:.0f} MB",
            ]
        )
    where = results["environment"]
    return (
        f"{table(rows)}\n\n{results['count']:,} random vectors of {results['width']} dimensions around 2,000 centres, "
        f"the {results['top']} greatest inner products, one thread, defaults of the engines or as in the script. Build "
        "and query are processor time; the first query includes opening the index, in wall time on a busy machine. "
        "Memory is that of the process. The installed size includes dependencies, also those of itm_fast itself. "
        "Measured on "
        f"{where['date'][:10]}: {where['processor']}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--path", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--engine", choices=list(ENGINES))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--phase", choices=("build", "search"))
    options = parser.parse_args()
    if options.phase:
        print(json.dumps(measure(options.engine, options.folder, options.count, options.phase)))
        return
    folders = dict(entry.split("=", 1) for entry in options.path)
    results: dict[str, Any] = {}
    for name in ENGINES:
        with tempfile.TemporaryDirectory() as place:
            try:
                built = _process(name, Path(place), options.count, "build", folders.get(name))
                found = _process(name, Path(place), options.count, "search", folders.get(name))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                continue
        results[name] = {**built, **found}
        if name in folders:
            files = [file for file in Path(folders[name]).rglob("*") if file.is_file()]
            results[name]["installed_bytes"] = sum(file.stat().st_size for file in files)
        print(name, results[name], flush=True)
    content = {
        "environment": environment(1, build_info()),
        "count": options.count,
        "width": WIDTH,
        "top": TOP,
        "queries": QUERIES,
        "engines": results,
    }
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
