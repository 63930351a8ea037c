"""Project training to many GPUs: time of a step and an epoch on 8 and 64 of them, and their input and memory.

Inside: `Step`, `step`, `Need`, `need`, `DATA`, `markdown`.

Operations and bytes come from the cost model, rates from data sheets at assumed shares. The processor time of reading
and the memory per caption were measured; GPUs and networks were not.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import attrs

from benchmarks import costs, kernels
from benchmarks.costs import Cost
from benchmarks.units import amount, seconds
from itm_fast.benchmarking.table import table
from itm_fast.data.layout import CAPTIONS_PER_IMAGE
from itm_fast.data.reader import MOST_THREADS

__all__ = ["DATA", "Need", "Step", "markdown", "need", "step"]

GPU, BATCH, NODE = "H200", 128, 8
# Bytes per second that a GPU receives: within a machine of eight over NVLink (half of the 900 GB/s that the data sheet
# of the H200 states for both directions), between machines over one 400 Gb/s adapter per GPU. The assumed share of
# both, and the latency of each exchange.
NVLINK, NETWORK, LINK_SHARE, LATENCY = 450e9, 50e9, 0.7, 20e-6
# Memory of a GPU and of a machine (DGX H200), the share available to features; sequential read of a drive (PCIe 4).
GPU_BYTES, HOST_BYTES, FEATURE_SHARE, DRIVE = 141e9, 2e12, 0.75, 7e9
FEATURE_BYTES = 2 * costs.REGIONS * 2048
# From a machine's memory to a GPU (PCIe 5, 16 lanes), at LINK_SHARE; drives per machine; maximum reader threads per
# process.
PCIE, READER_THREADS = 64e9, MOST_THREADS
# Memory of an epoch's order per caption: a permutation of int64; with several processes one for the batches and one for
# each process's part. Memory of a store per image: the number of its shard and its position there, int64.
ORDER_BYTES, PLACE_BYTES = 8, 16


_ON_GPU, _IN_CACHE, _ON_DRIVES = "each GPU", "each machine's page cache", "drives"


@attrs.frozen
class Data:
    """Pairs of an epoch and their images."""

    pairs: float
    images: float


DATA = {
    "COCO": Data(costs.EPOCH_IMAGES * CAPTIONS_PER_IMAGE, costs.EPOCH_IMAGES),
    "10 million pairs": Data(1e7, 1e7),
    "1 billion pairs": Data(1e9, 1e9),
}


@attrs.frozen
class Step:
    """Seconds of a rank in one step of SCAN over hardest negatives, and the bytes that it receives."""

    gpus: int
    encoding: float
    scoring: float  # including loss and backward
    gathered: float  # bytes of fragments of the other ranks
    matrix: float  # bytes of their scores
    scattered: float  # bytes of the gradients of fragments
    reduced: float  # bytes of the gradients of parameters

    @property
    def batch(self) -> int:
        return self.gpus * BATCH

    def link(self, received: float) -> float:
        """Return the seconds of an exchange."""
        if self.gpus == 1:
            return 0.0
        return LATENCY + received / (LINK_SHARE * (NVLINK if self.gpus <= NODE else NETWORK))

    @property
    def exchanging(self) -> float:
        return sum(self.link(part) for part in (self.gathered, self.matrix, self.scattered, self.reduced))

    @property
    def seconds(self) -> float:
        """Return the seconds of all parts in sequence."""
        return self.encoding + self.scoring + self.exchanging

    @property
    def rate(self) -> float:
        """Return captions per second of all GPUs."""
        return self.batch / self.seconds


def step(gpus: int, parameters: int, *, gathered: str = "images", sparse: bool = False) -> Step:
    """Compute a step of `gpus` ranks of 128 captions, each with its image.

    Each rank encodes its slice. The fragments named by `gathered`, images or captions, are sent to all ranks. Each rank
    scores them with its slice of the others, 16-bit vectors. The scores are sent to all ranks, which compute the same
    loss. Gradients of fragments, which have the fragments' type, are sent back and summed, then those of parameters.

    Args:
        sparse: send back only fragments of pairs with a gradient, at most three pairs for each of the rank's own; the
            others are known to be zero.
    """
    batch, others = gpus * BATCH, gpus - 1
    rows = costs.REGIONS if gathered == "images" else costs.WORDS
    sets = (batch, BATCH) if gathered == "images" else (BATCH, batch)
    back = kernels.backward(BATCH) + kernels.Work(Cost(bytes=2 * costs.ELEMENT * batch * rows * costs.DIM))
    parts = (kernels.scores(*sets), kernels.loss(batch), back)
    dense = float(costs.ELEMENT * others * BATCH * rows * costs.DIM)
    few = costs.ELEMENT * 3 * BATCH * rows * costs.DIM * others / gpus
    return Step(
        gpus=gpus,
        encoding=kernels.predict(kernels.encoders(BATCH), GPU).seconds,
        scoring=sum(kernels.predict(part, GPU).seconds for part in parts),
        gathered=float(costs.ELEMENT * others * BATCH * rows * costs.DIM),
        matrix=4.0 * batch * batch * others / gpus,
        scattered=min(few, dense) if sparse else dense,
        reduced=2 * 4.0 * parameters * others / gpus,
    )


@attrs.frozen
class Need:
    """Requirements of a training on given data.

    Attributes:
        features: bytes of all features in bf16. index: bytes of captions, token ids, order and positions of images in
            each process.
        epoch: seconds. bound: the bottleneck, "computing", "the reader" or "the drives".
        reading: bytes of features per second and GPU to keep up with computing. cores: cores per GPU that such reading
            occupies.
    """

    features: float
    index: float
    epoch: float
    bound: str
    reading: float
    cores: float


def need(data: Data, of: Step, caption_bytes: float, images_per_core: float) -> Need:
    """Compute the requirements of `data` with steps like `of`.

    Features that are not on each GPU are read during the previous step by the threads of the reader, from a drive of
    each machine if they do not fit its memory, and copied at the start of their step.
    """
    orders, where = 1 if of.gpus == 1 else 2, place(data, of.gpus)
    copied = 0.0 if where == _ON_GPU else BATCH * FEATURE_BYTES / (LINK_SHARE * PCIE)
    taken = {"computing": data.pairs / of.batch * (of.seconds + copied)}
    if where != _ON_GPU:
        taken["the reader"] = data.pairs / (of.gpus * READER_THREADS * images_per_core)
    if where not in (_ON_GPU, _IN_CACHE):
        # Ranks do not draw from separate slices.
        taken["the drives"] = data.pairs * FEATURE_BYTES / (-(-of.gpus // NODE) * DRIVE)
    bound = max(taken, key=lambda name: taken[name])
    each = BATCH / (of.seconds + copied)
    return Need(
        features=data.images * FEATURE_BYTES,
        index=data.pairs * (caption_bytes + orders * ORDER_BYTES) + data.images * PLACE_BYTES,
        epoch=taken[bound],
        bound=bound,
        reading=each * FEATURE_BYTES,
        cores=each / images_per_core,
    )


def place(data: Data, gpus: int) -> str:
    """Return where the features of a training are stored if each rank can access all of them."""
    size, machines = data.images * FEATURE_BYTES, -(-gpus // NODE)
    if size <= FEATURE_SHARE * GPU_BYTES:
        return _ON_GPU
    if size <= FEATURE_SHARE * HOST_BYTES:
        return _IN_CACHE
    # One slice of the rows each: only if ranks draw from separate slices.
    for where, room in (("GPUs", gpus * GPU_BYTES), ("machines", machines * HOST_BYTES)):
        if size <= FEATURE_SHARE * room:
            return f"the {where} together, a slice each"
    return _ON_DRIVES


def markdown(rehearsal: Mapping[str, Any], reader: Mapping[str, Any]) -> str:
    """Render the tables and the bottlenecks, from the rehearsal at COCO's size and the benchmark of the reader."""
    scan = rehearsal["models"]["SCAN t2i"]
    parameters, caption_bytes = scan["parameters"], rehearsal["epoch"]["caption_bytes"]
    per_core = statistics.median(reader["warm_rows_per_processor_second"]["bf16"])
    parts = [
        _measured(rehearsal, reader, per_core),
        _steps(parameters),
        _needs(parameters, caption_bytes, per_core),
        _first(parameters, caption_bytes, per_core),
    ]
    return "\n\n".join(parts) + "\n"


