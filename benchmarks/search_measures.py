"""What a process measures of an index: opening, searching, memory, recall and changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from itm_fast import reference
from itm_fast.benchmarking.measure import status_bytes
from itm_fast.data import emoji
from itm_fast.search import Index, check
from itm_fast.search.queries import of_texts
from itm_fast.search.searching import CANDIDATES, shortlist_places

__all__ = ["CANDIDATES", "K", "changes", "drop_from_cache", "search", "texts_of"]

K = 10
_TILE = 512


def drop_from_cache(path: Path) -> None:
    """Ask the system to forget the pages of all files of an index."""
    for file in path.iterdir():
        number = os.open(file, os.O_RDONLY)
        try:
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def texts_of(index: Index, count: int) -> list[str]:
    texts = emoji.captions("dev") + emoji.captions("test")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1))[:count].tolist()
    tokenizer = index.members.main.tokenizer
    return [texts[one] for one in order if {*tokenizer.encode(texts[one])[1:-1]} - {tokenizer.unk}]


def _in_torch(index: Index, text: str) -> None:
    """Compute SCAN's scores of a text with all images in plain PyTorch."""
    side = index.snapshot.sides["images"]
    words = index.members.encode_captions([text])[0]
    for positions in side.positions().split(_TILE):
        reference.cross_attention_scores_packed(words, side.encodings(positions)[0])


def search(path: Path, queries: int, exact: int) -> dict[str, float]:
    """Open and search an index in this process."""
    start = time.perf_counter()
    Index.open(path)
    opened = time.perf_counter() - start
    drop_from_cache(path)
    start = time.perf_counter()
    index = Index.open(path)
    cold = time.perf_counter() - start
    texts = texts_of(index, queries)
    members = index.members
    start = time.perf_counter()
    index.search(texts[0], K, candidates=CANDIDATES)
    first = time.perf_counter() - start
    index.search(texts[: len(texts) // 2], K, candidates=CANDIDATES)
    cpu, wall, found = [], [], []
    for text in texts:
        used, start = time.process_time(), time.perf_counter()
        found += index.search(text, K, candidates=CANDIDATES)
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - start)
    start = time.perf_counter()
    index.search(texts, K, candidates=CANDIDATES)
    together = (time.perf_counter() - start) / len(texts)
    # The exact searches below read all items.
    peak, own = status_bytes("VmHWM"), status_bytes("RssAnon")
    used = time.process_time()
    whole = index.search(texts[:exact], K, exact=True)
    native = (time.process_time() - used) / exact
    used = time.process_time()
    with torch.no_grad():
        _in_torch(index, texts[0])
    plain = time.process_time() - used
    hits = [
        len({hit.item.id for hit in one.hits} & {hit.item.id for hit in other.hits})
        for one, other in zip(whole, found, strict=False)
    ]
    side = index.snapshot.sides["images"]
    ranks = []
    for text, one in zip(texts, whole, strict=False):
        wanted = torch.tensor([side.find(hit.item.id) for hit in one.hits])
        ranks.append(shortlist_places(index.snapshot, of_texts(members, text), "images", wanted))
    needed = int(torch.cat(ranks).sort().values[int(0.95 * K * exact) - 1]) + 1
    return {
        "open_s": opened,
        "cold_open_s": cold,
        "first_query_s": first,
        "query_cpu_p50_s": float(np.quantile(cpu, 0.5)),
        "query_cpu_p99_s": float(np.quantile(cpu, 0.99)),
        "query_wall_p50_s": float(np.quantile(wall, 0.5)),
        "query_wall_p99_s": float(np.quantile(wall, 0.99)),
        "queries": len(texts),
        "batch_wall_s_per_query": together,
        "exact_cpu_s_per_query": native,
        "torch_cpu_s_per_query": plain,
        "exact_queries": exact,
        "recall": sum(hits) / (K * exact),
        "candidates_for_95_percent": needed,
        "peak_bytes": peak,
        "resident_own_bytes": own,
        "disk_bytes": sum(file.stat().st_size for file in path.iterdir()),
    }


def changes(path: Path) -> dict[str, float]:
    """Add ten images, delete them, compact the index and check all its files; its items are the same after it."""
    index = Index.open(path)
    index.members  # noqa: B018 - loads the model, which is no part of a change.
    pictures = emoji.patches(emoji.pictures("test")[:10])
    names = [f"added {number}" for number in range(len(pictures))]
    found = {}

    def clock(name: str, change: Callable[[], object]) -> None:
        start = time.perf_counter()
        if problems := change():
            raise RuntimeError(f"{name}: {problems}")
        found[f"{name}_s"] = time.perf_counter() - start

    clock("add", lambda: index.add(pictures, ids=names, thumbnails=False))
    clock("delete", lambda: index.delete(names) - len(names))
    clock("compact", lambda: index.compact())
    clock("check", lambda: check(path))
    return found
