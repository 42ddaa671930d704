"""The picture of a comparison: time ratios with the runs' own spread around 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plots.style import INK, MUTED, draw, figure_title
from .compare import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ratio_figure"]

_COLOURS = {"faster": "#1e9e82", "slower": "#a3243b", "same": "#9aa1ae"}
_MARKERS = {"faster": "v", "slower": "^", "same": "o"}
#: More rows than this and only the largest changes are shown.
MOST_ROWS = 48


def ratio_figure(comparison: Comparison) -> Figure:
    """A dot a case and contender; the bar is both runs' spread, so a dot outside it is a difference."""
    shown = list(comparison.differences)
    if len(shown) > MOST_ROWS:
        largest = set(sorted(range(len(shown)), key=lambda i: -abs(shown[i].ratio - 1))[:MOST_ROWS])
        shown = [d for i, d in enumerate(shown) if i in largest]
    with draw(8.8, 1.7 + 0.2 * len(shown), "ratios") as figure:
        axes = figure.subplots()
        axes.axvline(1, color=INK, linewidth=1.0)
        for y, d in enumerate(shown):
            axes.plot([1 - d.noise, 1 + d.noise], [y, y], color="#d9dde5", linewidth=7, solid_capstyle="butt", zorder=2)
            axes.plot([d.ratio], [y], _MARKERS[d.verdict], color=_COLOURS[d.verdict], zorder=3)
        axes.set_yticks(range(len(shown)), labels=[f"{d.case}, {d.by}" for d in shown], fontsize=8)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel("time / earlier time (left of 1 is faster; grey bar: both runs' spread)")
        axes.tick_params(axis="y", labelcolor=MUTED)
        finding = f"{comparison.count('faster')} faster, {comparison.count('slower')} slower, {comparison.count('same')} within the spread"
        less = (
            "" if len(shown) == len(comparison.differences) else f"; the {len(shown)} largest of {len(comparison.differences)}"
        )
        figure_title(figure, finding, f"{comparison.after} against {comparison.before}{less}")
    return figure
