"""The figures of a paper's claims."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import render
from benchmarks.experiments import forest
from benchmarks.experiments.files import Claim
from benchmarks.experiments.forest import draw_claims, source
from benchmarks.experiments.verdicts import Verdict
from itm_fast.report.comparison import point_style


def verdict(text: str, *differences: float, of: str = "rsum") -> Verdict:
    return Verdict(Claim(text, "new", "old", of), differences)


FOUND = [
    verdict("it helps", 9.9, 10.1),
    verdict("it harms", -200.5, -201.5),
    verdict("who knows", -80.0, 300.0),
    verdict("one seed only", 5.0),
    verdict("it sets scores apart", 0.1, 0.11, of="mean_distance"),
]


def test_claims_with_an_interval_of_recalls_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "claims.svg"
    draw_claims(path, FOUND)
    text = path.read_text()
    drawn = [one.claim.text for one in FOUND if f"<!-- {one.claim.text} -->" in text]
    assert drawn == ["it helps", "it harms", "who knows"]
    # Means beyond the edges have their numbers.
    numbers = [mean for mean in ("+10", "-201", "+110") if f"<!-- {mean} -->" in text]
    assert numbers == ["-201", "+110"]
    assert text.splitlines()[-1] == source(FOUND) == source(FOUND[:3])
    assert source(FOUND) != source([verdict("it helps", 9.9, 10.2), *FOUND[1:]])


@pytest.mark.parametrize(("one", "word"), [(FOUND[0], "holds"), (FOUND[1], "fails"), (FOUND[2], "open")])
def test_a_claim_is_drawn_as_its_interval_and_its_mean(one: Verdict, word: str) -> None:
    axes = Figure().subplots()
    forest._draw(axes, 3, one)
    line, *means = axes.lines
    assert (tuple(line.get_xdata()), list(line.get_ydata())) == (one.interval, [3, 3])
    assert line.get_color() == point_style(("open", "fails", "holds").index(word))["color"]
    # The marker of a mean beyond the edges is inside of them.
    assert [list(mean.get_xdata()) for mean in means] == [[min(max(one.mean, -58.8), 58.8)]]
    assert means[0].get_marker() == point_style(("open", "fails", "holds").index(word))["marker"]


def test_a_figure_of_other_results_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = render.PERFORMANCE / "results" / "rcar.md"
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "IMAGES", tmp_path)
    monkeypatch.setattr(render, "claimed", lambda name: [])
    monkeypatch.setattr(render, "judged", lambda experiments: found)
    found = FOUND
    with pytest.raises(SystemExit, match=r"^claims-rcar\.svg is out of date: run python -m benchmarks\.render$"):
        render.draw_figures(page, check=True)
    render.draw_figures(page, check=False)
    render.draw_figures(page, check=True)
    found = FOUND[1:]
    with pytest.raises(SystemExit, match="out of date"):
        render.draw_figures(page, check=True)
    # The methods' pages have no figure of claims.
    render.draw_figures(render.ROOT / "docs" / "methods" / "dbl.md", check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["claims-rcar.svg"]
