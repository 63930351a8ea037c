"""Predictions from counted instructions: bounds by hand, work by hand, and the committed counts."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from benchmarks import costs, kernels
from benchmarks.costs import Cost
from benchmarks.kernels import GPUS, Launch, Work, predict
from python_tests.helpers.processes import ROOT

NOTHING = {"instructions": 0.0, "tensor": 0.0, "shared": 0.0, "copied": 0.0}


def set_counts(monkeypatch: pytest.MonkeyPatch, products: float = 0.0, **counts: float) -> None:
    """Replace the committed counts by those of one loop, "run" of the kernel "work<float>"."""
    of_loop = {**NOTHING, **counts}
    entry = {"kernel": "work<float>", "loop": "run", "per": "score", "products": products, "tile": [16, 5]}
    monkeypatch.setattr(kernels, "counts", lambda: [{**entry, "counts": {gpu.code: of_loop for gpu in GPUS.values()}}])


@pytest.mark.parametrize(
    ("bound", "counts", "cycles"),
    [
        ("issue slots", {"instructions": 40.0, "shared": 9.0}, 10.0),
        ("shared memory", {"instructions": 40.0, "shared": 11.0}, 11.0),
        # 4,096 operations each, of which 60 % of 4,096 are done in a cycle.
        ("tensor cores", {"instructions": 40.0, "tensor": 12.0}, 20.0),
        # Per cycle, 5,120 bytes for all multiprocessors.
        ("L2 cache", {"instructions": 40.0, "copied": 5120 / 132 * 30}, 30.0),
    ],
)
def test_the_busiest_unit_determines_the_time_of_a_launch(
    monkeypatch: pytest.MonkeyPatch, bound: str, counts: dict[str, float], cycles: float
) -> None:
    set_counts(monkeypatch, **counts)
    clock = 989.5e12 / (132 * 4096)
    assert kernels.clock("H200") == pytest.approx(clock)
    # A unit of work for every multiprocessor, and two launches.
    work = Work(Cost(bytes=1.0, launches=2), (Launch("work<", {"run": 132.0}, times=2.0),))
    found = predict(work, "H200")
    assert found.bound == "launches"
    assert predict(Work(Cost(bytes=1.0), work.counted), "H200").bound == bound
    assert found.parts[bound] == pytest.approx(2 * cycles / clock)
    assert found.parts["launches"] == pytest.approx(6e-6)
    assert found.seconds == pytest.approx(6e-6 + 2 * cycles / clock)
    assert found.longest == pytest.approx(6e-6 + 2 * cycles / clock / 0.6)


def test_multiprocessors_take_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_counts(monkeypatch, instructions=1.0)
    times = [
        kernels.times(Launch("work<", {"run": 132.0}, blocks), "H200")["issue slots"] for blocks in (0, 132, 133, 66)
    ]
    assert [time / times[0] for time in times] == pytest.approx([1.0, 1.0, 2 * 132 / 133, 2.0])


def test_bytes_take_at_least_their_time_and_pytorch_comes_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    set_counts(monkeypatch, instructions=4.0)
    launch = Launch("work<", {"run": 132 * 1e6})
    elsewhere = Cost(tensor=989.5e12, other=2 * 66.9e12)
    found = predict(Work(Cost(bytes=4.8e12), (launch,), elsewhere), "H200")
    assert found.parts["issue slots"] == 0.0
    assert (found.parts["device memory"], found.parts["PyTorch"]) == (pytest.approx(1.0), pytest.approx(3.0))
    assert found.bound == "PyTorch"
    total = Work(Cost(bytes=1.0), (launch,)) + Work(Cost(launches=1), (), elsewhere)
    assert total == Work(Cost(bytes=1.0, launches=1), (launch,), elsewhere)
    three = kernels.repeated(total, 3)
    assert (three.cost, three.elsewhere) == (Cost(bytes=3.0, launches=3), Cost(tensor=3 * 989.5e12, other=6 * 66.9e12))
    assert predict(three, "H200").seconds == pytest.approx(3 * predict(total, "H200").seconds)


def test_a_loop_without_counts_is_one_line() -> None:
    line = r"^cuda_loops\.json: no loop 'gone' of score_tile<BFloat16, 1,\.\.\.>: name it in tools/named_loops\.py$"
    with pytest.raises(ValueError, match=line):
        kernels.counts_of(kernels.SCORES, "gone", "H200")


def test_the_work_of_scores_is_that_of_a_hand_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "caption_lengths", lambda count: torch.full((count,), 13))
    prepared, scored = kernels.scores(6, 18, dim=1024).counted
    # Two tiles of three images and two of nine captions; 32 slices, and 32 HMMA for each of eight warps. A Gram matrix
    # is a tile of 64 x 64, with 8 slices of 256 bytes.
    assert (scored.blocks, scored.work["product"]) == (4, 4 * 32 * 32 * 8)
    assert (prepared.blocks, prepared.work["product"]) == (6, 6 * 8 * 32 * 8)
    words = 6 * 18 * 13
    assert scored.work["statistics"] == scored.work["attention"] == words * 36 / 32
    # Blocks of eight columns of the Gram matrix have 36, 28, 20, 12 and 4 rows.
    assert scored.work["Gram rows"] == words * 100 / 32
    assert scored.work["Gram blocks"] == words * 40 / 32
    assert scored.work["cosines"] == words / 32


def test_the_work_of_long_sets_is_that_of_a_hand_count() -> None:
    prepared, scored = kernels.long_scores(6, 5, patches=196, words=64, dim=512).counted
    # A tile has two captions of 64 words. An image takes two products with it.
    assert scored.blocks == 6 * 3
    # Sixteen slices of 32 components, and 32 HMMA for each of eight warps.
    assert scored.work["product"] == 6 * 3 * 2 * 16 * 32 * 8
    # Rows of 200 float32 numbers are 13 slices of 16, and take six products.
    assert scored.work["Gram product"] == 6 * 3 * 2 * 13 * 16 * 6 * 8
    columns = 6 * 5 * 64
    for name in ("raw scores", "statistics", "attention", "norms"):
        assert scored.work[name] == columns * 196 / 32
    assert scored.work["cosines"] == columns  # a warp each
    # A Gram matrix is ten tiles of 64 x 64, with 4 slices of 256 bytes.
    assert (prepared.blocks, prepared.work["product"]) == (6, 6 * 10 * 4 * 32 * 8)
    # An image of 576 patches of width 512 has no Gram matrix. Tiles of 128, 128 and 64 words have 20 tiles of 16 rows.
    # They take 64 tiles of 8 columns, 36 steps of 16, and three products.
    prepared, scored = kernels.long_scores(6, 5, patches=576, words=64, dim=512).counted
    assert (prepared.work, scored.work["sum of rows"]) == ({}, 6 * 20 * 64 * 36 * 3)
    assert (scored.work["squares"], scored.work["scales"]) == (columns * 512 / 32, columns * 576 / 32)
    assert "Gram product" not in scored.work
    # A caption of 130 words takes two products with each piece of an image.
    (_, scored) = kernels.long_scores(2, 3, patches=113, words=130, dim=32).counted
    assert (scored.blocks, scored.work["product"]) == (2 * 3, 2 * 3 * 2 * 2 * 32 * 8)


def test_the_work_of_rcar_is_that_of_a_hand_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of a tile are those of the reference's formulas, in slices of 32 components for 128 columns."""
    monkeypatch.setattr(kernels, "caption_lengths", lambda count: torch.full((count,), 14))
    prepared, launch = kernels.regulated_scores(5, 16, dim=1024, width=256).counted
    assert (prepared.blocks, prepared.work) == (5, {"product": 5 * 64 * 4 * 8})  # 64 x 64 products of 1024 components
    assert launch.blocks == 2 * 5  # Eight captions of 14 words fill a tile of 112 rows.
    attention = 32 + (8 * 16 + 2 * 16)  # of raw queries; of channels from 512 hidden units, in two chunks of 512
    attended = 2 * 8 * 2  # 36 regions are two slices
    alignments = 2 * 2 * 2 * 16
    correspondence = (1 + 4) * 8
    aggregation = 2 * 2 * 2 * 8
    slices = attention + attended + alignments + correspondence + aggregation
    assert launch.work["product"] == 10 * slices * 32 * 8
    rows = 5 * 16 * 14
    assert launch.work["channels"] == rows * 1024 / 32
    assert launch.work["alignments"] == rows * 2 * 2 * 256 / 32
    assert launch.work["attention"] == 2 * rows
    # Blocks of eight columns of the Gram matrix have 36, 28, 20, 12 and 4 rows.
    assert (launch.work["Gram rows"], launch.work["Gram blocks"]) == (2 * rows * 100 / 32, 2 * rows * 40 / 32)


