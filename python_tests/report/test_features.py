"""t-SNE against loops and automatic derivatives, and the figures of embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from itm_fast import cli
from itm_fast.report.features import write_features
from itm_fast.report.neighbour_embedding import gradient, joint_shares, neighbour_embedding, principal_components
from python_tests.helpers.commands import error


def rows_of(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_components_are_those_of_the_covariance() -> None:
    rows = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([5.0, 3.0, 1, 1, 1, 1])
    found = principal_components(rows)
    centred = rows.double().numpy() - rows.double().numpy().mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    expected = centred @ vectors[:, [-1, -2]]
    np.testing.assert_allclose(np.abs(found.numpy()), np.abs(expected), rtol=1e-9, atol=1e-9)
    assert torch.equal(principal_components(rows.clone()), found)


def test_shares_have_the_perplexity_in_each_row() -> None:
    """From the joint shares p_ij of Gaussians whose widths are found by another method, row by row."""
    rows, perplexity = rows_of(12, 3), 4.0
    n = len(rows)
    conditional = np.zeros((n, n))
    for i in range(n):
        squares = [float((rows[i] - rows[j]).square().sum()) for j in range(n)]

        def shares(precision: float, i: int = i, squares: list[float] = squares) -> list[float]:
            powers = [0.0 if j == i else math.exp(-precision * squares[j]) for j in range(n)]
            return [power / sum(powers) for power in powers]

        def surplus(precision: float, shares=shares) -> float:
            return math.prod(p**-p for p in shares(precision) if p) - perplexity

        low, high = 1e-3, 1e3
        while high / low > 1 + 1e-13:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if surplus(middle) > 0 else (low, middle)
        assert surplus(low) == pytest.approx(0, abs=1e-9)
        conditional[i] = shares(low)
    found = joint_shares(rows, perplexity)
    np.testing.assert_allclose(found.numpy(), (conditional + conditional.T) / (2 * n), rtol=1e-8, atol=1e-15)
    assert float(found.sum()) == pytest.approx(1)


def divergence(shares: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return KL(P || Q) pair by pair."""
    n = len(points)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    closeness = {pair: 1 / (1 + (points[pair[0]] - points[pair[1]]).square().sum()) for pair in pairs}
    total = sum(closeness.values())
    return sum(shares[pair] * (shares[pair] * total / closeness[pair]).log() for pair in pairs)


def test_the_gradient_is_that_of_the_divergence() -> None:
    shares = joint_shares(rows_of(8, 4), 3.0)
    points = rows_of(8, 2, seed=1).requires_grad_()
    (expected,) = torch.autograd.grad(divergence(shares, points), points)
    torch.testing.assert_close(gradient(shares, points.detach()), expected, rtol=1e-10, atol=1e-12)


def test_the_descent_ends_in_a_minimum_and_keeps_groups_apart() -> None:
    """Three groups in ten dimensions: points nearly rest, their divergence is low, and no groups mix."""
    rows = rows_of(60, 10)
    group = torch.arange(60) % 3
    rows[torch.arange(60), 7 + group] += 6
    points = neighbour_embedding(rows, 10.0)
    assert torch.equal(points, neighbour_embedding(rows.clone(), 10.0))
    shares, start = joint_shares(rows, 10.0), principal_components(rows)
    assert float(gradient(shares, points).abs().max()) < 0.01 * float(gradient(shares, start).abs().max())
    assert float(divergence(shares, points)) < 0.7 * float(divergence(shares, start))
    distances = torch.cdist(points, points)
    own = group[:, None] == group
    assert float(distances[own].max()) < float(distances[~own].min())


@pytest.mark.parametrize("rows", [torch.zeros(7, 3), torch.eye(2), torch.eye(3)])
def test_few_and_equal_rows_have_finite_points(rows: torch.Tensor) -> None:
    points = neighbour_embedding(rows)
    assert points.shape == (len(rows), 2)
    assert bool(points.isfinite().all())


@pytest.mark.parametrize("by_model", [False, True])
def test_points_look_as_in_the_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_model: bool) -> None:
    """Each model, or each side, has one colour and one shape in all panels and the legend; there are no lines."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: (figures.append(self), save(self, *args, **more))
    )
    features = {name: (rows_of(7, 5, seed), rows_of(4, 5, 9 + seed)) for seed, name in enumerate(("a", "b$", "c"))}
    write_features(tmp_path / "features.png", features, by_model=by_model)
    (figure,) = figures
    (legend,) = figure.legends
    names, titles = list(features), ["Images", "Captions"]
    panels = [[both[side] for both in features.values()] for side in (0, 1)]
    if by_model:
        names, titles, panels = titles, names, [list(both) for both in features.values()]
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
        np.testing.assert_allclose(drawn, neighbour_embedding(torch.cat(parts)).numpy(), rtol=1e-12)


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
