"""The report: what was found, run by run and against each other."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..accuracy import AccuracyResult
from ..bench.results import read_json
from ..errors import InvalidArgument
from ..plots.files import PlottingUnavailable, render, require_matplotlib
from ..plots.runs import SCHEMAS, Row, Run, best_peer, check_version, digits, run_of
from .compare import Comparison, compare_runs
from .html import Cell, document, heading, paragraph, picture, preformatted, table

__all__ = ["NOISY", "Report", "make_report"]

#: A run whose median spread is above this is called noisy.
NOISY = 0.05


class Report:
    """What :func:`make_report` found.

    Attributes:
        html: the page.
        comparisons: each later run against the first.
        note: one sentence about what is missing, or "".
    """

    def __init__(self, html: str, comparisons: list[Comparison], note: str, num_pictures: int) -> None:
        self.html, self.comparisons, self.note, self.num_pictures = html, comparisons, note, num_pictures


def make_report(paths: Sequence[Path], *, title: str = "LeanMLA results") -> Report:
    """A page about result files of ``leanmla bench``, ``run`` and ``accuracy``; timed runs are compared with the first.

    Args:
        paths: files that ``--json`` wrote; at least one.
        title: of the page.

    Raises:
        InvalidArgument: a file cannot be read, or is of another kind.
    """
    if not paths:
        raise InvalidArgument("results: expected at least one file, got none.")
    runs: list[Run] = []
    accuracies: list[tuple[str, dict]] = []
    for path, label in zip(paths, _labels(paths)):
        found = read_json(path)
        schema = str(found["schema"])
        if schema.startswith(SCHEMAS):
            runs.append(run_of(found, label))
        elif schema.startswith("leanmla-accuracy/"):
            accuracies.append((label, _checked_accuracy(found, label)))
        else:
            raise InvalidArgument(f"{path}: expected a result of leanmla bench, run or accuracy, got one of {schema!r}.")
    pictures = _Pictures()
    comparisons = [compare_runs(runs[0], other) for other in runs[1:]]
    body = [heading(1, title), _summary(runs, accuracies), _navigation(runs, accuracies, comparisons)]
    body += [_comparison(c, runs[0], pictures) for c in comparisons]
    body += [_run(run, pictures) for run in runs]
    body += [_accuracy(label, found, pictures) for label, found in accuracies]
    if pictures.missing:
        body.insert(1, paragraph(f"Without pictures: {pictures.missing}", "callout"))
    return Report(document(title, "".join(body)), comparisons, pictures.missing, pictures.count)


def _checked_accuracy(found: dict, label: str) -> dict:
    """The document, if it is a whole one.

    Raises:
        InvalidArgument: it is not.
    """
    check_version(found, label)
    wanted = {"bytes_per_token", "label", *(f.name for f in dataclasses.fields(AccuracyResult))} - {"variant"}
    for r in found["results"]:
        if not isinstance(r, dict) or not wanted <= set(r):
            raise InvalidArgument(f"{label}: is not a whole result of leanmla accuracy.")
    if not found["results"]:
        raise InvalidArgument(f"{label}: has no results.")
    return found


def _labels(paths: Sequence[Path]) -> list[str]:
    """File names without suffix; with as many folders as it takes to tell them apart, and a number where that is not enough."""
    depth = 1
    whole = {p.absolute() for p in paths}
    while depth < 4 and len({p.parts[-depth:] for p in whole}) < len(whole):
        depth += 1
    labels = ["/".join((*p.absolute().parts[-depth:-1], p.stem)) for p in paths]
    return [f"{label} ({labels[: i + 1].count(label)})" if labels.count(label) > 1 else label for i, label in enumerate(labels)]


class _Pictures:
    """Figures as HTML, or nothing and a reason where matplotlib is missing."""

    def __init__(self) -> None:
        self.missing, self.count = "", 0
        try:
            require_matplotlib()
        except PlottingUnavailable as error:
            self.missing = str(error)

    def bench(self, run: Run) -> str:
        if self.missing or not run.good:
            return ""
        from ..plots.bench_plots import bench_figures

        return "".join(self._one(figure) for figure in bench_figures(run).values())

    def accuracy(self, found: dict) -> str:
        if self.missing:
            return ""
        from ..plots.accuracy_plot import accuracy_figure

        return self._one(accuracy_figure(found["results"], budget=found.get("budget")))

    def ratios(self, comparison: Comparison) -> str:
        if self.missing or not comparison.differences:
            return ""
        from .ratios import ratio_figure

        return self._one(ratio_figure(comparison))

    def _one(self, figure) -> str:
        self.count += 1
        return picture(render(figure, "svg"), f"{figure.get_label()}: {figure.get_suptitle().strip()}")


# -- sections --------------------------------------------------------------------------------------------------------------


def _anchor(label: str) -> str:
    return "run-" + "".join(c if c.isalnum() else "-" for c in label)


def _navigation(runs: list[Run], accuracies: list[tuple[str, dict]], comparisons: list[Comparison]) -> str:
    from html import escape

    links = [(f"compare-{_anchor(c.after)}", f"{c.after} against {c.before}") for c in comparisons]
    links += [(_anchor(r.label), r.label) for r in runs] + [(_anchor(label), label) for label, _ in accuracies]
    return "<nav>" + "".join(f'<a href="#{escape(a)}">{escape(words)}</a>' for a, words in links) + "</nav>\n"


def _summary(runs: list[Run], accuracies: list[tuple[str, dict]]) -> str:
    rows = []
    for run in runs:
        unit, scale = run.time_unit
        means = sorted(run.geomeans().items(), key=lambda item: item[1])
        cases = len({r.case for r in run.rows})
        best = f"{means[0][0]}: {means[0][1] * scale:.4g} {unit}" if means else "—"
        state = "complete" if run.document.get("complete", True) else Cell("not complete", "bad")
        if any(r.status in ("wrong", "failed") and not r.peer for r in run.rows):
            state = Cell("a kernel is wrong", "bad")
        rows.append([run.label, run.device["name"], _when(run.document.get("started")), run.document["environment"].get("commit") or "—",
                     str(cases), best, state])  # fmt: skip
    for label, found in accuracies:
        choice = found.get("recommendation")
        words = f"{choice['label']} within {choice['budget']:g}" if choice else "—"
        rows.append([label, "accuracy of formats", "—", found["environment"].get("commit") or "—", "—", words, "complete"])
    return table(["run", "device", "started (UTC)", "commit", ">cases", "best mean of the contest's grid", "state"], rows)


def _when(started: str | None) -> str:
    """ "2026-11-30 14:03" from an ISO time in UTC."""
    return started[:16].replace("T", " ") if started else "—"


def _grouped(keys: Iterable[str]) -> str:
    """ "hopper fp8 (4 x 64, 8 x 64); ..." from "4 x 64, hopper fp8" and so on."""
    cases: dict[str, list[str]] = {}
    for key in keys:
        case, _, by = key.rpartition(", ")
        cases.setdefault(by, []).append(case)
    return "; ".join(f"{by} ({', '.join(mine)})" for by, mine in cases.items())


def _run(run: Run, pictures: _Pictures) -> str:
    parts = [heading(2, f"{run.label}: {run.device['name']}", _anchor(run.label))]
    parts.append(preformatted(str(run.document.get("command", "command not recorded"))))
    parts += [_ceilings(run), _noise(run)]
    parts.append(pictures.bench(run))
    parts += [heading(3, "All times"), _times(run), _problems(run)]
    means = sorted(run.geomeans().items(), key=lambda item: item[1])
    if means:
        unit, scale = run.time_unit
        parts += [heading(3, "Geometric mean over the contest's grid"),
                  table(["by", f">{unit}"], [[by, digits(mean * scale)] for by, mean in means])]  # fmt: skip
    parts += [_goals(run), heading(3, "Environment and protocol"), _environment(run.document)]
    return "".join(parts)


def _ceilings(run: Run) -> str:
    found = run.document.get("ceilings")
    if not found:
        return paragraph("This run measured no ceilings; leanmla bench does.", "muted")
    rate, rate_scale = run.rate_unit
    unit, scale = ("GFLOP/s", 1e3) if run.on_cpu else ("TFLOP/s", 1.0)
    words = (
        f"Ceilings measured in this run: reading {found['read_tb_s'] * rate_scale:.3g} {rate} ({found['read_by']}), multiplying "
        f"{found['matmul_tflop_s'] * scale:.3g} {unit} ({'fp32' if run.on_cpu else 'bf16'})"
    )
    if found.get("launch_us") is not None:
        words += f", an empty launch in a graph {found['launch_us']:.2f} µs"
    return paragraph(words + ".")


def _noise(run: Run) -> str:
    """A warning where a run's own spread is so wide that its times say little."""
    spreads = [r.spread for r in run.good]
    if not spreads or statistics.median(spreads) <= NOISY:
        return ""
    return paragraph(
        f"These times are noisy: half of them spread by more than {statistics.median(spreads):.0%} of the median. Something else was running, "
        "or clocks moved; measure again on a quiet machine before drawing conclusions.",
        "callout",
    )


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _times(run: Run) -> str:
    unit, scale = run.time_unit
    rate, rate_scale = run.rate_unit
    peers = best_peer(run.rows)

    def cells(r: Row) -> list[str]:
        head = [r.case, r.format, r.by]
        if not r.ok:
            return [*head, Cell(r.status, "bad" if r.status in ("wrong", "failed") else "muted"), *[""] * 7]
        against = f"{r.time_us / peers[r.case].time_us:.2f}" if not r.peer and r.case in peers else ""
        return [*head, digits(r.time_us * scale), f"{r.spread:.1%}", digits(r.tb_s * rate_scale, 3), _number(r.read_share, ".0%"),
                digits(r.tflop_s * (1e3 if run.on_cpu else 1), 3), _number(r.relative_error, ".1e"), _number(r.quantisation_error, ".1e"),
                against]  # fmt: skip

    columns = ["case", "cache", "by", f">{unit}", ">spread", f">{rate}", ">share", ">GFLOP/s" if run.on_cpu else ">TFLOP/s", ">error",
               ">format's cost", ">vs peer"]  # fmt: skip
    note = ("case: sequences x keys, then what differs from 16 heads, one query row and pages of 64. share: of the measured read ceiling. error: "
            "relative L2 error of the output against fp64 on the same cache. format's cost: fp64 on this cache against fp64 on the bf16 cache. "
            "vs peer: time over that of the case's fastest other library; below 1 is faster.")  # fmt: skip
    return table(columns, [cells(r) for r in run.rows], group_by_first=True) + paragraph(note, "muted")


