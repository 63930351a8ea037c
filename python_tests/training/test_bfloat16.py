"""Every model in bfloat16: dtypes of results, errors of losses and gradients against float32, and recalls."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast import evaluation, models
from itm_fast.data import EpochSampler, emoji, pack, reader
from itm_fast.evaluation import word_attention
from itm_fast.models import MatchingModel
from itm_fast.nn import PatchEncoder, final_states, l2norm
from itm_fast.nn.reasoning import RegionSelfAttention, SimilarityAttentionFiltration, WordSelfAttention
from itm_fast.training import TrainConfig, Trainer
from itm_fast.training.creation import create_model
from itm_fast.training.run import load_data
from itm_fast.training.step import Stepper
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.runs import config, make_trainer, same

BERT = {
    "text_encoder": "bert", "bert_dim": 24, "bert_layers": 2, "bert_heads": 2, "bert_hidden_dim": 48,
    "bert_max_length": 16, "bert_dropout": 0.0,
}  # fmt: skip
GRU = {"word_dim": 20, "word_dropout": 0.0}
SGRAF = {**GRU, "n_regions": 6, "alignment_dim": 16, "attention_dropout": 0.0}
SAEM = {"attention_hidden_dim": 64, "phrase_channels": 32, "attention_dropout": 0.0, "phrase_dropout": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "scan t2i": ("scan", GRU),
    "scan i2t": ("scan", {**GRU, "direction": "i2t", "aggregation": "logsumexp"}),
    "rcar": ("scan", {**GRU, "regulator": "rcar", "alignment_dim": 16, "regulator_dropout": 0.0}),
    "bfan": ("bfan", GRU),
    "sgr": ("sgraf", SGRAF),
    "saf": ("sgraf", {**SGRAF, "module": "saf"}),
    "dbl": ("dbl", {**GRU, "alignment_dim": 16}),
    "chan": ("chan", GRU),
    "chan bert": ("chan", BERT),
    "vsepp": ("vsepp", GRU),
    "vse_infty": ("vse_infty", GRU),
    "vse_infty bert": ("vse_infty", BERT),
    "rvsepp": ("rvsepp", GRU),
    "vsrn": ("vsrn", {**GRU, "graph_layers": 2, "image_batch_norm": True}),
    "saem": ("saem", {**GRU, **SAEM}),
    "esa": ("esa", GRU),
    "camp": ("camp", GRU),
    "camp rcar": ("camp", {**GRU, "regulator": "rcar", "alignment_dim": 16, "regulator_dropout": 0.0}),
    "fdf scan": ("fdf", {"host": "scan", "host_options": GRU, "conversions": 2}),
    "fdf vse_infty": ("fdf", {"host": "vse_infty", "host_options": GRU, "conversions": 2}),
}
COUNT, REGIONS = 12, 6


def make(name: str) -> MatchingModel:
    kind, options = MODELS[name]
    sizes = {"vocab_size": 40, "feature_dim": 48, "embed_dim": 64}
    torch.manual_seed(1)
    if kind == "fdf":
        return models.create("fdf", **{**options, "host_options": {**sizes, **options["host_options"]}}).train()
    return models.create(kind, **sizes, **options).train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(COUNT, REGIONS, 48, generator=random)
    lengths = torch.randint(3, 13, (COUNT,), generator=random)
    return features, torch.randint(40, (COUNT, 12), generator=random), lengths


def stepped(model: MatchingModel, features: Tensor, low: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, the loss of all negatives with active hinges, and its gradient for all weights as one vector."""
    _, token_ids, lengths = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        scores = model(features, token_ids, lengths)
    loss = F_itm.triplet_loss(scores, margin=3.0, mining="all")
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return scores.detach(), loss.detach(), torch.cat([grad.detach().double().flatten() for grad in grads])


def _plain_l2norm(x: Tensor, dim: int = -1, eps: float = 1e-8) -> Tensor:
    return x / (torch.linalg.vector_norm(x, dim=dim, keepdim=True) + eps)


def moved(model: MatchingModel, features: Tensor, seed: int) -> tuple[MatchingModel, Tensor]:
    """Return the model in float64 with weights and features moved up or down by the last digit of bfloat16."""
    random = torch.Generator().manual_seed(seed)
    eps = torch.finfo(torch.bfloat16).eps

    def move(values: Tensor) -> Tensor:
        signs = torch.randint(2, values.shape, generator=random).to(values.dtype) * 2 - 1
        return values * (1 + eps * signs)

    other = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(move(parameter))
    return other, move(features.double())


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_as_near_to_float32_as_rounding_lets_it(name: str) -> None:
    """Moving weights and features by a digit of bfloat16 bounds the error of scores, and half that of gradients.

    Autocast rounds the operands of a product by half a digit. Moving weights and features by a whole digit, in float64,
    is twice that and accounts for rounding between products. A backward rounds as often again as the forward. The loss
    is linear in the scores, because every hinge is active, so its error follows from theirs.
    """
    model, features = make(name), batch()[0]
    exact = stepped(copy.deepcopy(model).double(), features.double(), low=False)
    single = stepped(copy.deepcopy(model), features, low=False)
    draws = [stepped(*moved(model, features, seed), low=False) for seed in range(4)]
    found = stepped(model, features, low=True)
    assert found[0].dtype == found[1].dtype == torch.float32
    for place, digits in ((0, 1), (2, 2)):
        error, float32 = (float((one[place] - exact[place]).norm()) for one in (found, single))
        allowed = digits * max(float((draw[place] - exact[place]).norm()) for draw in draws)
        assert error <= allowed
        assert float32 < error / 100, "products were in bfloat16"
    slopes = torch.full((COUNT, COUNT), 2.0).fill_diagonal_(-2.0 * (COUNT - 1))
    rounding = COUNT**2 * torch.finfo(torch.float32).eps * float(exact[1])
    assert float((found[1] - exact[1]).abs()) <= float(slopes.norm() * (found[0] - exact[0]).norm()) + rounding


