"""The schedule as a picture: workers down, time in key blocks to the right, one colour a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..split_plan import SplitPlan
from .files import save
from .schedule import ScheduleFigures, Timetable, timetable
from .style import CEILING, GRID, INK, MUTED, draw, figure_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_timeline", "timeline_figure"]

#: Up to this many sequences have a legend; more have a colour bar.
LEGEND_SEQUENCES = 10
#: Rows lower than this, in points, are drawn without gaps.
DENSE_ROW_POINTS = 5.0
#: Height from which items carry their names.
NAMED_ROW_POINTS = 9.0
IDLE = "#d9dde5"
#: The part of the colour map that is used.
_DARKEST, _LIGHTEST = 0.05, 0.95


def plot_timeline(
    plan: SplitPlan, path: Path, *, subject: str = "", sources: Mapping[str, str] | None = None
) -> ScheduleFigures:
    """Draw a plan into a file and return the numbers in it.

    Args:
        plan: from :func:`leanmla.split_plan.plan_splits` or a backend's ``host_plan``.
        path: a .png, .svg or .pdf.
        subject: what is scheduled, for the second line of the title.
        sources: see :func:`leanmla.plots.files.render`.

    Raises:
        PlottingUnavailable: matplotlib is not installed.
    """
    table = timetable(plan)
    save(_figure(plan, table, subject), path, sources)
    return table.figures


def timeline_figure(plan: SplitPlan, *, subject: str = "") -> Figure:
    """The figure that :func:`plot_timeline` writes."""
    return _figure(plan, timetable(plan), subject)


def _figure(plan: SplitPlan, table: Timetable, subject: str) -> Figure:
    rows = len(table.loads)
    height = min(7.6, max(3.4, 2.0 + 0.2 * rows))
    with draw(9.6, height, "schedule") as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(max(3.0, height - 1.6), 0.9))
        f = table.figures
        row_points = 72 * (height - 2.2) / max(rows, 1)
        _draw_rows(top, table, row_points)
        _draw_busy(bottom, table)
        bottom.set_xlabel(f"time in blocks of {f.block_keys} keys")
        _draw_key(figure, top, plan, named=row_points > NAMED_ROW_POINTS)
        figure_title(
            figure, _finding(f), subject or f"{f.num_sequences} sequences on {f.num_workers} workers, {plan.mode} splits"
        )
    return figure


def _finding(f: ScheduleFigures) -> str:
    if not f.makespan:
        return "No keys, no work"
    if f.idle_share < 0.005:
        return f"No worker waits: {f.num_items} items fill {f.num_workers} workers for {f.makespan} blocks"
    nothing = f"; {f.idle_workers} workers get nothing" if f.idle_workers else ""
    return f"{f.idle_share:.0%} of the workers' time is idle: the busiest has {f.makespan} blocks, the mean is {f.mean_load:.1f}{nothing}"


def _colours(count: int) -> list[tuple[float, float, float]]:
    """One colour a sequence from a map whose lightness rises steadily (readable in grey and for colour-blind eyes).

    Every other sequence is paler, so that neighbours differ where many sequences share the map.
    """
    import matplotlib

    shades = matplotlib.colormaps["viridis"]
    colours = []
    for i in range(count):
        r, g, b, _ = shades(_DARKEST + (_LIGHTEST - _DARKEST) * (i / (count - 1) if count > 1 else 0.4))
        pale = 0.28 if i % 2 and count > LEGEND_SEQUENCES else 0.0
        colours.append((r + (1 - r) * pale, g + (1 - g) * pale, b + (1 - b) * pale))
    return colours


def _draw_rows(axes: Axes, table: Timetable, row_points: float) -> None:
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.ticker import MaxNLocator

    f, rows = table.figures, len(table.loads)
    colours = _colours(f.num_sequences)
    # High rows are bars with gaps between them. Low ones touch, and antialiasing would only draw stripes.
    tall = row_points > DENSE_ROW_POINTS
    pad = 0.1 if tall else 0.0
    idle = [_box(load, f.makespan, row, pad) for row, load in enumerate(table.loads) if load < f.makespan]
    axes.add_collection(PolyCollection(idle, facecolors=IDLE, linewidths=0, antialiased=tall))
    bars = [_box(b.start, b.end, b.worker, pad) for b in table.bars]
    axes.add_collection(
        PolyCollection(bars, facecolors=[colours[b.item.seq] for b in table.bars], linewidths=0, antialiased=tall)
    )
    cuts = [[(b.start, b.worker - 0.5 + pad), (b.start, b.worker + 0.5 - pad)] for b in table.bars if b.start]
    axes.add_collection(LineCollection(cuts, colors="white", linewidths=1.6 if tall else 0.9))
    merges = [b for b in table.bars if b.ends_sequence]
    if merges:
        size = max(1.8, min(5.5, 0.75 * row_points))
        axes.plot([b.end for b in merges], [b.worker for b in merges], linestyle="none", marker="D", markersize=size,
                  markerfacecolor="white", markeredgecolor=CEILING, markeredgewidth=0.9 if size > 3 else 0.6, clip_on=False,
                  zorder=5)  # fmt: skip
    if row_points > NAMED_ROW_POINTS:
        _name_items(axes, table, colours)
    axes.set_xlim(0, max(f.makespan, 1))
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_ylabel("worker, busiest first")
    axes.grid(False)
    axes.tick_params(axis="x", labelbottom=False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _box(start: float, end: float, row: int, pad: float) -> list[tuple[float, float]]:
    return [(start, row - 0.5 + pad), (end, row - 0.5 + pad), (end, row + 0.5 - pad), (start, row + 0.5 - pad)]


def _name_items(axes: Axes, table: Timetable, colours: list[tuple[float, float, float]]) -> None:
    """Sequence and split in every item that is wide enough."""
    room = 62.0 * 9 / max(table.figures.makespan, 1)  # points a block, about
    for b in table.bars:
        split = b.item.num_splits > 1
        words = f"{b.item.seq}.{b.item.split}" if split else f"{b.item.seq}"
        if (b.end - b.start) * room < 6.0 * len(words):
            continue
        r, g, blue = colours[b.item.seq]
        light = 0.2126 * r + 0.7152 * g + 0.0722 * blue > 0.42
        axes.text(
            (b.start + b.end) / 2, b.worker, words, ha="center", va="center", fontsize=7.5, color=INK if light else "white"
        )


def _draw_busy(axes: Axes, table: Timetable) -> None:
    """How many workers are busy at each time."""
    ordered = sorted(table.loads)
    workers = len(ordered)
    x, y = [0], [sum(load > 0 for load in ordered)]
    for i, load in enumerate(ordered):
        if load:
            x += [load, load]
            y += [y[-1], workers - i - 1]
    axes.fill_between(x, y, step=None, color="#8d99b3", linewidth=0)
    axes.axhline(workers, color=MUTED, linewidth=0.8, linestyle=(0, (3, 2)))
    axes.set_ylim(0, workers * 1.12)
    axes.set_yticks([0, workers])
    axes.set_ylabel("busy\nworkers")
    axes.grid(True, axis="x", color=GRID)


def _draw_key(figure: Figure, axes: Axes, plan: SplitPlan, *, named: bool) -> None:
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    count = len(plan.kv_lens)
    handles: list = []
    if count <= LEGEND_SEQUENCES:
        handles = [Patch(color=c, label=f"{i}: {n} keys") for i, (c, n) in enumerate(zip(_colours(count), plan.kv_lens))]
    else:
        shades = matplotlib.colormaps["viridis"]([_DARKEST + (_LIGHTEST - _DARKEST) * i / 255 for i in range(256)])
        bar = figure.colorbar(ScalarMappable(Normalize(0, count - 1), ListedColormap(shades)), ax=axes, pad=0.015, aspect=30)
        bar.set_label("sequence")
        bar.outline.set_visible(False)
    handles.append(Patch(color=IDLE, label="idle"))
    if any(n > 1 for n in plan.splits_per_seq):
        handles.append(Line2D([], [], linestyle="none", marker="D", markerfacecolor="white", markeredgecolor=CEILING, markersize=5,
                              label="last item of a split sequence:\nits partial results are combined"))  # fmt: skip
    if count <= LEGEND_SEQUENCES:
        axes.legend(
            handles=handles,
            title="sequence; 2.1 on a bar is\nitem 1 of sequence 2" if named else "sequence",
            loc="upper left",
            bbox_to_anchor=(1.015, 1.0),
            alignment="left",
            borderaxespad=0,
        )
    else:
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
