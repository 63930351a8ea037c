"""Figures of embeddings, placed in a plane by t-SNE."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from itm_fast import cli
from itm_fast.data import CaptionDataset
from itm_fast.report import features
from python_tests.helpers.commands import error
from python_tests.helpers.search import concepts, scan


def rows_of(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_groups_stay_apart_and_the_same_rows_give_the_same_points() -> None:
    """Three groups in ten dimensions."""
    rows = rows_of(60, 10)
    group = torch.arange(60) % 3
    rows[torch.arange(60), 7 + group] += 6
    points = features._in_plane(rows)
    assert torch.equal(points, features._in_plane(rows.clone()))
    distances = torch.cdist(points, points)
    own = group[:, None] == group
    assert float(distances[own].max()) < float(distances[~own].min())


@pytest.mark.parametrize("rows", [torch.zeros(7, 3), torch.eye(2), torch.eye(3)])
def test_few_and_equal_rows_have_finite_points(rows: torch.Tensor) -> None:
    points = features._in_plane(rows)
    assert points.shape == (len(rows), 2)
    assert bool(points.isfinite().all())


def test_without_scikit_learn_the_command_says_what_to_install(
    data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    message = "figure: the package scikit-learn is not installed; install it with pip install 'itm_fast[tsne]'"
    out = tmp_path / "features.svg"
    assert error(capsys, "features", "--checkpoint", trained, "--data", data, "--out", out) == (1, message)
    realign = ["realign", "--extractor", trained, "--heads", trained, "--data", data, "--out", tmp_path / "run"]
    assert error(capsys, *realign, "--figure", out) == (1, message)


def test_pooled_features_are_means_of_the_first_images_with_captions(data: Path) -> None:
    whole, model = concepts(data), scan()
    owners = 3 + torch.arange(60) % 5
    dataset = CaptionDataset(np.asarray(whole.features), whole.captions[:60], owners, whole.vocabulary)
    images, captions = features.pooled_features(model, dataset, 2)
    assert len(images) == len(captions) == 2
    with torch.no_grad():
        for number, image in enumerate((3, 4)):
            regions = model.encode_images(dataset.image_batch([image])).values
            words = model.encode_captions(*dataset.caption_batch([number])).values
            torch.testing.assert_close(images[number], regions.mean(0))
            torch.testing.assert_close(captions[number], words.mean(0))


def test_features_are_pooled_on_the_device_of_the_model(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, devices = scan().to("meta"), []

    def encoded(*inputs: torch.Tensor) -> torch.Tensor:
        devices.extend(one.device.type for one in inputs)
        return torch.zeros(4, 3)

    for name in ("encode_images", "encode_captions"):
        monkeypatch.setattr(model, name, encoded)
    features.pooled_features(model, concepts(data), 4)
    assert devices == ["meta"] * 3


def test_embeddings_of_two_parts_are_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = scan()
    monkeypatch.setattr(model, "encode_images", lambda regions: (regions, regions))
    message = "model: expected one tensor or Fragments per side, but scan encodes as tuple"
    with pytest.raises(ValueError, match=f"^{message}$"):
        features.pooled_features(model, concepts(data), 4)


@pytest.mark.parametrize("by_model", [False, True])
def test_points_look_as_in_the_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_model: bool) -> None:
    """Each model, or each side, has one colour and one shape in all panels and the legend; there are no lines."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: (figures.append(self), save(self, *args, **more))
    )
    embeddings = {name: (rows_of(7, 5, seed), rows_of(4, 5, 9 + seed)) for seed, name in enumerate(("a", "b$", "c"))}
    features.write_features(tmp_path / "features.png", embeddings, by_model=by_model)
    (figure,) = figures
    (legend,) = figure.legends
    names, titles = list(embeddings), ["Images", "Captions"]
    panels = [[both[side] for both in embeddings.values()] for side in (0, 1)]
    if by_model:
        names, titles, panels = titles, names, [list(both) for both in embeddings.values()]
    assert [text.get_text() for text in legend.get_texts()] == names
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles

    def looks(lines: Iterable[Line2D]) -> list[tuple]:
        assert {line.get_linestyle() for line in lines} == {"None"}
        return [(line.get_color(), line.get_marker()) for line in lines]

    shown = looks(legend.legend_handles)
    assert len(set(shown)) == len({marker for _, marker in shown}) == len(names)
    for parts, axes in zip(panels, figure.axes, strict=True):
        assert looks(axes.lines) == shown
        drawn = np.concatenate([line.get_xydata() for line in axes.lines])
        np.testing.assert_allclose(drawn, features._in_plane(torch.cat(parts)).numpy())


def test_the_command_draws_a_panel_for_each_run(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "features.svg"
    command = ["features", "--checkpoint", trained, "--data", data, "--first-images", "6", "--out", out]
    assert cli.run([*map(str, command), "--checkpoint", str(trained)]) == 0
    assert capsys.readouterr().out == f"figure: {out}\n"
    text = out.read_text()
    assert ("<!-- Images -->" in text, "<!-- Captions -->" in text) == (True, True)
    assert error(capsys, *command[:-1], tmp_path / "features.gif") == (
        1, f"{tmp_path}/features.gif: expected a name that ends in .svg, .png or .pdf"
    )  # fmt: skip
    assert error(capsys, "features", "--checkpoint", tmp_path, "--data", data, "--out", out)[0] == 1
