"""The store of discriminators: Adam per row as in torch, low precision, files, and rejected input."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from itm_fast.training.addr.discriminators import Discriminators
from itm_fast.training.addr.rows import LowPrecisionRows
from python_tests.helpers.full_disk import no_file_above

N, DIM = 9, 37


def gradients(step: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return values of very different sizes, some of them zero."""
    random = torch.Generator().manual_seed(1000 * seed + step)
    values = torch.randn(shape, generator=random) * torch.logspace(-6, 3, shape[-1])
    return values.masked_fill(torch.rand(shape, generator=random) < 0.1, 0.0)


def batches(steps: int, size: int = 4) -> list[Tensor]:
    """Return the images of several batches, with repeats; the last image is never included."""
    random = np.random.default_rng(5)
    return [torch.from_numpy(random.integers(0, N - 1, size)) for _ in range(steps)]


def rate(step: int) -> float:
    return 1e-3 * 0.2 ** (step // 10)


def train(store: Discriminators, steps: range, seed: int = 0) -> None:
    for step, images in enumerate(batches(steps.stop)):
        if step in steps:
            rows = store.gather(images)
            changed = gradients(step, (len(rows.images), DIM + 1), seed)
            store.update(rows, changed[:, :DIM], changed[:, DIM], rate(step))


def everything(store: Discriminators) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in store._tensors().items()}


def test_every_row_goes_where_adam_takes_it() -> None:
    """Each row equals, bit for bit, one torch Adam that steps when the row is in a batch."""
    store = Discriminators(N, DIM)
    weights = [torch.zeros(DIM, requires_grad=True) for _ in range(N)]
    biases = [torch.zeros(1, requires_grad=True) for _ in range(N)]
    adams = [torch.optim.Adam(pair, betas=(0.5, 0.999), foreach=False) for pair in zip(weights, biases, strict=True)]
    done = [0] * N
    for step, images in enumerate(batches(60)):
        rows = store.gather(images)
        assert rows.images.tolist() == sorted(set(images.tolist()))
        assert rows.images[rows.places].tolist() == images.tolist()
        changed = gradients(step, (len(rows.images), DIM + 1))
        for place, image in enumerate(rows.images.tolist()):
            assert torch.equal(rows.weights[place], weights[image].detach())
            assert torch.equal(rows.biases[place : place + 1], biases[image].detach())
            weights[image].grad, biases[image].grad = changed[place, :DIM].clone(), changed[place, DIM:].clone()
            adams[image].param_groups[0]["lr"] = rate(step)
            adams[image].step()
            done[image] += 1
        store.update(rows, changed[:, :DIM], changed[:, DIM], rate(step))
    kept = store.gather(torch.arange(N))
    assert torch.equal(kept.weights, torch.stack(weights).detach())
    assert torch.equal(kept.biases, torch.cat(biases).detach())
    assert len(set(done)) > 4
    assert done[-1] == 0
    assert not bool(kept.weights[-1].any()), "what is in no batch stays as it is"
    assert store.updates == 60


def test_a_dense_adam_is_the_same_where_every_row_is_in_every_batch() -> None:
    """If every row is in every batch, one torch Adam on a table of usual width gives the same."""
    store, weight = Discriminators(5, 1024), torch.zeros(5, 1024, requires_grad=True)
    adam = torch.optim.Adam([weight], betas=(0.5, 0.999), foreach=False)
    for step in range(20):
        weight.grad = gradients(step, (5, 1024))
        adam.param_groups[0]["lr"] = rate(step)
        rows = store.gather(torch.arange(5))
        store.update(rows, weight.grad, torch.zeros(5), rate(step))
        adam.step()
    assert torch.equal(store.gather(torch.arange(5)).weights, weight.detach())


