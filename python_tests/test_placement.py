"""Where training features lie, and batches of captions of like length."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import error
from helpers.concepts import write_concepts
from helpers.precomputed import VOCABULARY
from helpers.runs import config, make_trainer, run, same, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import assert_same_batches, write_data

from itm_fast.data import EpochSampler, PrecomputedDataset, open_split, pack, placement
from itm_fast.data.features import ResidentFeatures
from itm_fast.data.placement import place

GIB = 2**30


@pytest.mark.parametrize("asked", ["host", "device"])
@pytest.mark.parametrize("ragged", [False, True])
def test_features_in_memory_give_the_same_batches(tmp_path: Path, asked: str, ragged: bool) -> None:
    data = write_data(tmp_path / "data")
    if ragged:
        (data / "train_regions.txt").write_text("3\n1\n2\n3\n3\n1\n2\n")
    pack(data, tmp_path / "store", dtype="fp32", shard_bytes=100)
    on_disk = PrecomputedDataset(data, "train", VOCABULARY)
    indices = np.random.default_rng(0).permutation(35)
    for path in (data, tmp_path / "store"):
        dataset = open_split(path, "train", VOCABULARY)
        dataset.source, choice = place(dataset.source, asked, torch.device("cpu"))
        assert choice.where == asked
        assert isinstance(dataset.source, ResidentFeatures)
        expected, found = on_disk.batch(indices).features, dataset.batch(indices).features
        if ragged:
            assert torch.equal(found.offsets, expected.offsets)
            assert torch.equal(found.values, expected.values)
        else:
            assert_same_batches(on_disk, dataset, torch.float32)


def test_images_are_copied_one_by_one_from_the_host_to_a_gpu() -> None:
    """The way of the copies, to the CPU itself."""
    values = torch.arange(24.0).view(12, 2).to(torch.bfloat16)
    images = np.array([2, 0, 2])
    for counts in (None, np.array([2, 1, 3, 6])):
        shape = (4, 3 if counts is None else 6, 2)
        sources = [ResidentFeatures(values, shape, counts, torch.device("cpu"), by_image=one) for one in (True, False)]
        copied, selected = (source.gather(images) for source in sources)
        if counts is None:
            expected = values.float().view(4, 3, 2)[images]
            assert torch.equal(copied, expected)
            assert torch.equal(selected, expected)
        else:
            expected = values.float()[[3, 4, 5, 0, 1, 3, 4, 5]]
            for found in (copied, selected):
                assert found.lengths.tolist() == [3, 2, 3]
                assert torch.equal(found.values, expected)


@pytest.mark.parametrize(
    ("asked", "device", "free", "expected"),
    [
        ("auto", "cuda", {"cuda": (138, 140), "cpu": (100, 128)},
         ("device", "16.00 GiB of features, 103.00 GiB to spare in the memory of the device")),
        ("auto", "cuda", {"cuda": (22, 23), "cpu": (100, 128)},
         ("device", "16.00 GiB of features, 16.25 GiB to spare in the memory of the device")),
        ("auto", "cuda", {"cuda": (15, 16), "cpu": (100, 128)},
         ("host", "16.00 GiB of features, 68.00 GiB to spare in the memory of the host")),
        ("auto", "cuda", {"cuda": (15, 16), "cpu": (12, 32)},
         ("disk", "16.00 GiB of features, 11.00 GiB to spare in the memory of the device; "
                  "16.00 GiB of features, 4.00 GiB to spare in the memory of the host")),
        ("auto", "cpu", {}, ("disk", "16.00 GiB, which the system caches; training runs on the CPU")),
        ("disk", "cuda", {}, ("disk", "as asked for")),
        ("host", "cpu", {"cpu": (25, 32)},
         ("host", "16.00 GiB of features, 17.00 GiB to spare in the memory of the host")),
    ],
)  # fmt: skip
def test_the_choice_and_its_reason(
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    device: str,
    free: dict[str, tuple[int, int]],
    expected: tuple[str, str],
) -> None:
    monkeypatch.setattr(placement, "_memory", lambda where: tuple(GIB * size for size in free[where.type]))
    choice = placement._choice(16 * GIB, asked, torch.device(device))
    assert (choice.where, choice.reason) == expected


def test_what_does_not_fit_where_it_was_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_concepts(tmp_path / "data")
    monkeypatch.setattr(placement, "_memory", lambda _where: (1000, 2000))
    expected = "features: they do not fit into the memory of the host: 0.00 GiB of features, 0.00 GiB to spare in the "
    status, message = error(capsys, "train", "--data", data, "--out", tmp_path / "run", "--features", "host")
    assert (status, message) == (1, f"{expected}memory of the host")
    assert not (tmp_path / "run").exists()


def test_training_does_not_depend_on_the_placement(tmp_path: Path) -> None:
    data = write_concepts(tmp_path / "data")
    pack(data, tmp_path / "store", dtype="bf16")
    for where in ("disk", "host", "device"):
        run(config(tmp_path / "store", tmp_path / where, features=where, region_augmentation=0.2))
        assert same(weights(tmp_path / where), weights(tmp_path / "disk"))


@settings(deadline=None)
@given(
    n=st.integers(1, 90), size=st.integers(1, 9), window=st.integers(1, 5), seed=st.integers(0, 3), drop=st.booleans()
)
def test_bucketed_batches_hold_every_item_once(n: int, size: int, window: int, seed: int, drop: bool) -> None:
    lengths = np.random.default_rng(seed).integers(5, 25, n)
    options = {"lengths": lengths, "bucket_batches": window, "drop_last": drop, "seed": seed}
    batches = [batch.tolist() for batch in EpochSampler(n, size, **options)]
    plain = [batch.tolist() for batch in EpochSampler(n, size, seed=seed, drop_last=drop)]
    assert [len(batch) for batch in batches] == [len(batch) for batch in plain]
    assert sorted(itertools.chain(*batches)) == sorted(itertools.chain(*plain))
    if window == 1:
        assert sorted(map(sorted, batches)) == sorted(map(sorted, plain))
    for start in range(len(batches) + 1):
        assert [batch.tolist() for batch in EpochSampler(n, size, start_batch=start, **options)] == batches[start:]


def test_batches_of_like_length_are_random_and_waste_less() -> None:
    lengths = np.clip(np.rint(6 + np.random.default_rng(0).gamma(5, 1, 4000)), 6, 22)

    def share_of_padding(batches: list[np.ndarray]) -> float:
        slots = sum(len(batch) * lengths[batch].max() for batch in batches)
        return 1 - lengths.sum() / slots

    plain = list(EpochSampler(4000, 40, seed=1))
    bucketed = [
        list(EpochSampler(4000, 40, seed=1, epoch=epoch, lengths=lengths, bucket_batches=25)) for epoch in (0, 1)
    ]
    assert share_of_padding(plain) > 0.3
    assert share_of_padding(bucketed[0]) < 0.05
    # Neither short captions come first, nor the same ones together in each epoch.
    means = np.array([lengths[batch].mean() for batch in bucketed[0]])
    assert abs(np.corrcoef(np.arange(100), means)[0, 1]) < 0.4
    together = [{frozenset(pair) for batch in epoch for pair in itertools.pairwise(batch)} for epoch in bucketed]
    assert len(together[0] & together[1]) < 0.01 * len(together[0])


def test_a_bucketed_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    data = write_concepts(tmp_path / "data")
    (data / "train_caps.txt").write_text(
        "".join(
            f"{line.strip()} {'ball ' * (number % 5)}\n" for number, line in enumerate((data / "train_caps.txt").open())
        )
    )
    trainer = make_trainer(config(data, tmp_path / "x", bucket_batches=3))
    first = next(trainer._batches(0))
    assert int(first.lengths.max()) - int(first.lengths.min()) <= 2
    assert torch.equal(
        next(trainer._batches(2)).caption_index, list(itertools.islice(trainer._batches(0), 3))[2].caption_index
    )
    run(config(data, tmp_path / "whole", bucket_batches=3))
    run(config(data, tmp_path / "parts", bucket_batches=3, epochs=1))
    run(config(data, tmp_path / "parts", bucket_batches=3), resume=True)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    with pytest.raises(ValueError, match="holds a run with bucket_batches = 3, not 0"):
        run(config(data, tmp_path / "parts"), resume=True)
