"""Pictures of a benchmark: times and bandwidths against batch and kv length, speed-ups over others, geometric means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument
from .files import require_matplotlib, save
from .roofline import roofline_figure
from .runs import Row, Run, digits, mean_speedup, short_count, speedups
from .series import looks_of
from .style import INK, MUTED, ceiling_line, draw, figure_title, log_ticks, look_of_format, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bench_figures", "geomean_figure", "save_bench_figures", "speedup_figure", "sweep_figure"]

#: Panels side by side in a sweep.
MOST_COLUMNS = 4


def bench_figures(run: Run) -> dict[str, Figure]:
    """name -> figure, of everything this run has data for: sweep-batch, sweep-kv, roofline, speedup, geomean.

    Raises:
        InvalidArgument: nothing in the run has a time. PlottingUnavailable: matplotlib is not installed.
    """
    require_matplotlib()
    if not run.good:
        raise InvalidArgument(f"{run.label}: no contender has a time, so there is nothing to draw.")
    figures: dict[str, Figure] = {}
    for against in ("batch", "kv"):
        figure = sweep_figure(run, against)
        if figure is not None:
            figures[f"sweep-{against}"] = figure
    if run.read_tb_s and run.matmul_tflop_s:
        figures["roofline"] = roofline_figure(run)
    for name, maybe in (("speedup", speedup_figure(run)), ("geomean", geomean_figure(run))):
        if maybe is not None:
            figures[name] = maybe
    return figures


def save_bench_figures(
    run: Run, folder: Path, *, suffix: str = ".svg", prefix: str = "", sources: Mapping[str, str] | None = None
) -> list[Path]:
    """Draw a run into ``folder``, one file a figure; returns the files."""
    paths = []
    for name, figure in bench_figures(run).items():
        paths.append(folder / f"{prefix}{name}{suffix}")
        save(figure, paths[-1], sources)
    return paths


# -- time and bandwidth ----------------------------------------------------------------------------------------------------


def sweep_figure(run: Run, against: str) -> Figure | None:
    """Times (above) and bandwidths (below) against batch or kv length; None if fewer than two values occur.

    Args:
        against: "batch" (a column of panels for each kv length) or "kv" (a column for each batch).
    """
    shapes = run.shapes()
    if not shapes:
        return None
    rows = [r for r in run.good if r.kv is not None and r.shape == shapes[0]]
    x_of, column_of = _axes_of(against)
    columns = {c: [r for r in rows if column_of(r) == c] for c in sorted({column_of(r) for r in rows})}
    columns = {c: members for c, members in columns.items() if len({x_of(r) for r in members}) > 1}
    columns = _thin(columns)
    if not columns:
        return None
    unit, scale = run.time_unit
    rate, rate_scale = run.rate_unit
    looks = looks_of(run)
    with draw(max(8.4, min(11.0, 2.6 + 2.9 * len(columns))), 6.0, f"sweep against {against}") as figure:
        grid = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False)
        for j, (value, members) in enumerate(columns.items()):
            above, below = grid[0][j], grid[1][j]
            for by, look in looks.items():
                line = sorted((r for r in members if r.by == by), key=x_of)
                if not line:
                    continue
                x = [x_of(r) for r in line]
                above.plot(x, [r.time_us * scale for r in line], **look.line, label=by)
                below.plot(x, [r.tb_s * rate_scale for r in line], **look.line)
                if run.read_tb_s and not line[0].peer:
                    floor = [r.cache_bytes / run.read_tb_s / 1e6 * scale for r in line]
                    above.plot(x, floor, color=look.colour, linewidth=0.9, linestyle=(0, (1, 1.5)))
            words = f"kv {short_count(value)}" if against == "batch" else f"batch {value}"
            above.set_title(words)
            xs = sorted({x_of(r) for r in members})
            for axes in (above, below):
                axes.set_xscale("log", base=2)
                plain_ticks(axes.xaxis, xs, [str(v) if against == "batch" else short_count(v) for v in xs])
            above.set_yscale("log")
            if run.read_tb_s:
                ceiling_line(below, run.read_tb_s * rate_scale, f"measured: {run.read_tb_s * rate_scale:.3g} {rate}")
            below.set_xlabel("sequences in the batch" if against == "batch" else "keys a sequence")
        log_ticks(grid[0][0].yaxis)
        top = max([r.tb_s for r in rows] + [run.read_tb_s or 0.0]) * rate_scale
        grid[1][0].set_ylim(0, top * 1.14)
        grid[0][0].set_ylabel(f"time a step, {unit}")
        grid[1][0].set_ylabel(f"cache read, {rate}")
        _legend(figure, grid[0], run)
        figure_title(figure, _sweep_finding(run, rows, against), f"{run.device['name']}, {_shape_words(shapes[0])}, cold cache")
    return figure


def _axes_of(against: str):
    if against == "batch":
        return (lambda r: r.batch), (lambda r: r.kv)
    if against == "kv":
        return (lambda r: r.kv), (lambda r: r.batch)
    raise InvalidArgument(f"against: expected 'batch' or 'kv', got {against!r}.")


def _thin(columns: dict[int, list[Row]]) -> dict[int, list[Row]]:
    """At most MOST_COLUMNS of them, the ends included."""
    keys = list(columns)
    if len(keys) > MOST_COLUMNS:
        step = (len(keys) - 1) / (MOST_COLUMNS - 1)
        keys = [keys[round(i * step)] for i in range(MOST_COLUMNS)]
    return {k: columns[k] for k in keys}


def _legend(figure: Figure, panels: Iterable[Axes], run: Run, *, floor: bool = True) -> None:
    """One legend for all panels, each series once, in the run's order."""
    from matplotlib.lines import Line2D

    found: dict[str, Any] = {}
    for axes in panels:
        found.update({label: h for h, label in zip(*axes.get_legend_handles_labels()) if label not in found})
    labels = [by for by in looks_of(run) if by in found]
    handles = [found[by] for by in labels]
    if run.read_tb_s and floor:
        handles.append(Line2D([], [], color=MUTED, linewidth=0.9, linestyle=(0, (1, 1.5))))
        labels.append("floor: bytes / measured bandwidth")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))


