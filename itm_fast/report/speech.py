"""Figures of attention by part of speech, as Figures 6 and 7 of RCAR.

Inside: `write_speech`.
"""

from __future__ import annotations

import os

from matplotlib.axes import Axes
from torch import Tensor

from itm_fast.evaluation import SpeechStatistics
from itm_fast.files.messages import printable, shortened
from itm_fast.report.comparison import line_style, write_figure

__all__ = ["write_speech"]

_MAX_NAME = 20


def write_speech(path: str | os.PathLike[str], statistics: SpeechStatistics) -> None:
    """Draw bars for each part of speech: weights in positive and in negative pairs, and distances of the two.

    Panels without numbers are left out. The bars of a part belong to the steps of the model.

    Args:
        path: figure to write, atomically; the suffix selects the format.
        statistics: what to draw.

    Raises:
        ValueError: the suffix is unknown.
    """
    panels = [
        ("Aggregation, positive pairs", "mean weight", statistics.positive_weights),
        ("Aggregation, negative pairs", "mean weight", statistics.negative_weights),
        ("Positive against negative pairs", "Wasserstein distance of cosines", statistics.distances),
    ]
    panels = [panel for panel in panels if len(panel[2])]
    steps = max(len(values) for _, _, values in panels)
    size = max(4.0, 0.6 * len(statistics.parts)), 2.8 * len(panels)
    with write_figure(path, [f"step {step + 1}" for step in range(steps)], size=size) as figure:
        for place, (title, label, values) in enumerate(panels, start=1):
            axes = figure.add_subplot(len(panels), 1, place)
            _draw(axes, values, statistics.parts)
            axes.set_title(title, loc="left")
            axes.set_ylabel(label)


def _draw(axes: Axes, values: Tensor, parts: list[str]) -> None:
    width = 0.8 / len(values)
    for step, of_step in enumerate(values.tolist()):
        middle = [number + width * (step - (len(values) - 1) / 2) for number in range(len(parts))]
        axes.bar(middle, of_step, width, color=line_style(step)["color"])
    axes.set_xticks(range(len(parts)), [shortened(printable(part), _MAX_NAME) for part in parts], rotation=30)
    for tick in axes.get_xticklabels():
        tick.set_parse_math(False)
    axes.tick_params(length=0)
