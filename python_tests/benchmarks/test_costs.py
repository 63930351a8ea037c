"""The cost model and its tables: counts by hand, floors, and which results count as measured on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import costs, kernels
from benchmarks.costs import DEVICES, Cost, Peaks
from benchmarks.performance import NOT_RUN, tables
from benchmarks.units import seconds
from itm_fast import Fragments, reference
from itm_fast.nn import RegulatedSimilarity
from python_tests.helpers.processes import ROOT


def test_scores_are_counted_as_by_hand() -> None:
    cost = costs.scores(images=2, captions=3, dim=10, words=4, element=2)
    # 72 regions by 12 words and 10 components, and two 36 x 36 Gram matrices; a multiply-add is 2 operations.
    assert cost.tensor == 2 * 72 * 12 * 10 + 2 * 2 * 36 * 36 * 10
    # For each of 2 images and 12 words: 666 multiply-adds, and 8 operations for each of 36 regions.
    assert cost.other == 2 * 12 * (2 * 666 + 8 * 36)
    assert cost.bytes == 2 * (72 + 12) * 10 + 2 * 4 * 2 * 36 * 36 + 4 * 2 * 3
    long = costs.scores(images=2, captions=200, dim=300, words=4, element=2, regions=200)
    # Also the product of a 200 x 200 matrix with the attention of each of 2 images and 800 words.
    assert long.tensor == 2 * 400 * 800 * 300 + 2 * 2 * 200 * 200 * 300 + 2 * 2 * 800 * 200 * 200
    # A multiply-add, and 8 operations of the softmax, for each of 200 regions.
    assert long.other == 2 * 800 * 200 * (2 + 8)
    assert long.bytes == 2 * (400 + 800) * 300 + 2 * 4 * 2 * 200 * 200 + 4 * 2 * 200
    # Of few words, or of narrow vectors, attended vectors take fewer products.
    narrow = costs.scores(images=2, captions=3, dim=10, words=4, element=2, regions=200)
    assert (narrow.tensor, narrow.bytes) == (2 * 2 * 400 * 12 * 10, 2 * (400 + 12) * 10 + 4 * 2 * 3)
    assert costs.gemm(2, 3, 5) == Cost(tensor=60, bytes=2 * (10 + 15 + 6), launches=1)


def test_a_step_adds_loss_and_backward() -> None:
    step, scores, loss = costs.step(4, dim=10, words=5), costs.scores(4, 4, 10, 5), costs.loss(4)
    # Twelve pairs: scores and two sums of two parts, 36 x 5 x 10 each; products of 36 x 36 x 5, six and three times.
    of_pairs = 12 * 2 * ((1 + 2 * 2) * 36 * 5 * 10 + (6 + 3) * 36 * 36 * 5)
    # Four images: the Gram matrix, and a sum of two parts.
    assert step.tensor - scores.tensor == of_pairs + 4 * 2 * (1 + 2) * 36 * 36 * 10
    # The softmax forward and backward.
    assert step.other - scores.other - loss.other == 12 * 2 * 5 * 8 * 36
    assert step.bytes - scores.bytes - loss.bytes == 2 * 2 * (4 * 41) * 10 + 4 * 16
    assert loss == Cost(other=64, bytes=128, launches=1)
    # Preparation and pairs; loss value and gradient; scaling of that gradient, lists, pairs with their sums.
    assert step.launches == 2 + 1 + 3
    long = costs.step(4, dim=10, words=5, regions=200)
    of_pairs = 12 * 2 * ((1 + 2 * 2) * 200 * 5 * 10 + (6 + 3) * 200 * 200 * 5)
    assert long.tensor - costs.scores(4, 4, 10, 5, regions=200).tensor == of_pairs + 4 * 2 * 3 * 200 * 200 * 10
    # Preparation; pairs, loss value and gradient.
    assert costs.matching_step(4, dim=10, words=5) == replace(step, launches=2 + 3)


def test_the_launches_of_a_step_are_those_of_the_design() -> None:
    """By the numbers that begin the cells of the table of launches: of scores, of a loss, and of `matching_loss`."""
    text = (ROOT / "docs/internals/design.md").read_text(encoding="utf-8")
    names = ("cross-attention", "hardest negatives, SelHN", "these losses on cross-attention")
    rows = [re.findall(r"[^|]+", re.search(rf"^\| {name}.*$", text, re.M)[0]) for name in names]
    scores, loss, together = ([cell.strip() for cell in row] for row in rows)
    forward, backward = ([int(row[column][0]) for row in (scores, loss, together)] for column in (1, 2))
    assert costs.step(4).launches == forward[0] + forward[1] + backward[1] + backward[0]
    assert together[2].startswith("1 + 2;")
    assert costs.matching_step(4).launches == forward[2] + backward[1] + backward[0]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_products_of_rcar_are_those_that_pytorch_makes(steps: int) -> None:
    """The counts equal those of torch's FLOP counter for the published loop, forward and backward."""
    images, captions, dim, words, width = 2, 3, 10, 4, 6
    module = RegulatedSimilarity(dim, width, correspondence_steps=steps - 1, aggregation_steps=steps, dropout=0.0)
    torch.manual_seed(0)
    queries = Fragments.from_padded(torch.randn(captions, words, dim, requires_grad=True))
    contexts = Fragments.from_padded(torch.randn(images, costs.REGIONS, dim, requires_grad=True))
    with FlopCounterMode(display=False) as forward:
        scores = reference.regulated_scores(queries, contexts, module.regulator_parameters())
    with FlopCounterMode(display=False) as backward:
        scores.sum().backward()
    pairs, rows = images * captions, images * captions * words
    cost = costs.regulated_scores(images, captions, dim, words, alignment=width, steps=steps)
    # Matrix-vector products: the weight of each word and the temperature for every row, the score for every pair.
    single = 2 * rows * (steps * width + (steps - 1) * (width // 2)) + 2 * pairs * width
    assert cost.tensor + single == forward.get_total_flops()
    # The backward has two products for each product of the forward.
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    assert sum(tensor.numel() for tensor in module.parameters()) == costs._weights(dim, width, steps)


def test_rcar_is_counted_as_by_hand() -> None:
    """The bytes include the weights of one RCR step and two RAR steps; 6 pairs, 24 rows, 36 regions."""
    cost = costs.regulated_scores(images=2, captions=3, dim=10, words=4, element=2, alignment=6, steps=2)
    row = 2 * (8 * 36)  # two softmaxes over regions
    row += 2 * (2 * 10 + 10 + 10 + 10)  # two attended vectors: norm, division, difference, square
    row += 2 * (6 + 2 * 6 + 6)  # two alignments: bias, norm, division
    row += 2 * 12 + 10 + 10 + 10 + 2 * 10 + 10  # channels: wide layer; bias, tanh, sum, clamp; times the query
    row += 2 * 3 + 2 * 3 + 3  # temperature: narrow layer, its one output; bias, sum, clip
    row += 6  # sum of the first guide
    row += 2 * (2 * 6 + 6 + 2 * 6 + 6 + 2 * 6)  # two steps of RAR: hidden layer, times guide, logit, softmax, sum
    pair = 6 + 2 * (2 * 6 + 3 * 6) + 2 * 6 + 2  # mean; two guides, two norms; score
    assert cost.other == 24 * row + 6 * pair
    weights = 2 * 66 + (84 + 130 + 21 + 4) + 2 * (2 * 42 + 7) + 7
    assert cost.bytes == 2 * (72 + 12) * 10 + 4 * 6 + 4 * weights
    assert cost.launches == 2

    step, scores, loss = costs.regulated_step(4, 10, 5, 2, 6), costs.regulated_scores(4, 4, 10, 5, 2, 6), costs.loss(4)
    # Twelve pairs (three images and four captions): one more forward, and a backward of twice its work.
    again = costs.regulated_scores(3, 4, 10, 5, 2, 6)
    assert step.tensor - scores.tensor == pytest.approx(3 * again.tensor)
    assert step.other - scores.other - loss.other == pytest.approx(3 * again.other)
    assert step.bytes - scores.bytes - loss.bytes == 2 * 2 * (4 * 41) * 10 + 4 * 16 + 8 * weights
    of_all = costs.regulated_step(4, 10, 5, 2, 6, partners=4)
    assert of_all.tensor - scores.tensor == pytest.approx(4 * again.tensor)
    # Preparation and pairs; loss value and gradient; gradient of the scores, preparation and pairs.
    assert step.launches == costs.regulated_step(1024).launches == 2 + 1 + 3


def test_ranks_evaluation_and_epoch() -> None:
    ranks = costs.ranks(10, 50)
    assert ranks.bytes == 4 * 500 + 8 * 110
    assert costs.evaluation(10, 50) == costs.scores(10, 50) + ranks
    assert costs.epoch(128).tensor == pytest.approx(113_287 * 5 / 128 * costs.step(128).tensor)
    assert costs.epoch(128).launches == round(113_287 * 5 / 128 * costs.matching_step(128).launches)
    # 36 regions of 2048 components into 1024; a GRU of 3 gates, 2 directions and 13 words; three products each.
    encoders = 3 * 2 * 128 * (36 * 2048 * 1024 + 13 * 6 * 1324 * 1024)
    assert costs.encoders(128).tensor == encoders


def test_blocks_are_counted_as_by_hand() -> None:
    # Three images of 36 regions fill a tile of 112 rows. Captions fill a tile of 128 words or 32 sets.
    assert costs.tiles([36] * 7, 112) == 3
    assert costs.tiles([100, 28, 1, 127, 1], 128) == 3
    assert costs.tiles([1] * 65, 128) == 3
    assert costs.tiles([5, 200, 0, 3], 128) == 3
    assert costs.tiles([], 128) == 0
    # Two neighbouring tiles have at least 113 rows together, so 252 rows need at most two such pairs and a tile.
    assert costs.most_tiles(7, 252, 112) == 2 * 252 // 113 + 1 == 5
    assert costs.pairs_of_tiles([36] * 7, [100, 28, 1, 127, 1]) == (9, 5 * (2 * 257 // 129 + 1))
    kernels = ROOT / "csrc/include/itm_fast/cuda"
    tile = f"using ScoreTile112 = ProductTile<{costs.TILE_REGIONS}, {costs.TILE_WORDS}, "
    assert tile in (kernels / "cross_attention_launch.h").read_text()
    assert f"kTileSets = {costs.TILE_SETS};" in (kernels / "set_tiles.h").read_text()


def test_floors() -> None:
    peaks = Peaks(tensor=100.0, other=10.0, memory=5.0, source="a test")
    assert costs.floors(Cost(tensor=200.0, other=1.0, bytes=5.0, launches=1000), peaks) == (2.0, 1.0)


def result(name: str = "NVIDIA H200", **changes: Any) -> dict[str, Any]:
    median = {"median_s": 40e-6}
    variants = {
        "loop": {"median_s": 1.0},
        "native": median,
        "native bf16": median,
        "native bf16 graph": {"median_s": 32.4e-6},
    }
    return {
        "format_version": 1,
        "kind": "itm_fast GPU benchmark",
        "dry_run": False,
        "device": {"type": "cuda", "name": name},
        "workloads": {
            "scores 128": {"variants": variants},
            "loss hardest 4096": {"variants": {"plain": {"median_s": 1.0}, "native": {"median_s": 56e-6}}},
            "step 128": {"variants": {"loop": {"median_s": 1.0}}},
            "matching step 128": {"variants": {"packed bf16": {"median_s": 1.0}, "native bf16": {"median_s": 1e-4}}},
        },
        "not_built": {"step 128": ["cross_attention_scores_backward"]},
        **changes,
    }  # fmt: skip


def lines(text: str, device: str) -> dict[str, list[str]]:
    """Return the cells by workload from the table of one GPU."""
    [part] = [part for part in text.split("\n\n") if part.startswith(f"| on {device} |")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_the_page_says_what_was_measured_and_what_was_not() -> None:
    text = tables([result()])
    assert text.startswith(
        "Measured on H200; elsewhere the kernels are compiled, and [simulated](../internals/shim.md) by the tests."
    )
    on_h200 = lines(text, "H200")
    floor = costs.scores(128, 128).tensor / 989.5e12
    share = f"floor / time {100 * floor / 32.4e-6:.0f} %"
    assert on_h200["scores, 128 x 128"][-1] == f"**32.4 µs** as a CUDA graph, {share}"
    assert on_h200["triplet loss and gradient, B = 4096"][-1] == "**56 µs**, floor / time 50 %"
    assert on_h200["hardest-negative step, separate calls, B = 128"][-1] == "not built: cross_attention_scores_backward"
    assert on_h200["hardest-negative step, `matching_loss`, B = 128"][-1].startswith("**100 µs**, ")
    epoch = "one COCO epoch, 4,425 steps with `matching_loss`, B = 128"
    assert on_h200[epoch][-1].startswith(f"**{113_287 * 5 / 128 * 0.1:.0f} ms**, ")
    assert on_h200["scores, 1024 x 1024"][-1] == "not run"
    assert {cells[-1] for cells in lines(text, "A100").values()} == {"reached", "---:", NOT_RUN}


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([result(dry_run=True)], "measured without a GPU"),
        ([result(device={"type": "cpu", "name": "dry run on H200"})], "measured without a GPU"),
        ([result("NVIDIA T4")], "one result for each of A100, RTX 4090, H200, got 'NVIDIA T4'"),
        ([result(), result()], "one result for each of A100, RTX 4090, H200, got 'NVIDIA H200'"),
    ],
)
def test_what_is_no_measurement_of_such_a_gpu_is_refused(results: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tables(results)


def test_without_results_the_page_claims_none() -> None:
    assert tables([]).startswith("No CUDA kernel of this project has run on a GPU yet: they are compiled")
    for device in DEVICES:
        cells = lines(tables([]), device)
        assert {row[-1] for name, row in cells.items() if "on " not in name and name != "---"} == {NOT_RUN}
    floors = lines(tables([]), "H200")["triplet loss and gradient, B = 4096"]
    assert floors[1] == "28 µs"  # 134 MB at 4.8 TB/s
    assert floors[-2].startswith("issue slots, ")


def test_the_page_lists_what_keeps_each_unit_busy() -> None:
    [part] = [part for part in tables([]).split("\n\n") if part.startswith("| kernel on H200 |")]
    kernels_of = [line.split("`")[1] for line in part.splitlines()[2:]]
    assert kernels_of[:2] == ["score_tile", "prepare_scores"]
    assert {"regulate_tiles", "triplet_with_gradient", "count_ranks"} < set(kernels_of)
    _, launch = kernels.long_scores(64, 64, 196, 64, 512).counted
    busy = kernels.times(launch, "H200")
    loops = ("norms", "raw scores", "attention", "statistics")
    issued = {loop: kernels.counts_of(launch.kernel, loop, "H200")["instructions"] for loop in launch.work}
    epilogue = sum(issued[loop] for loop in loops)
    everything = sum(issued[loop] * units for loop, units in launch.work.items())
    # 64 x 64 pairs of 64 x 196 raw scores, 32 by an instruction of a warp.
    share = 100 * epilogue * 64 * 64 * 64 * 196 / 32 / everything
    assert (
        f"busy for {seconds(busy['issue slots'])}, its tensor cores for {seconds(busy['tensor cores'])}. For 32 raw "
        f"scores a warp issues {epilogue:.0f} instructions beside the products "
        f"({', '.join(f'{loop} {issued[loop]:.0f}' for loop in loops)}), {share:.0f} % of all."
    ) in tables([])
    busy = kernels.times(kernels.scores(128, 128).counted[1], "H200")
    cells = [cell.strip() for cell in part.splitlines()[2].strip("|").split("|")]
    assert cells[2:] == [seconds(busy[unit]) for unit in ("tensor cores", "issue slots", "shared memory", "L2 cache")]
