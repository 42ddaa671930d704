"""``leanmla bench``: check, then time, against ceilings and peers of the same run."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .output import Output, new_table
from .words import check_seconds, pick_device, resolve_settings, time_unit

if TYPE_CHECKING:
    from ..bench.goals import Verdict

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla bench``."""
    parser.add_argument("--cases", metavar="SETS", help="contest, heads, qlen, pages, ragged, long, small, all, or BATCHxKV, with "
                        "commas (default: contest on a GPU, small on a CPU)")  # fmt: skip
    parser.add_argument("--formats", default="all", metavar="NAMES",
                        help="cache formats with commas, or all that have a kernel here (default: %(default)s)")  # fmt: skip
    parser.add_argument("--backend", default="auto", help="auto, all, or names with commas (default: auto)")
    parser.add_argument("--peers", default="auto", help="auto, none, or parts of names: sdpa, bmm, flash_mla, flashinfer")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: cuda if there is one)")
    parser.add_argument("--seconds", type=float, help="sampling time a contender and case (default: 0.15 on a GPU, 1 on a CPU)")
    parser.add_argument("--time-limit", type=float, default=540, metavar="S",
                        help="leave out the cases that no longer fit into S seconds (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--commit", metavar="TEXT", help="commit to record for a copy of the tree that is no repository of its own"
    )
    parser.add_argument("--compare", metavar="FILE", help="also show time / time in an earlier --json FILE")
    parser.add_argument("--goals", metavar="FILE", help="hold the times against the limits in FILE, pass or miss for each")
    parser.add_argument(
        "--plot", metavar="DIR", help="draw times, bandwidths, the roofline and speed-ups into this folder (SVG)"
    )


def main(args: argparse.Namespace, out: Output) -> int:
    """Run it; 1 if a kernel of ours is wrong."""
    with _plot_folder(args.plot) as folder:
        return _bench(args, out, folder)


def _bench(args: argparse.Namespace, out: Output, folder: Path | None) -> int:
    from ..bench.cases import cases_named
    from ..bench.data import problem_of
    from ..bench.goals import judge, read_goals
    from ..bench.peers import peers_named
    from ..bench.results import read_json
    from ..bench.runner import contenders_for, earlier_times, formats_named, run_bench
    from ..device import describe

    if args.time_limit != 0:  # 0 measures the ceilings alone
        check_seconds(args.time_limit, "--time-limit")
    if args.seconds is not None:
        check_seconds(args.seconds, "--seconds")
    device = pick_device(args.device)
    gpu = device.type == "cuda"
    goals = read_goals(Path(args.goals)) if args.goals else None
    before = earlier_times(read_json(Path(args.compare))) if args.compare else {}
    cases = cases_named(args.cases or ("contest" if gpu else "small"))
    names = formats_named([f.strip() for f in args.formats.split(",")], cases, device)
    contenders = contenders_for(cases, names, args.backend, peers_named(args.peers), device)
    autos = [c.format for c in contenders if c.backend == "auto"]
    resolve_settings((problem_of(case, f) for f in autos for case in cases), describe(device))
    with out.steps(len(cases), "bench") as steps:
        run = run_bench(cases, contenders, device, time_limit=args.time_limit, seconds=args.seconds or (0.15 if gpu else 1.0),
                        commit=args.commit, on_step=steps.now, on_case=steps.advance)  # fmt: skip
    verdicts = judge(goals, run.results, cases, run.ceilings.read_tb_s) if goals else []
    out.json({**run.document(), "goals": [v.document() for v in verdicts]})
    _print(out, run, before)
    if goals:
        _print_goals(out, goals.device, run.environment["device"]["name"], verdicts)
    if folder is not None and any(r.status == "ok" for r in run.results):
        from ..plots.bench_plots import save_bench_figures
        from ..plots.runs import run_of

        drawn = save_bench_figures(run_of(run.document(), "this run"), folder)
        out.print(f"Drawn: {', '.join(map(str, drawn))}.")
    return 0 if run.ok else 1


