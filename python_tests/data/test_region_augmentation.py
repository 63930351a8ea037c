"""Size augmentation of images: remaining regions, their use in models, and equal random draws after resuming."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

from itm_fast import models
from itm_fast.data import Batch, BatchAugmentation, RegionAugmentation, Vocabulary
from itm_fast.fragments import Fragments
from python_tests.helpers.runs import config, make_trainer, run, same, weights


def numbered(n: int, k: int) -> torch.Tensor:
    """Return features in which the integer part is the image and the fraction is the region."""
    return (torch.arange(n)[:, None] + torch.arange(k) / 1000)[:, :, None].double()


@pytest.mark.parametrize("probability", [0.2, 0.7])
def test_dropped_regions_have_the_given_share(probability: float) -> None:
    features = numbered(2000, 30)
    kept = RegionAugmentation(probability)(features, torch.Generator().manual_seed(0))
    assert isinstance(kept, Fragments)
    assert kept.max_length == int(kept.lengths.max())
    assert torch.equal(kept.values[:, 0].floor().long(), kept.set_index()), "regions stay with their image"
    whole = set(features.flatten().tolist())
    assert set(kept.values.flatten().tolist()) <= whole
    assert bool((kept.values[1:] > kept.values[:-1]).all()), "and in their order"
    # The standard deviation of the share is at most 0.002.
    assert len(kept.values) / 60000 == pytest.approx(1 - probability, abs=0.008)
    places = torch.bincount((kept.values[:, 0].frac() * 1000).round().long(), minlength=30)
    assert float((places / 2000 - (1 - probability)).abs().max()) < 0.05, "every place alike"


def test_an_image_that_would_lose_all_of_its_regions_keeps_them() -> None:
    features = numbered(500, 2)
    kept = RegionAugmentation(0.9)(features, torch.Generator().manual_seed(0))
    counts = torch.bincount(kept.lengths, minlength=3)
    # Of two regions 0.81 of the images would lose both, 0.18 lose one, 0.01 lose none.
    assert (counts / 500).tolist() == pytest.approx([0, 0.18, 0.82], abs=0.05)


def test_the_generator_decides() -> None:
    features = numbered(20, 10)
    augmentation = RegionAugmentation(0.3)
    first, again, other = (augmentation(features, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.lengths, other.lengths)
    torch.manual_seed(3)
    assert torch.equal(augmentation(features).values, first.values), "without one, torch's own"
    assert augmentation(torch.zeros(0, 4, 3)).values.shape == (0, 3)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, float("nan")])
def test_bad_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(ValueError, match=f"probability: expected a number above 0 and below 1, got {probability}"):
        RegionAugmentation(probability)


def test_a_batch_of_ragged_images_moves_to_a_device() -> None:
    vocabulary = Vocabulary(["<pad>", "<start>", "<end>", "<unk>", "<mask>", "a"])
    ids = torch.tensor([[1, 5, 5, 5, 2]] * 8)
    batch = Batch(numbered(8, 6).float(), ids, torch.full((8,), 5), torch.arange(8), torch.arange(8))
    torch.manual_seed(0)
    changed = BatchAugmentation(vocabulary, words=0.5, regions=0.5)(batch)
    assert int(changed.features.lengths.max()) < 6
    assert changed.lengths.tolist() != [5] * 8
    moved = changed.to("cpu")
    assert torch.equal(moved.features.values, changed.features.values)
    assert moved.features.max_length == changed.features.max_length
    assert BatchAugmentation(vocabulary)(batch) is batch, "as it was, where nothing changes"
    torch.manual_seed(0)
    there = BatchAugmentation(vocabulary, words=0.5, regions=0.5)(batch, "meta")
    assert there.features.values.shape == changed.features.values.shape
    parts = (there.features.values, there.features.offsets, there.token_ids, there.lengths, there.image_index)
    assert {part.device.type for part in parts} == {"meta"}


@pytest.mark.parametrize("ragged", [False, True])
def test_regions_are_dropped_after_the_copy_to_a_device(monkeypatch: pytest.MonkeyPatch, ragged: bool) -> None:
    """Copies from page-locked memory are asynchronous; regions selected before would be in other memory."""
    features = numbered(8, 6)
    read = Fragments.from_padded(features) if ragged else features
    memory, travelled, to = (read.values if ragged else read).data_ptr(), [], torch.Tensor.to
    waited = []

    def noted(self: torch.Tensor, *where: object, **how: object) -> torch.Tensor:
        if self.is_floating_point():
            travelled.append((self.data_ptr(), tuple(self.shape)))
        waited.append(how.get("non_blocking"))
        return to(self, *where, **how)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    RegionAugmentation(0.5)(read, device="meta", non_blocking=True)
    assert travelled == [(memory, (48, 1))]
    # Features, which of them are left, and where those of each image begin.
    assert waited == [True] * 3


@pytest.mark.parametrize("model", ["scan", "bfan", "vsepp", "vse_infty"])
def test_models_train_on_dropped_and_evaluate_on_all_regions(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    settings = config(data, tmp_path / "run", model=model, region_augmentation=0.3)
    seen: dict[bool, list[int]] = {True: [], False: []}
    kind = models.base._MODELS[model]
    encode = kind.encode_images

    def recording(self: models.MatchingModel, features: object) -> object:
        ragged = features if isinstance(features, Fragments) else Fragments.from_padded(features)
        seen[self.training] += ragged.lengths.tolist()
        return encode(self, features)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "encode_images", recording)
        run(settings)
    assert set(seen[False]) == {4}
    assert len(seen[True]) == 240
    # Four regions a picture; one that would lose all of them keeps them.
    assert sum(seen[True]) / 960 == pytest.approx(0.7 + 0.3**4, abs=0.04)
    with pytest.raises(ValueError, match=r"run: holds a run with region_augmentation = 0.3, not 0.0"):
        run(attrs.evolve(settings, region_augmentation=0.0), resume=True)


def test_a_resumed_run_draws_the_same_regions(data: Path, tmp_path: Path) -> None:
    options = {"region_augmentation": 0.2, "text_augmentation": 0.2, "model": "vse_infty"}
    settings = config(data, tmp_path / "whole", **options)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=1)
    run(parts)
    torch.manual_seed(99)
    assert run(attrs.evolve(parts, epochs=2), resume=True).steps == 8
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    run(attrs.evolve(settings, out=str(tmp_path / "plain"), region_augmentation=0.0))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "plain"))


def test_models_with_a_fixed_number_of_regions_refuse_augmentation(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", model="sgraf", region_augmentation=0.5)
    with pytest.raises(ValueError, match="images: expected 4 regions in each, got"):
        run(settings)
    assert make_trainer(attrs.evolve(settings, region_augmentation=0.0)).model.config.n_regions == 4
