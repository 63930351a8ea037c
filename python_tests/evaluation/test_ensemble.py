"""Ensembles by mean score, compared with independent scores and ranks in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from itm_fast import cli, models
from itm_fast.data import Vocabulary
from itm_fast.evaluation import evaluate, evaluate_ensemble, evaluate_scores
from python_tests.helpers.concepts import WORDS, write_concepts
from python_tests.helpers.precomputed import SPECIAL
from python_tests.helpers.runs import config, run

OTHER_ORDER = Vocabulary([*SPECIAL, *reversed(WORDS), "<mask>"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"), n_dev=30)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """SCAN, and VSE++ with another vocabulary, after a few steps: both are inaccurate, and different."""
    folder = tmp_path_factory.mktemp("runs")
    OTHER_ORDER.save(folder / "other.json")
    run(config(data, folder / "scan", epochs=3))
    run(config(data, folder / "vsepp", epochs=2, model="vsepp", vocab=str(folder / "other.json"), lr=1e-2))
    run(config(data, folder / "scan2", epochs=1, seed=3))
    return [folder / name for name in ("scan", "vsepp", "scan2")]


def scores64(checkpoint: Path, data: Path) -> np.ndarray:
    """All scores of a saved model on the test split, computed in float64."""
    vocabulary = Vocabulary.from_file(checkpoint / "vocab.json")
    model = models.load(checkpoint).double()
    captions = (data / "test_caps.txt").read_text().splitlines()
    ids = [vocabulary.encode(caption) for caption in captions]
    features = torch.from_numpy(np.load(data / "test_ims.npy")).double()
    with torch.no_grad():
        # All captions have four words, so that nothing is padded.
        return model(features, torch.tensor(ids), torch.tensor([len(row) for row in ids])).numpy()


def recalls(scores: np.ndarray) -> dict[str, float]:
    """Return recalls by sorting; five captions per image."""
    owner = np.arange(scores.shape[1]) // 5
    text = np.array([min(np.flatnonzero(owner[np.argsort(-row)] == i)) for i, row in enumerate(scores)])
    image = np.array([np.flatnonzero(np.argsort(-column) == owner[j])[0] for j, column in enumerate(scores.T)])
    result = {
        f"{side}_r{k}": 100 * float(np.mean(ranks < k))
        for side, ranks in (("i2t", text), ("t2i", image))
        for k in (1, 5, 10)
    }
    return {
        **result,
        "rsum": sum(result.values()),
        "i2t_meanr": float(text.mean() + 1),
        "t2i_meanr": float(image.mean() + 1),
    }


def mean_distance(scores: np.ndarray) -> object:
    """Of scores within [-1, 1], which the models compute in float32; five captions an image."""
    own = np.arange(scores.shape[1]) // 5 == np.arange(len(scores))[:, None]
    return pytest.approx(scores[own].mean() - scores[~own].mean(), rel=0, abs=1e-6)


def result_of(tmp_path: Path, data: Path, checkpoints: list[Path], *more: str) -> dict:
    arguments = [text for checkpoint in checkpoints for text in ("--checkpoint", str(checkpoint))]
    file = tmp_path / "result.json"
    assert cli.run(["evaluate", *arguments, "--data", str(data), "--json", str(file), *more]) == 0
    return json.loads(file.read_text())


def test_the_ensemble_ranks_by_the_mean_score(
    data: Path, runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    result = result_of(tmp_path, data, runs)
    alone = [scores64(checkpoint, data) for checkpoint in runs]
    expected = recalls(np.mean(alone, axis=0))
    assert {key: result[key] for key in expected} == pytest.approx(expected)
    assert result["mean_distance"] == mean_distance(np.mean(alone, axis=0))
    assert [member["checkpoint"] for member in result["members"]] == [str(checkpoint) for checkpoint in runs]
    for member, scores in zip(result["members"], alone, strict=True):
        of_member = recalls(scores)
        assert {key: member[key] for key in of_member} == pytest.approx(of_member)
        assert member["mean_distance"] == mean_distance(scores)
        assert member["rsum"] != pytest.approx(expected["rsum"], abs=0.5), "or the ensemble could be any one of them"
    assert [Path(member["vocabulary"]).parent.name for member in result["members"]] == ["scan", "vsepp", "scan2"]
    assert "checkpoint" not in result

    table, intervals = capsys.readouterr().out.split("measure ")
    *vocabularies, protocol, header, columns, first, second, third, last = table.splitlines()
    assert vocabularies == [f"vocabulary: {checkpoint / 'vocab.json'}" for checkpoint in runs]
    assert protocol == "test, 30 images"
    for line, name, summary in zip(
        (first, second, third, last), [*map(str, runs), "mean score of 3"], [*result["members"], result], strict=True
    ):
        assert line.startswith(f"{name} ")
        shown = f"{summary['mean_distance']:8.2f}".replace("-0.00", " 0.00")
        assert line.endswith(f"{summary['rsum']:8.1f}{shown}")
    assert len({len(line) for line in (header, columns, first, last)}) == 1
    low, high = result["intervals"]["rsum"]
    assert low < result["rsum"] < high
    assert " ".join(intervals.split()).endswith(f"rsum {result['rsum']:.2f} {low:.2f} to {high:.2f}")


def test_folds_and_first_images(data: Path, runs: list[Path], tmp_path: Path) -> None:
    pair = runs[:2]
    mean = np.mean([scores64(checkpoint, data) for checkpoint in pair], axis=0)
    parts = [recalls(mean[10 * fold : 10 * fold + 10, 50 * fold : 50 * fold + 50]) for fold in range(3)]
    folds = result_of(tmp_path, data, pair, "--folds", "3")
    assert folds["rsum"] == pytest.approx(np.mean([part["rsum"] for part in parts]))
    assert folds["folds"] == 3
    few = result_of(tmp_path, data, pair, "--first-images", "12")
    assert few["rsum"] == pytest.approx(recalls(mean[:12, :60])["rsum"])
    assert few["images"] == 12


def test_one_checkpoint_is_written_as_before(data: Path, runs: list[Path], tmp_path: Path) -> None:
    result = result_of(tmp_path, data, runs[:1])
    expected = recalls(scores64(runs[0], data))
    assert {key: result[key] for key in expected} == pytest.approx(expected)
    assert result["checkpoint"] == str(runs[0])
    assert result["vocabulary"] == str(runs[0] / "vocab.json")
    assert "members" not in result


def test_a_vocabulary_is_read_where_the_model_has_none(data: Path, runs: list[Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    models.load(runs[0]).save(bare)
    expected = result_of(tmp_path, data, [runs[0], runs[2]])
    got = result_of(tmp_path, data, [bare, runs[2]], "--vocab", str(runs[0] / "vocab.json"))
    assert got["rsum"] == expected["rsum"]


def test_errors_are_one_line(data: Path, runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = tmp_path / "narrow"
    sizes = {"vocab_size": len(OTHER_ORDER), "feature_dim": 5, "embed_dim": 4, "word_dim": 3}
    models.create("vsepp", **sizes).save(narrow)
    OTHER_ORDER.save(narrow / "vocab.json")
    twice = runs[0].parent / "." / "scan"
    for second, more, message in (
        (twice, [], f"--checkpoint: {twice} was given twice; an ensemble needs different models"),
        (runs[1], ["--vocab", runs[0] / "vocab.json"],
         f"{runs[0] / 'vocab.json'}: not the vocabulary that the model was trained with, {runs[1] / 'vocab.json'}"),
        (narrow, [], f"{data / 'test_ims.npy'}: regions have 8 channels, but the model in {narrow} needs 5"),
        (tmp_path, [], f"{tmp_path / 'config.json'}: no such file; {tmp_path} is not a saved model"),
    ):  # fmt: skip
        capsys.readouterr()
        arguments = ["--checkpoint", runs[0], "--checkpoint", second, "--data", data, *more]
        assert cli.run(["evaluate", *map(str, arguments)]) == 1
        assert capsys.readouterr().err == f"itm-fast: error: {message}\n"


# The function


class Table(nn.Module):
    """Take scores from a table; images and captions are numbers."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def encode_images(self, features: Tensor) -> Tensor:
        return features[:, 0, 0].long()

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        return token_ids[:, 0]

    def score(self, images: Tensor, captions: Tensor) -> Tensor:
        return self.table[images][:, captions]


