"""One look for all pictures: few colours that stay apart for colour-blind readers and in grey, titles that say the finding.

Formats differ by colour, marker and dash at once, so any one of the three is enough. Others' paths are grey and hollow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .files import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CEILING", "INK", "MUTED", "Look", "draw", "figure_title", "look_of_format", "look_of_peer", "plain_ticks"]

INK, MUTED, GRID, CEILING = "#1b2333", "#5b6577", "#dfe3ea", "#a3243b"


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    colour: str
    marker: str
    dash: Any
    hollow: bool = False
    half: bool = False  #: the marker's left half is filled

    @property
    def line(self) -> dict:
        """Keyword arguments of ``Axes.plot``."""
        face = "white" if self.hollow else self.colour
        style = {"color": self.colour, "marker": self.marker, "linestyle": self.dash, "markerfacecolor": face,
                 "markeredgecolor": self.colour}  # fmt: skip
        return {**style, "fillstyle": "left", "markerfacecoloralt": "white"} if self.half else style


#: Lightness (CIE L*) 22, 35, 48, 58, 75: still an order in grey, and none too pale for white paper.
_FORMATS: dict[str, Look] = {
    "bf16": Look("#1d2f6f", "o", "-"),
    "fp8": Look("#c8501e", "s", (0, (6, 1.5))),
    "mxfp4": Look("#1e9e82", "D", (0, (3, 1.2))),
    "fp8_tile128": Look("#e5b13a", "^", (0, (5, 1.2, 1, 1.2))),
    "mxfp4_row320": Look("#7d2f86", "X", (0, (8, 1.5, 2, 1.5))),
}
_PEERS = [
    Look("#3f4654", "v", (0, (1, 1)), True), Look("#7d8594", "P", (0, (2, 1)), True), Look("#5a6170", "X", (0, (4, 1, 1, 1)), True),
    Look("#a3a9b5", "<", (0, (1, 2)), True), Look("#6b7280", ">", (0, (6, 2)), True), Look("#8f96a3", "h", (0, (3, 2)), True),
    Look("#4b5260", "p", (0, (2, 2)), True),
]  # fmt: skip


def look_of_format(name: str) -> Look:
    """Look of a cache format of ours."""
    return _FORMATS.get(name, Look("#555555", "*", "-"))


def look_of_peer(index: int) -> Look:
    """Look of the n-th path of others."""
    return _PEERS[index % len(_PEERS)]


_RC: Any = {
    "font.family": "DejaVu Sans", "font.size": 9.0, "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 9.0, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "axes.linewidth": 0.8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.7,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "text.color": INK,
    "lines.linewidth": 1.7, "lines.markersize": 5.0, "lines.markeredgewidth": 1.2, "legend.frameon": False, "legend.fontsize": 8.5,
    "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip


@contextmanager
def draw(width: float, height: float, label: str) -> Iterator[Figure]:
    """A figure of this size in inches in our style, without touching any global state of matplotlib.

    Raises:
        PlottingUnavailable: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        yield Figure(figsize=(width, height), layout="constrained", label=label)


def figure_title(figure: Figure, finding: str, subject: str) -> None:
    """The finding in bold, and under it what is shown; a long finding is set smaller so that it fits the width."""
    points = 72 * figure.get_figwidth() - 12
    size = max(7.5, min(11.5, points / (0.66 * len(finding))))  # a bold letter is about 0.66 of its size wide
    # constrained layout keeps room for the title's lines; the second is drawn apart, lighter.
    figure.suptitle(f"{finding}\n ", x=0.01, ha="left", fontsize=size, fontweight="bold", linespacing=1.75 * 11.5 / size)
    figure.text(0.01, 1 - 0.33 / figure.get_figheight(), subject, ha="left", va="top", fontsize=8.8, color=MUTED)


def plain_ticks(axis: Any, values: Sequence[float], words: Sequence[str] | None = None) -> None:
    """Ticks at these values only."""
    from matplotlib.ticker import NullFormatter, NullLocator

    axis.set_ticks(list(values), labels=list(words) if words else [f"{v:g}" for v in values])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def log_ticks(axis: Any) -> None:
    """Ticks 1, 2, 5, 10, ... in plain numbers on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.4g}".replace(",", " ")))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def ceiling_line(axes: Axes, y: float, words: str) -> None:
    """A measured bound, named on the line."""
    axes.axhline(y, color=CEILING, linewidth=1.3)
    axes.annotate(words, (1, y), xycoords=("axes fraction", "data"), xytext=(-2, 3), textcoords="offset points", ha="right",
                  va="bottom", color=CEILING, fontsize=8)  # fmt: skip
