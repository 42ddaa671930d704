"""``leanmla report``: one HTML page about one or several result files."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output import Output, new_table

__all__ = ["add_arguments", "main"]

SCHEMA = "leanmla-report/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla report``."""
    parser.add_argument(
        "results",
        nargs="+",
        metavar="RESULT.json",
        help="what bench, run or accuracy wrote with --json; the first timed one is compared with",
    )
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="the page (default: %(default)s)")
    parser.add_argument("--title", default="LeanMLA results", help="of the page (default: %(default)s)")


def main(args: argparse.Namespace, out: Output) -> int:
    """Write it."""
    from ..files import write_whole
    from ..plots.files import check_target
    from ..report import make_report

    target = Path(args.output)
    check_target(target, "--output", (".html", ".htm"))
    report = make_report([Path(p) for p in args.results], title=args.title)
    write_whole(target, report.html.encode())
    out.json({
        "schema": SCHEMA, "results": args.results, "output": args.output, "pictures": report.num_pictures,
        "comparisons": [c.document() for c in report.comparisons],
    })  # fmt: skip
    for c in report.comparisons:
        table = new_table(f"{c.after} against {c.before}", "case", "by", ">ratio", ">spread of both", "verdict")
        for d in c.differences:
            if d.verdict != "same":
                table.add_row(d.case, d.by, f"{d.ratio:.3f}", f"±{d.noise:.1%}", d.verdict)
        if table.row_count:
            out.print(table)
        out.print(c.sentence() + ".", "")
    if report.note:
        out.print(f"Without pictures: {report.note}")
    out.print(f"{args.output}: {len(report.html.encode()) / 1e3:.0f} kB, {report.num_pictures} pictures, needs no network.")
    return 0
