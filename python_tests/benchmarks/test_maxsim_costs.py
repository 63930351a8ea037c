"""MaxSim in the cost model: costs and work by hand, and the constants of the kernels."""

from __future__ import annotations

import pytest

from benchmarks import costs, kernels, maxsim_costs
from benchmarks.kernels import GPUS, predict
from benchmarks.maxsim_workloads import MaxsimSizes
from python_tests.helpers.processes import ROOT

PATCHES = MaxsimSizes(images=6, captions=6, dim=512, words=32, patches=196)
REGIONS = MaxsimSizes(images=6, captions=6, dim=320, words=40, patches=36)


def test_costs_are_those_of_a_hand_count() -> None:
    scores = maxsim_costs.scores_cost(PATCHES, element=4)
    products = 6 * 32 * 6 * 196
    assert (scores.tensor, scores.other, scores.launches) == (2 * products * 512, products, 2)
    assert scores.bytes == 4 * 6 * (32 + 196) * 512 + 4 * 36
    step, loss = maxsim_costs.step_cost(PATCHES, element=4), costs.loss(6)
    # Eighteen pairs: their products, and a sum of 512 multiply-adds for each query row on either side.
    rows = 18 * 32
    assert step.tensor - scores.tensor == 2 * rows * 196 * 512
    assert step.other - scores.other - loss.other == rows * 196 + 2 * 2 * rows * 512
    assert step.bytes - scores.bytes - loss.bytes == 2 * 4 * 6 * 228 * 512 + 4 * 36 + 8 * rows
    # Plan and pairs; loss and gradient; gradient of the scores, plan, pairs, sums.
    assert step.launches == 2 + 1 + 4


def test_the_work_is_that_of_a_hand_count() -> None:
    # A picture of 196 patches is a tile of its own and takes two products; four captions of 32 words fill a tile.
    (scored,) = maxsim_costs.scores(PATCHES).counted
    assert (scored.kernel, scored.blocks) == (maxsim_costs.MAXSIM, 6 * 2)
    # Sixteen slices of 32 elements, and 32 HMMA for each of eight warps.
    assert scored.work["product"] == 12 * 2 * 16 * 32 * 8
    assert scored.work["maxima"] == pytest.approx(6 * 32 * 6 * 196 / 32)
    # Three pictures of 36 regions and three captions of 40 words fill a tile.
    (scored,) = maxsim_costs.scores(REGIONS).counted
    assert (scored.blocks, scored.work["product"]) == (2 * 2, 4 * 10 * 32 * 8)
    assert scored.work["maxima"] == pytest.approx(6 * 40 * 6 * 36 / 32)


def test_the_backward_touches_at_most_three_pairs_of_tiles_for_an_anchor() -> None:
    scored, loss, again, gathered = maxsim_costs.step(REGIONS).counted
    assert loss == kernels.loss(6).counted[0]
    assert again == scored  # Eighteen pairs of sets touch all four pairs of tiles.
    # Two parts of 256 columns for each row, and two searches of 32 of the 40 query rows.
    rows, parts = 6 * (40 + 36), 2
    assert gathered.work == {
        "candidates": rows * parts,
        "partners": 3 * rows * parts,
        "search": 3 * 6 * 36 * parts * 2,
        "rows": 3 * 6 * 40 * parts,
    }
    large = MaxsimSizes(images=64, captions=64, dim=512, words=32, patches=196)
    scored, _, again, _ = maxsim_costs.step(large).counted
    assert (scored.blocks, again.blocks) == (64 * 16, 3 * 64)
    assert again.work["maxima"] == pytest.approx(scored.work["maxima"] * 3 / 16)


@pytest.mark.parametrize("device", GPUS)
def test_predictions_take_longer_than_their_floors(device: str) -> None:
    for sizes in (*maxsim_costs.MAXSIM_SIZES, PATCHES, REGIONS):
        scores, step = (predict(work(sizes), device) for work in (maxsim_costs.scores, maxsim_costs.step))
        assert scores.seconds >= max(costs.floors(maxsim_costs.scores_cost(sizes), costs.DEVICES[device]))
        assert step.seconds > scores.seconds


def test_the_columns_of_a_warp_are_those_of_the_kernel() -> None:
    source = (ROOT / "csrc/include/itm_fast/cuda/maxsim_backward.h").read_text()
    assert f"kGatherColumns = {maxsim_costs.GATHERED_COLUMNS};" in source