def _problems(run: Run) -> str:
    lines = [f"{r.status}: {r.case}, {r.by}: {r.message}" for r in run.rows if not r.ok and r.status != "refused"]
    refused: dict[tuple[str, str], list[str]] = {}
    for r in run.rows:
        if r.status == "refused":
            refused.setdefault((r.by, r.message), []).append(r.case)
    for (by, message), cases in refused.items():
        lines.append(f"refused: {cases[0] if len(cases) == 1 else f'{len(cases)} cases'}, {by}: {message}")
    lines += [f"not run, the time limit came first: {case}" for case in run.document.get("not_run") or ()]
    if run.document.get("aborted"):
        lines.append(f"the run ended early at {run.document['aborted']}")
    if not lines:
        return ""
    return heading(3, "What was left out, and why") + table(["what"], [[line] for line in dict.fromkeys(lines)])


def _goals(run: Run) -> str:
    """Pass or miss of every goal the run was held against (``leanmla bench --goals``); "" if there were none."""
    verdicts = run.document.get("goals") or []
    if not verdicts:
        return ""
    words = {True: Cell("pass", "faster"), False: Cell("miss", "slower"), None: Cell("not timed", "muted")}
    rows = []
    for v in verdicts:
        time, limit, met = v.get("time_us"), v.get("limit_us"), v.get("met")
        what = f"{v['row']}, {v['column']}" if v.get("table") else f"{v['row']} ({v.get('case') or 'contest grid'})"
        over = f"{time / limit:.2f}" if time and limit else ""
        cells = ["" if n is None else digits(n) for n in (time, limit)]
        rows.append([v.get("table") or "Single goals", what, *cells, over, words[met]])
    counts = [sum(v.get("met") is state for v in verdicts) for state in (True, False, None)]
    sentence = f"Goals: {counts[0]} met, {counts[1]} missed, {counts[2]} not timed in this run."
    columns = ["goals", "what", ">µs", ">goal, µs", ">time / goal", "verdict"]
    return heading(3, "Goals") + paragraph(sentence, "callout") + table(columns, rows, group_by_first=True)


