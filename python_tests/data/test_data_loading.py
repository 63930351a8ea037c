"""Index batches that depend on seed and epoch, and the loader that reads them."""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from itm_fast.data import BatchLoader, EpochSampler, PrecomputedDataset, loading, open_split, pack
from itm_fast.data.placement import place
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.precomputed import VOCABULARY, features_of, write_split
from python_tests.helpers.processes import children_left
from python_tests.helpers.runs import config, make_trainer


@given(n=st.integers(0, 60), batch_size=st.integers(1, 20), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_contains_every_item_once_in_full_batches(n, batch_size, seed, epoch):
    batches = list(EpochSampler(n, batch_size, seed=seed, epoch=epoch))
    assert sorted(np.concatenate(batches).tolist() if batches else []) == list(range(n))
    assert [len(batch) for batch in batches] == [batch_size] * (n // batch_size) + [n % batch_size] * (
        n % batch_size > 0
    )
    full = EpochSampler(n, batch_size, seed=seed, epoch=epoch, drop_last=True)
    assert len(full) == n // batch_size
    for batch, same in zip(full, batches, strict=False):
        np.testing.assert_array_equal(batch, same)


@given(start=st.integers(0, 12), drop_last=st.booleans())
def test_a_resumed_epoch_continues_at_its_position(start, drop_last):
    whole = list(EpochSampler(47, 5, seed=3, epoch=2, drop_last=drop_last))
    rest = EpochSampler(47, 5, seed=3, epoch=2, drop_last=drop_last, start_batch=start)
    assert len(rest) == max(len(whole) - start, 0)
    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in whole[start:]]


def test_the_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        return tuple(np.concatenate(list(EpochSampler(100, 7, seed=seed, epoch=epoch))).tolist())

    assert order(1, 4) == order(1, 4)
    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16
    assert next(iter(EpochSampler(10, 10, seed=0, epoch=0))).tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]


def test_the_order_is_uniform():
    first = np.bincount([next(iter(EpochSampler(10, 1, seed=0, epoch=epoch)))[0] for epoch in range(5000)])
    # Each count is binomial(5000, 0.1): five standard deviations are 106.
    assert np.abs(first - 500).max() < 106


def test_without_shuffling_items_come_in_order():
    assert [batch.tolist() for batch in EpochSampler(5, 2, shuffle=False)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"n": -1}, "n: expected at least 0, got -1"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"epoch": -2}, "epoch: expected at least 0, got -2"),
        ({"start_batch": -1}, "start_batch: expected at least 0, got -1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EpochSampler(**{"n": 10, "batch_size": 2, **arguments})


@pytest.fixture
def dataset(tmp_path):
    write_split(tmp_path, "train", features_of(6), 30)
    return PrecomputedDataset(tmp_path, "train", VOCABULARY)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_in_the_given_order(dataset, workers):
    asked = EpochSampler(30, 4, seed=1)
    loader = BatchLoader(dataset, asked, workers=workers)
    assert len(loader) == 8
    for batch, indices in zip(loader, asked, strict=True):
        expected = dataset.batch(indices)
        assert batch.caption_index.tolist() == indices.tolist()
        for name in ("features", "token_ids", "lengths", "image_index"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))


