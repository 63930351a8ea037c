"""Raw inputs at inference: strings and arrays, without an autograd graph."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import Fragments, models
from itm_fast.data import Vocabulary, open_split
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import config, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    run(config(data, out, epochs=1, model="sgraf", model_options={"embed_dim": 16, "word_dim": 12, "alignment_dim": 8}))
    return out


def values(embeddings: Fragments | torch.Tensor) -> torch.Tensor:
    return embeddings.values if isinstance(embeddings, Fragments) else embeddings


def test_a_loaded_model_reads_strings_and_arrays(data: Path, trained: Path, tmp_path: Path) -> None:
    model = models.load(trained)
    test = open_split(data, "dev", Vocabulary.from_file(trained / "vocab.json"))
    captions = model.encode_captions(list(test.captions[:7]))
    assert torch.equal(values(captions), values(model.encode_captions(*test.caption_batch(range(7)))))
    images = model.encode_images(np.asarray(test.image_batch(range(3))))
    assert torch.equal(values(images), values(model.encode_images(test.image_batch(range(3)))))
    # A memory-mapped file cannot be written.
    np.save(tmp_path / "features.npy", np.asarray(test.image_batch(range(3))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = model.encode_images(np.load(tmp_path / "features.npy", mmap_mode="r"))
    assert torch.equal(values(mapped), values(images))
    # Scoring with SGRAF uses trainable weights.
    scores = model.score(images, captions)
    assert not any(values(part).requires_grad for part in (images, captions, scores))
    assert scores.numpy().shape == (3, 7)


def test_training_and_graphs_are_left_alone(data: Path, trained: Path) -> None:
    model = models.load(trained)
    test = open_split(data, "dev", model.tokenizer)
    images = model.encode_images(test.image_batch([0, 1]))
    words = model.encode_captions(["a dog"])
    assert values(images).requires_grad
    assert model.score(images, words).requires_grad
    model.train()
    assert model.score(images.with_values(images.values.detach()), words).requires_grad


def test_the_tokenizer_is_saved_with_the_model(trained: Path, tmp_path: Path) -> None:
    model = models.load(trained)
    model.save(tmp_path)
    again = models.load(tmp_path)
    assert again.tokenizer == model.tokenizer
    assert again.tokenizer is not None
    models.create("scan", vocab_size=5, feature_dim=4, embed_dim=8, word_dim=8).save(tmp_path)
    again.tokenizer.save(tmp_path / "vocab.json")
    known = len(again.tokenizer)
    with pytest.raises(ValueError, match=rf"vocab.json: {known} words, but the model in {tmp_path} knows 5"):
        models.load(tmp_path)


def test_captions_that_cannot_be_read_are_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.load(trained)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "max_caption_length", 4)
        with pytest.raises(ValueError, match="captions: the model reads 4 tokens, got 5: 'one two three'"):
            model.encode_captions(["one", "one two three"])
    with pytest.raises(TypeError, match="captions: expected a list of strings, or token ids and lengths, got 'a dog'"):
        model.encode_captions("a dog")
    with pytest.raises(TypeError, match="captions: expected a list of strings"):
        model.encode_captions([3])
    fresh = models.create("scan", vocab_size=5, feature_dim=4, embed_dim=8, word_dim=8)
    with pytest.raises(ValueError, match="tokenizer: the model has none; load it from a run directory"):
        fresh.encode_captions(["a dog"])
    assert len(values(model.encode_captions([]))) == 0