def _environment(found: dict[str, Any]) -> str:
    from .compare import _facts

    parts = [table(["fact", "value"], [[k, v] for k, v in _facts(found["environment"])])]
    if found.get("protocol"):
        parts.append(table(["protocol", "how"], [[k, str(v)] for k, v in found["protocol"].items()]))
    return "<details><summary>show</summary>\n" + "".join(parts) + "</details>\n"


def _comparison(c: Comparison, before: Run, pictures: _Pictures) -> str:
    unit, scale = before.time_unit
    parts = [
        heading(2, f"{c.after} against {c.before}", f"compare-{_anchor(c.after)}"),
        paragraph(c.sentence() + ".", "callout"),
    ]
    if c.differences:
        parts.append(pictures.ratios(c))
        marks = {"faster": "▼ faster", "slower": "▲ slower", "same": "= same"}
        rows = [[d.case, d.by, digits(d.before_us * scale), digits(d.after_us * scale), f"{d.ratio:.3f}", f"±{d.noise:.1%}",
                 Cell(marks[d.verdict], d.verdict)] for d in c.differences]  # fmt: skip
        parts.append(table(["case", "by", f">{c.before}, {unit}", f">{c.after}, {unit}", ">ratio", ">spread of both", "verdict"], rows,
                           group_by_first=True))  # fmt: skip
        parts += [
            heading(3, "Geometric mean of the ratios"),
            table(["by", ">time / earlier time"], [[k, f"{v:.3f}"] for k, v in c.ratios().items()]),
        ]
    for label, keys in ((c.before, c.only_before), (c.after, c.only_after)):
        if keys:
            parts.append(paragraph(f"Only in {label}: {_grouped(keys)}.", "muted"))
    if c.environment:
        parts += [heading(3, "What differs besides the times"), table(["fact", c.before, c.after], c.environment)]
    return "".join(parts)


