"""`itm-fast curves`: several runs in one figure."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from itm_fast import cli
from itm_fast.report import comparison
from itm_fast.report.comparison import write_comparison
from python_tests.helpers.commands import error


def log(*steps: int, rsum: float = 100.0, **numbers: float) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "epoch": 1, "mining": "selective", "loss": 1.0, "seconds": 1.0,
         **{name: value * step for name, value in numbers.items()}}
        for step in steps
    ]  # fmt: skip
    return [*lines, {"kind": "validation", "split": "dev", "step": steps[-1], "epoch": 1, "rsum": rsum, "seconds": 1.0}]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: (figures.append(self), save(self, *args, **more))
    )
    return figures


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


GRADIENT, GAP = "Gradient of first image layer", "Gap to the hardest negative"
COSINE = "Cosine within images and captions"


def test_each_panel_has_a_line_of_each_run_that_has_its_numbers(tmp_path: Path, drawn: list[Figure]) -> None:
    shares = {"i2t_hardest_share": 0.01, "t2i_hardest_share": 0.02}
    runs = {
        "SelHN": log(*range(10, 51, 10), hardest_gap=0.001, image_grad_norm=0.5, lr=1e-4, **shares),
        "older": log(25, 50, rsum=200.0, image_grad_norm=0.25),
    }
    write_comparison(tmp_path / "figure.png", runs)
    assert Image.open(tmp_path / "figure.png").size == (1800, 840)
    (figure,) = drawn
    found = {title: [line.get_xydata().tolist() for line in axes.lines] for title, axes in panels(figure).items()}
    assert found == {
        "Loss": [[[s, 1] for s in (10, 20, 30, 40, 50)], [[25, 1], [50, 1]]],
        "Validation": [[[50, 100]], [[50, 200]]],
        "Learning rate": [[[s, pytest.approx(1e-4 * s)] for s in (10, 20, 30, 40, 50)]],
        GRADIENT: [[[s, 0.5 * s] for s in (10, 20, 30, 40, 50)], [[25, 6.25], [50, 12.5]]],
        GAP: [[[s, pytest.approx(0.001 * s)] for s in (10, 20, 30, 40, 50)]],
        # The mean of both directions in percent.
        "Anchors with hardest negative": [[[s, pytest.approx(1.5 * s)] for s in (10, 20, 30, 40, 50)]],
    }
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["SelHN", "older"]
    # The second run keeps its colour in every panel, even if the first run has no curve there.
    colours = {panels(figure)[title].lines[1].get_color() for title in ("Loss", "Validation", GRADIENT)}
    assert len(colours) == 1


def test_panels_without_numbers_are_left_out(tmp_path: Path, drawn: list[Figure]) -> None:
    """Also the shares of a loss over all negatives, which are 0."""
    shares = {"i2t_hardest_share": 0.0, "t2i_hardest_share": 0.0}
    write_comparison(tmp_path / "figure.svg", {"a": log(10, 20, hardest_gap=1.0, **shares), "b": log(10, 20)})
    assert list(panels(drawn[0])) == ["Loss", "Validation", GAP]


def test_cosines_are_the_mean_of_both_modalities_and_may_be_negative(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = {"a": log(10, 20, hardest_distance=0.01, image_cosine=0.04, caption_cosine=-0.06)}
    write_comparison(tmp_path / "figure.svg", runs)
    found = panels(drawn[0])
    assert list(found) == ["Loss", "Validation", "Distance to the hardest negative", COSINE]
    assert found["Distance to the hardest negative"].lines[0].get_ydata().tolist() == pytest.approx([0.1, 0.2])
    assert found[COSINE].lines[0].get_ydata().tolist() == pytest.approx([-0.1, -0.2])
    assert found[COSINE].get_ylim()[0] == pytest.approx(-0.2)
    assert found["Loss"].get_ylim()[0] == 0


def test_the_risk_of_discriminators_is_shown_in_both_phases(tmp_path: Path, drawn: list[Figure]) -> None:
    """Steps of the discriminators have no loss of the model."""
    of_discriminators = {"kind": "train", "step": 10, "epoch": 1, "mining": "all", "domain_risk": 0.7}
    write_comparison(tmp_path / "figure.svg", {"a": [of_discriminators, *log(20, 30, domain_risk=0.03)]})
    found = panels(drawn[0])["Risk of the discriminators"].lines[0].get_xydata().tolist()
    assert found == [[10, 0.7], [20, pytest.approx(0.6)], [30, pytest.approx(0.9)]]


def test_the_loss_is_that_of_the_last_negatives(tmp_path: Path, drawn: list[Figure]) -> None:
    warm_up = [{**line, "mining": "all", "loss": 900.0} for line in log(10, 20)[:2]]
    write_comparison(tmp_path / "figure.svg", {"a": [*warm_up, *log(30, 40)]})
    assert panels(drawn[0])["Loss"].lines[0].get_xydata().tolist() == [[30, 1], [40, 1]]


@pytest.mark.parametrize(("norms", "scale"), [((0.5, 50.0), "log"), ((0.5, 1.0), "linear"), ((0.0, 50.0), "linear")])
def test_gradients_far_apart_are_drawn_in_powers_of_ten(
    tmp_path: Path, drawn: list[Figure], norms: tuple[float, float], scale: str
) -> None:
    runs = {str(norm): log(10, 20, image_grad_norm=norm, hardest_gap=1.0) for norm in norms}
    write_comparison(tmp_path / "figure.svg", runs)
    scales = {title: axes.get_yscale() for title, axes in panels(drawn[0]).items()}
    assert scales == {"Loss": "linear", "Validation": "linear", GRADIENT: scale, GAP: "linear"}


def test_the_last_step_between_two_log_lines_is_left_out(tmp_path: Path, drawn: list[Figure]) -> None:
    write_comparison(tmp_path / "figure.svg", {"a": log(10, 20, 30, 33, hardest_gap=1.0)})
    assert panels(drawn[0])[GAP].lines[0].get_xdata().tolist() == [10, 20, 30]


def test_many_points_become_means_of_neighbours(tmp_path: Path, drawn: list[Figure]) -> None:
    write_comparison(tmp_path / "figure.svg", {"a": log(*range(1, 121), hardest_gap=1.0)})
    points = panels(drawn[0])[GAP].lines[0].get_xydata().tolist()
    assert points == [[step + 0.5, step + 0.5] for step in range(1, 121, 2)]
    # Every point is the mean of equally many batches, up to the end: means of fewer batches would scatter more.
    write_comparison(tmp_path / "figure.svg", {"a": log(*range(1, 105), hardest_gap=1.0)})
    assert panels(drawn[1])[GAP].lines[0].get_xdata().tolist() == [step + 0.5 for step in range(1, 105, 2)]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("_private", "_private"), ("$\\bad$", "$\\bad$"), ("nul\0bell\a", "nul\\x00bell\\x07"), ("x" * 121, None)],
)
def test_any_name_gives_a_clean_legend(tmp_path: Path, drawn: list[Figure], name: str, shown: str | None) -> None:
    write_comparison(tmp_path / "figure.svg", {name: log(10, 20)})
    (text,) = drawn[0].legends[0].get_texts()
    assert text.get_text() == (shown or f"{'x' * 72}... (121 characters)")
    ElementTree.parse(tmp_path / "figure.svg")


@pytest.mark.parametrize(("length", "columns"), [(5, 4), (37, 3), (100, 1)])
def test_the_legend_has_as_many_columns_as_fit(tmp_path: Path, drawn: list[Figure], length: int, columns: int) -> None:
    runs = {letter * length: log(10, 20, hardest_gap=1.0) for letter in "abcde"}
    write_comparison(tmp_path / "figure.svg", runs)
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == list(runs)
    box = legend.get_window_extent()
    assert 0 <= box.x0 <= box.x1 <= drawn[0].bbox.width
    assert len({round(text.get_window_extent().x0) for text in legend.get_texts()}) == columns


def test_a_figure_repeats_byte_for_byte_and_leaves_the_settings_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    for name in ("a.svg", "b.svg"):
        write_comparison(tmp_path / name, {"run": log(10, 20, hardest_gap=1.0)})
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert dict(mpl.rcParams) == before


def test_the_command_draws_runs(
    trained: Path, tmp_path: Path, drawn: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(trained, tmp_path / "other")
    out = tmp_path / "figures" / "both.pdf"
    assert cli.run(["curves", str(trained), str(other), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"figure: {out}\n"
    assert out.read_bytes().startswith(b"%PDF")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["run", "other"]
    assert [len(axes.lines) for axes in drawn[0].axes] == [2] * 8
    labels = ["--label", "hardest", "--label", "SelHN"]
    assert cli.run(["curves", str(trained), str(trained), *labels, "--out", str(out)]) == 0
    assert [text.get_text() for text in drawn[1].legends[0].get_texts()] == ["hardest", "SelHN"]


def test_what_cannot_be_drawn_is_one_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curves.svg"
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(trained, tmp_path / "run")
    for arguments, message in (
        ([empty], f"{empty}: contains no metrics.jsonl, so it is not a training run"),
        ([trained, tmp_path / "run"], "--label: expected a different name for each run, got 'run' twice"),
        ([trained, "--label", "a", "--label", "b"], "--label: expected one for each of the 1 runs, got 2"),
        ([trained, "--out", tmp_path / "curves.gif"],
         f"{tmp_path / 'curves.gif'}: expected a name that ends in .svg, .png or .pdf"),
    ):  # fmt: skip
        more = [] if "--out" in arguments else ["--out", out]
        assert error(capsys, "curves", *arguments, *more) == (1, message)
    for line, message in (
        ('{"kind": "train", "step": 1}', "empty: the log has none of the numbers that the figure shows"),
        ('{"kind": "train", "step": 1, "loss": "x"}',
         f"{empty / 'metrics.jsonl'}: line 1: loss: expected a number below 1e+100 in size, got 'x'"),
    ):  # fmt: skip
        (empty / "metrics.jsonl").write_text(line + "\n")
        assert error(capsys, "curves", empty, "--out", out) == (1, message)
    assert not out.exists()
    assert comparison.SUFFIXES == (".svg", ".png", ".pdf")
