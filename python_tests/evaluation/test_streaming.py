"""Ranks and best matches by tiles equal those of the whole score matrix."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from itm_fast import Fragments, cli
from itm_fast.evaluation import evaluate, evaluate_ensemble, protocols, stream_ranks, top_k
from itm_fast.functional import retrieval_ranks
from python_tests.evaluation.test_evaluation import Gallery, TableModel, random_table
from python_tests.helpers.commands import train_small
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.processes import ROOT
from python_tests.helpers.processes import run as run_process


@given(data=st.data())
def test_ranks_are_those_of_the_whole_matrix(data: st.DataObject) -> None:
    """Few different scores, including NaN and infinity; captions in any order; tiles of any size."""
    n_images = data.draw(st.integers(1, 7))
    owners = data.draw(st.lists(st.integers(0, n_images - 1), min_size=1, max_size=15))
    values = st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("inf"), -float("inf")])
    size = n_images * len(owners)
    table = torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size))).view(n_images, len(owners))
    ties = data.draw(st.sampled_from(["pessimistic", "optimistic"]))
    sizes = {name: data.draw(st.integers(1, 8)) for name in ("tile_images", "tile_captions", "chunk_captions")}
    model, gallery = TableModel(table), Gallery(owners, n_images)
    _, ranks = stream_ranks([(model, gallery)], torch.arange(n_images), torch.arange(len(owners)), ties=ties, **sizes)
    expected = retrieval_ranks(table, torch.tensor(owners), ties)
    assert torch.equal(ranks.image_to_text, expected[0])
    assert torch.equal(ranks.text_to_image, expected[1])
    assert sum(rows * columns for rows, columns in model.tiles) == size, "every pair is scored once"
    if table.isnan().any():
        return
    others = torch.arange(n_images)[:, None] != torch.tensor(owners)
    own = table[torch.tensor(owners), torch.arange(len(owners))]
    assert torch.equal(ranks.text_ties, ((table == own) & others).sum(0))


@pytest.mark.parametrize("options", [{}, {"folds": 3}, {"first_images": 7}, {"ties": "optimistic"}])
def test_summaries_are_the_same(options: dict[str, object]) -> None:
    owner = torch.randint(0, 12, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    table = random_table(12, 50)
    table[:, ::3] = table[:, ::3].round()
    sizes = {"tile_images": 5, "tile_captions": 7}
    whole, tiled = (
        evaluate(TableModel(table), Gallery(owner, 12), streaming=streaming, **sizes, **options)
        for streaming in (False, True)
    )
    distances = whole.pop("mean_distance"), tiled.pop("mean_distance")
    assert tiled == whole
    assert distances[0] == pytest.approx(distances[1], rel=1e-12)


def test_an_ensemble_is_the_same() -> None:
    owner = [number // 5 for number in range(40)]
    tables = random_table(8, 40), random_table(8, 40).flip(0).double()
    members = [(TableModel(table), Gallery(owner, 8)) for table in tables]
    sizes = {"tile_images": 3, "tile_captions": 11}
    whole, tiled = (evaluate_ensemble(members, streaming=streaming, **sizes) for streaming in (False, True))
    for one, other in zip([*whole[0], whole[1]], [*tiled[0], tiled[1]], strict=True):
        assert other == pytest.approx(one, rel=1e-12)
    assert whole[1]["rsum"] not in [summary["rsum"] for summary in whole[0]]


@given(data=st.data())
def test_the_best_of_each_are_those_of_a_sort(data: st.DataObject) -> None:
    n_images, n_captions = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    values = st.sampled_from([0.0, 1.0, 2.0, float("nan"), -3.0, float("inf"), -float("inf")])
    size = n_images * n_captions
    table = torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size))).view(n_images, n_captions)
    k = data.draw(st.integers(1, 10))
    sizes = {name: data.draw(st.integers(1, 8)) for name in ("tile_images", "tile_captions", "chunk_captions")}
    found = top_k(TableModel(table), Gallery([0] * n_captions, n_images), k, **sizes)

    def expected(rows: Tensor) -> list[list[int]]:
        # NaN last, then the score, then the index.
        keys = [[(bool(score.isnan()), -float(score), index) for index, score in enumerate(row)] for row in rows]
        keys = [[(lost, 0.0 if lost else score, index) for lost, score, index in row] for row in keys]
        return [[index for _, _, index in sorted(row)][:k] for row in keys]

    for (scores, indices), rows in zip(found, (table, table.t()), strict=True):
        assert indices.tolist() == expected(rows)
        assert torch.equal(
            *(found.nan_to_num(-9.0, torch.inf, -torch.inf) for found in (scores, rows.gather(1, indices)))
        )


class _OnDevice(Tensor):
    """Scores on another device, from which they can only be copied."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is Tensor.cpu, f"{func} beside a tensor of the host"
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].as_subclass(Tensor)


