"""The decoder of captions against its equations, word by word, and VSRN with its second loss."""

from __future__ import annotations

import itertools
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.distributed import Launch, World
from itm_fast.fragments import Fragments
from itm_fast.nn import CaptionDecoder
from itm_fast.training.step import Stepper
from python_tests.helpers.gru import directions
from python_tests.helpers.runs import config, make_trainer, run, same, weights

IDS = torch.tensor([[1, 5, 2, 9], [4, 2, 0, 0], [7, 8, 3, 0], [6, 0, 0, 0]])
LENGTHS = torch.tensor([4, 2, 3, 1])


def caption_loss(decoder: CaptionDecoder, regions: Tensor, caption: list[int]) -> Tensor:
    """Generate a caption word by word: the sum of its negative log-likelihoods."""
    rows = [decoder.project.weight @ row + decoder.project.bias for row in regions]
    (read,) = directions(decoder.reader, torch.stack(rows))
    state, total = read[-1], torch.zeros((), dtype=read.dtype)
    writer = decoder.writer
    for word, following in itertools.pairwise(caption):
        hidden = [decoder.of_region.weight @ e + decoder.of_state.weight @ state + decoder.of_state.bias for e in read]
        raw = torch.stack([decoder.relevance.weight[0] @ torch.tanh(one) for one in hidden])
        shares = raw.exp() / raw.exp().sum()
        context = sum(share * e for share, e in zip(shares, read, strict=True))
        given = torch.cat([decoder.embed.weight[word], context])
        of_input = (writer.weight_ih @ given + writer.bias_ih).chunk(3)
        of_state = (writer.weight_hh @ state + writer.bias_hh).chunk(3)
        reset, update = torch.sigmoid(of_input[0] + of_state[0]), torch.sigmoid(of_input[1] + of_state[1])
        new = torch.tanh(of_input[2] + reset * of_state[2])
        state = (1 - update) * new + update * state
        logits = decoder.out.weight @ state + decoder.out.bias
        total = total - logits[following] + logits.exp().sum().log()
    return total


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [2, 4, 1, 5]])
def test_losses_and_gradients_equal_the_equations(lengths: list[int]) -> None:
    torch.manual_seed(0)
    decoder = CaptionDecoder(6, 11, hidden_dim=5, word_dim=4).double().eval()
    images = [torch.randn(length, 6, dtype=torch.float64, requires_grad=True) for length in lengths]
    found = decoder(Fragments.from_list(images), IDS, LENGTHS)
    captions = [row[:length].tolist() for row, length in zip(IDS, LENGTHS, strict=True)]
    expected = torch.stack([caption_loss(decoder, *pair) for pair in zip(images, captions, strict=True)])
    assert expected[3] == 0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    inputs = [*decoder.parameters(), *images[:3]]
    of_found, of_expected = (torch.autograd.grad(losses.sum(), inputs) for losses in (found, expected))
    for ours, theirs in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_empty_images_and_captions_are_finite() -> None:
    decoder = CaptionDecoder(6, 11, hidden_dim=5, word_dim=4)
    regions = Fragments(torch.randn(3, 6), torch.tensor([0, 3, 3]))
    losses = decoder(regions, IDS[:2], LENGTHS[:2])
    losses.sum().backward()
    assert bool(losses.isfinite().all())
    assert all(bool(one.grad.isfinite().all()) for one in decoder.parameters())
    assert decoder(regions, IDS[:2, :1], torch.tensor([1, 1])).tolist() == [0.0, 0.0]


def test_an_image_without_regions_has_the_same_loss_alone() -> None:
    torch.manual_seed(0)
    decoder = CaptionDecoder(6, 11, hidden_dim=5, word_dim=4).eval()
    beside = decoder(Fragments(torch.randn(3, 6), torch.tensor([0, 3, 3])), IDS[:2], LENGTHS[:2])
    alone = decoder(Fragments(torch.zeros(0, 6), torch.tensor([0, 0])), IDS[1:2], LENGTHS[1:2])
    torch.testing.assert_close(alone, beside[1:])
    alone.sum().backward()
    assert all(one.grad is not None for one in decoder.parameters())
    assert decoder(Fragments(torch.zeros(0, 6), torch.tensor([0])), IDS[:0], LENGTHS[:0]).shape == (0,)


