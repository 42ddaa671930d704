"""Check and time every arrangement of the kernel on this GPU: ``python -m leanmla.kernels.hopper_cuda.tune --json tuned.json``.

For whoever edits ``launch_configs.py``; nothing is tuned at run time. First every arrangement decodes a list of awkward cases and is
compared with the fp64 definition; one that is wrong is not timed. Then the contest grid, checked again and timed as ``leanmla bench`` does
(graphs of calls on cold copies of the cache, all arrangements in turns, median of replays). Twice over, so that drift shows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch

from ... import mla_decode
from ...backends import why_not
from ...bench import cases, data, environment, measure, results
from ...bench.peers import Peer
from ...device import describe
from ...errors import BackendUnavailable, LeanMLAError
from ...reference import mla_decode_reference
from ...testing.cases import DecodeCase
from ...testing.compare import compare
from ...testing.inputs import make_inputs
from .compiler import FORMATS
from .launch_configs import ARRANGEMENTS, FEW_TILES, using

__all__ = ["CASES", "SCHEMA", "check", "main", "table", "timed"]

SCHEMA = "leanmla-hopper-cuda-tune/1"
BACKEND = "hopper_cuda"
#: What can go wrong: pieces of several sequences and the reverse, masks, causal rows, small pages, large logits, many parts, all row tiles.
CASES: tuple[DecodeCase, ...] = tuple(
    case.replace(format=FORMATS[0])
    for case in (
        DecodeCase((64,)),
        DecodeCase((17, 130, 64, 0), q_lens=3),
        DecodeCase((8192, 8192, 77), table="csr", page_size=128),
        DecodeCase((40000, *(1,) * 31), table="csr"),
        DecodeCase(tuple(1 + 37 * i for i in range(300))),
        DecodeCase((1024,) * 4, num_heads=128, q_lens=4),
        DecodeCase((700, 64, 900), num_heads=20, page_size=1, table="csr"),
        DecodeCase((3000, 64, 900, 0), num_kv_splits=40),
        DecodeCase((1500, 64, 900, 0), split_size=256, table="contiguous"),
        DecodeCase((2000, 300), q_std=8.0, logit_shift=300.0),
        DecodeCase((300,), q_std=100.0),
        DecodeCase((700, 64), q_std=30.0, q_lens=2),
        DecodeCase((500, 1, 0, 70), q_lens=(2, 0, 1, 5), num_heads=5, page_size=7, table="csr", q_dtype="fp16", logit_cap=20.0),
    )
)


def check(case: DecodeCase, device: str, calls: int = 3) -> str:
    """What is wrong with the arrangement in use on a case, or "". Every call must give the same bits."""
    inputs = make_inputs(case, device=device)
    options = {**inputs.options, **inputs.splits}
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    first = None
    for _ in range(calls):
        out, lse = mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, backend=BACKEND, **options)
        if first is None:
            first = out, lse
            report = compare(inputs, out, reference=(want, want_lse))
            if not report.ok:
                return report.message
            if not torch.equal(lse == -torch.inf, want_lse == -torch.inf):
                return "lse is -inf in other rows than the definition's"
            finite = want_lse.isfinite()
            error = (lse.double() - want_lse)[finite].abs()
            if not bool((error <= 2e-3 + 2e-4 * want_lse[finite].abs()).all()):
                return f"lse off by {float(error.max()):.2g}"
        elif not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, (out, lse), strict=True)):
            return "two calls gave different bits"
    return ""


def _checked(names: list[str], fmt: str, device: str) -> dict[str, list[str]]:
    """Name -> what is wrong."""
    wrong: dict[str, list[str]] = {}
    for name in names:
        wrong[name] = []
        for case in CASES:
            with using(name):
                try:
                    message = check(case.replace(format=fmt), device)
                except LeanMLAError as error:
                    message = str(error)
            if message:
                wrong[name].append(f"{case.id}: {message}")
        print(f"{name:20} {len(CASES) - len(wrong[name])} of {len(CASES)} cases right", *wrong[name], sep="\n  ", flush=True)
    return wrong


def _contender(name: str, fmt: str) -> measure.Contender:
    """An arrangement as something that ``leanmla bench`` can time beside others, on the same copies and in turns with them."""

    def prepare(copies: list[data.Copy]) -> list[Callable[[], torch.Tensor]]:
        with using(name):
            plan = measure.plan_for(copies[0].case, fmt, copies[0].q.device, BACKEND)

        def call_of(copy: data.Copy) -> Callable[[], torch.Tensor]:
            def call() -> torch.Tensor:
                with using(name):
                    plan.run(copy.q, copy.cache, copy.table, sm_scale=copy.case.sm_scale, out=copy.out)
                return copy.out

            return call

        return [call_of(copy) for copy in copies]

    return measure.Contender(fmt, peer=Peer(name, ("cuda", "cpu"), fmt, "torch", lambda case: None, prepare))


def timed(names: list[str], fmt: str, grid: list[cases.BenchCase], rounds: int, device: str) -> list[dict]:
    """Every case ``rounds`` times with all arrangements in turns; documents of ``leanmla.bench.measure.Measurement`` with the round."""
    pool = data.LatentPool(torch.device(device))
    found = []
    for case in grid:
        for turn in range(rounds):
            for result in measure.measure_case(case, [_contender(name, fmt) for name in names], pool):
                if result.status == "ok" and not result.relative_error <= measure.MAX_RELATIVE_ERROR:
                    result.status, result.message = "wrong", f"relative error {result.relative_error:.2g}"
                found.append({"round": turn, **result.document()})
                said = f"{result.time_us:8.2f} us ±{result.spread:.1%}" if result.status == "ok" else f"{result.status}: {result.message}"
                print(f"{case.label:16} {result.contender:20} {said}", flush=True)
    return found


def table(names: list[str], grid: list[cases.BenchCase], found: list[dict]) -> str:
    """Best of the rounds, microseconds; the fastest of a case is marked."""
    width = max(10, *(len(name) + 2 for name in names))
    best = {
        (case.label, name): min(
            (r["time_us"] for r in found if r["case"] == case.label and r["contender"] == name and r["status"] == "ok"), default=math.nan
        )
        for case in grid
        for name in names
    }
    lines = [f"{'us':16}" + "".join(f"{name:>{width}}" for name in names)]
    for case in grid:
        times = [best[case.label, name] for name in names]
        fastest = min((t for t in times if not math.isnan(t)), default=math.nan)
        lines.append(f"{case.label:16}" + "".join(f"{t:>{width - 1}.1f}{'*' if t == fastest else ' '}" for t in times))
    means = [results.geomean([best[case.label, name] for case in grid]) for name in names]
    lines.append(f"{'geometric mean':16}" + "".join(f"{t:>{width - 1}.2f} " for t in means))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Check, time, print, write; 1 if an arrangement is wrong, 2 where the kernel cannot run."""
    parser = argparse.ArgumentParser(prog="python -m leanmla.kernels.hopper_cuda.tune", description="Check and time the arrangements.")
    parser.add_argument("names", nargs="*", metavar="arrangement", help=f"of {', '.join(ARRANGEMENTS)} (default: all)")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=f"of the cache (default: {FORMATS[0]})")
    parser.add_argument("--rounds", type=int, default=2, help="times each case is timed (default: 2)")
    parser.add_argument("--check-only", action="store_true", help="do not time")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(argv)
    names = options.names or list(ARRANGEMENTS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = cases.contest_cases()
    try:
        if options.json is not None:
            results.check_writable(options.json)
        for name in names:
            with using(name):
                reason = why_not(BACKEND, data.problem_of(grid[0], options.format), describe(device))
            if reason is not None:
                raise BackendUnavailable(f"backend='{BACKEND}' cannot run this: {reason}.")
    except LeanMLAError as error:
        print(error)
        return 2
    print(f"{describe(device).name}, torch {torch.__version__}, {options.format}; two groups up to {FEW_TILES} tiles a multiprocessor")
    wrong = _checked(names, options.format, device)
    right = [name for name in names if not wrong[name]]
    found = timed(right, options.format, grid, options.rounds, device) if right and not options.check_only else []
    if found:
        print(table(right, grid, found))
    if options.json is not None:
        document = {"schema": SCHEMA, "format": options.format, "environment": environment.environment(device), "wrong": wrong, "results": found}
        results.write_json(options.json, document)
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