def test_contributions_to_one_image_add_up() -> None:
    """Five pairs of two images give two gradients, each the sum of the contributions of its pairs."""
    store = Discriminators(N, DIM)
    images = torch.tensor([7, 2, 7, 7, 2])
    rows = store.gather(images)
    weights = rows.weights.requires_grad_()
    parts = gradients(3, (5, DIM))
    (weights[rows.places] * parts).sum().backward()
    expected = torch.stack([parts[images == 2].double().sum(0), parts[images == 7].double().sum(0)])
    torch.testing.assert_close(weights.grad.double(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("precision", "size"), [("float32", 12 * DIM + 16), ("low", 5 * DIM + 20)])
def test_bytes(precision: str, size: int) -> None:
    assert Discriminators(N, DIM, precision=precision).nbytes == N * size


def test_low_precision_holds_the_training_set_of_coco() -> None:
    """113,287 images of width 1024 take less than 600 MB."""
    small = Discriminators(3, 1024, precision="low")
    assert small.nbytes / 3 * 113_287 == 582_295_180 < 600e6


def test_low_precision_moves_like_float32() -> None:
    """With gradients of one size, like those of unit fragments, rows differ by at most 2 % from float32 after 200
    steps.

    Steps of 2e-4 are a fourth of the distance between neighbouring bfloat16 values at the end. Rounding to the nearest
    would lose them.
    """
    exact, low = Discriminators(4, 512), Discriminators(4, 512, precision="low", seed=3)
    random = torch.Generator().manual_seed(0)
    drift = torch.randn(4, 512, generator=random)
    for _ in range(200):
        changed = drift + torch.randn(4, 512, generator=random)
        bias = changed[:, 0]
        for store in (exact, low):
            store.update(store.gather(torch.arange(4)), changed, bias, 2e-4)
    wanted, found = (store.gather(torch.arange(4)) for store in (exact, low))
    difference = found.weights - wanted.weights
    assert float(difference.norm() / wanted.weights.norm()) < 0.02
    # The errors are unbiased: their mean is that of equally many random signs.
    assert abs(float(difference.mean())) < 4 * float(difference.std()) / math.sqrt(difference.numel())
    assert torch.equal(found.biases, wanted.biases), "biases are in float32"


@pytest.mark.parametrize("scale", [1e-2, 1e-6])
def test_low_precision_takes_no_longer_steps_where_gradients_are_small(scale: float) -> None:
    """Every other column's gradients are scaled; neither Adam's steps nor those in low precision depend on it."""
    exact, low = Discriminators(2, 64), Discriminators(2, 64, precision="low", seed=3)
    random = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, scale]).repeat(32)
    longest = {id(exact): 0.0, id(low): 0.0}
    for _ in range(100):
        changed = torch.randn(2, 64, generator=random) * sizes
        for store in (exact, low):
            before = store.gather(torch.arange(2))
            store.update(before, changed, changed[:, 0], 1e-3)
            step = store.gather(torch.arange(2)).weights - before.weights
            longest[id(store)] = max(longest[id(store)], float(step[:, 1::2].abs().max()))
    # A float32 step, plus the rounding of a weight below 1/4 to a neighbour.
    assert longest[id(low)] < 1.3 * longest[id(exact)] + 2.0**-10


def test_low_precision_rounds_to_a_neighbour_and_keeps_the_mean() -> None:
    rows = LowPrecisionRows(1, 64, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    random = torch.Generator().manual_seed(1)
    weights, ratios = torch.randn(1, 64, generator=random), torch.randn(1, 64, generator=random)
    exp_avg_sq = torch.rand(1, 64, generator=random) * torch.logspace(-12, 0, 64)
    # As Adam computes them: with its betas a first moment is at most 18.3 times the root of the second.
    exp_avg = ratios * exp_avg_sq.sqrt()
    index = torch.tensor([0])
    totals, draws = [torch.zeros(1, 64, dtype=torch.float64) for _ in range(3)], 2000
    # A level of the ratio to the root of the second moment, which is rounded by less than 1 / 128 itself: the root of
    # one entry by half of that, and that of the row's largest ratio too.
    quantum = ratios.abs().max() / 127 * exp_avg_sq.sqrt() * (1 + 1 / 128)
    for draw in range(draws):
        rows.write(index, weights, exp_avg, exp_avg_sq, (7, draw))
        kept = (rows.weights(index), *rows.moments(index))
        for total, value in zip(totals, kept, strict=True):
            total += value.double()
        for value, wanted in zip((kept[0], kept[2]), (weights, exp_avg_sq), strict=True):
            assert bool(((value - wanted).abs() < wanted.abs() / 128).all())
        assert bool(((kept[1] - exp_avg).abs() <= quantum * 1.001).all())
        assert bool((kept[2] >= 0).all())
    # The mean of 2000 values that differ by at most one step is within four standard errors of the exact value.
    for total, wanted, step in zip(
        totals, (weights, exp_avg, exp_avg_sq), (weights.abs() / 128, quantum, exp_avg_sq / 128), strict=True
    ):
        assert bool(((total / draws - wanted).abs() <= 4 * 0.5 * step / math.sqrt(draws) + 1e-7 * wanted.abs()).all())


@pytest.mark.parametrize("precision", ["float32", "low"])
def test_files_in_the_place_of_memory(tmp_path: Path, precision: str) -> None:
    """A store in files gives the same numbers as one in memory and leaves no files."""
    folder = tmp_path / "store"
    in_memory, on_disk = (Discriminators(N, DIM, precision=precision, folder=where) for where in (None, folder))
    for store in (in_memory, on_disk):
        train(store, range(30))
    first, second = everything(in_memory), everything(on_disk)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("precision", ["float32", "low"])
def test_what_is_saved_goes_on_as_if_nothing_had_happened(tmp_path: Path, precision: str) -> None:
    whole, first = (Discriminators(N, DIM, precision=precision, seed=4) for _ in range(2))
    train(whole, range(50))
    train(first, range(20))
    first.save(tmp_path / "rows.safetensors", "some data")
    second = Discriminators(N, DIM, precision=precision, seed=4, folder=tmp_path / "disk")
    second.load(tmp_path / "rows.safetensors", "some data", 20)
    train(second, range(20, 50))
    for store, name in ((whole, "whole"), (second, "second")):
        store.save(tmp_path / f"{name}.safetensors", "some data")
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "second.safetensors").read_bytes()
    kept = load_file(tmp_path / "whole.safetensors")
    assert kept.keys() == everything(whole).keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in everything(whole).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "disk", "rows.safetensors", "second.safetensors", "whole.safetensors",
    ]  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    store = Discriminators(N, DIM)
    train(store, range(5))
    store.save(tmp_path / "rows.safetensors", "some data")
    return tmp_path / "rows.safetensors"


