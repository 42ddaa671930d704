"""What formats cost and what they save: output error against bytes a token, a panel a distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..accuracy import same_values
from .runs import short_count
from .style import CEILING, Look, draw, figure_title, look_of_format, plain_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["accuracy_figure"]


def accuracy_figure(results: Sequence[dict], *, budget: float | None = None) -> Figure:
    """Points are the error over all heads, whiskers reach to the worst head; lengths stand side by side, short to long.

    Args:
        results: documents of :class:`leanmla.accuracy.AccuracyResult`, as in the JSON.
        budget: an error to draw a line at.
    """
    names = list(dict.fromkeys(r["distribution"] for r in results))
    labels = list(dict.fromkeys(r["label"] for r in results))
    lengths = sorted({r["kv_len"] for r in results})
    sizes = sorted({r["bytes_per_token"] for r in results})
    from matplotlib.lines import Line2D

    with draw(max(8.4, 1.4 + 3.0 * len(names)), 4.6, "accuracy of formats") as figure:
        grid = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(grid, names):
            for label in labels:
                look = _look(label)
                line = [r for r in results if r["distribution"] == name and r["label"] == label]
                x = [r["bytes_per_token"] * _shift(label, r["kv_len"], lengths) for r in line]
                y = [r["out_error"] for r in line]
                axes.vlines(x, y, [r["worst_head_error"] for r in line], color=look.colour, linewidth=1.1)
                axes.plot(x, y, **{**look.line, "linestyle": "-", "linewidth": 0.7}, label=label)
            if budget is not None:
                axes.axhline(budget, color=CEILING, linewidth=1.2)
                axes.annotate(f"budget {budget:g}", (1, budget), xycoords=("axes fraction", "data"), xytext=(-2, 3),
                              textcoords="offset points", ha="right", color=CEILING, fontsize=8)  # fmt: skip
            axes.set_title(name)
            axes.set_xscale("log")
            axes.set_xlim(min(sizes) / 1.22, max(sizes) * 1.22)
            plain_ticks(axes.xaxis, sizes)
            for label, size, following in zip(axes.get_xticklabels(), sizes, [*sizes[1:], None]):
                if following and following / size < 1.25:  # 576 and 656: let the first end and the second begin at its tick
                    label.set_ha("right")
                elif any(size / other < 1.25 for other in sizes if other < size):
                    label.set_ha("left")
            axes.set_yscale("log")
            axes.set_xlabel("bytes a token")
        grid[0].set_ylabel("relative error of the output")
        handles, words = grid[0].get_legend_handles_labels()
        for label, twin in same_values(labels):  # not drawn: the same error at another size
            if twin.mx_scale_rule in ("", "even"):
                handles.append(Line2D([], [], linestyle="none"))
                words.append(f"{twin.format}: as {label.split()[0]}, at {twin.bytes_per_token}")
        figure.legend(handles, words, loc="outside lower center", ncols=len(words))
        spans = " to ".join(dict.fromkeys(short_count(n) for n in (lengths[0], lengths[-1])))
        figure_title(figure, _finding(results, budget), f"exact attention on the stored values against the unrounded ones; kv {spans}, left to "
                     "right within a format; whisker: worst head")  # fmt: skip
    return figure


def _look(label: str) -> Look:
    name, _, rule = label.partition(" ")
    look = look_of_format(name)
    return Look(look.colour, "v", look.dash, hollow=True) if rule == "floor" else look


def _shift(label: str, kv_len: int, lengths: Sequence[int]) -> float:
    """Lengths side by side around the format's size; the two rules of mxfp4 beside each other."""
    along = lengths.index(kv_len) / (len(lengths) - 1) - 0.5 if len(lengths) > 1 else 0.0
    apart = {"even": 0.96, "floor": 1.05}.get(label.partition(" ")[2], 1.0)
    return apart * 1.05**along


def _finding(results: Sequence[dict], budget: float | None) -> str:
    worst: dict[str, dict] = {}
    for r in results:
        if r["label"] not in worst or r["out_error"] > worst[r["label"]]["out_error"]:
            worst[r["label"]] = r
    ordered = sorted(worst.values(), key=lambda r: (r["bytes_per_token"], r["out_error"]))
    if budget is not None:
        fits = next((r for r in ordered if r["out_error"] <= budget), None)
        if fits is None:
            return f"No format stays within an error of {budget:g} everywhere"
        return f"{fits['label']} is the smallest format within an error of {budget:g}: {fits['out_error']:.2g} at worst"
    first, last = ordered[0], ordered[-1]
    ratio = last["bytes_per_token"] / first["bytes_per_token"]
    return f"{first['label']} saves {ratio:.1f} times the bytes of {last['label']} and errs by up to {first['out_error']:.2g}"
