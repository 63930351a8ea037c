"""OSCAR: scores of the equations for single pairs, sparse gradients, training, and rejected input."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, models
from itm_fast.data import BertVocabulary, PrecomputedDataset
from itm_fast.evaluation import rerank, score_matrix
from itm_fast.nn import PairScores, PairTransformer
from itm_fast.training.cautions import few_images
from itm_fast.training.metrics_log import read_metrics
from python_tests.evaluation.test_evaluation import Gallery, TableModel
from python_tests.evaluation.test_reranking import expected as expected_recalls
from python_tests.helpers.bert import PIECES, random_bert, write_bert
from python_tests.helpers.commands import error
from python_tests.helpers.concepts import WORDS
from python_tests.helpers.official_oscar import official_score, random_oscar
from python_tests.helpers.runs import config, differences, make_trainer, run, same, stop_at, what_a_run_leaves
from python_tests.helpers.worlds import run_jobs

WIDTH = 8
BERT = {"bert_dim": 24, "bert_layers": 2, "bert_heads": 12, "bert_hidden_dim": 20, "bert_max_length": 16}
MODEL = {"vocab_size": len(PIECES), "feature_dim": WIDTH, **BERT}
CAPTIONS = [[2, 11, 5, 6, 3], [2, 3], [2, 8, 9, 10, 3], [2, 7, 12, 3]]
IDS = torch.tensor([caption + [7] * (5 - len(caption)) for caption in CAPTIONS])
LENGTHS = torch.tensor([len(caption) for caption in CAPTIONS])
COUNTS = [4, 1, 3]
# A bias of all keys of a query, or of all scores, changes neither the attention nor a difference of scores.
IDLE = [
    "text_encoder.bert.encoder.layer.0.attention.self.key.bias",
    "text_encoder.bert.encoder.layer.1.attention.self.key.bias", "text_encoder.classifier.bias",
]  # fmt: skip


def regions(dtype: torch.dtype = torch.float64) -> Fragments:
    rows = torch.randn(sum(COUNTS), WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Fragments.from_list(rows.to(dtype).split(COUNTS))


def model_of(official: dict[str, Tensor], **changes: Any) -> models.OSCAR:
    """Return the model with official weights, in evaluation mode."""
    names = {"bert.img_embedding.": "image_encoder.fc.", "bert.LayerNorm.": "image_norm.",
             "bert.pooler.dense.": "text_encoder.pooler.", "bert.": "text_encoder.bert.",
             "classifier.": "text_encoder.classifier."}  # fmt: skip
    own = {}
    for name, value in official.items():
        start = next(prefix for prefix in names if name.startswith(prefix))
        own[names[start] + name.removeprefix(start)] = value
    model: Any = models.create("oscar", **MODEL, image_norm="bert.LayerNorm.weight" in official, **changes)
    model.load_state_dict(own)
    return model.eval()


def expected(official: dict[str, Tensor]) -> Tensor:
    pictures = [rows.numpy() for rows in regions().values.split(COUNTS)]
    scores = [[official_score(official, rows, caption) for caption in CAPTIONS] for rows in pictures]
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("chunk_pairs", [1, 5, 64])
def test_scores_equal_the_equations(norm: bool, chunk_pairs: int) -> None:
    """Sets of different lengths are scored together; the equations see each pair alone."""
    official = random_oscar(WIDTH, norm=norm)
    wanted = expected(official)
    assert wanted.std() > 0.1, "scores that tell pairs apart"
    model = model_of(official, chunk_pairs=chunk_pairs)
    found = model(regions(torch.float32), IDS, LENGTHS)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    exact = model.double()(regions(), IDS, LENGTHS)
    torch.testing.assert_close(exact, wanted, rtol=1e-9, atol=1e-10)
    assert not model.scores_within_one


def test_probabilities() -> None:
    official = random_oscar(WIDTH)
    model = model_of(official, probability=True).double()
    torch.testing.assert_close(model(regions(), IDS, LENGTHS), expected(official).sigmoid())
    assert model.scores_within_one


@pytest.mark.parametrize("most", [70, 7])
def test_tags_follow_the_caption(most: int) -> None:
    """Images with three, no and one tag. With at most seven pieces of text, lists of tags are cut before `[SEP]`."""
    official = random_oscar(WIDTH)
    tags = [[5, 13, 7, 3], [], [14, 3]]
    module = PairTransformer(
        len(PIECES), dim=24, layers=2, heads=12, hidden_dim=20, max_length=16, max_text_length=most
    ).double()
    names = {"bert.pooler.dense.": "pooler.", "classifier.": "classifier.", "bert.": "bert."}
    own = {
        next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)): value
        for name, value in official.items() if not name.startswith("bert.img_embedding.")
    }  # fmt: skip
    module.load_state_dict(own)
    module.eval()
    embedded = torch.nn.functional.linear(
        regions().values, *(official[f"bert.img_embedding.{name}"].double() for name in ("weight", "bias"))
    )
    padded = torch.tensor([one + [0] * (4 - len(one)) for one in tags])
    sides = regions().with_values(embedded), module.embed_tags(padded, torch.tensor([len(one) for one in tags]))
    captions = module.embed_captions(IDS, LENGTHS)
    wanted = []
    for rows, some in zip(regions().values.split(COUNTS), tags, strict=True):
        kept = [(some if len(some) <= most - len(one) else [*some[: most - len(one) - 1], 3]) for one in CAPTIONS]
        wanted.append(
            [official_score(official, rows.numpy(), one, few) for one, few in zip(CAPTIONS, kept, strict=True)]
        )
    found = F_itm.gradient_sparse_scores(module.pairs(tags=True), sides, captions, chunk_pairs=3)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-10)
    without = F_itm.gradient_sparse_scores(module.pairs(tags=False), sides[0], captions)
    assert (found[1] - without[1]).abs().max() < 1e-12, "an image without tags"
    assert (found - without)[[0, 2]].abs().min() > 1e-3


def gradients(model: Any, *, sparse: bool, seed: int = 3) -> list[Tensor]:
    """Return the gradients of all weights for the hardest negatives of three pairs."""
    model.zero_grad()
    torch.manual_seed(seed)
    images, captions = model.encode(regions(), IDS[:3], LENGTHS[:3])
    pairs = model.text_encoder.pairs(tags=False)
    scores = model.score(images, captions) if sparse else pairs(images, captions)
    F_itm.triplet_loss(scores, margin=0.2, mining="hardest").backward()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("chunk_pairs", [2, 64])
def test_sparse_gradients_are_those_of_the_dense_computation(chunk_pairs: int) -> None:
    model = model_of(random_oscar(WIDTH), chunk_pairs=chunk_pairs, bert_dropout=0.0).double().train()
    dense = gradients(model, sparse=False)
    idle = [name for (name, _), one in zip(model.named_parameters(), dense, strict=True) if float(one.norm()) < 1e-9]
    assert idle == IDLE
    for one, other in zip(gradients(model, sparse=True), dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)


def test_dropout_is_the_same_in_the_backward_pass() -> None:
    model = model_of(random_oscar(WIDTH), bert_dropout=0.3).double().train()
    dense = gradients(model, sparse=False)
    for one, other in zip(gradients(model, sparse=True), dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)
    apart = [
        float((one - other).norm()) for one, other in zip(gradients(model, sparse=True, seed=4), dense, strict=True)
    ]
    assert sum(one > 1e-3 for one in apart) == len(apart) - len(IDLE)


def test_only_pairs_with_a_gradient_are_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [0]
    plain = PairScores.forward

    def counting(self: Any, images: Any, captions: Any) -> Tensor:
        counted[0] += torch.is_grad_enabled() * len(images) * len(captions)
        return plain(self, images, captions)

    monkeypatch.setattr(PairScores, "forward", counting)
    for dropout, most in ((0.0, 9), (0.3, 36)):
        model = model_of(random_oscar(WIDTH), bert_dropout=dropout).double().train()
        counted[0] = 0
        chosen = [0, 1, 2, 3, 0, 1]
        images, captions = model.encode(Fragments.cat([regions()] * 2), IDS[chosen], LENGTHS[chosen])
        scores = model.score(images, captions)
        (scores.diagonal().sum() - scores[0, 1:4].sum()).backward()
        assert counted[0] == most


def test_special_sets() -> None:
    model = model_of(random_oscar(WIDTH))
    none = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    images = model.encode_images(regions(torch.float32))
    assert model.score(images, model.encode_captions(*none)).isfinite().all()
    assert model.score(images, model.encode_captions(IDS[:0], LENGTHS[:0])).shape == (3, 0)
    mixed = model.encode_captions(IDS, torch.tensor([0, 2, 5, 4]))
    whole = model.score(images, model.encode_captions(IDS, LENGTHS))
    torch.testing.assert_close(model.score(images, mixed)[:, 1:], whole[:, 1:], rtol=0, atol=1e-5)
    blank = model.encode_images(Fragments(torch.zeros(0, WIDTH), torch.tensor([0, 0])))
    found = model.score(blank, model.encode_captions(IDS, LENGTHS))
    wanted = [official_score(random_oscar(WIDTH), np.zeros((0, WIDTH)), caption) for caption in CAPTIONS]
    torch.testing.assert_close(found[0].double(), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-5)


# Training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("oscar") / "bert")


@pytest.fixture(scope="module")
def tagged(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set with one to three tags for most images."""
    folder = shutil.copytree(data, tmp_path_factory.mktemp("tagged") / "data")
    for split, count in (("train", 24), ("dev", 10), ("test", 10)):
        tags = [" ".join(WORDS[image % 7 : image % 7 + image % 4]) for image in range(count)]
        (folder / f"{split}_tags.txt").write_text("".join(f"{one}\n" for one in tags))
    return folder


