"""Attention by part of speech against loops, the Wasserstein distance, tags from files and from NLTK, the command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import nltk
import pytest
import torch

from itm_fast import cli, evaluation, models
from itm_fast.data import nltk_speech_tags, open_split, read_speech_tags
from itm_fast.data.dataset import CaptionDataset
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files.run_files import VOCABULARY
from python_tests.helpers.commands import error
from python_tests.helpers.runs import config, run


def area(first: list[float], second: list[float]) -> float:
    """Return the distance by the quantile functions: both samples repeated to the same size, in order."""
    ours = sorted(first * len(second))
    theirs = sorted(second * len(first))
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [([0.0], [1.0], 1.0), ([0.0, 1.0], [0.0, 1.0], 0.0), ([0.0, 1.0], [0.5], 0.5), ([1.0, 2.0, 3.0], [2.0, 5.0], None)],
)
def test_the_wasserstein_distance(first: list[float], second: list[float], distance: float | None) -> None:
    found = evaluation.wasserstein_distance(torch.tensor(first), torch.tensor(second))
    assert found == pytest.approx(area(first, second) if distance is None else distance, rel=1e-6)


def test_the_distance_of_random_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    for n, m in ((7, 7), (3, 8), (20, 1)):
        first, second = (torch.randn(size, generator=generator).round(decimals=1) for size in (n, m))
        found = evaluation.wasserstein_distance(first, second)
        assert found == pytest.approx(area(first.double().tolist(), second.double().tolist()), abs=1e-7)
    with pytest.raises(ValueError, match="samples: expected two of at least one number"):
        evaluation.wasserstein_distance(first, first[:0])


OPTIONS = {"embed_dim": 16, "alignment_dim": 8, "regulator": "rcar", "steps": 2}
TAGS = ("noun", "verb", "adjective")


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speech") / "run"
    run(config(data, out, model="scan", model_options=OPTIONS, epochs=1))
    return out


def split_of(data: Path, trained: Path) -> CaptionDataset:
    return open_split(data, "test", Vocabulary.from_file(trained / VOCABULARY))


def tags_of(dataset: CaptionDataset) -> list[list[str]]:
    names = itertools.cycle(TAGS)
    return [[next(names) for _ in range(length - 2)] for length in dataset.caption_lengths.tolist()]


def test_weights_and_distances_are_those_of_loops(data: Path, trained: Path) -> None:
    dataset, model = split_of(data, trained), models.load(trained).eval()
    tags, chosen = tags_of(dataset), [0, 3, 7, 8]
    found = evaluation.speech_statistics(model, dataset, [tags[caption] for caption in chosen], chosen, seed=5)
    draws = torch.Generator().manual_seed(5)
    weights: dict[tuple[str, bool, int], list[float]] = {}
    cosines: dict[tuple[str, bool, int], list[float]] = {}
    for caption in chosen:
        own = int(dataset.caption_image[caption])
        other = (own + int(torch.randint(1, dataset.n_images, (), generator=draws))) % dataset.n_images
        names = ["<start>", *tags[caption], "<end>"]
        for image in (own, other):
            steps = evaluation.explain(model, dataset, caption, image).directions["t2i"]
            with torch.no_grad():
                regions = model.encode_images(dataset.image_batch([image]))[0]
                words = model.encode_captions(*dataset.caption_batch([caption]))[0]
            for number, word in enumerate(names):
                for step, aggregation in enumerate(steps.aggregation["RAR"]):
                    weights.setdefault((word, image == own, step), []).append(float(aggregation[number]))
                for step, attention in enumerate(steps.attention):
                    attended = sum(float(a) * region for a, region in zip(attention[number], regions, strict=True))
                    cosine = words[number] @ attended / (words[number].norm() * attended.norm())
                    cosines.setdefault((word, image == own, step), []).append(float(cosine))
    assert set(found.parts) == {"<start>", "<end>", *TAGS}
    assert found.counts == sorted(found.counts, reverse=True)
    assert found.positive_weights.shape == found.negative_weights.shape == found.distances.shape == (2, 5)
    for place, part in enumerate(found.parts):
        assert found.counts[place] == len(weights[part, True, 0])
        for step in range(2):
            for kind, side in ((True, found.positive_weights), (False, found.negative_weights)):
                values = weights[part, kind, step]
                assert float(side[step, place]) == pytest.approx(sum(values) / len(values), rel=1e-5)
            distance = area(cosines[part, True, step], cosines[part, False, step])
            assert float(found.distances[step, place]) == pytest.approx(distance, abs=2e-6)
    assert found.mean_distances == pytest.approx(found.distances.mean(dim=1).tolist())
    assert found.mean_distances[0] > 0


def test_what_has_no_statistics(data: Path, trained: Path) -> None:
    dataset = split_of(data, trained)
    sizes = {"vocab_size": len(dataset.vocabulary), "feature_dim": models.load(trained).config.feature_dim}
    tags = tags_of(dataset)[:1]
    for name, options in (("vsepp", {}), ("scan", {"direction": "i2t"})):
        model = models.create(name, **sizes, embed_dim=8, **options)
        with pytest.raises(ValueError, match="do not attend to regions"):
            evaluation.speech_statistics(model, dataset, tags, [0])
    model = models.load(trained)
    with pytest.raises(ValueError, match=r"^caption 0: expected \d+ tags, got 1$"):
        evaluation.speech_statistics(model, dataset, [["noun"]], [0])
    with pytest.raises(ValueError, match="captions: expected at least one"):
        evaluation.speech_statistics(model, dataset, [], [])


def test_the_command_draws_and_writes_the_numbers(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = split_of(data, trained)
    file = tmp_path / "tags.txt"
    tags = tags_of(dataset)
    file.write_text("".join(" ".join(line) + "\n" for line in tags))
    out, numbers = tmp_path / "speech.svg", tmp_path / "speech.json"
    command = ["speech", "--checkpoint", trained, "--data", data, "--tags", file, "--out", out, "--json", numbers]
    capsys.readouterr()
    assert cli.run([*map(str, command), "--max-captions", "5", "--seed", "3"]) == 0
    content = json.loads(numbers.read_text())
    chosen = [number * len(dataset) // 5 for number in range(5)]
    expected = evaluation.speech_statistics(
        models.load(trained), dataset, [tags[caption] for caption in chosen], chosen, seed=3
    )
    assert content["parts"] == expected.parts
    assert content["mean_distances"] == pytest.approx(expected.mean_distances)
    assert torch.tensor(content["positive_weights"]).shape == (2, len(expected.parts))
    printed = capsys.readouterr().out
    assert ", ".join(f"{distance:.3f}" for distance in expected.mean_distances) in printed
    assert all(f"<!-- {part} -->" in out.read_text() for part in TAGS)
    for lines, message in (
        (tags[:-1], f"{file}: expected a line for each of {len(tags)} captions, got {len(tags) - 1}"),
        ([tags[0][:-1], *tags[1:]], f"{file}: line 1: expected {len(tags[0])} tags, got {len(tags[0]) - 1}"),
    ):
        file.write_text("".join(" ".join(line) + "\n" for line in lines))
        assert error(capsys, *command) == (1, message)


def tagged(sentences: list[list[str]]) -> list[list[tuple[str, str]]]:
    kinds = {"dog": "NN", "dogs": "NNS", "runs": "VBZ", "brown": "JJ", "a": "DT", "to": "TO", "!": "."}
    return [[(word, kinds.get(word, "FW")) for word in sentence] for sentence in sentences]


def test_tags_of_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    captions = ["A brown dog runs to dogs !", "A zebra"]
    vocabulary = Vocabulary(["<pad>", "<start>", "<end>", "<unk>", "a", "brown", "dog", "runs", "to", "dogs", "!"])
    dataset = CaptionDataset(torch.zeros(2, 1, 3).numpy(), captions, [0, 1], vocabulary)
    monkeypatch.setattr(nltk, "pos_tag_sents", tagged)
    kinds = [["determiner", "adjective", "noun", "verb", "preposition", "noun", "other"], ["determiner", "other"]]
    assert nltk_speech_tags(dataset, [0, 1]) == kinds
    assert nltk_speech_tags(dataset, [1]) == kinds[1:]

    def without_data(_sentences: object) -> None:
        raise LookupError("a long text of nltk\nwith lines")

    monkeypatch.setattr(nltk, "pos_tag_sents", without_data)
    with pytest.raises(ValueError, match=r"tagger: nltk has no data; install them once .*\(--tags FILE\)$"):
        nltk_speech_tags(dataset, [0])
    monkeypatch.setattr(nltk.tag, "PerceptronTagger", SimpleNamespace())
    with pytest.raises(ValueError, match=r"tagger: expected nltk 3\.9 or newer, got"):
        nltk_speech_tags(dataset, [0])


def test_a_file_is_read_by_words(tmp_path: Path) -> None:
    vocabulary = Vocabulary(["<pad>", "<start>", "<end>", "<unk>", "a", "dog"])
    dataset = CaptionDataset(torch.zeros(1, 1, 3).numpy(), ["A dog", "Dog"], [0, 0], vocabulary)
    for text in ("DT  NN\nNN\n", "DT\u2028NN\r\nNN", "DT\x85NN\n\x0bNN\r\n", "\ufeffDT NN\nNN"):
        (tmp_path / "tags.txt").write_bytes(text.encode())
        assert read_speech_tags(tmp_path / "tags.txt", dataset) == [["DT", "NN"], ["NN"]]