@pytest.mark.parametrize(
    ("changes", "data", "updates", "message"),
    [
        ({"n_images": 8}, "some data", 5, "discriminators of another training: images 9, expected 8"),
        ({"dim": 36}, "some data", 5, "discriminators of another training: width 37, expected 36"),
        ({"precision": "low"}, "some data", 5,
         "discriminators of another training: precision 'float32', expected 'low'"),
        ({}, "others", 5, "discriminators of another training: data 'some data', expected 'others'"),
        ({}, "some data", 6, "discriminators of another training: updates 5, expected 6"),
    ],
)  # fmt: skip
def test_a_store_of_another_training(saved: Path, changes: dict, data: str, updates: int, message: str) -> None:
    store = Discriminators(**{"n_images": N, "dim": DIM, **changes})
    before, content = everything(store), saved.read_bytes()
    with pytest.raises(ValueError, match=f"^{re.escape(f'{saved}: {message}')}$"):
        store.load(saved, data, updates)
    assert all(torch.equal(before[name], tensor) for name, tensor in everything(store).items())
    assert (saved.read_bytes(), store.updates) == (content, 0)


def damage(path: Path, how: str) -> None:
    tensors = load_file(path)
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:-8])
    elif how == "no metadata":
        save_file(tensors, path)
    else:
        content, length = path.read_bytes(), 8 + int.from_bytes(path.read_bytes()[:8], "little")
        header = content[8:length].decode()
        name, value = {"infinite": ("weight", np.float32("inf")), "negative": ("steps", np.int32(-1))}[how]
        start = length + int(header.split(f'"{name}":')[1].split('"data_offsets":[')[1].split(",")[0])
        path.write_bytes(content[: start + 4] + value.tobytes() + content[start + 8 :])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut off", "truncated: the header promises"),
        ("no metadata", "no discriminators of format version 1"),
        ("infinite", "weight, from row 0: row 0 holds values that are not finite"),
        ("negative", "steps, from row 0: expected no negative values"),
    ],
)
def test_a_damaged_file(saved: Path, how: str, message: str) -> None:
    damage(saved, how)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{saved}: {message}')}"):
        Discriminators(N, DIM).load(saved, "some data", 5)


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    message = f"{path}: no such file; the discriminators of the run are missing"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Discriminators(N, DIM).load(path, "some data", 5)


def test_a_full_disk_keeps_the_file_of_before(saved: Path) -> None:
    """One error line, for the file and for mapped rows; no partial file remains."""
    store, content = Discriminators(N, DIM), saved.read_bytes()
    train(store, range(8))
    with no_file_above(1000), pytest.raises(OSError, match="cannot be written: File too large") as caught:
        store.save(saved, "some data")
    assert str(caught.value) == f"{saved}: cannot be written: File too large; its earlier content is kept"
    assert (saved.read_bytes(), [path.name for path in saved.parent.iterdir()]) == (content, [saved.name])
    with no_file_above(1000), pytest.raises(OSError, match="cannot be written: File too large"):
        Discriminators(N, DIM, folder=saved.parent)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_images_of_others() -> None:
    store = Discriminators(N, DIM)
    for images in ([0, 9], [-1, 3]):
        message = f"expected ids from 0 to 8, which the store has discriminators of, got {images[0]} to {images[1]}"
        with pytest.raises(ValueError, match=f"^images: {message}$"):
            store.gather(torch.tensor(images))
    with pytest.raises(ValueError, match=r"^images: expected integers of shape \(B,\), got torch.float32 of \(1,\)$"):
        store.gather(torch.zeros(1))


def test_gradients_that_do_not_fit_change_nothing() -> None:
    store = Discriminators(N, DIM)
    train(store, range(5))
    before = everything(store)
    rows = store.gather(torch.tensor([1, 3]))
    good, bias = torch.ones(2, DIM), torch.ones(2)
    for weights, biases, message in (
        (good[:1], bias, r"weight_gradients: expected shape \(2, 37\), got \(1, 37\)"),
        (good, bias[:, None], r"bias_gradients: expected shape \(2,\), got \(2, 1\)"),
        (good * math.nan, bias, "weight_gradients: expected finite values"),
        (good, bias * math.inf, "bias_gradients: expected finite values"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            store.update(rows, weights, biases, 1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in everything(store).items())
    assert store.updates == 5


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^n_images, dim: expected at least 1 each, got 0 and 4$"):
        Discriminators(0, 4)
    with pytest.raises(ValueError, match=r"^precision: expected float32 or low, got 'bfloat16'$"):
        Discriminators(3, 4, precision="bfloat16")