def _accuracy(label: str, found: dict, pictures: _Pictures) -> str:
    parts = [heading(2, f"{label}: accuracy of cache formats", _anchor(label)), preformatted(str(found.get("command", "")))]
    choice = found.get("recommendation")
    if choice:
        parts.append(paragraph(f"Smallest format within {choice['budget']:g}: {choice['label']}, {choice['bytes_per_token']} bytes a token, at worst "
                               f"{choice['worst_out_error']:.2g}.", "callout"))  # fmt: skip
    parts.append(pictures.accuracy(found))
    rows = [[f"{r['distribution']}, {r['kv_len']} keys", r["label"], str(r["bytes_per_token"]), f"{r['out_error']:.1e}",
             f"{r['worst_head_error']:.1e} (#{r['worst_head']})", f"{r['lse_error']:.1e}", str(r["saturated"])] for r in found["results"]]  # fmt: skip
    parts.append(
        table(
            ["latents", "cache", ">bytes/token", ">error of out", ">worst head", ">error of lse", ">clipped"],
            rows,
            group_by_first=True,
        )
    )
    parts += [paragraph(f"{name}: {words}.", "muted") for name, words in (found.get("distributions") or {}).items()]
    parts += [heading(3, "Environment"), _environment(found)]
    return "".join(parts)
