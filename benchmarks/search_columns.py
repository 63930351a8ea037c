"""Measure where embeddings of candidates are read faster: in an index, or in a multi-vector column of LanceDB.

    python -m benchmarks.search_columns --index runs/search/100000-bf16 --path DIR --json FILE

The index is one that `benchmarks.search --keep runs/search` left. Its embeddings are copied into a table with a column
of lists of vectors. Then both stores give the embeddings of the same candidates, one after the other, and the model
scores them. `DIR` is a folder that `pip install --target DIR lancedb pylance` filled.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.search_measures import CANDIDATES, texts_of
from itm_fast import Fragments, build_info
from itm_fast.benchmarking.table import table
from itm_fast.files.environment import environment
from itm_fast.search import Index
from itm_fast.search.queries import of_texts

_BATCH, _COLUMN = 5000, "embeddings"
Store = Callable[[torch.Tensor], Fragments]


def lancedb_table(index: Index, path: Path) -> dict[str, float]:
    """Copy the embeddings of all images, as float16, into a table of LanceDB; return what that took."""
    import lancedb
    import pyarrow

    side = index.snapshot.sides["images"]
    width = side.encodings(side.positions()[:1])[0].values.shape[1]
    kind = pyarrow.list_(pyarrow.list_(pyarrow.float16(), width))

    def batches() -> Any:
        for positions in side.positions().split(_BATCH):
            rows = side.encodings(positions)[0]
            vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.values.half().numpy().ravel()), width)
            column = pyarrow.ListArray.from_arrays(rows.offsets.to(torch.int32).numpy(), vectors)
            yield pyarrow.record_batch([column.cast(kind)], names=[_COLUMN])

    start = time.process_time()
    schema = pyarrow.schema([(_COLUMN, kind)])
    lancedb.connect(path).create_table("items", pyarrow.RecordBatchReader.from_batches(schema, batches()))
    seconds = time.process_time() - start
    return {"copy_cpu_s": seconds, "disk_bytes": sum(one.stat().st_size for one in path.rglob("*") if one.is_file())}


def lancedb_store(path: Path) -> Store:
    import lancedb

    dataset = lancedb.connect(path).open_table("items").to_lance()

    def read(positions: torch.Tensor) -> Fragments:
        column = dataset.take(positions.tolist(), columns=[_COLUMN])[_COLUMN].combine_chunks()
        lengths = column.value_lengths().to_numpy()
        vectors = column.flatten()
        values = np.asarray(vectors.flatten()).reshape(len(vectors), -1)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        return Fragments(torch.from_numpy(values.astype(np.float32)), offsets)

    return read


def compared(index: Index, stores: Mapping[str, Store], texts: list[str]) -> dict[str, Any]:
    """Read the candidates of captions from every store in turn, and score those of the first one; in this process."""
    side, members = index.snapshot.sides["images"], index.members
    wall: dict[str, list[float]] = {name: [] for name in (*stores, "scoring")}
    cpu: dict[str, list[float]] = {name: [] for name in wall}

    def clock(name: str, do: Callable[[], Any]) -> Any:
        start, used = time.perf_counter(), time.process_time()
        found = do()
        cpu[name].append(time.process_time() - used)
        wall[name].append(time.perf_counter() - start)
        return found

    difference = 0.0
    for _ in range(2):  # The first round reads pages from the disk; its times are dropped.
        for times in (*wall.values(), *cpu.values()):
            times.clear()
        for text in texts:
            query = of_texts(members, [text])
            n = min(CANDIDATES, side.count)
            ((_, positions),) = side.nearest(index.snapshot.pooling("captions", query.encodings), n)
            first, *others = [clock(name, functools.partial(read, positions)) for name, read in stores.items()]
            for other in others:
                difference = max(difference, float((first.values - other.values).abs().max()))
            clock("scoring", functools.partial(members.scores, query.encodings, "captions", [first], "images"))
    seconds = {
        name: {
            "wall_p50": float(np.quantile(wall[name], 0.5)),
            "wall_p99": float(np.quantile(wall[name], 0.99)),
            "cpu_p50": float(np.quantile(cpu[name], 0.5)),
        }
        for name in wall
    }
    return {"queries": len(texts), "largest_difference": difference, "seconds": seconds}


def measured(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Copy the index into `place`, read and score; return the content of the JSON file."""
    index = Index.open(options.index)
    side = index.snapshot.sides["images"]
    copied = lancedb_table(index, place)
    stores: dict[str, Store] = {
        "index": lambda positions: side.encodings(positions)[0],
        "lancedb": lancedb_store(place),
    }
    return {
        "environment": environment(options.threads, build_info()),
        "load": os.getloadavg()[0],
        "items": side.count,
        "candidates": CANDIDATES,
        "lancedb": sys.modules["lancedb"].__version__,
        "index_disk_bytes": sum(file.stat().st_size for file in options.index.iterdir()),
        **copied,
        **compared(index, stores, texts_of(index, options.queries)),
    }


_NAMES = {"index": "index of itm_fast, bf16", "lancedb": "LanceDB, lists of float16 vectors", "scoring": "(scores)"}


def markdown(results: dict[str, Any]) -> str:
    """Render one row per store, and one for the scores."""
    rows = [["embeddings read from", "p50", "p99", "processor time", "on disk"]]
    disk = {"index": results["index_disk_bytes"], "lancedb": results["disk_bytes"]}
    for name, found in results["seconds"].items():
        size = f"{disk[name] / 1e9:.2f} GB" if name in disk else "-"
        times = [f"{1e3 * found[key]:.1f} ms" for key in ("wall_p50", "wall_p99", "cpu_p50")]
        rows.append([_NAMES[name], *times, size])
    where = results["environment"]
    return (
        f"{table(rows)}\n\nThe embeddings of {results['candidates']} of {results['items']:,} images, read from the "
        "page cache into one float32 tensor, and the scores of a caption with them; medians of "
        f"{results['queries']} captions, whose candidates are read from one store after the other; {where['threads']} "
        f"threads in PyTorch, LanceDB {results['lancedb']} with its own threads. Measured on {where['date'][:10]} with "
        f"`python -m benchmarks.search_columns`: {where['processor']}; load of the machine {results['load']:.0f}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--path", type=Path, help="folder with LanceDB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.path is not None:
        sys.path.append(str(options.path))
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.index.parent) as place:
        results = measured(options, Path(place))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
