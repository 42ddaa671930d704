"""``leanmla run``: the main job. The contest's ranked cases, every cache format, checked, on whatever machine this is."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from typing import TYPE_CHECKING

from .bench import print_problems
from .output import Output, new_table
from .words import check_seconds, pick_device, resolve_settings, time_unit

if TYPE_CHECKING:
    from ..bench.cases import BenchCase

__all__ = ["add_arguments", "main"]

SCHEMA = "leanmla-run/1"
#: Largest cache to build, whatever the machine has.
MEMORY_LIMIT = 4 << 30
#: Calls of a backend for a case and format: check, warm-up, samples, check of the timed calls.
CALLS = 7
#: Seconds a case costs besides decoding: the fp64 checks, and a token's share of filling the caches.
FIXED_SECONDS, SECONDS_PER_TOKEN = 1.5, 4e-6
#: A case expected to take less than this is not made smaller: what small cases say about a token's time is mostly overhead.
WORTH_SHRINKING = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``leanmla run``."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: cuda if there is one)")
    parser.add_argument("--backend", default="auto", help="auto or a backend's name (default: auto)")
    parser.add_argument("--formats", default="all", metavar="NAMES",
                        help="cache formats with commas, or all that have a kernel here (default: %(default)s)")  # fmt: skip
    parser.add_argument("--cases", default="contest", help="contest, or BATCHxKV with commas (default: contest)")
    parser.add_argument("--time-limit", type=float, default=40, metavar="S",
                        help="make batches smaller so that it all takes about S seconds (default: %(default)s)")  # fmt: skip


def main(args: argparse.Namespace, out: Output) -> int:
    """Run it; 1 if a result is wrong, 2 if there is no result at all."""
    from ..bench.cases import cases_named
    from ..bench.data import LatentPool, problem_of
    from ..bench.environment import command_line, environment
    from ..bench.measure import Measurement, measure_case
    from ..bench.runner import contenders_for, formats_named
    from ..device import describe, free_memory

    check_seconds(args.time_limit, "--time-limit")
    device = pick_device(args.device)
    cases = cases_named(args.cases)
    names = formats_named([f.strip() for f in args.formats.split(",")], cases, device)
    autos = names if args.backend == "auto" else []
    resolve_settings((problem_of(case, f) for f in autos for case in cases), describe(device))
    memory = min(MEMORY_LIMIT, (free_memory(device) or 2 * MEMORY_LIMIT) // 2)
    contenders = contenders_for(cases, names, args.backend, [], device)
    results: list[Measurement] = []
    shrunk: list[str] = []
    start = time.monotonic()
    with out.steps(len(cases), "run") as steps:
        steps.now("latents")
        pool = LatentPool(device)
        for i, case in enumerate(cases):
            left = args.time_limit - (time.monotonic() - start)
            fitted, why = _fit(case, cases[i:], names, memory, left, _seconds_per_token(results))
            if why:
                shrunk.append(f"{fitted.label} ({why})")
            measured = measure_case(fitted, contenders, pool, seconds=0.2, min_rounds=3, max_rounds=15, checked_sequences=4,
                                    by_format=True, on_step=steps.now)  # fmt: skip
            for r in measured:
                if r.status == "skipped" and fitted is not case:
                    r.message = _too_large(case, fitted, r.format)
            results += measured
            steps.advance()
    seconds = time.monotonic() - start
    some = any(r.status == "ok" for r in results)
    ok = some and all(r.status in ("ok", "refused") for r in results)
    out.json({
        "schema": SCHEMA, "command": command_line(), "ok": ok, "seconds": round(seconds, 1), "shrunk": shrunk,
        "environment": environment(device), "results": [r.document() for r in results],
    })  # fmt: skip
    _print(out, describe(device), results, shrunk, seconds)
    if not some and all(r.status in ("refused", "skipped") for r in results):
        return 2
    return 0 if ok else 1


def _too_large(case: BenchCase, fitted: BenchCase, format: str) -> str:
    """Why a case does not even run with fewer sequences."""
    from ..bench.data import bytes_of

    whole, part = (f"{bytes_of(c, format) / 2**30:,.1f} GiB" for c in (case, fitted))
    count = "one sequence" if fitted.batch == 1 else f"{fitted.batch} sequences"
    return f"{case.label} needs {whole} for the cache, {count} of it {part}, more than there is"


def _seconds_per_token(results) -> float:
    """Decode time for one token in all formats, from the largest case done so far; 0 before the first."""
    from ..formats import get

    if not results:
        return 0.0
    last = results[-1].case
    done = [r for r in results if r.case == last and r.status == "ok"]
    if not done:
        return 0.0
    tokens = done[0].cache_bytes / get(done[0].format).bytes_per_token
    return sum(r.time_us for r in done) / 1e6 / tokens


def _fit(
    case: BenchCase, remaining: list[BenchCase], names: list[str], memory: int, seconds: float, per_token: float
) -> tuple[BenchCase, str]:
    """The case with as many sequences as memory and time allow, and the reason if those are fewer."""
    from ..bench.data import bytes_of

    batch, why = case.batch, ""
    largest = max(bytes_of(case, f) for f in names)
    if largest > memory:
        batch, why = max(1, math.floor(case.batch * memory / largest)), "memory"
    budget = max(seconds - FIXED_SECONDS * len(remaining), seconds / 4)
    seconds_per_token = per_token * CALLS + SECONDS_PER_TOKEN
    need = sum(c.tokens for c in remaining) * seconds_per_token
    if need > budget and (case.tokens * seconds_per_token > WORTH_SHRINKING or budget <= 0):
        timely = max(1, math.floor(case.batch * max(budget, 0) / need))
        if timely < batch:
            batch, why = timely, "time"
    if batch == case.batch:
        return case, ""
    return dataclasses.replace(case, kv_lens=case.kv_lens[:batch], name=f"{batch} of {case.label}"), why


def _print(out: Output, info, results, shrunk: list[str], seconds: float) -> None:
    unit, scale = time_unit(info.kind)
    caption = [
        "case: sequences x keys; 16 heads, one query row, pages of 64 in random order.",
        "error: relative L2 error of the output against fp64 on the same cache, over "
        f"{max((r.checked_sequences for r in results), default=0)} sequences at most of each batch; all outputs are finite.",
        "cost: what the cache format itself costs: fp64 on this cache against fp64 on the bf16 cache.",
    ]
    if shrunk:
        caption.append(f"Made smaller to fit this machine: {', '.join(shrunk)}.")
    if any(r.backend == "reference" for r in results):
        caption.append("reference is the fp64 definition and slow; leanmla info says why nothing faster runs here.")
    caption.append(f"Took {seconds:.0f} s.")
    table = new_table(f"MLA decode on {info.name}", "case", "cache", "by", f">{unit}", ">GB/s", ">error", ">cost", ">cache MiB")
    last = None
    for r in results:
        if r.status == "refused":
            continue
        if last is not None and r.case != last:
            table.add_section()
        head = (r.case if r.case != last else "", r.format, r.backend or r.contender.split()[0])
        last = r.case
        mib = f"{r.cache_bytes / 2**20:.1f}"
        if r.status != "ok":
            table.add_row(*head, r.status.upper(), "", "", "", mib)
            continue
        cost = "" if r.format == "bf16" else f"{r.quantisation_error:.1e}"
        table.add_row(*head, f"{r.time_us * scale:.4g}", f"{r.tb_s * 1e3:.3g}", f"{r.relative_error:.1e}", cost, mib)
    out.print(table, *caption)
    print_problems(out, results)