OPTIONS = {"embed_dim": 16, "word_dim": 12, "graph_layers": 1, "caption_weight": 0.5, "caption_hidden_dim": 8}


def test_the_loss_of_a_step_has_the_generation(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path, model="vsrn", model_options={**OPTIONS, "caption_dropout": 0.0}, mining="all")
    trainer = make_trainer(settings)
    batch = next(trainer._batches(0))
    model = trainer.model.train()
    functions = trainer.stepper._functions(batch, "all", None)
    scores, loss = functions.scores_and_loss(model)
    regions = model.image_fragments(batch.features)[1]
    captions = [row[:length].tolist() for row, length in zip(batch.token_ids, batch.lengths, strict=True)]
    generated = sum(float(caption_loss(model.decoder, regions[i], one).detach()) for i, one in enumerate(captions))
    expected = 0.5 * generated / len(batch)
    assert float(loss.detach() - functions.loss(scores).detach()) == pytest.approx(expected, rel=1e-4)
    assert model.take_auxiliary_loss() is None, "a loss counts once"
    assert model.eval()(batch.features, batch.token_ids, batch.lengths).requires_grad
    assert model.take_auxiliary_loss() is None, "evaluation generates nothing"
    numbers = trainer.stepper(batch, "all", 1)
    assert numbers["auxiliary_loss"] == pytest.approx(expected, rel=1e-4)


def test_it_learns_to_tell_what_an_image_shows() -> None:
    """Captions become likely for their own images and unlikely for others."""
    torch.manual_seed(0)
    decoder = CaptionDecoder(6, 11, hidden_dim=16, word_dim=8, dropout=0.0)
    regions = Fragments.from_padded(torch.randn(4, 3, 6))
    captions = torch.tensor([[1, 5, 6, 2], [1, 7, 8, 2], [1, 9, 10, 2], [1, 4, 3, 2]])
    lengths = torch.full((4,), 4)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        decoder(regions, captions, lengths).sum().backward()
        optimizer.step()
    with torch.no_grad():
        own = decoder(regions, captions, lengths)
        other = decoder(regions.index_select(torch.tensor([1, 2, 3, 0])), captions, lengths)
    assert float(own.max()) < 0.5
    assert float(other.min()) > 3.0


def test_a_run_learns_to_generate_and_resumes(data: Path, tmp_path: Path) -> None:
    options = {"epochs": 4, "log_every": 1, "lr": 1e-2, "mining": "all"}
    settings = config(data, tmp_path / "whole", model="vsrn", model_options=OPTIONS, **options)
    run(settings)
    log = (tmp_path / "whole" / "metrics.jsonl").read_text()
    found = [float(line.split('"auxiliary_loss":')[1].split(",")[0]) for line in log.splitlines()
             if '"auxiliary_loss":' in line]  # fmt: skip
    assert found[-1] < 0.93 * found[0]
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=2)
    run(parts)
    torch.manual_seed(99)
    run(attrs.evolve(parts, epochs=4), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert models.load(tmp_path / "whole").decoder is not None


def test_what_cannot_add_the_loss(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path, model="vsrn", model_options=OPTIONS, scenario="ncr")
    message = r"^caption_weight: goes with the scenario single, oas, oss, mss, sam, not ncr; expected 0$"
    with pytest.raises(ValueError, match=message):
        make_trainer(settings)
    model = models.create("vsrn", vocab_size=9, feature_dim=4, **OPTIONS)
    with pytest.raises(ValueError, match=r"^caption_weight: goes with a single process, got 2; expected 0$"):
        Stepper(attrs.evolve(settings, scenario="single"), model, None, torch.device("cpu"), 4,
                world=World(Launch(0, 2)))  # fmt: skip
