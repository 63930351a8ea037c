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
    prepared, tiles, *_, sums, _ = dense_costs.backward(128).counted
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


def test_products_on_the_ordinary_units() -> None:
    """A pair has `K K n` multiply-adds with its Gram matrix, in rows of 40, and for M 45 of 81 blocks of 4 x 4."""
    pairs = 128 * sum(kernels.caption_lengths(128).tolist())
    work = {loop: kernels.LANES * step.times * units for step in dense_costs.backward(128).counted
            for loop, units in step.work.items()}  # fmt: skip
    assert work["block Gram rows"] == pytest.approx(pairs * 36 * 40 / 8)  # eight at a time
    assert work["block squares"] == pytest.approx(pairs * 45 * 16)


@pytest.mark.parametrize("device", GPUS)
def test_the_steps_of_a_tile_follow_one_another(device: str) -> None:
    steps = dense_costs.tile_seconds(128, device)
    launches = [step for step in dense_costs.backward(128).counted if set(step.work) <= set(steps)]
    assert len(launches) == len(steps) == 6
    assert sum(steps.values()) == pytest.approx(sum(s.times * max(kernels.times(s, device).values()) for s in launches))


@pytest.mark.parametrize("device", GPUS)
def test_tensor_cores_in_place_of_the_ordinary_units(device: str) -> None:
    """A tile has two images, 64 words and three products: 48 x 48 x 64 with G, and 9 pieces of 16 x 8 of M."""
    found = dense_costs.on_tensor_cores(128, device)
    tiles, gpu = dense_costs.backward(128).counted[1], kernels.GPUS[device]
    rate = gpu.tensor_operations * gpu.mma_share * gpu.cores * kernels.clock(device)
    of_tiles = 2 * 2 * 3 * tiles.times * tiles.blocks * kernels.unevenness(tiles, gpu.cores) / rate
    assert found["block Gram rows"] == pytest.approx(48 * 48 * 64 * of_tiles)
    assert found["block squares"] == pytest.approx(9 * 16 * 8 * 64 * of_tiles)


@pytest.mark.parametrize("device", GPUS)
def test_blocks_are_slower_than_their_floors_and_their_products_faster_than_lists(device: str) -> None:
    """Of lists, products of rows are counted only."""
    blocks, steps = dense_costs.backward(128), dense_costs.tile_seconds(128, device)
    total = predict(blocks, device).seconds
    assert max(costs.floors(blocks.cost, costs.DEVICES[device])) < total
    assert total - sum(steps.values()) + steps["block product"] < dense_costs.listed_seconds(128, device)