def _shape_words(shape: tuple[int, int, int]) -> str:
    heads, q_len, page = shape
    return f"{heads} heads, {q_len} query row{'s' if q_len > 1 else ''}, pages of {page}"


def _sweep_finding(run: Run, rows: Sequence[Row], against: str) -> str:
    """Of the largest case: who is fastest (against batch), or who comes closest to the ceiling (against kv)."""
    ours = [r for r in rows if not r.peer] or list(rows)
    largest = max(ours, key=lambda r: r.tokens)
    here = [r for r in ours if r.case == largest.case]
    unit, scale = run.time_unit
    best = max(here, key=lambda r: r.tb_s)
    if against == "kv" and run.read_tb_s:
        return f"{best.by} reads at {best.tb_s / run.read_tb_s:.0%} of the measured bandwidth for {best.case}"
    first = min(here, key=lambda r: r.time_us)
    others = [r for r in rows if r.case == largest.case and r.peer]
    words = f"{first.by} does {first.case} in {first.time_us * scale:.4g} {unit}"
    if others:
        peer = min(others, key=lambda r: r.time_us)
        words += f"; {peer.by} takes {peer.time_us * scale:.4g}"
    return words


# -- others ----------------------------------------------------------------------------------------------------------------


def speedup_figure(run: Run) -> Figure | None:
    """Peer's time over ours, case by case, a panel a peer; None without peers."""
    peers = list(dict.fromkeys(r.contender for r in run.good if r.peer))
    tables = {p: t for p in peers if (t := speedups(run.rows, p))}
    if not tables:
        return None
    cases = list(dict.fromkeys(r.case for r in run.good if any(r.case in one for t in tables.values() for one in t.values())))
    looks = looks_of(run)
    wide = min(len(tables), MOST_COLUMNS)
    high = math.ceil(len(tables) / wide)
    with draw(max(8.4, min(11.5, 2.4 + 2.9 * wide)), 1.9 + high * (0.55 + 0.27 * len(cases)), "speed-up") as figure:
        grid = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False)
        panels = [axes for row in grid for axes in row]
        for axes, (peer, table) in zip(panels, tables.items()):
            axes.axvline(1, color=INK, linewidth=1.0)
            for k, (by, ratios) in enumerate(table.items()):
                at = [i for i, c in enumerate(cases) if c in ratios]
                y = [
                    i + 0.3 * (k / (len(table) - 1) - 0.5) if len(table) > 1 else i for i in at
                ]  # side by side, not one on another
                style = {**looks[by].line, "linestyle": "none", "markersize": 6}
                axes.plot([ratios[cases[i]] for i in at], y, **style, label=by)
            axes.set_title(f"against {peer}")
            axes.set_xscale("log", base=2)
            axes.set_yticks(range(len(cases)), labels=cases)
        top = max(v for t in tables.values() for one in t.values() for v in one.values())
        low = min(1.0, min(v for t in tables.values() for one in t.values() for v in one.values()))
        ticks = [2.0**i for i in range(math.floor(math.log2(low)), math.ceil(math.log2(top)) + 1)]
        for axes in panels[: len(tables)]:
            axes.set_xlim(low / 1.15, top * 1.15)
            plain_ticks(axes.xaxis, [t for t in ticks if low / 1.15 <= t <= top * 1.15], None)
        for axes in panels[len(tables) :]:
            axes.set_visible(False)
        grid[0][0].set_ylim(len(cases) - 0.5, -0.5)
        for axes in panels[max(0, len(tables) - wide) : len(tables)]:
            axes.set_xlabel("peer's time / our time")
        for row in grid:
            row[0].set_ylabel("case: batch x keys")
        _legend(figure, panels[: len(tables)], run, floor=False)
        figure_title(
            figure,
            _speedup_finding(tables),
            f"{run.device['name']}, one run and protocol for all, each with its own cache format; right of 1 ours is faster",
        )
    return figure