class _DeviceModel(TableModel):
    def score(self, images: Fragments, captions: Tensor) -> Tensor:
        return super().score(images, captions).as_subclass(_OnDevice)


def test_scores_of_a_device_are_brought_to_the_host_first() -> None:
    table, gallery = random_table(7, 20), Gallery([number // 3 for number in range(20)], 7)
    sizes = {"tile_images": 2, "tile_captions": 5, "chunk_captions": 10}
    ranks, best = [], []
    for model in (TableModel(table), _DeviceModel(table)):
        ranks.append(stream_ranks([(model, gallery)] * 2, torch.arange(7), torch.arange(20), **sizes)[1])
        best.append(top_k(model, gallery, 3, **sizes))
    assert torch.equal(ranks[0].image_to_text, ranks[1].image_to_text)
    assert torch.equal(ranks[0].text_to_image, ranks[1].text_to_image)
    for one, other in zip(*best, strict=True):
        assert all(map(torch.equal, one, other))
    with pytest.raises(AssertionError, match="beside a tensor of the host"):
        _ = table.as_subclass(_OnDevice) + 1


def test_no_captions_or_no_images() -> None:
    model, gallery = TableModel(random_table(3, 2)), Gallery([0, 1], 3)
    nothing = torch.arange(0)
    _, ranks = stream_ranks([(model, gallery)], torch.arange(3), nothing)
    assert ranks.image_to_text.tolist() == [-1, -1, -1]
    assert ranks.text_to_image.tolist() == []
    (of_images, _), (of_captions, places) = top_k(model, gallery, 2, captions=nothing)
    assert (of_images.shape, of_captions.shape, places.shape) == ((3, 0), (0, 0), (0, 0))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="k: expected at least 1, got 0"):
        top_k(TableModel(random_table(2, 2)), Gallery([0, 1], 2), 0)
    with pytest.raises(ValueError, match="tile_images: expected at least 1, got 0"):
        evaluate(TableModel(random_table(2, 2)), Gallery([0, 1], 2), streaming=True, tile_images=0)
    with pytest.raises(ValueError, match="ties: expected one of 'pessimistic', 'optimistic', got 'some'"):
        evaluate(TableModel(random_table(2, 2)), Gallery([0, 1], 2), streaming=True, ties="some")


def test_the_command_gives_the_same_recalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_concepts(tmp_path / "data")
    run = train_small(data, tmp_path / "run")
    results, streamed = [], []

    def noting(*given: Any, **more: Any) -> Any:
        streamed.append(len(results))
        return stream_ranks(*given, **more)

    monkeypatch.setattr(protocols, "stream_ranks", noting)
    for flags in ([], ["--streaming"]):
        file = tmp_path / "result.json"
        arguments = ["evaluate", "--checkpoint", str(run), "--data", str(data), "--json", str(file), *flags]
        assert cli.run(arguments) == 0
        results.append(json.loads(file.read_text()))
    assert streamed == [1]
    for result in results:
        assert result.pop("seconds") >= 0
    assert results[0].pop("mean_distance") == pytest.approx(results[1].pop("mean_distance"), rel=1e-9)
    assert results[0] == results[1]


MEMORY = """
import torch
from torch import nn
from itm_fast.benchmarking.measure import status_bytes
from itm_fast.evaluation import evaluate, top_k

class Gallery:
    caption_image = torch.arange(25000) // 5
    n_images = 5000
    def __len__(self): return 25000
    def image_batch(self, indices): return indices
    def caption_batch(self, indices): return indices, torch.ones(len(indices), dtype=torch.int64)

class Model(nn.Module):
    # Scores of four numbers, which captions repeat until they are as wide as they are asked to be.
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.images, self.captions = nn.Parameter(torch.randn(5000, 4)), nn.Parameter(torch.randn(25000, 4))
        self.repeats = width // 4
    def encode_images(self, indices): return self.images[indices]
    def encode_captions(self, indices, lengths): return self.captions[indices].repeat(1, self.repeats)
    def score(self, images, captions): return images @ captions[:, :4].t()

# Not ru_maxrss, which a process takes over from the one that started it.
def used(): return status_bytes("VmHWM") // 1024
before = used()
narrow = evaluate(Model(4), Gallery(), streaming=True)
print(used() - before, narrow["t2i_meanr"])
wide = evaluate(Model(8192), Gallery(), streaming=True)
best = [top_k(Model(width), Gallery(), 3, images=torch.arange(32)) for width in (8192, 4)]
same = all(torch.equal(one, other) for wide, narrow in zip(*best) for one, other in zip(wide, narrow))
print(used() - before, wide == narrow and same)
"""


@pytest.mark.thorough
def test_5000_by_25000_in_a_fifth_of_the_memory_of_its_matrix() -> None:
    """A chunk of wide captions is in memory too, whether captions are ranked or the best ones are searched."""
    # What is freed goes back at once: the allocator is not what is measured.
    done = run_process([sys.executable, "-c", MEMORY], cwd=ROOT, OMP_NUM_THREADS=1, MALLOC_MMAP_THRESHOLD_=2**20)
    assert done.returncode == 0, done.stderr
    kilobytes, rank, of_wide, same = done.stdout.split()
    assert int(kilobytes) < 100_000, "of 500 MB of float32 scores"
    # Scores at random: the mean rank is that of the middle. Its standard error is 5000 / sqrt(12 * 25000) = 9.
    assert abs(float(rank) - 2500) < 5 * 9
    chunk = 8192 * 8192 * 4 / 1024
    assert chunk < int(of_wide) < chunk + 100_000, "of 819 MB of captions"
    assert same == "True"


class _Counting(TableModel):
    """Count encoded images and captions, and the largest number at a time."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.alive, self.most = {"images": 0, "captions": 0}, {"images": 0, "captions": 0}

    def _born(self, kind: str, encoded: Any) -> Any:
        self._add(kind, len(encoded))
        kept = encoded.values if isinstance(encoded, Fragments) else encoded
        weakref.finalize(kept, self._add, kind, -len(encoded))
        return encoded

    def _add(self, kind: str, count: int) -> None:
        self.alive[kind] += count
        self.most[kind] = max(self.most[kind], self.alive[kind])

    def encode_images(self, features: Tensor) -> Any:
        return self._born("images", super().encode_images(features))

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Any:
        return self._born("captions", super().encode_captions(token_ids, lengths).clone())


@pytest.mark.parametrize("way", ["ranks", "top_k"])
def test_what_is_encoded_at_a_time(way: str) -> None:
    """A chunk of captions and a tile of images are encoded at a time, also if a tile does not divide the chunk."""
    model, gallery = _Counting(random_table(20, 100)), Gallery([number // 5 for number in range(100)], 20)
    sizes = {"tile_images": 3, "tile_captions": 7, "chunk_captions": 25}
    if way == "ranks":
        stream_ranks([(model, gallery)], torch.arange(20), torch.arange(100), **sizes)
    else:
        top_k(model, gallery, 4, **sizes)
    assert model.most == {"images": 3, "captions": 21}
    assert model.alive == {"images": 0, "captions": 0}
    assert sum(len(batch) for batch in gallery.caption_batches) >= 100