class Numbers:
    """A gallery whose images and captions are their numbers."""

    def __init__(self, caption_image: list[int], n_images: int) -> None:
        self.caption_image, self.n_images = torch.tensor(caption_image), n_images

    def __len__(self) -> int:
        return len(self.caption_image)

    def image_batch(self, image_indices: Tensor) -> Tensor:
        return image_indices.float().reshape(-1, 1, 1)

    def caption_batch(self, caption_indices: Tensor) -> tuple[Tensor, Tensor]:
        return caption_indices[:, None], torch.ones(len(caption_indices), dtype=torch.int64)


@pytest.mark.parametrize("dtypes", [("32", "32"), ("64", "32"), ("32", "64")])
def test_members_keep_their_own_scores(dtypes: tuple[str, str]) -> None:
    """The sum is computed in the memory of a score matrix, which must not be a member's own."""
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(4, 6, generator=generator).to(getattr(torch, f"float{bits}")) for bits in dtypes]
    before = [table.clone() for table in tables]
    gallery = Numbers([3, 0, 0, 1, 2, 3], 4)
    alone, ensemble = evaluate_ensemble([(Table(table), gallery) for table in tables], tile_images=3, tile_captions=4)
    mean = (tables[0].double() + tables[1].double()) / 2
    # Sums in another order: the mean distance may differ in its last digits.
    assert ensemble == pytest.approx(evaluate_scores(mean, gallery.caption_image), rel=1e-12)
    for summary, table in zip(alone, tables, strict=True):
        assert summary == pytest.approx(evaluate_scores(table, gallery.caption_image), rel=1e-12)
    assert alone[0] == pytest.approx(evaluate(Table(tables[0]), gallery), rel=1e-12)
    assert all(torch.equal(table, kept) for table, kept in zip(tables, before, strict=True))
    only, same = evaluate_ensemble([(Table(tables[0]), gallery)])
    assert only == [same] == alone[:1]


def test_members_must_see_the_same_pairs() -> None:
    table = Table(torch.zeros(2, 2))
    for other in (Numbers([0, 0], 2), Numbers([0, 1, 1], 2), Numbers([0, 1], 3)):
        with pytest.raises(ValueError, match="members: expected the same images and captions in all data sets"):
            evaluate_ensemble([(table, Numbers([0, 1], 2)), (table, other)])
    with pytest.raises(ValueError, match="members: expected at least one model with its data set"):
        evaluate_ensemble([])
