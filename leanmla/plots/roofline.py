"""The roofline: operations per byte of cache against operations per second, under both ceilings of the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from .runs import Run
from .series import looks_of
from .style import CEILING, MUTED, draw, figure_title, log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["roofline_figure"]


def roofline_figure(run: Run, *, width: float = 9.0, height: float = 5.2) -> Figure:
    """Every case of a run under its measured bounds.

    Raises:
        InvalidArgument: the run measured no ceilings, or has no times.
    """
    read, matmul, rows = run.read_tb_s, run.matmul_tflop_s, run.good
    if not read or not matmul:
        raise InvalidArgument(
            f"{run.label}: has no measured ceilings, so no roofline. leanmla bench measures them, leanmla run does not."
        )
    if not rows:
        raise InvalidArgument(f"{run.label}: no contender has a time.")
    unit, scale = ("GFLOP/s", 1e3) if run.on_cpu else ("TFLOP/s", 1.0)
    ridge = matmul / read
    with draw(width, height, "roofline") as figure:
        axes = figure.subplots()
        low = min(min(r.intensity for r in rows) / 2.5, ridge / 4)
        high = max(max(r.intensity for r in rows) * 2.5, ridge * 4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.plot(
            [low, ridge, high], [low * read * scale, matmul * scale, matmul * scale], color=CEILING, linewidth=1.6, zorder=2
        )
        _points(axes, run, scale)
        bottom = min(r.tflop_s for r in rows) * scale / 1.6
        axes.set_xlim(low, high)
        axes.set_ylim(bottom, max([matmul, *(r.tflop_s for r in rows)]) * scale * 1.8)
        rate, rate_scale = run.rate_unit
        axes.annotate(f"reads {read * rate_scale:.3g} {rate}", _on_slope(low, ridge, bottom, read, scale), xytext=(-4, 5),
                      textcoords="offset points", ha="right", color=CEILING, fontsize=8.5)  # fmt: skip
        axes.annotate(f"multiplies {matmul * scale:.3g} {unit} ({'fp32' if run.on_cpu else 'bf16'} matmul)", (high, matmul * scale),
                      xytext=(-4, 4), textcoords="offset points", ha="right", color=CEILING, fontsize=8.5)  # fmt: skip
        axes.axvline(ridge, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
        axes.annotate(
            f" {ridge:.0f} FLOP/byte", (ridge, bottom), xytext=(0, 4), textcoords="offset points", color=MUTED, fontsize=8
        )
        log_ticks(axes.xaxis)
        log_ticks(axes.yaxis)
        axes.set_xlabel("operations per byte of cache read, FLOP/byte")
        axes.set_ylabel(unit)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
        figure_title(figure, _finding(run), f"Roofline of {run.device['name']}: both ceilings measured in this run; a column of points "
                     "is one format, from short cases (low) to long ones")  # fmt: skip
    return figure


def _points(axes: Axes, run: Run, scale: float) -> None:
    for by, look in looks_of(run).items():
        members = [r for r in run.good if r.by == by]
        if members:
            style = {**look.line, "linestyle": "none"}
            axes.plot(
                [r.intensity for r in members],
                [r.tflop_s * scale for r in members],
                **style,
                label=by,
                zorder=3 if look.hollow else 4,
            )
    best = max((r for r in run.good if not r.peer), key=lambda r: r.tflop_s, default=None)
    if best is not None:
        axes.annotate(
            best.case,
            (best.intensity, best.tflop_s * scale),
            xytext=(7, -3),
            textcoords="offset points",
            fontsize=8,
            color=MUTED,
        )


def _on_slope(low: float, ridge: float, bottom: float, read: float, scale: float) -> tuple[float, float]:
    """A point on the bandwidth line that is inside the picture."""
    x = (max(low, bottom / (read * scale)) * ridge) ** 0.5
    return x, x * read * scale


def _finding(run: Run) -> str:
    read, matmul = run.read_tb_s or 1.0, run.matmul_tflop_s or 1.0
    ours = [r for r in run.good if not r.peer] or run.good
    under = sum(r.intensity < matmul / read for r in ours)
    if under == 0:
        best = max(ours, key=lambda r: r.tflop_s)
        return f"Every case is on the compute-bound side; {best.by} reaches {best.tflop_s / matmul:.0%} of the measured matmul"
    best = max(ours, key=lambda r: r.tb_s)
    side = "Every case is" if under == len(ours) else f"{under} of {len(ours)} points are"
    return f"{side} on the memory-bound side; {best.by} reaches {best.tb_s / read:.0%} of the measured bandwidth"
