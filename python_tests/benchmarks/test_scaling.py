"""The cost model of many GPUs and large data: bytes and seconds by hand, and its page."""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs
import pytest

from benchmarks import costs, kernels, scaling
from benchmarks.costs import Cost
from benchmarks.scaling import DATA, FEATURE_BYTES, Data, markdown, need, place, step
from python_tests.helpers.processes import ROOT

PARAMETERS = 13_000_000


def test_one_gpu_exchanges_nothing() -> None:
    found = step(1, PARAMETERS)
    assert (found.gathered, found.matrix, found.scattered, found.reduced, found.exchanging) == (0, 0, 0, 0, 0)
    gradients = kernels.backward(128) + kernels.Work(Cost(bytes=4 * 128 * 36 * 1024))
    parts = (kernels.encoders(128), kernels.scores(128, 128), kernels.loss(128), gradients)
    assert found.seconds == pytest.approx(sum(kernels.predict(part, "H200").seconds for part in parts))
    assert found.rate == pytest.approx(128 / found.seconds)


@pytest.mark.parametrize(("gathered", "rows"), [("images", 36), ("captions", 13)])
@pytest.mark.parametrize("gpus", [8, 64])
def test_bytes_that_a_rank_receives(gathered: str, rows: int, gpus: int) -> None:
    found = step(gpus, PARAMETERS, gathered=gathered)
    others = gpus - 1
    # Vectors of 1024 two-byte numbers from all other ranks, as many for their gradients; columns of the scores.
    assert found.gathered == others * 128 * rows * 1024 * 2
    assert found.scattered == found.gathered
    assert found.matrix == (128 * gpus) * (128 * others) * 4
    # A ring all-reduce passes all parts but one twice: for the sums, then for the results.
    assert found.reduced == pytest.approx(2 * PARAMETERS * 4 * others / gpus)
    rate = 0.7 * (450e9 if gpus == 8 else 50e9)
    exchanged = found.gathered + found.scattered + found.matrix + found.reduced
    assert found.exchanging == pytest.approx(4 * 20e-6 + exchanged / rate)
    assert found.batch == 128 * gpus
    # Sparse: gradients of at most three pairs for each of 128 anchors, spread evenly over the owners.
    few = step(gpus, PARAMETERS, gathered=gathered, sparse=True)
    assert few.scattered == pytest.approx(3 * 128 * rows * 1024 * 2 * others / gpus)
    assert (few.gathered, few.scoring) == (found.gathered, found.scoring)


def test_ranks_score_slices() -> None:
    """With 64 ranks, each rank scores 64 times as many pairs, whichever side is gathered. The Gram matrices depend on
    the number of images.
    """
    one, images, captions = step(1, PARAMETERS), step(64, PARAMETERS), step(64, PARAMETERS, gathered="captions")
    assert images.encoding == captions.encoding == one.encoding
    pairs = 2 * (64 * 128 * 36) * (128 * 13) * 1024
    gram = 2 * 128 * 36**2 * 1024
    assert costs.scores(64 * 128, 128).tensor == pairs + 64 * gram
    assert costs.scores(128, 64 * 128).tensor == pairs + gram
    assert captions.scoring < images.scoring
    assert captions.seconds < images.seconds


def test_what_data_need() -> None:
    of = step(8, PARAMETERS)
    found = need(Data(pairs=1e6, images=2e5), of, 200.0, 20_000.0)
    assert FEATURE_BYTES == 36 * 2048 * 2
    assert found.features == 2e5 * 147_456
    # Two orders of the captions, and the location of each image. A single process needs one order only.
    assert found.index == 1e6 * 216 + 2e5 * 16
    alone = need(Data(pairs=1e6, images=2e5), step(1, PARAMETERS), 200.0, 20_000.0)
    assert alone.index == 1e6 * 208 + 2e5 * 16
    # 29.5 GB of features on each GPU.
    assert (found.epoch, found.bound) == (pytest.approx(1e6 / of.rate), "computing")
    assert found.reading == pytest.approx(of.rate / 8 * 147_456)
    assert found.cores == pytest.approx(of.rate / 8 / 20_000)


@pytest.mark.parametrize(
    ("gpus", "pairs", "per_core", "bound", "epoch"),
    [
        # 128 images are copied at 70 % of 64 GB/s after each step. Eight threads read in parallel.
        (1, 1e7, 1e6, "computing", lambda of: 1e7 / 128 * (of.seconds + 128 * 147_456 / (0.7 * 64e9))),
        (1, 1e7, 1e3, "the reader", lambda _: 1e7 / (8 * 1e3)),
        (64, 1e9, 1e6, "the drives", lambda _: 1e9 * 147_456 / (8 * 7e9)),
        (8, 1e9, 1e6, "the drives", lambda _: 1e9 * 147_456 / 7e9),
        # A slice per GPU would fit in memory, but no sampler draws from a slice.
        (64, 3e7, 1e6, "the drives", lambda _: 3e7 * 147_456 / (8 * 7e9)),
    ],
)
def test_what_takes_an_epoch(
    gpus: int, pairs: float, per_core: float, bound: str, epoch: Callable[[scaling.Step], float]
) -> None:
    """The computation of a step takes a fixed time here."""
    of = attrs.evolve(step(gpus, PARAMETERS, gathered="captions", sparse=True), encoding=1e-4, scoring=1e-4)
    found = need(Data(pairs, pairs), of, 200.0, per_core)
    assert (found.bound, found.epoch) == (bound, pytest.approx(epoch(of)))
    # Rows per second that keep up with the steps and their copies.
    each = 128 / (of.seconds + 128 * 147_456 / (0.7 * 64e9))
    assert (found.reading, found.cores) == pytest.approx((each * 147_456, each / per_core))


@pytest.mark.parametrize(
    ("images", "gpus", "where"),
    [
        (113_287, 1, "each GPU"),
        (1e6, 8, "each machine's page cache"),
        (1.1e7, 64, "the GPUs together, a slice each"),
        (5e7, 64, "the machines together, a slice each"),
        (1e9, 64, "drives"),
    ],
)
def test_where_features_lie(images: float, gpus: int, where: str) -> None:
    assert place(Data(images, images), gpus) == where


def test_the_tables_say_what_was_measured_and_compute_the_rest() -> None:
    results = ROOT / "benchmarks" / "results"
    rehearsal = json.loads((results / "coco_epoch.json").read_text())
    text = markdown(rehearsal, json.loads((results / "reader.json").read_text()))
    parts = text.split("\n\n")
    assert parts[0].startswith(f"Measured, on {rehearsal['environment']['processor']} with ")
    assert parts[0].endswith("All figures below are computed.")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in parts[1].splitlines()]
    assert [row[:3] for row in rows[2:]] == [
        ["1", "128", "nothing"],
        *[[gpus, pairs, name] for gpus, pairs in (("8", "1,024"), ("64", "8,192")) for name, _ in scaling._SCHEMES],
    ]
    assert rows[2][-1] == "100 %"
    assert len(parts[2].splitlines()) == 2 + 3 * len(DATA)
    assert [line[:2] for line in parts[3].splitlines()] == ["1.", "2.", "3.", "4.", "5."]