@contextlib.contextmanager
def _plot_folder(name: str | None) -> Iterator[Path | None]:
    """The folder for pictures, made if it is missing, and removed again if nothing was drawn into it.

    Raises:
        PlottingUnavailable, InvalidArgument: before any work, where no picture could be drawn.
    """
    from ..errors import InvalidArgument
    from ..plots.files import check_folder, require_matplotlib

    if name is None:
        yield None
        return
    require_matplotlib()
    folder = Path(name)
    new = [f for f in (folder, *folder.parents) if not f.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"--plot: expected a folder, {folder} cannot be made ({error.strerror}).") from None
    try:
        check_folder(folder, "--plot")
        yield folder
    finally:
        with contextlib.suppress(OSError):  # the first that holds something ends it
            for made in new:
                made.rmdir()


def _print(out: Output, run, before: dict) -> None:
    device, ceilings = run.environment["device"], run.ceilings
    unit, scale = time_unit(device["kind"])
    cpu = device["kind"] == "cpu"
    # Two comparisons side by side would not fit 100 columns; the ratios to peers have a table of their own.
    columns = ["case", "cache", "by", f">{unit}", ">spread", ">GB/s" if cpu else ">TB/s", ">share", ">error",
               ">vs before" if before else ">vs peer"]  # fmt: skip
    best_peer = _best_peers(run.results)
    read = f"{ceilings.read_tb_s * 1e3:.3g} GB/s" if cpu else f"{ceilings.read_tb_s:.3g} TB/s"
    matmul = f"fp32 {ceilings.matmul_tflop_s * 1e3:.3g} GFLOP/s" if cpu else f"bf16 {ceilings.matmul_tflop_s:.3g} TFLOP/s"
    launch = f", empty launch in a graph {ceilings.launch_us:.2f} µs" if ceilings.launch_us is not None else ""
    table = new_table(f"Decode on {device['name']}", *columns)
    shown: set[str] = set()
    for i, r in enumerate(run.results):
        if r.status == "refused":
            continue
        first = r.case not in shown
        shown.add(r.case)
        cells = [
            r.case if first else "",
            r.format,
            r.contender.removesuffix(f" {r.format}") if r.peer else r.backend or r.contender,
        ]
        if r.status != "ok":
            table.add_row(*cells, r.status.upper(), *[""] * (len(columns) - 4), end_section=_last_of_case(run.results, i))
            continue
        rate = r.tb_s * 1e3 if cpu else r.tb_s
        cells += [
            f"{r.time_us * scale:.4g}", f"{r.spread:.1%}", f"{rate:.3g}", f"{r.read_share:.0%}", f"{r.relative_error:.1e}",
            _against_earlier(r, before) if before else _against_peer(r, best_peer),
        ]  # fmt: skip
        table.add_row(*cells, end_section=_last_of_case(run.results, i))
    out.print(
        table,
        f"Ceilings of this run: read {read} ({ceilings.read_by}), matmul {matmul}{launch}.",
        "share: of the read ceiling. error: relative L2 error of the output against fp64 on the same cache.",
        "vs before: time / earlier time; * is more than both runs' spread."
        if before
        else "vs peer: time / the time of the case's fastest peer; below 1 is faster.",
    )
    _print_ratios(out, run)
    _print_geomeans(out, run, before, unit, scale)
    _print_problems(out, run)
    out.print(f"Took {run.seconds:.0f} s.")


def _print_ratios(out: Output, run) -> None:
    """Ours against each peer, one column a peer."""
    peers = list(dict.fromkeys(r.contender for r in run.results if r.peer and r.status == "ok"))
    if not peers:
        return
    times = {r.key: r.time_us for r in run.results if r.status == "ok"}
    table = new_table("Time / peer's time", "case", "cache", "by", *(f">{p}" for p in peers))
    last = None
    for r in run.results:
        if r.peer or r.status != "ok":
            continue
        ratios = [f"{r.time_us / times[r.case, p]:.2f}" if (r.case, p) in times else "" for p in peers]
        if any(ratios):
            if last is not None and r.case != last:
                table.add_section()
            table.add_row(r.case if r.case != last else "", r.format, r.backend, *ratios)
            last = r.case
    out.print("", table)


