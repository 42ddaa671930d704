"""``leanmla contest``: run a submission and show what came of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from .. import settings
from ..errors import InvalidArgument
from . import popcorn
from .cases import RANKED, SMALL_DIVISOR, TESTS, Case, read_cases
from .runner import Limits, Outcome, Session
from .timing import geometric_mean

__all__ = ["add_arguments", "main"]

_SECONDS_A_CASE = {"cpu": 10.0, "cuda": 20.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``leanmla contest`` to a parser."""
    parser.description = (
        "Run a submission to the mixed-mla contest, as it is, in a process of its own. On a machine without a GPU, "
        "device='cuda' inside the submission means the CPU. Exit code 0: passed, 112: failed, 113: bad cases file."
    )
    parser.add_argument("mode", choices=popcorn.MODES, help="test checks; benchmark times; leaderboard times on fresh inputs")
    parser.add_argument("submission", type=Path, metavar="SUBMISSION.py", help="a file with custom_kernel(data)")
    parser.add_argument(
        "--cases", type=Path, metavar="FILE", help="lines like 'batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220'"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--small", action="store_true", help=f"divide kv lengths by {SMALL_DIVISOR}: for a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    parser.add_argument("--quiet", action="store_true", help="one line of result, nothing of what the submission prints")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="limit on one call (default: 300)")
    parser.add_argument(
        "--seconds", type=float, metavar="SECONDS", help="limit on one case's timed calls (default: 10 on a CPU, 20 on a GPU)"
    )
    parser.add_argument("--strict", action="store_true", help="fail submissions that keep what they made from q by its address")


def main(args: argparse.Namespace) -> int:
    """Run what the arguments say. Returns the exit code."""
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: there is no GPU here. Use --device cpu.", file=sys.stderr)
        return popcorn.USAGE
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = list(TESTS if args.mode == "test" else RANKED)
    if args.mode == "profile":
        cases = cases[:1]
    if settings.popcorn_fd():
        if args.small:
            cases = [c.small() for c in cases]
        return popcorn.run(args.mode, args.cases, args.submission, device=device, cases=cases)
    if args.cases is not None:
        try:
            cases = read_cases(args.cases)
        except InvalidArgument as error:
            print(error, file=sys.stderr)
            return popcorn.BAD_CASES
    if args.small:
        cases = [c.small() for c in cases]
    limits = Limits(call_seconds=args.timeout, case_seconds=args.seconds or _SECONDS_A_CASE[device])
    outcomes = []
    with Session(args.submission, device, limits=limits, quiet=args.quiet, strict=args.strict) as session:
        for case in cases:
            if not args.quiet:
                print(f"{args.mode} {case.short} ...", file=sys.stderr, flush=True)
            outcomes.append(getattr(session, args.mode)(case))
    passed = all(o.ok for o in outcomes)
    _show(args, device, outcomes, passed)
    if args.json is not None:
        args.json.write_text(json.dumps(_as_json(args, device, outcomes, passed), indent=1) + "\n", encoding="utf-8")
    return popcorn.PASSED if passed else popcorn.CHECK_FAILED


def _score(outcomes: list[Outcome]) -> float | None:
    """Geometric mean of the cases' means, nanoseconds, if every case has one."""
    means = [o.stats.mean for o in outcomes if o.ok and o.stats is not None]
    return geometric_mean(means) if means and len(means) == len(outcomes) else None


def _show(args: argparse.Namespace, device: str, outcomes: list[Outcome], passed: bool) -> None:
    score = _score(outcomes)
    verdict = "pass" if passed else "fail"
    total = f", geometric mean {_time(score)}" if score is not None else ""
    small = f", kv lengths / {SMALL_DIVISOR}" if args.small else ""
    line = (
        f"{args.submission.name}: {verdict}, {sum(o.ok for o in outcomes)} of {len(outcomes)} cases on {device}{small}{total}"
    )
    if args.quiet:
        reasons = [o.message for o in outcomes if not o.ok][:1]
        print(" ".join([line + ".", *reasons]))
        return
    from rich.console import Console
    from rich.table import Table

    from ..device import describe

    console = Console() if sys.stdout.isatty() else Console(width=120)
    timed = any(o.stats for o in outcomes)
    console.print(
        f"{args.mode}: {args.submission.name} on {device} ({describe(device).name}){small}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    table.add_column("case")
    table.add_column("check")
    table.add_column("rel. error", justify="right")
    if timed:
        for name in ("mean", "± error", "best", "worst", "runs"):
            table.add_column(name, justify="right")
    for o in outcomes:
        row = [o.case.short, "pass" if o.ok else "FAIL", "" if o.relative_error is None else f"{o.relative_error:.1e}"]
        if timed and o.stats is not None:
            s = o.stats
            row += [_time(s.mean), f"{100 * s.err / s.mean:.2f} %", _time(s.best), _time(s.worst), str(s.runs)]
        table.add_row(*row, style=None if o.ok else "red")
    console.print(table)
    for o in outcomes:
        if o.report:
            print(o.report)
    for text in dict.fromkeys(o.note for o in outcomes if o.note):
        console.print(f"note: {text}", markup=False, soft_wrap=True)
    for o in outcomes:
        if not o.ok:
            console.print(f"{o.case.short}: {o.message}", markup=False, soft_wrap=True)
    console.print(line + ".", markup=False, soft_wrap=True)


def _time(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.4g} {unit}"
    return f"{ns:.0f} ns"


def _as_json(args: argparse.Namespace, device: str, outcomes: list[Outcome], passed: bool) -> dict:
    import torch

    from .. import __version__
    from ..device import describe

    return {
        "mode": args.mode,
        "submission": args.submission.name,
        "device": describe(device).name,
        "leanmla": __version__,
        "torch": torch.__version__,
        "passed": passed,
        "geometric_mean_ns": _score(outcomes),
        "cases": [
            {
                **_arguments(o.case),
                "ok": o.ok,
                "message": o.message,
                "note": o.note,
                "relative_error": o.relative_error,
                "max_error": o.max_error,
                "stats": dataclasses.asdict(o.stats) if o.stats else None,
            }
            for o in outcomes
        ],
    }


def _arguments(case: Case) -> dict[str, int]:
    return case.arguments