def test_the_backward_multiplies_what_the_cost_model_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All loops with products together compute the products of a pair, in whole tiles of their own."""
    products = 3  # the scores of a pair, and the sums of both gradients
    assert sum(entry["products"] for entry in kernels.counts()) == products
    found = kernels.backward(128)
    multiply_adds = 32 * sum(sum(launch.work.values()) for launch in found.counted)
    assert multiply_adds > products * 3 * 128 * 36 * 13 * 1024
    # Beside products of rows: for each pair, the attention times the Gram matrix in six products and M in three, where
    # the loop counts two; for each image, its Gram matrix and M X.
    (launch,), (of_rows,) = found.counted, kernels.listed_pairs(3 * 128)
    of_matrices = (6 + 3) / 2 * 3 * 128 * 16 * 48 * 36 + 128 * 40 * 48 * 1024
    assert launch.work["contexts"] - of_rows.work["contexts"] == pytest.approx(of_matrices / 32)
    assert launch.work["raw scores"] - of_rows.work["raw scores"] == 128 * 48 * 48 * 1024 / 32
    assert launch.work["queries"] == of_rows.work["queries"]
    set_counts(monkeypatch, products=2.0)
    (launch,) = kernels.listed_pairs(3, dim=10)
    # Tiles of 16 queries and 5 contexts: 16 for 13 words, 40 for 36 regions.
    assert (launch.kernel, launch.work["run"]) == ("work<float>", 2 * 3 * 16 * 40 * 10 / 32)


@pytest.mark.parametrize("device", GPUS)
def test_every_workload_takes_longer_than_its_floors(device: str) -> None:
    for work in (
        kernels.scores(128, 128), kernels.step(128), kernels.loss(4096), kernels.loss(4096, kernels.BOOSTING),
        kernels.ranks(5000, 25000), kernels.regulated_scores(128, 128), kernels.regulated_step(128),
        kernels.encoders(128), kernels.evaluation(5000, 25000), kernels.long_scores(64, 64, 576, 64, 512),
        kernels.long_step(64, 196, 64, 512), kernels.long_step(64, 576, 64, 512),
        kernels.backward(64, 512, 64, 196), kernels.backward(64, 512, 64, 576), kernels.backward(128),
        kernels.regulated_step(128, partners=128),
    ):  # fmt: skip
        assert predict(work, device).seconds >= max(costs.floors(work.cost, costs.DEVICES[device]))
    assert predict(kernels.step(128), device).bound in kernels.BOUNDS


def test_the_backward_of_rcar_takes_as_many_tiles_as_its_workspace_has_room_for() -> None:
    *_, tiles, sums = kernels.regulated_step(128, partners=128).counted
    # 128 captions of 13 words are 15 tiles of 112 rows for each of 128 images; the room is for 5,652 rows.
    assert (tiles.blocks, tiles.times) == (math.ceil(128 * 15 / 38), 38)
    assert sums.times == 38
    assert tiles.work["product"] == pytest.approx(2 * sums.work["sum of rows"])
    *_, tiles, _ = kernels.regulated_step(128).counted
    assert (tiles.blocks, tiles.times) == (128, 1)


def test_parts_of_the_gradients_of_rcar_take_unequal_time() -> None:
    """By hand: a task sums 48 x 256 numbers. RCAR's weights that sum all rows have 119 parts, each in four tasks."""
    of_weights = 2 * 6 * 4 + 11 + 22 * 2 + 3 + 1 + 2 * 6
    hardest, of_all = (kernels.regulated_step(128, partners=partners).counted[-1] for partners in (3, 128))
    rows = 3 * 13 * 128
    assert sum(count for count, size in hardest.tasks if size == rows / 4) == 4 * of_weights
    assert hardest.tasks[:3] == ((4 * 24, rows / 4), (4 * 24, rows / 4), (4 * 11, rows / 4))
    assert hardest.tasks[8:10] == ((4 * 128, 3 * 13 * 4), (4 * 6, rows / 13 / 4))
    assert sum(count for count, size in of_all.tasks if size > 5000) == 14
    launch = kernels.Launch("k", {}, tasks=((1, 4.0), (6, 0.0), (2, 4.0)))
    assert kernels.unevenness(launch, 7) == 4.0 * 7 / 12


