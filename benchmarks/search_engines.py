"""Measure engines for the first stage of a search: the items with the nearest pooled vectors.

    python -m benchmarks.search_engines --index runs/search/100000-bf16 --path NAME=DIR \\
        --json benchmarks/results/search_engines.json

The vectors are those of an index that `benchmarks.search --keep runs/search` left, and the queries are captions. Each
engine runs in a process of its own: it builds an index on disk, opens it in a new process, and answers single queries
with one thread. It finds as many items as the shortlist of a search has. What counts is how many of the ten images with
the best scores are among them: the later stages find no others. `--path NAME=DIR` imports an engine from a folder that
`pip install --target DIR` filled, whose size is then that of the engine with its dependencies.
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

from benchmarks.search_measures import CANDIDATES, K, texts_of
from itm_fast import build_info
from itm_fast.benchmarking.measure import status_bytes
from itm_fast.benchmarking.table import table
from itm_fast.files.environment import environment
from itm_fast.search import Index
from itm_fast.search.queries import of_texts
from itm_fast.search.searching import SHORTLIST

TOP = CANDIDATES * SHORTLIST
# What an engine is told to try more of, as a multiple of the least: the first that is good enough is reported.
EFFORTS = (1, 2, 4)
# Such effort misses at most this share more of the best images than the exact product, or than the greatest effort.
_MISSED = 0.01
Search = Callable[[np.ndarray, int], np.ndarray]


def write_arrays(index: Index, folder: Path, queries: int, exact: int) -> None:
    """Write pooled vectors (n, D) of an index and of captions, and the places (exact, 10) of the best images."""
    side = index.snapshot.sides["images"]
    pooled = torch.cat([segment.stored["pooled"] for segment in side.segments])
    texts = texts_of(index, queries)
    asked = index.snapshot.pooling("captions", of_texts(index.members, texts).encodings)
    best = [[side.find(hit.item.id) for hit in one.hits] for one in index.search(texts[:exact], K, exact=True)]
    np.save(folder / "vectors.npy", pooled.float().numpy())
    np.save(folder / "queries.npy", asked.to(pooled.dtype).float().numpy())
    np.save(folder / "best.npy", np.array(best))


def _usearch(path: Path, data: np.ndarray | None) -> Search:
    from usearch.index import Index as Usearch

    file = str(path / "index.usearch")
    if data is not None:
        index = Usearch(ndim=data.shape[1], metric="ip", dtype="f32")
        index.add(np.arange(len(data)), data, threads=1)
        index.save(file)
    opened = Usearch.restore(file, view=True)

    def search(query: np.ndarray, effort: int) -> np.ndarray:
        opened.expansion_search = TOP * effort
        return opened.search(query, TOP, threads=1).keys

    return search


def _faiss(path: Path, data: np.ndarray | None) -> Search:
    import faiss

    file = str(path / "index.faiss")
    faiss.omp_set_num_threads(1)
    if data is not None:
        built = faiss.IndexHNSWFlat(data.shape[1], 16, faiss.METRIC_INNER_PRODUCT)
        built.hnsw.efConstruction = 100
        built.add(data)
        faiss.write_index(built, file)
    opened = faiss.read_index(file)

    def search(query: np.ndarray, effort: int) -> np.ndarray:
        opened.hnsw.efSearch = TOP * effort
        return opened.search(query[None], TOP)[1][0]

    return search


def _milvus(path: Path, data: np.ndarray | None) -> Search:
    from pymilvus import MilvusClient

    client = MilvusClient(str(path / "index.db"))
    if data is not None:
        client.create_collection("items", dimension=data.shape[1], metric_type="IP", auto_id=False)
        for first in range(0, len(data), 10_000):
            part = data[first : first + 10_000]
            client.insert("items", [{"id": first + row, "vector": one.tolist()} for row, one in enumerate(part)])
        client.flush("items")
    client.load_collection("items")

    def search(query: np.ndarray, _: int) -> np.ndarray:
        return np.array([hit["id"] for hit in client.search("items", [query.tolist()], limit=TOP, output_fields=[])[0]])

    return search


def _lancedb(path: Path, data: np.ndarray | None) -> Search:
    import lancedb
    import pyarrow

    database = lancedb.connect(path / "index.lance")
    if data is not None:
        rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(data.ravel()), data.shape[1])
        table = database.create_table("items", pyarrow.table({"id": np.arange(len(data)), "vector": rows}))
        table.create_index(metric="dot", num_partitions=256, num_sub_vectors=64)
    table = database.open_table("items")

    def search(query: np.ndarray, effort: int) -> np.ndarray:
        asked = table.search(query).distance_type("dot").limit(TOP).nprobes(32 * effort).refine_factor(2)
        return asked.select(["id"]).to_arrow()["id"].to_numpy()

    return search


def _torch(path: Path, data: np.ndarray | None) -> Search:
    """The exact product of the package with all vectors in mapped memory."""
    file = path / "vectors.bf16"
    if data is not None:
        torch.from_numpy(data).bfloat16().view(torch.int16).numpy().tofile(file)
    torch.set_num_threads(1)

    def search(query: np.ndarray, _: int) -> np.ndarray:
        asked = torch.from_numpy(query).bfloat16()
        stored = torch.from_numpy(np.memmap(file, np.int16, "c")).view(torch.bfloat16).view(-1, len(asked))
        return (stored @ asked).float().topk(TOP).indices.numpy()

    return search


ENGINES: dict[str, Callable[[Path, np.ndarray | None], Search]] = {
    "torch": _torch,
    "usearch": _usearch,
    "faiss": _faiss,
    "milvus": _milvus,
    "lancedb": _lancedb,
}


def measure(name: str, path: Path, arrays: Path, phase: str) -> dict[str, Any]:
    """Build an index in `path`, or open and search it, in this process."""
    if phase == "build":
        data = np.load(arrays / "vectors.npy")
        before, start = status_bytes("VmRSS"), time.process_time()
        ENGINES[name](path, data)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return {
            "build_cpu_s": time.process_time() - start,
            "build_bytes": max(status_bytes("VmHWM") - before, 0),
            "disk_bytes": size,
        }
    asked, best = np.load(arrays / "queries.npy"), np.load(arrays / "best.npy")
    # The engine's modules are imported before the clock starts.
    start = time.perf_counter()
    search = ENGINES[name](path, None)
    search(asked[0], 1)
    opened, efforts = time.perf_counter() - start, []
    for effort in EFFORTS:
        cpu, wall, found = [], [], []
        for query in asked:
            start, used = time.perf_counter(), time.process_time()
            found.append(search(query, effort))
            cpu.append(time.process_time() - used)
            wall.append(time.perf_counter() - start)
        hits = [len(set(map(int, one)) & set(row.tolist())) for one, row in zip(found, best, strict=False)]
        efforts.append(
            {
                "effort": effort,
                "query_cpu_p50_s": float(np.quantile(cpu, 0.5)),
                "query_p50_s": float(np.quantile(wall, 0.5)),
                "query_p99_s": float(np.quantile(wall, 0.99)),
                "best_found": sum(hits) / best.size,
            }
        )
    return {"open_s": opened, "efforts": efforts, "resident_bytes": float(status_bytes("VmRSS"))}


def _process(name: str, path: Path, arrays: Path, phase: str, folder: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.search_engines", "--engines", name, "--folder", str(path)]
    command += ["--arrays", str(arrays), "--phase", phase]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1],
        env={**os.environ, **({"PYTHONPATH": folder} if folder else {}), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"{name}: {lines[-1] if lines else done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


_NAMES = {
    "torch": "exact product in torch",
    "usearch": "usearch, HNSW",
    "faiss": "faiss-cpu, HNSW",
    "milvus": "Milvus Lite",
    "lancedb": "LanceDB, IVF-PQ",
}


def good_enough(efforts: list[dict[str, Any]], best: float) -> dict[str, Any]:
    """Return the least effort that finds as many of the best images as the exact product does, or as more effort."""
    most = min(best, max(one["best_found"] for one in efforts))
    return next(one for one in efforts if one["best_found"] >= most - _MISSED)


def markdown(results: dict[str, Any]) -> str:
    """Render one row per engine and size."""
    rows = [["images", "engine", "build", "query, p50", "best 10 found", "first query", "memory", "installed size"]]
    for case in results["cases"]:
        best = case["engines"]["torch"]["efforts"][0]["best_found"]
        for name, found in case["engines"].items():
            installed, chosen = found.get("installed_bytes"), good_enough(found["efforts"], best)
            rows.append(
                [
                    f"{case['items']:,}",
                    _NAMES[name],
                    f"{found['build_cpu_s']:.1f} s",
                    f"{1e3 * chosen['query_cpu_p50_s']:.1f} ms",
                    f"{chosen['best_found']:.3f}",
                    f"{1e3 * found['open_s']:.0f} ms",
                    f"{found['resident_bytes'] / 1e6:.0f} MB",
                    "-" if installed is None else f"{installed / 1e6:.0f} MB",
                ]
            )
    where, cases = results["environment"], results["cases"]
    exact = ", ".join(str(case["exact_queries"]) for case in cases)
    return (
        f"{table(rows)}\n\nPooled vectors of the images and captions of the table above. Each engine finds "
        f"{results['top']:,} items, the shortlist of {CANDIDATES} candidates, with one thread, for "
        f'{cases[0]["queries"]} captions. "best 10 found" is the share of the ten images with the best scores that '
        f"are among them, over {exact} captions. HNSW and IVF were tried with up to four times the fewest vectors to "
        "visit; the row has the first setting within 0.01 of the exact product or of the largest setting. Build and "
        "query are processor time; the first query includes opening the index, in wall time on a busy machine. Memory "
        "is that of the process. The installed size includes dependencies, also those of itm_fast itself. "
        f"Measured on {where['date'][:10]}: {where['processor']}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, action="append", help="index of `benchmarks.search`; repeatable")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--exact", type=int, default=40, help="captions with all images scored")
    parser.add_argument("--path", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--add", action="store_true", help="keep the other cases of --json")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--arrays", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--phase", choices=("build", "search"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        print(json.dumps(measure(options.engines[0], options.folder, options.arrays, options.phase)))
        return
    kept = json.loads(options.json.read_text())["cases"] if options.add else []
    content = {
        "environment": environment(1, build_info()),
        "top": TOP,
        "cases": [*kept, *(measured(path, options) for path in options.index)],
    }
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(markdown(content))


def measured(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Build and search with each engine that is installed."""
    folders = dict(entry.split("=", 1) for entry in options.path)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as arrays:
        index = Index.open(path)
        write_arrays(index, Path(arrays), options.queries, options.exact)
        for name in options.engines:
            with tempfile.TemporaryDirectory() as place:
                try:
                    built = _process(name, Path(place), Path(arrays), "build", folders.get(name))
                    found = _process(name, Path(place), Path(arrays), "search", folders.get(name))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    continue
            results[name] = {**built, **found}
            if name in folders:
                files = [file for file in Path(folders[name]).rglob("*") if file.is_file()]
                results[name]["installed_bytes"] = sum(file.stat().st_size for file in files)
            print(name, results[name], file=sys.stderr, flush=True)
    count = index.snapshot.sides["images"].count
    return {"items": count, "queries": options.queries, "exact_queries": options.exact, "engines": results}


if __name__ == "__main__":
    main()