def _speedup_finding(tables: dict[str, dict[str, dict[str, float]]]) -> str:
    """The best of ours against the strongest peer, as a mean."""
    means = {(p, by): mean_speedup(one.values()) for p, t in tables.items() for by, one in t.items()}
    hardest = min(tables, key=lambda p: max(means[p, by] for by in tables[p]))
    by = max(tables[hardest], key=lambda b: means[hardest, b])
    return f"{by} is {means[hardest, by]:.2f} times as fast as {hardest} in the geometric mean"


def geomean_figure(run: Run) -> Figure | None:
    """Bars of the geometric means over the contest's grid; None if nobody finished it."""
    means = sorted(run.geomeans().items(), key=lambda item: item[1])
    if not means:
        return None
    by_name = {r.by: r for r in run.good}
    unit, scale = run.time_unit
    with draw(8.2, 1.5 + 0.34 * len(means), "geometric means") as figure:
        axes = figure.subplots()
        for i, (by, mean) in enumerate(means):
            row = by_name.get(by)
            peer = row is not None and row.peer
            colour = "#c3c8d1" if peer or row is None else look_of_format(row.format).colour
            axes.barh(i, mean * scale, color=colour, height=0.7)
            axes.annotate(
                f"{digits(mean * scale, 3)} {unit}",
                (mean * scale, i),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
        axes.set_yticks(range(len(means)), labels=[by for by, _ in means])
        axes.set_ylim(len(means) - 0.5, -0.5)
        axes.set_xlim(0, max(m for _, m in means) * scale * 1.12)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"geometric mean over the contest's 8 cases, {unit} (shorter is better; grey: other libraries)")
        figure_title(
            figure,
            _geomean_finding(means, by_name, unit, scale),
            f"{run.device['name']}, batch 4 to 256, kv 1024 and 8192, 16 heads",
        )
    return figure


def _geomean_finding(means: list[tuple[str, float]], by_name: dict[str, Row], unit: str, scale: float) -> str:
    ours = next(((by, m) for by, m in means if by in by_name and not by_name[by].peer), None)
    peer = next(((by, m) for by, m in means if by in by_name and by_name[by].peer), None)
    if ours is None:
        return f"{means[0][0]} is fastest, {means[0][1] * scale:.4g} {unit}"
    if peer is None:
        return f"{ours[0]} is fastest: {ours[1] * scale:.4g} {unit}"
    return f"{ours[0]} takes {ours[1] * scale:.4g} {unit}, {peer[1] / ours[1]:.2f} times as fast as {peer[0]}"
