"""``leanmla accuracy``: what each cache format costs in accuracy, on synthetic latents, and which one fits an error budget."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .output import Output, new_table
from .words import check_seed, integers

__all__ = ["SCHEMA", "add_arguments", "main"]

SCHEMA = "leanmla-accuracy/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla accuracy``."""
    from ..accuracy import DISTRIBUTIONS

    parser.add_argument("--kv", default="1024,8192", help="keys a sequence, with commas (default: %(default)s)")
    parser.add_argument("--distributions", default="all", help=f"all, or some of {', '.join(DISTRIBUTIONS)} (default: all)")
    parser.add_argument(
        "--formats",
        default="all",
        help="all, or names with commas; mxfp4 stands for both of its scale rules, and for mxfp4_row320 among all",
    )
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="E",
        help="recommend the smallest format whose output error stays within E, such as 0.05",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw error against bytes a token into a .png, .svg or .pdf")


def main(args: argparse.Namespace, out: Output) -> int:
    """Measure; 2 if no format fits the budget."""
    from ..accuracy import DISTRIBUTIONS, measure_accuracy, recommend, variants_named
    from ..bench.environment import command_line, environment
    from ..errors import InvalidArgument
    from ..plots.files import check_target, require_matplotlib, save

    check_seed(args.seed)
    kv_lens = integers(args.kv, "--kv", 1)
    names = list(DISTRIBUTIONS) if args.distributions == "all" else [n.strip() for n in args.distributions.split(",")]
    formats = None if args.formats == "all" else args.formats.split(",")
    variants_named(formats)
    if args.budget is not None and not args.budget > 0:
        raise InvalidArgument(f"--budget: expected a positive number, such as 0.05, got {args.budget:g}.")
    if args.plot:
        require_matplotlib()
        check_target(Path(args.plot), "--plot")
    start = time.monotonic()
    with out.steps(len(names) * len(kv_lens), "accuracy") as steps:
        results = measure_accuracy(names, kv_lens, formats=formats, num_heads=args.heads, seed=args.seed, on_step=steps.now,
                                   on_done=steps.advance)  # fmt: skip
    seconds = time.monotonic() - start
    choice = recommend(results, args.budget) if args.budget is not None else None
    document = {
        "schema": SCHEMA, "command": command_line(), "seconds": round(seconds, 1), "environment": environment("cpu"),
        "num_heads": args.heads, "seed": args.seed, "kv_lens": kv_lens,
        "distributions": {n: DISTRIBUTIONS[n].words for n in names},
        "budget": args.budget, "recommendation": choice.document() if choice else None,
        "results": [r.document() for r in results],
    }  # fmt: skip
    out.json(document)
    if args.plot:
        from ..plots.accuracy_plot import accuracy_figure

        save(accuracy_figure(document["results"], budget=args.budget), Path(args.plot))
    _print(out, results, names, seconds)
    if args.plot:
        out.print(f"Drawn into {args.plot}.")
    if args.budget is None:
        return 0
    if choice is None:
        raise InvalidArgument(
            f"--budget: no format measured stays within {args.budget:g}. Allow more, or keep the values unrounded."
        )
    out.print(f"Budget: {choice.sentence()}")
    return 0


def _print(out: Output, results, names: list[str], seconds: float) -> None:
    from ..accuracy import DISTRIBUTIONS, NUM_ROWS, same_values

    table = new_table("What a cache format costs in accuracy", "latents", ">keys", "cache", ">B/token", ">error of out", ">worst head",
                      ">error of lse", ">clipped")  # fmt: skip
    last = None
    for r in results:
        head = (r.distribution, r.kv_len)
        if last is not None and head != last:
            table.add_section()
        table.add_row(r.distribution if head != last else "", str(r.kv_len) if head != last else "", r.variant.label,
                      str(r.variant.bytes_per_token), f"{r.out_error:.1e}", f"{r.worst_head_error:.1e} (#{r.worst_head})",
                      f"{r.lse_error:.1e}", str(r.saturated) if r.saturated else "")  # fmt: skip
        last = head
    out.print(table)
    out.print(
        f"error of out: relative L2 over {NUM_ROWS} rows and all heads of exact (fp64) attention on the stored values against the "
        "unrounded ones;",
        "worst head: the same, of the head where it is largest; error of lse: the largest difference; kernels add about 2e-3.",
    )
    for twin in dict.fromkeys(
        (t.format, t.bytes_per_token, label.split()[0]) for label, t in same_values(r.variant.label for r in results)
    ):
        out.print("{}: {} bytes a token, the values of {} and so its errors.".format(*twin))
    for name in names:
        out.print(f"{name}: {DISTRIBUTIONS[name].words}.")
    out.print(f"Took {seconds:.0f} s.")