@pytest.mark.parametrize("name", ["vsepp", "vse_infty", "rvsepp", "vsrn", "saem", "esa", "fdf vse_infty"])
def test_one_vector_an_item_is_float32(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        images, captions = make(name).encode(*batch())
    for vectors in (images, captions):
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(COUNT), rtol=1e-6, atol=1e-6)


def test_norms_are_computed_in_float32_and_rounded_once() -> None:
    """This holds whatever autocast does on a device. A bfloat16 row stays bfloat16."""
    x = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    wanted = _plain_l2norm(x.double()).to(torch.float32).to(torch.bfloat16)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = l2norm(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted)
    zeros = torch.zeros(2, 5, dtype=torch.bfloat16, requires_grad=True)
    l2norm(zeros).sum().backward()
    assert bool(zeros.grad.isfinite().all())


def test_pooled_vectors_are_float32() -> None:
    """Means, last states and the global vectors of SGRAF are float32, so that their differences are kept."""
    sets = random_fragments([6, 6, 6], 32, torch.float32)
    low = sets.to(torch.bfloat16)
    assert final_states(low).dtype == torch.float32
    assert final_states(low, bidirectional=True).dtype == torch.float32
    assert final_states(random_fragments([], 4, torch.bfloat16)).dtype == torch.float32
    torch.manual_seed(0)
    for pool in (RegionSelfAttention(32, 6, dropout=0.0), WordSelfAttention(32, dropout=0.0)):
        exact = copy.deepcopy(pool).double()(sets.to(torch.float64))
        with torch.autocast("cpu", torch.bfloat16):
            found = pool(low)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.norm(dim=1), torch.ones(3), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2**-8)


def test_gates_sum_to_one_in_float32() -> None:
    torch.manual_seed(0)
    saf = SimilarityAttentionFiltration(16).eval()
    nodes = torch.randn(3, 30, 16).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        (shares,) = saf.shares(nodes)
    assert shares.dtype == torch.float32
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "scenario"), [("scan", "mss"), ("sgraf", "single"), ("vsrn", "single"), ("rvsepp", "mss")]
)
def test_what_training_keeps_is_float32(data: Path, tmp_path: Path, model: str, scenario: str) -> None:
    """Weights, running statistics, gradients, Adam's moments and the moving average are float32, products bfloat16."""
    options = {"embed_dim": 16, "word_dim": 12, "image_encoder": "residual"}
    trainer = make_trainer(
        config(data, tmp_path, model=model, scenario=scenario, precision="bfloat16", model_options=options)
    )
    products, batches = [], trainer._batches(0)
    trainer.model.image_encoder.fc.register_forward_hook(lambda _, __, result: products.append(result.dtype))
    norms = []
    clip = nn.utils.clip_grad_norm_
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.utils, "clip_grad_norm_", lambda *args: norms.append(clip(*args)) or norms[-1])
            numbers = trainer._step(next(batches))
    assert all(map(math.isfinite, numbers.values()))
    assert set(products) == {torch.bfloat16}
    assert {norm.dtype for norm in norms} == {torch.float32}
    branch = trainer.stepper.scenario.target
    kept = {
        "weights": trainer.model.state_dict().values(),
        "gradients": [parameter.grad for parameter in trainer.model.parameters()],
        "moments": [value for state in branch.optimizer.state.values() for value in state.values()],
        "beside": [value for other in trainer.stepper.scenario.companions() for value in other.state_dict().values()],
    }
    for what, tensors in kept.items():
        assert {value.dtype for value in tensors if value.is_floating_point()} <= {torch.float32}, what
    assert len(kept["moments"]) == 3 * len(list(trainer.model.parameters()))


def test_attention_to_look_at_is_float32(data: Path, tmp_path: Path) -> None:
    """Results with and without autocast differ only in the rounding of the embeddings."""
    trainer = make_trainer(config(data, tmp_path))
    captions = torch.arange(4)
    expected = word_attention(trainer.model, trainer.validation_data, captions)
    explained = evaluation.explain(trainer.model, trainer.validation_data, 0, 0)
    with torch.autocast("cpu", torch.bfloat16):
        found = word_attention(trainer.model, trainer.validation_data, captions)
        low = evaluation.explain(trainer.model, trainer.validation_data, 0, 0)
    for weights, wanted in zip(found, expected, strict=True):
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(len(weights)), rtol=1e-6, atol=1e-6)
        # A digit of the embeddings changes a normalised score by as much, and the logit by nine times that.
        torch.testing.assert_close(weights, wanted, rtol=0, atol=2**-8 * 9)
    assert torch.equal(low.directions["t2i"].attention[0], found[0])
    assert low.score == pytest.approx(explained.score, abs=2**-7)


