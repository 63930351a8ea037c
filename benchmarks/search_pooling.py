"""Measure how well pooled vectors find what cross-attention ranks first.

    python -m benchmarks.search_pooling --run RUN --json benchmarks/results/search_pooling.json

The gallery is all 3,621 bundled emoji; the queries are captions of dev and test, which neither the model nor a pooling
was trained on. Recall is the share of the ten images with the best scores that are among the candidates. The exact
scores of the candidates then give their order, so this is the recall of a search in two stages.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.units import commit_of
from itm_fast import build_info
from itm_fast.benchmarking.table import table
from itm_fast.data import emoji
from itm_fast.files.environment import environment
from itm_fast.fragments import Fragments
from itm_fast.search import learning
from itm_fast.search.members import Members
from itm_fast.search.pooling import Pooling
from itm_fast.search.rows import best_rows, chosen_rows, decoded_rows, encoded_rows
from itm_fast.search.searching import SHORTLIST

CANDIDATES = (10, 20, 50, 100, 200, 400)
TOP = 10


def fixed_encoding(sets: Fragments, repeats: int, bits: int, width: int, *, queries: bool) -> Tensor:
    """Return MUVERA's fixed-dimensional encoding of sets: (n, repeats * 2^bits * width).

    The space is cut into 2^bits cells by random planes. A query adds its rows of a cell; an item takes their mean, and
    an empty cell the mean of the nearest cell that is not empty. Random signs project rows to `width` dimensions.

    Source: Dhulipala et al., "MUVERA: Multi-Vector Retrieval via Fixed Dimensional Encodings" (NeurIPS 2024), sec. 2.
    """
    generator = torch.Generator().manual_seed(0)
    cells = 2**bits
    numbers = torch.arange(cells)
    distance = torch.stack([((numbers[:, None] ^ numbers) >> bit) & 1 for bit in range(bits)]).sum(0)
    found = []
    for _ in range(repeats):
        planes = torch.randn(sets.values.shape[1], bits, generator=generator)
        signs = torch.randint(0, 2, (sets.values.shape[1], width), generator=generator) * 2.0 - 1
        cell = ((sets.values @ planes > 0) * 2 ** torch.arange(bits)).sum(1)
        place = sets.set_index() * cells + cell
        rows = sets.values @ signs / width**0.5
        sums = torch.zeros(len(sets) * cells, width).index_add(0, place, rows).view(len(sets), cells, width)
        if not queries:
            counts = torch.bincount(place, minlength=len(sets) * cells).view(len(sets), cells)
            means = sums / counts.clamp(min=1)[:, :, None]
            nearest = (distance + 1000 * (counts == 0)[:, None]).argmin(2)
            sums = means.gather(1, nearest[:, :, None].expand_as(means))
        found.append(sums.flatten(1))
    return torch.cat(found, 1)


def recalls(products: Tensor, best: Tensor) -> list[float]:
    """Return the recall by number of candidates, for products (queries, images) and the best images (queries, k)."""
    places = (products[:, None] > products.gather(1, best)[:, :, None]).sum(2)
    return [float((places < count).double().mean()) for count in CANDIDATES]


def shortlist_recalls(products: Tensor, blended: Tensor, best: Tensor) -> list[float]:
    """Return the recall by number of candidates if `blended` chooses them from a shortlist, as a search does."""
    found = []
    for count in CANDIDATES:
        near = products.topk(min(SHORTLIST * count, products.shape[1])).indices
        chosen = near.gather(1, blended.gather(1, near).topk(count).indices)
        found.append(float((best[:, :, None] == chosen[:, None]).any(2).double().mean()))
    return found


def run(checkpoint: Path, queries: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    members = Members(checkpoint)
    pictures = [torch.from_numpy(emoji.patches(emoji.pictures(split))) for split in emoji.SPLITS]
    images = Fragments.cat([members.encode_images(part)[0] for part in torch.cat(pictures).split(256)])
    texts = emoji.captions("dev") + emoji.captions("test")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:queries]
    captions = members.encode_captions([texts[number] for number in order.tolist()])[0]

    def scored(images: Fragments) -> Tensor:
        tiles = torch.arange(len(images)).split(256)
        parts = [members.scores([captions], "captions", [images.index_select(tile)], "images") for tile in tiles]
        return torch.cat(parts, 1)

    best = scored(images).topk(TOP).indices
    stored = {}
    for dtype in ("bf16", "int8"):
        kept = {**encoded_rows(images.values, dtype), "offsets": images.offsets}
        rows = decoded_rows([chosen_rows(kept, torch.arange(len(images)))])
        found = scored(rows).topk(TOP).indices
        stored[dtype] = float((found[:, :, None] == best[:, None]).any(2).double().mean())
    forms: dict[str, Any] = {}

    def add(name: str, products: Tensor, width: int | None) -> None:
        forms[name] = {"width": width, "recalls": recalls(products, best)}

    mean = Pooling([None])
    add("normalised mean", mean("captions", [captions]) @ mean("images", [images]).t(), images.values.shape[1])
    for repeats, bits, width in ((4, 4, 16), (10, 4, 32), (20, 5, 16)):
        left = fixed_encoding(captions, repeats, bits, width, queries=True)
        right = fixed_encoding(images, repeats, bits, width, queries=False)
        add(f"MUVERA, {repeats} x {2**bits} cells x {width}", left @ right.t(), right.shape[1])
    train = emoji.load("train", members.main.tokenizer)
    with mock.patch.object(learning, "refined", lambda _captions, _images, _scores, maps, _held_out: maps):
        squares = learning.learned_pooling(members, train)
    vectors = squares("images", [images])
    add("learned, least squares only", squares("captions", [captions]) @ vectors.t(), vectors.shape[1])
    start = time.process_time()
    learned = learning.learned_pooling(members, train)
    seconds = time.process_time() - start
    vectors = learned("images", [images])
    products, fits = learned("captions", [captions]) @ vectors.t(), best_rows([captions], [images])
    add("learned", products, vectors.shape[1])
    add("MaxSim of all rows", fits, None)
    assert learned.blend is not None
    blended = learned.blend[0] * products + learned.blend[1] * fits
    forms["learned, then MaxSim"] = {"width": vectors.shape[1], "recalls": shortlist_recalls(products, blended, best)}
    return {
        "environment": environment(threads, build_info()),
        "load": os.getloadavg()[0],
        "model": members.main.name,
        "images": len(images),
        "queries": len(captions),
        "candidates": CANDIDATES,
        "learning_cpu_s": seconds,
        "stored": stored,
        "forms": forms,
    }


def markdown(results: dict[str, Any]) -> str:
    """Render the recalls by number of candidates."""
    rows = [["pooled vectors", "width", *(f"{count}" for count in results["candidates"])]]
    for name, form in results["forms"].items():
        width = "-" if form["width"] is None else f"{form['width']:,}"
        rows.append([name, width, *(f"{recall:.3f}" for recall in form["recalls"])])
    where = results["environment"]
    return (
        f"{table(rows)}\n\nShare of the {TOP} best of {results['images']:,} pictures among the candidates, by their "
        f"number, over {results['queries']} captions of unseen pictures; {results['model']} after a short training on "
        f"the emoji. Learning the vectors took {results['learning_cpu_s']:.0f} s of processor time. With stored "
        f"rows in bf16, {100 * results['stored']['bf16']:.1f} % of the ten best are those of float32 rows, with int8 "
        f"{100 * results['stored']['int8']:.1f} %. Measured on "
        f"{where['date'][:10]} with `python -m benchmarks.search_pooling` at {commit_of(where)}: "
        f"{where['processor']}, torch {where['torch']}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run directory of a SCAN trained on the emoji")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    results = run(options.run, options.queries, options.threads)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