def settings(data: Path, folder: Path, out: Path, **changes: Any) -> Any:
    own = {"model": "oscar", "bert": str(folder), "model_options": {}, "text_lr_factor": 1.0, "batch_size": 20}
    return config(data, out, **{**own, "epochs": 1, **changes})


def test_a_resumed_training_equals_an_uninterrupted_one(
    data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = settings(data, folder, tmp_path / "whole", micro_batch=7)
    trainer = make_trainer(whole)
    for name, weight in random_bert().items():
        assert torch.equal(trainer.model.state_dict()[f"text_encoder.bert.{name}"], weight), name
    assert run(whole).steps == 6
    parts = attrs.evolve(whole, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        assert run(parts).steps == 4
    assert run(parts, resume=True).steps == 6
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []
    # The run is the anchor of another one, which starts from its weights.
    beside = settings(data, folder, tmp_path / "oas", scenario="oas", anchor=str(tmp_path / "whole"), batch_size=5)
    assert same(make_trainer(beside).model.state_dict(), models.load(tmp_path / "whole").state_dict())


@pytest.mark.parametrize("scenario", ["single", "oss", "mss"])
def test_micro_batches_train_as_the_batch(tagged: Path, folder: Path, tmp_path: Path, scenario: str) -> None:
    """With tags, of which some regions and none of the tags are dropped."""
    options = {"bert_dropout": 0.0, "tags": True}
    changes = {"scenario": scenario, "batch_size": 6, "model_options": options, "region_augmentation": 0.2}
    found = []
    for size in (None, 4):
        trainer = make_trainer(settings(tagged, folder, tmp_path, micro_batch=size, **changes))
        trainer.train_data.read_tags()
        for branch in trainer.stepper.scenario.branches:
            branch.model.double()
            assert torch.equal(
                branch.model.state_dict()["text_encoder.bert.embeddings.LayerNorm.weight"],
                random_bert()["embeddings.LayerNorm.weight"].double(),
            )
        if scenario == "mss":
            trainer.stepper.scenario.anchor.double()
        batches = trainer._batches(0)
        numbers = []
        torch.manual_seed(3)
        for _ in range(2):
            batch = next(batches)
            numbers.append(trainer._step(attrs.evolve(batch, features=batch.features.to(torch.float64))))
        found.append((numbers, trainer.model.state_dict()))
    for plain, parts in zip(found[0][0], found[1][0], strict=True):
        assert parts == pytest.approx(plain, rel=1e-9)
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=1e-7, atol=1e-9, msg=name)


def test_it_learns(data: Path, folder: Path, tmp_path: Path) -> None:
    """All negatives of each pair; the rest of the settings as usual."""
    options = {"model_options": {"bert_dropout": 0.0}, "loss": "siglip", "mining": "all", "epochs": 6, "lr": 1e-2}
    options["loss_options"] = {"initial_scale": 1.0, "initial_bias": -2.0}
    result = run(settings(data, folder, tmp_path, **options, validate_every=6))
    assert result.best["rsum"] > 250, "untrained it is near 160: 1, 5 and 10 of 10 pictures or 50 captions"


def test_it_re_ranks_the_candidates_of_a_cheap_model(tagged: Path) -> None:
    """With tags, embeddings of images are pairs of Fragments."""
    model = model_of(random_oscar(WIDTH), tags=True)
    data = PrecomputedDataset(tagged, "test", BertVocabulary(PIECES), max_images=4)
    data.read_tags()
    cheap = torch.randn(4, 20, generator=torch.Generator().manual_seed(5))
    owners = [caption // 5 for caption in range(20)]
    found, _ = rerank(model, data, (TableModel(cheap), Gallery(owners, 4)), 3, tile_images=3, tile_captions=7)
    scores = score_matrix(model, data)
    assert found == expected_recalls(cheap, scores, owners, 3)
    without = score_matrix(
        model_of(random_oscar(WIDTH)), PrecomputedDataset(tagged, "test", data.vocabulary, max_images=4)
    )
    changed = (scores - without).abs().amax(1) > 1e-3
    assert changed.tolist() == [False, True, True, True], "the first image has no tags"


@pytest.mark.thorough
def test_two_processes_train_as_one(tagged: Path, folder: Path, tmp_path: Path) -> None:
    options = [
        "--model", "oscar", "--bert", folder, "--batch-size", "15", "--lr-schedule", "constant", "--data", tagged,
        "--model-option", "bert_dropout=0.0", "--model-option", "tags=true", "--epochs", "1",
        "--log-every", "1", "--validation-images", "2",
    ]  # fmt: skip
    jobs = [
        {
            "size": size,
            "imports": ["transformers.models.bert.modeling_bert"],
            "arguments": ["train", "--out", str(tmp_path / str(size)), *map(str, options)],
        }
        for size in (1, 2)
    ]
    for outcomes in run_jobs(jobs):
        warning = f"itm-fast: warning: {few_images({'dev': 2})}\n"
        assert [(status, err) for status, _, err in outcomes] == [(0, warning), (0, "")][: len(outcomes)]
    one, two = (read_metrics(tmp_path / str(size) / "metrics.jsonl") for size in (1, 2))
    losses = [[line["loss"] for line in log if line["kind"] == "train"] for log in (one, two)]
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "bert: text_encoder bert needs the folder of a BERT model: --bert DIR"),
        (["--bert", "BERT", "--model-option", "tags=true"],
         "DATA/train_ims.npy: the model reads object tags, but there are none; write train_tags.txt, one line per "
         "image"),
        (["--bert", "DATA"], "DATA/config.json: no such file; expected the folder of a BERT model"),
        (["--bert", "BERT", "--model-option", "bert_layers=3"],
         "model_options: bert_layers: expected 2 with the BERT in BERT, got 3"),
        (["--bert", "BERT", "--model-option", "chunk_pairs=0"],
         "chunk_pairs: expected a number at least 1, got 0"),
        (["--bert", "BERT", "--conversions", "2"],
         "conversions: expected one of the models chan, scan, vse_infty, got oscar"),
        (["--bert", "BERT", "--scenario", "addr"],
         "scenario: addr needs regions and words, but the model oscar has none"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(
    data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    def filled(text: str) -> str:
        return text.replace("BERT in BERT", f"BERT in {folder}").replace("DATA", str(data))

    given = [str(folder) if one == "BERT" else filled(one) for one in arguments]
    command = ["train", "--model", "oscar", "--data", data, "--out", tmp_path / "run", *given]
    assert error(capsys, *command)[1] == filled(message)
    assert not (tmp_path / "run").exists()


def official_folder(folder: Path, official: object) -> Path:
    """Write a pretrained model as the official code does: with other heads, and not as safetensors."""
    write_bert(folder)
    (folder / "model.safetensors").unlink()
    torch.save(official, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("norm", [False, True])
def test_pretrained_models_of_the_official_code(data: Path, tmp_path: Path, norm: bool) -> None:
    official = {**random_oscar(WIDTH, norm=norm), "cls.seq_relationship.weight": torch.zeros(2, 24)}
    folder = official_folder(tmp_path / "oscar", official)
    options = {"image_norm": norm}
    found = make_trainer(settings(data, folder, tmp_path / "run", model_options=options)).model.state_dict()
    wanted = model_of(random_oscar(WIDTH, norm=norm)).state_dict()
    differing = {name for name, weight in wanted.items() if not torch.equal(found[name], weight)}
    assert differing == {"text_encoder.classifier.weight", "text_encoder.classifier.bias"}, (
        "the head is that of the seed"
    )


@pytest.mark.parametrize("scenario", ["oss", "ncr"])
def test_all_branches_start_from_the_pretrained_parts(data: Path, tmp_path: Path, scenario: str) -> None:
    folder = official_folder(tmp_path / "oscar", random_oscar(WIDTH, norm=True))
    chosen = settings(data, folder, tmp_path / "run", model_options={"image_norm": True}, scenario=scenario)
    first, target = (branch.model.state_dict() for branch in make_trainer(chosen).stepper.scenario.branches)
    differing = {name for name, weight in target.items() if not torch.equal(first[name], weight)}
    assert differing == {"text_encoder.classifier.weight"}


def test_pretrained_models_that_do_not_fit(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (official, message) in enumerate((
        (random_oscar(WIDTH + 1), "img_embedding: weight: expected shape (24, 8), got (24, 9)"),
        ({**random_oscar(WIDTH), "more": Path("x")}, "not readable weights: names the Python object "),
        ({**random_oscar(WIDTH), "more": 5}, "expected tensors by name, got 'more': int"),
        ([], "expected a state dict, got list"),
    )):  # fmt: skip
        folder = official_folder(tmp_path / str(number), official)
        command = ["train", "--model", "oscar", "--data", data, "--out", tmp_path / "run", "--bert", folder]
        found = error(capsys, *command)[1]
        assert found.startswith(f"{folder}/pytorch_model.bin: {message}")
        assert not (tmp_path / "run").exists()


def test_data_of_another_width(data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.create("oscar", **{**MODEL, "feature_dim": 9}).save(tmp_path / "run")
    (tmp_path / "run" / "vocab.json").write_text(BertVocabulary(PIECES).to_json())
    assert error(capsys, "evaluate", "--checkpoint", tmp_path / "run", "--data", data)[1] == (
        f"{data}/test_ims.npy: regions have 8 channels, but the model in {tmp_path / 'run'} needs 9"
    )