def _measured(rehearsal: Mapping[str, Any], reader: Mapping[str, Any], per_core: float) -> str:
    where, found = rehearsal["environment"], []
    counted = {"SCAN t2i": costs.step(BATCH), "RCAR t2i": costs.regulated_step(BATCH)}
    for label, cost in counted.items():
        taken = statistics.median(rehearsal["models"][label]["native"]["seconds"])
        operations = (cost + costs.encoders(BATCH)).operations
        found.append(
            f"{label} {amount(operations, 'FLOP')} in {seconds(taken)}, {amount(operations / taken, 'FLOP/s')}"
        )
    cold = next(row for row in reader["cold"] if row["way"] == "bf16")
    return (
        f"Measured, on {where['processor']} with {where['threads']} thread(s): a step of the rehearsal against the "
        f"operations that the model counts, encoders included ({'; '.join(found)}); the reader, {per_core:,.0f} images "
        f"per second of processor time from a warm cache ({amount(per_core * FEATURE_BYTES, 'B/s')} in bf16), and "
        f"{amount(cold['bytes_per_second'], 'B/s')} at random from a cache that was cold throughout; "
        f"{rehearsal['epoch']['caption_bytes']:.0f} bytes of memory per caption. All figures below are computed."
    )


_SCHEMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("images", {}),
    ("captions (not built)", {"gathered": "captions"}),
    ("captions, gradients of few pairs only (not built)", {"gathered": "captions", "sparse": True}),
)