def test_a_step_with_scores_and_loss_together_saves_a_launch() -> None:
    separate, together = (predict(work(128), "H200").parts for work in (kernels.step, kernels.matching_step))
    assert {**separate, "launches": 5 * kernels.LAUNCH_SECONDS} == together


def test_a_change_of_the_counts_changes_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    before = predict(kernels.step(128), "A100").seconds
    more = json.loads(kernels.COUNTS.read_text())["loops"]
    for entry in more:
        if entry["products"]:
            for counts in entry["counts"].values():
                counts["instructions"] *= 10
    monkeypatch.setattr(kernels, "counts", lambda: more)
    assert predict(kernels.step(128), "A100").seconds > 1.1 * before


def test_the_constants_are_those_of_the_kernels() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "csrc/include/itm_fast/cuda").glob("*.h"))
    assert f"kChunk = {kernels.CHUNK};" in sources
    assert "kSlice = 32;  // of a row, in 16-bit units: 64 bytes" in sources
    tile = re.search(r"using ScoreTile112 = ProductTile<(\d+), (\d+), (\d+), (\d+),", sources)
    assert tile is not None
    rows, columns, *warps = map(int, tile.groups())
    assert (rows, columns) == (costs.TILE_REGIONS, costs.TILE_WORDS)
    assert (warps[0] * warps[1], warps) == (kernels.TILE_WARPS, [2, 4])
    assert columns == kernels.COLUMNS
    assert "using LargeTile = ScoreTile<8, 8, 4>;" in sources
    assert kernels.STRIP == 32 * 4
    assert f"kRows = {kernels.SUM_ROWS}, kColumns = {kernels.SUM_COLUMNS}, kDepth" in sources
    assert f"kWeightParts = {kernels.WEIGHT_PARTS};" in sources