def _print_goals(out: Output, meant_for: str, device: str, verdicts: list[Verdict]) -> None:
    """Pass or miss of every goal that this run can tell."""
    told = [v for v in verdicts if v.met is not None]
    for title in dict.fromkeys(v.goal.table for v in told if v.goal.table):
        mine = [v for v in told if v.goal.table == title]
        columns = list(dict.fromkeys(v.goal.column for v in mine))
        table = new_table(f"{title}: µs, goal, verdict", "case", *(f">{c}" for c in columns))
        cells = {(v.goal.row, v.goal.column): v for v in mine}
        for row in dict.fromkeys(v.goal.row for v in mine):
            table.add_row(row, *(_verdict(cells[row, c]) if (row, c) in cells else "" for c in columns))
        out.print("", table)
    single = [v for v in told if not v.goal.table]
    if single:
        table = new_table("Other goals", "goal", "case", ">µs, goal, verdict")
        for v in single:
            table.add_row(v.goal.row, v.goal.which.case or "contest grid", _verdict(v))
        out.print("", table)
    met = sum(v.met is True for v in told)
    out.print(f"Goals: {met} met, {len(told) - met} missed, {len(verdicts) - len(told)} not timed in this run.")
    if meant_for not in device:
        out.print(f"These goals are meant for {meant_for}; this is {device}.")


def _verdict(v: Verdict) -> str:
    return f"{v.time_us:.4g} / {v.limit_us:.4g} {'pass' if v.met else 'MISS'}"


def _last_of_case(results, i: int) -> bool:
    later = [r for r in results[i + 1 :] if r.status != "refused"]
    return not later or later[0].case != results[i].case


def _best_peers(results) -> dict[str, float]:
    best: dict[str, float] = {}
    for r in results:
        if r.peer and r.status == "ok":
            best[r.case] = min(best.get(r.case, math.inf), r.time_us)
    return best


def _against_peer(r, best_peer: dict[str, float]) -> str:
    return "" if r.peer or r.case not in best_peer else f"{r.time_us / best_peer[r.case]:.2f}"


def _against_earlier(r, before: dict) -> str:
    if r.key not in before:
        return "new"
    time_us, spread = before[r.key]
    ratio = r.time_us / time_us
    return f"{ratio:.3f}" + ("*" if abs(ratio - 1) > spread + r.spread else " ")


def _print_geomeans(out: Output, run, before: dict, unit: str, scale: float) -> None:
    from ..bench.cases import contest_cases
    from ..bench.results import geomean

    means = run.geomeans()
    if not means:
        return
    table = new_table("Geometric mean over the contest grid", "by", f">{unit}", *([">vs before"] if before else []))
    grid = [c.label for c in contest_cases()]
    for name, mean in sorted(means.items(), key=lambda item: item[1]):
        cells = [name, f"{mean * scale:.4g}"]
        if before:
            earlier = [before[key][0] for key in ((c, name) for c in grid) if key in before]
            cells.append(f"{mean / geomean(earlier):.3f}" if len(earlier) == len(grid) else "")
        table.add_row(*cells)
    out.print("", table)


def print_problems(out: Output, results) -> None:
    """A line for everything that gave no figure; the same refusal only once."""
    for r in results:
        if r.status in ("wrong", "failed", "skipped"):
            out.print(f"{r.status.upper()}: {r.case}, {r.contender}: {r.message}")
    for name, message in dict.fromkeys((r.contender, r.message) for r in results if r.status == "refused"):
        count = sum((r.contender, r.message) == (name, message) for r in results)
        out.print(f"Left out, {count} {'case' if count == 1 else 'cases'}: {name}: {message.rstrip('.')}.")


def _print_problems(out: Output, run) -> None:
    print_problems(out, run.results)
    if run.not_run:
        out.print(f"Not run, the time limit came first: {', '.join(run.not_run)}.")
    if run.aborted:
        out.print(f"The run ended early at {run.aborted}")