def _steps(parameters: int) -> str:
    one = step(1, parameters)
    head = ["GPUs", "pairs in a step", "gathered", "encoders", "scores, loss, backward", "fragments", "score matrix"]
    rows = [[*head, "their gradients", "parameters", "a step", "captions per second", "of that many GPUs"]]
    for gpus in (1, 8, 64):
        for name, options in _SCHEMES if gpus > 1 else (("nothing", {}),):
            found = step(gpus, parameters, **options)
            exchanged = (found.gathered, found.matrix, found.scattered, found.reduced)
            cells = [f"{amount(part, 'B')}, {seconds(found.link(part))}" if gpus > 1 else "" for part in exchanged]
            share = found.rate / (gpus * one.rate)
            rows.append(
                [
                    str(gpus), f"{found.batch:,}", name, seconds(found.encoding), seconds(found.scoring), *cells,
                    seconds(found.seconds), f"{found.rate:,.0f}", f"{100 * share:.0f} %",
                ]
            )  # fmt: skip
    return table(rows)


def _needs(parameters: int, caption_bytes: float, per_core: float) -> str:
    head = [
        "data",
        "GPUs",
        "features in bf16",
        "where they fit",
        "captions, order and places, each process",
        "an epoch",
        "bound by",
    ]
    rows = [[*head, "to keep up: read by each GPU", "cores for that, each GPU"]]
    for name, data in DATA.items():
        for gpus in (1, 8, 64):
            found = need(data, step(gpus, parameters), caption_bytes, per_core)
            kept = place(data, gpus) == _ON_GPU
            rows.append(
                [
                    name, str(gpus), amount(found.features, "B"), place(data, gpus), amount(found.index, "B"),
                    seconds(found.epoch), found.bound, "nothing" if kept else amount(found.reading, "B/s"),
                    "" if kept else f"{found.cores:.1f}",
                ]
            )  # fmt: skip
    return table(rows)