@pytest.mark.parametrize(
    ("model", "features", "native"), [("scan", "disk", True), ("vse_infty", "disk", False), ("scan", "host", True)]
)
def test_features_of_a_bfloat16_store_stay_as_they_are(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, features: str, native: bool
) -> None:
    """A run on them ends bit for bit like one on float32 copies, with two bytes per number."""
    pack(data, tmp_path / "store", dtype="bf16", shard_bytes=200)
    if not native:
        monkeypatch.setattr(reader, "_host", lambda: None)
    ends, dtypes = [], []
    for keep in (True, False):
        changes = {"model": model, "precision": "bfloat16", "features": features, "region_augmentation": 0.2}
        trainer = make_trainer(config(tmp_path / "store", tmp_path / "run", **changes))
        assert trainer.train_data.source.keep_bfloat16
        trainer.train_data.source.keep_bfloat16 = keep
        torch.manual_seed(4)
        batches = trainer._batches(0)
        for _ in range(3):
            batch = next(batches)
            trainer._step(batch)
        dtypes.append(batch.features.dtype)
        ends.append(trainer.model.state_dict())
    assert dtypes == [torch.bfloat16, torch.float32]
    assert same(*ends)
    # Validation and float32 training read float32.
    assert trainer.validation_data.image_batch([0]).dtype == torch.float32
    single = make_trainer(config(tmp_path / "store", tmp_path / "run", features=features))
    assert single.train_data.batch([0]).features.dtype == torch.float32


def test_the_data_of_the_caller_give_float32_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds after a run, after a failed run, and if there was nothing to run or resume."""
    pack(data, tmp_path / "store", dtype="bf16")
    settings = config(tmp_path / "store", tmp_path / "run", precision="bfloat16", epochs=1)
    vocabulary, train_data, dev_data = load_data(settings)

    def trainer_of(**changes: object) -> Trainer:
        torch.manual_seed(0)
        changed = attrs.evolve(settings, **changes)
        model = create_model(changed, vocabulary, train_data)
        return Trainer(changed, model, train_data, dev_data, progress=False)

    def dtype() -> torch.dtype:
        return train_data.batch([0]).features.dtype

    (tmp_path / "run").mkdir()
    trainer = trainer_of()
    assert dtype() == torch.bfloat16
    assert trainer.run().finished
    assert dtype() == torch.float32
    trainer = trainer_of(out=str(tmp_path))
    with pytest.raises(ValueError, match="no such file; there is no run to resume"):
        trainer.restore()
    assert dtype() == torch.float32
    trainer = trainer_of()
    assert dtype() == torch.bfloat16
    monkeypatch.setattr(trainer.stepper, "augmentation", None)
    with pytest.raises(TypeError, match="not callable"):
        trainer.run()
    assert dtype() == torch.float32
    with pytest.raises(ValueError, match="5 conversions need as many batches per epoch, but there are 4"):
        trainer_of(conversions=5)
    assert dtype() == torch.float32


def test_patches_in_bfloat16_are_normalised_in_float32() -> None:
    torch.manual_seed(0)
    encoder = PatchEncoder(48, 8)
    patches = torch.randn(4, 9, 48).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        kept, widened = (copy.deepcopy(encoder)(features).values for features in (patches, patches.float()))
    assert torch.equal(kept, widened)


def test_recalls_on_the_bundled_pictures_are_nearly_those_of_float32() -> None:
    """For a model trained for a few steps in bfloat16, at most one query in a hundred changes."""
    words = emoji.vocabulary()
    dev = emoji.load("dev", words)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(words), "feature_dim": dev.features.shape[2], "embed_dim": 64, "word_dim": 32}
    model = models.create("vse_infty", **sizes, image_encoder="patches")
    settings = TrainConfig(data="", out="", model="vse_infty", precision="bfloat16", lr=1e-3, mining="all")
    stepper = Stepper(settings, model, words, torch.device("cpu"), 30)
    for number, indices in enumerate(EpochSampler(len(dev), 48)):
        stepper(dev.batch(indices), "all", number)
    found = {}
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            scores = evaluation.score_matrix(model, dev, images=torch.arange(100), captions=torch.arange(500))
            found[low] = scores, evaluation.evaluate(model, dev, first_images=100)
    # Both vectors of a pair move by one digit of bfloat16.
    assert found[False][0].dtype == found[True][0].dtype == torch.float32
    assert 0 < float((found[True][0] - found[False][0]).abs().max()) < 2 * torch.finfo(torch.bfloat16).eps
    assert found[False][1]["rsum"] > 60, "chance has about 32"
    for name in ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10"):
        # One of a hundred images is one percent.
        assert found[True][1][name] == pytest.approx(found[False][1][name], abs=2.0), name
