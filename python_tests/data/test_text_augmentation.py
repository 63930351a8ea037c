"""Text augmentation: shares of the changes, unchanged parts, and equal random draws after resuming."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from itm_fast import models
from itm_fast.data import TextAugmentation, Vocabulary
from itm_fast.training import TrainConfig, Trainer
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.bert import write_bert
from python_tests.helpers.concepts import WORDS, with_boxes, write_concepts
from python_tests.helpers.precomputed import SPECIAL
from python_tests.helpers.runs import OPTIONS, config, make_trainer, run, same, weights

VOCABULARY = Vocabulary([*SPECIAL, "<mask>", *(f"word{index}" for index in range(2000))])
PAD, START, END, MASK = VOCABULARY.pad, VOCABULARY.start, VOCABULARY.end, VOCABULARY.mask


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


def padded(captions: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids of <start>, words, <end> and padding, and the lengths."""
    rows = [[START, *words, END] for words in captions]
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def words_of(ids: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """Check <start>, <end> and the padding, and return the words of each caption."""
    captions = []
    for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        assert (row[0], row[length - 1]) == (START, END)
        assert row[length:] == [PAD] * (len(row) - length)
        captions.append(row[1 : length - 1])
    assert ids.shape[1] == int(lengths.max())
    return captions


@pytest.mark.parametrize("probability", [0.2, 0.6])
def test_shares_of_the_changes(probability: float) -> None:
    """60,000 different words, so that the change of each is known."""
    generator = torch.Generator().manual_seed(0)
    captions = [list(range(10000 + 30 * index, 10030 + 30 * index)) for index in range(2000)]
    before = padded(captions)
    ids, lengths = TextAugmentation(VOCABULARY, probability)(*before, generator)
    assert words_of(*before) == captions, "the arguments stay as they were"
    counts: Counter[str] = Counter()
    for old, new in zip(captions, words_of(ids, lengths), strict=True):
        assert set(new).isdisjoint({PAD, START, END, VOCABULARY.unk})
        kept = [word for word in new if word >= 10000]
        assert sorted(kept) == kept, "the order of the words stays"
        assert set(kept) <= set(old)
        masked = new.count(MASK)
        counts.update(kept=len(kept), masked=masked, replaced=len(new) - len(kept) - masked)
        counts.update(deleted=len(old) - len(new))
    shares = {change: count / 60000 for change, count in counts.items()}
    wanted = {
        "kept": 1 - probability, "masked": probability / 2, "replaced": probability / 10, "deleted": probability * 0.4
    }  # fmt: skip
    # The standard deviation of a share is at most 0.002.
    assert shares == pytest.approx(wanted, abs=0.008)


def test_random_words_are_drawn_from_the_whole_vocabulary() -> None:
    vocabulary = Vocabulary([*SPECIAL, "a", "<mask>", "b", "c"])
    ids = torch.tensor([[vocabulary.start, *[vocabulary.unk] * 3000, vocabulary.end]])
    changed, lengths = TextAugmentation(vocabulary, 1.0)(ids, torch.tensor([3002]), torch.Generator().manual_seed(0))
    counts = Counter(vocabulary.words[index] for index in changed[0, 1:-1].tolist())
    assert set(counts) == {"a", "b", "c", "<mask>"}
    assert int(lengths) == 2 + counts.total()
    # Of 3000 words half are masked, and a tenth shared by three words.
    assert counts["<mask>"] == pytest.approx(1500, abs=140)
    assert all(counts[word] == pytest.approx(100, abs=50) for word in "abc")


def test_a_caption_that_would_lose_all_words_is_kept() -> None:
    """One word would be deleted with probability 0.4, two words with 0.16: then nothing changes."""
    one, two = [[7]] * 4000, [[8, 9]] * 4000
    augmentation = TextAugmentation(VOCABULARY, 1.0)
    ids, lengths = augmentation(*padded([*one, *two, []]), torch.Generator().manual_seed(1))
    captions = words_of(ids, lengths)
    assert captions[-1] == []
    of_one, of_two = Counter(map(tuple, captions[:4000])), Counter(map(tuple, captions[4000:8000]))
    assert of_one[()] == of_two[()] == 0
    assert of_one[(7,)] / 4000 == pytest.approx(0.4, abs=0.04)
    assert of_one[(MASK,)] / 4000 == pytest.approx(0.5, abs=0.04)
    assert of_two[(8, 9)] / 4000 == pytest.approx(0.16, abs=0.03)
    assert of_two[(MASK, MASK)] / 4000 == pytest.approx(0.25, abs=0.035)


def test_the_generator_decides() -> None:
    before = padded([list(range(5, 50))] * 3)
    augmentation = TextAugmentation(VOCABULARY)
    first, again, other = (augmentation(*before, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert words_of(*first) != words_of(*other)
    torch.manual_seed(3)
    assert torch.equal(augmentation(*before)[0], first[0]), "without one, torch's own"
    empty = augmentation(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert (empty[0].shape, empty[1].shape) == ((0, 0), (0,))


@pytest.mark.parametrize(
    ("words", "probability", "message"),
    [
        ([*SPECIAL, "a"], 0.2, "vocabulary: text augmentation needs the word <mask>, which it does not have"),
        ([*SPECIAL, "<mask>"], 0.2, "vocabulary: text augmentation needs a word to draw, found none"),
        ([*SPECIAL, "<mask>", "a"], 1.5, "probability: expected a number above 0 and at most 1, got 1.5"),
        ([*SPECIAL, "<mask>", "a"], 0, "probability: expected a number above 0 and at most 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(words: list[str], probability: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextAugmentation(Vocabulary(words), probability)


def test_with_mask_appends_a_mask() -> None:
    plain = Vocabulary([*SPECIAL, "a"])
    assert plain.with_mask().words == [*SPECIAL, "a", "<mask>"]
    assert (plain.mask, plain.with_mask().mask) == (None, 5)
    assert VOCABULARY.with_mask() is VOCABULARY


# In training


def seen_by(settings: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[list[int]]]]:
    """Record the captions that a model encodes in training and in evaluation, batch by batch, in a whole run."""
    seen: dict[str, list[list[list[int]]]] = {"training": [], "evaluation": []}
    # Conversions encode what one extractor makes of the captions.
    name, method = ("fdf", "base_captions") if settings.conversions else (settings.model, "encode_captions")
    kind = models.base._MODELS[name]
    encode = getattr(kind, method)

    def recording(self: models.MatchingModel, ids: torch.Tensor, lengths: torch.Tensor) -> object:
        rows = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
        seen["training" if self.training else "evaluation"].append(rows)
        return encode(self, ids, lengths)

    with monkeypatch.context() as patch:
        patch.setattr(kind, method, recording)
        run(settings)
    return seen


@pytest.mark.parametrize("model", [name for name in models.names() if name != "clip"])
def test_models_train_on_changed_and_evaluate_on_unchanged_captions(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    options = {**OPTIONS, "alignment_dim": 8} if model == "sgraf" else OPTIONS
    named: dict[str, Any] = {"model": model}
    if model == "fdf":
        named = {"model": "scan", "conversions": 2, "other_batches": "kept"}
    if model == "oscar":
        named, options = (
            {
                **named,
                "bert": str(write_bert(tmp_path / "bert")),
                "batch_size": 6,
                "validation_images": 1,
                "mining": "all",
            },
            {"bert_dropout": 0.0},
        )
    if model == "pfan":
        data = with_boxes(data, tmp_path / "located")
    settings = config(data, tmp_path / "run", **named, model_options=options, text_augmentation=0.2)
    changed = seen_by(settings, monkeypatch)
    whole = seen_by(config(data, tmp_path / "whole", **named, model_options=options), monkeypatch)
    assert changed["evaluation"] == whole["evaluation"]
    before = [row for batch in whole["training"] for row in batch]
    after = [row for batch in changed["training"] for row in batch]
    assert len(before) == len(after) == 240
    vocabulary = Vocabulary.from_file(tmp_path / "run" / "vocab.json")
    masks = sum(row.count(vocabulary.mask) for row in after)
    words = sum(len(row) - 2 for row in before)
    assert masks / words == pytest.approx(0.1, abs=0.04)
    assert (words - sum(len(row) - 2 for row in after)) / words == pytest.approx(0.08, abs=0.04)
    assert {(row[0], row[-1]) for row in after} == {(vocabulary.start, vocabulary.end)}


@pytest.mark.parametrize(
    "changes",
    [
        {"model_options": {"word_dropout": 0.3}},
        {"model": "vsepp", "precision": "bfloat16", "model_options": {"image_encoder": "residual"}},
    ],
)
def test_a_resumed_run_draws_the_same_changes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict
) -> None:
    """The run stops within the second epoch and uses dropout from the same generator, or batch normalisation."""
    changes = {**changes, "model_options": {"embed_dim": 16, "word_dim": 12, **changes["model_options"]}}
    settings = config(data, tmp_path / "whole", text_augmentation=0.2, **changes)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    step = Trainer._step

    def stopping(self: Trainer, batch: object, *more: object) -> dict[str, float]:
        if self.engine.state.iteration == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopping)
        assert run(parts).finished is False
    torch.manual_seed(99)
    assert run(parts, resume=True).steps == 8
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if line["kind"] == "train"]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    run(attrs.evolve(settings, out=str(tmp_path / "plain"), text_augmentation=0.0))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "plain"))
    with pytest.raises(ValueError, match=r"parts: holds a run with text_augmentation = 0.2, not 0.0"):
        run(attrs.evolve(parts, text_augmentation=0.0), resume=True)


def test_a_mask_is_added_to_a_published_vocabulary(data: Path, tmp_path: Path) -> None:
    own = Vocabulary([*SPECIAL, *WORDS])
    own.save(tmp_path / "published.json")
    settings = config(data, tmp_path / "run", vocab=str(tmp_path / "published.json"), epochs=1)
    assert make_trainer(settings).train_data.vocabulary == own
    settings = attrs.evolve(settings, text_augmentation=0.2)
    run(settings)
    kept = Vocabulary.from_file(tmp_path / "run" / "vocab.json")
    assert kept.words == [*own.words, "<mask>"]
    assert models.load(tmp_path / "run").config.vocab_size == 17
    assert run(attrs.evolve(settings, epochs=2), resume=True).steps == 8