def _first(parameters: int, caption_bytes: float, per_core: float) -> str:
    one, images, captions = step(1, parameters), step(64, parameters), step(64, parameters, gathered="captions")
    sparse, eight = step(64, parameters, gathered="captions", sparse=True), step(8, parameters)
    alone = need(DATA["COCO"], one, caption_bytes, per_core)
    million, billion = (need(DATA[name], images, caption_bytes, per_core) for name in list(DATA)[1:])
    one_million = need(DATA["10 million pairs"], one, caption_bytes, per_core)
    one_billion = need(DATA["1 billion pairs"], eight, caption_bytes, per_core)
    threads = READER_THREADS * per_core * FEATURE_BYTES
    return "\n".join(
        (
            f"1. *One GPU: reading.* {one.rate:,.0f} captions per second need {amount(alone.reading, 'B/s')} of "
            f"features, {alone.cores:.0f} cores of the reader. The reader takes {READER_THREADS} threads and delivers "
            f"{amount(threads, 'B/s')}; a drive reads {amount(DRIVE, 'B/s')}. COCO's {amount(alone.features, 'B')} "
            "fit on the GPU (`--features device`), so nothing is read.",
            "2. *Eight GPUs: exchanges.* With images gathered they take "
            f"{100 * eight.exchanging / eight.seconds:.0f} % of a step of {seconds(eight.seconds)}, "
            "in which each caption meets eight times as many negatives. "
            f"{100 * eight.link(eight.reduced) / eight.exchanging:.0f} % of that are gradients of parameters, which "
            "could overlap with the encoders' backward.",
            f"3. *Sixty-four GPUs: the network.* With images gathered, exchanges take "
            f"{100 * images.exchanging / images.seconds:.0f} % of a step of {seconds(images.seconds)}. Captions have "
            f"{costs.WORDS:.0f} vectors where images have {costs.REGIONS}: a step that gathers captions takes "
            f"{seconds(captions.seconds)}. At most three pairs for each of a rank's own have a gradient: a step that "
            f"sends only those takes {seconds(sparse.seconds)}. Neither is built. With images gathered, {images.gpus} "
            f"GPUs see {images.rate:,.0f} captions per second, fewer than one GPU; the other two schemes see "
            f"{captions.rate / one.rate:.1f} and {sparse.rate / one.rate:.1f} times as many as one. 128 captions per "
            "GPU are too few: with more, products grow with the square and bytes do not. For speed without more "
            "negatives, train on eight GPUs.",
            f"4. *Ten million pairs: reading.* {amount(million.features, 'B')} of features fit no GPU, but "
            f"{place(DATA['10 million pairs'], 64)}, which its processes share (`--features disk`). With "
            "`--features host` every process keeps a copy, and eight do not fit. Copies to a GPU take "
            f"{seconds(BATCH * FEATURE_BYTES / (LINK_SHARE * PCIE))} of each step, because they do not run beside "
            "kernels. With these and the reader a single GPU reaches "
            f"{100 * DATA['10 million pairs'].pairs / one.rate / one_million.epoch:.0f} % of its speed without both; "
            f"each of 64 needs only {amount(million.reading, 'B/s')}. A sampler that draws from a slice per rank would "
            f"keep {amount(million.features / 64, 'B')} on each GPU and read nothing; it is not built.",
            f"5. *A billion pairs: the index.* Each process holds captions, token ids, the order of an epoch and the "
            f"place of each image in memory: {amount(billion.index, 'B')}, eight times per machine. Drawing the order "
            "shard by shard and reading captions from the store would avoid this; neither is built. "
            f"Features take {amount(billion.features, 'B')}, the memory of {billion.features / HOST_BYTES:.0f} "
            f"machines. With a drive in each machine, an epoch takes {seconds(one_billion.epoch)} on eight GPUs, bound "
            f"by {one_billion.bound}, and {seconds(billion.epoch)} on 64, bound by {billion.bound}.",
        )
    )
