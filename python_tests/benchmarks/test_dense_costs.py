"""The cost model of blocks of scores."""

from __future__ import annotations

import pytest

from benchmarks import costs, dense_costs, kernels
from benchmarks.kernels import GPUS, Launch, predict


def test_chunks_fit_the_room_and_hold_all_tiles() -> None:
    for tiles in ((64, 29), (1, 1), (5, 200), (512, 229)):
        for room in (20_000, 300_000, dense_costs.ROOM):
            found = dense_costs.chunks(*tiles, room)
            assert found.across * found.context_tiles >= tiles[0] > (found.across - 1) * found.context_tiles
            assert found.down * found.query_tiles >= tiles[1] > (found.down - 1) * found.query_tiles
            # Two matrices of 16-bit parts, a matrix of squares per query tile and one more, in float32.
            contexts, queries = 80 * found.context_tiles, 64 * found.query_tiles
            used = 2 * contexts * queries + (1 + found.query_tiles) * contexts * 40 + found.context_tiles * queries
            assert used <= room


def test_the_products_are_at_least_those_of_all_pairs() -> None:
    prepared, tiles, sums, _ = dense_costs.backward(128).counted
    pairs = 128 * sum(kernels.caption_lengths(128).tolist()) * 36 * 1024
    hmma = kernels.HMMA_OPERATIONS / 2
    assert pairs < tiles.times * tiles.work["block product"] * hmma < 1.6 * pairs
    assert 2 * 2 * pairs <= sums.times * sums.work["block sums"] * hmma < 1.1 * 2 * 2 * pairs
    assert prepared.blocks == 128


def test_the_longest_tasks_of_a_launch_come_first() -> None:
    launch = Launch("work<", {}, tasks=((2, 3.0), (3, 1.0)))
    assert kernels.unevenness(launch, 2) == pytest.approx(5 / 4.5)  # 3 + 1 + 1 beside 3 + 1
    assert kernels.unevenness(launch, 3) == pytest.approx(3 / 3)
    assert kernels.unevenness(launch, 9) == pytest.approx(3)


def test_products_on_the_ordinary_units_are_a_part_of_the_tiles() -> None:
    """A pair has `K K n` multiply-adds with its Gram matrix, in rows of 40, and for M 45 of 81 blocks of 4 x 4."""
    tiles, pairs = dense_costs.backward(128).counted[1], 128 * sum(kernels.caption_lengths(128).tolist())
    assert set(dense_costs.ORDINARY_PRODUCTS) < set(tiles.work)
    multiply_adds = [kernels.LANES * tiles.times * tiles.work[name] for name in dense_costs.ORDINARY_PRODUCTS]
    assert multiply_adds == pytest.approx([pairs * 36 * 40 / 8, pairs * 45 * 16])  # eight at a time; one
    whole, part = (dense_costs.of_tiles(128, "A100", loops) for loops in (None, dense_costs.ORDINARY_PRODUCTS))
    assert whole == {unit: tiles.times * busy for unit, busy in kernels.times(tiles, "A100").items()}
    assert 0 < part["issue slots"] < whole["issue slots"]
    assert part["tensor cores"] == 0


@pytest.mark.parametrize("device", GPUS)
def test_products_with_gram_matrices_on_tensor_cores(device: str) -> None:
    """A tile has two images and 64 words: 2 x 48 x 48 x 64 multiply-adds, six times."""
    issued, on_tensor_cores = dense_costs.gram_seconds(128, device)
    tiles, gpu = dense_costs.backward(128).counted[1], kernels.GPUS[device]
    operations = 2 * 6 * 2 * 48 * 48 * 64 * tiles.times * tiles.blocks * kernels.unevenness(tiles, gpu.cores)
    rate = gpu.tensor_operations * gpu.mma_share * gpu.cores * kernels.clock(device)
    assert on_tensor_cores == pytest.approx(operations / rate)
    assert issued == dense_costs.of_tiles(128, device, ["block Gram rows"])["issue slots"]


@pytest.mark.parametrize("device", GPUS)
def test_blocks_are_faster_than_lists_and_slower_than_their_floors(device: str) -> None:
    blocks = dense_costs.backward(128)
    assert max(costs.floors(blocks.cost, costs.DEVICES[device])) < predict(blocks, device).seconds
    assert predict(blocks, device).seconds < dense_costs.listed_seconds(128, device)