def test_more_workers_than_processors_give_no_warning(dataset, monkeypatch, recwarn):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert len(list(BatchLoader(dataset, EpochSampler(30, 7), workers=2))) == 5
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_reaches_the_training_process_as_one_line(tmp_path, workers):
    images = features_of(6)
    images[5] = np.nan
    write_split(tmp_path, "train", images, 30)
    loader = BatchLoader(
        PrecomputedDataset(tmp_path, "train", VOCABULARY), EpochSampler(30, 5, shuffle=False), workers=workers
    )
    received, others = [], set(multiprocessing.active_children())
    message = f"^{re.escape(str(tmp_path / 'train_ims.npy'))}: row 5 holds values that are not finite in float32$"
    with pytest.raises(ValueError, match=message) as kept:
        received.extend(loader)
    assert not children_left(others)
    del kept
    with contextlib.closing(iter(loader)) as batches:
        assert [next(batches).image_index[0].item() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert not children_left(others)


def test_all_tensors_of_a_batch_move(dataset):
    batch = dataset.batch([0, 1])
    moved = batch.to("meta")
    assert len(moved) == 2
    for name in ("features", "token_ids", "lengths", "image_index", "caption_index"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(batch, name).shape


@pytest.mark.parametrize("kind", ["store", "resident", "ragged"])
def test_batches_for_a_gpu_are_page_locked(tmp_path, monkeypatch, kind):
    """Features are read into page-locked memory directly; smaller tensors are copied there."""
    write_split(tmp_path, "train", features_of(6), 30)
    if kind == "ragged":
        (tmp_path / "train_regions.txt").write_text("1\n2\n1\n2\n2\n1\n")
    VOCABULARY.save(tmp_path / "vocab.json")
    pack(tmp_path, tmp_path / "store", dtype="fp32")
    dataset = open_split(tmp_path / "store", "train", VOCABULARY)
    if kind == "resident":
        dataset.source, _ = place(dataset.source, "host", torch.device("cpu"))
    expected = dataset.batch(np.arange(8))
    locked, copied, empty = set(), [], torch.empty

    def locking(*size, pin_memory=False, **options):
        made = empty(*size, **options)
        if pin_memory:
            locked.add(made.untyped_storage().data_ptr())
        return made

    def pin(tensor):
        if tensor.untyped_storage().data_ptr() not in locked:
            copied.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", locking)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    (plain,) = BatchLoader(dataset, [np.arange(8)], pin_memory=True)
    assert not locked
    assert not copied, "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (batch,) = BatchLoader(dataset, [np.arange(8)], pin_memory=True)
    for found in (plain, batch):
        assert torch.equal(found.token_ids, expected.token_ids)
        if kind == "ragged":
            assert torch.equal(found.features.values, expected.features.values)
        else:
            assert torch.equal(found.features, expected.features)
    features = batch.features.values if kind == "ragged" else batch.features
    small = [batch.token_ids, batch.lengths, batch.image_index, batch.caption_index]
    small += [batch.features.offsets] if kind == "ragged" else []
    assert (features.untyped_storage().data_ptr() in locked) == (kind != "resident")
    assert {id(tensor) for tensor in copied} == {id(tensor) for tensor in small} | (
        {id(features)} if kind == "resident" else set()
    )


@pytest.mark.parametrize("kept", [0, 200])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_truncated_memory_map_is_an_error_instead_of_a_signal(tmp_path, kept, ragged):
    write_split(tmp_path, "train", features_of(5), 25)
    if ragged:
        (tmp_path / "train_regions.txt").write_text("1\n2\n3\n1\n2\n")
    dataset, path = PrecomputedDataset(tmp_path, "train", VOCABULARY), tmp_path / "train_ims.npy"
    size = path.stat().st_size
    before = dataset.image_batch([4, 2])
    os.truncate(path, kept)
    sizes = f"(expected {size} bytes, found {kept})"
    message = re.escape(f"{path}: row 2 cannot be read: the file was truncated since it was opened {sizes}")
    for read in (lambda: dataset.image_batch([4, 2]), lambda: dataset.source.stored(2, 5)):
        with pytest.raises(ValueError, match=f"^{message}$"):
            read()
    assert bool((before.values if ragged else before).isfinite().all())


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_batch_is_released_before_the_next(tmp_path: Path, repeats: int) -> None:
    """A batch that is kept through an epoch takes additional memory."""
    options = {"scenario": "addr", "alternation": "step"} if repeats == 2 else {}
    trainer = make_trainer(config(write_concepts(tmp_path / "data"), tmp_path / "run", **options))
    batches = trainer._batches(0)
    before = None
    for _ in range(2 * repeats):
        batch = next(batches)
        if before is not None and before() is not batch:
            gc.collect()
            assert before() is None
        before = weakref.ref(batch)
        del batch


def test_only_the_training_process_ends_its_workers(dataset):
    """A launcher or a batch system sends SIGTERM to all processes of a job, and the training may be in a step."""
    loader = BatchLoader(dataset, EpochSampler(30, 2), workers=2)
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    # One batch from each worker, so that every worker has started.
    found = [next(batches).caption_index for _ in range(2)]
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for name in ("TERM", "INT", "TERM"):
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
        time.sleep(0.1)
        assert all(worker.is_alive() for worker in workers)
        found.append(next(batches).caption_index)
    found += [batch.caption_index for batch in batches]
    assert sorted(torch.cat(found).tolist()) == list(range(30))
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    for worker in set(multiprocessing.active_children()) - others:
        worker.terminate()
        worker.join(300)
        assert worker.exitcode == 0


def test_signals_before_a_worker_is_ready_are_ignored(dataset, monkeypatch):
    """Workers start again in each epoch."""
    ready, over = loading._follow_main_process, multiprocessing.Event()
    monkeypatch.setattr(loading, "_follow_main_process", lambda number: (over.wait(300), ready(number)))
    others, sent = set(multiprocessing.active_children()), []

    def send() -> None:
        while len(workers := set(multiprocessing.active_children()) - others) < 2:
            time.sleep(0.01)
        for name in ("TERM", "INT"):
            done = subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)])
            sent.append(done.returncode)
        over.set()

    sender = threading.Thread(target=send)
    sender.start()
    found = [batch.caption_index for batch in BatchLoader(dataset, EpochSampler(30, 2), workers=2)]
    sender.join()
    assert sent == [0, 0]
    assert sorted(torch.cat(found).tolist()) == list(range(30))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}
