"""How fast the CPU backend is beside plain torch, as ratios measured in one run.

    python benchmarks/cpu_ratios.py [--json FILE] [--rounds 15] [--case 4,8192,16] [--without-bf16-dot]

Every path is timed once a round, in turn, so that whatever else the machine does falls on all of them. Times are wall
clock, the median and the least of the rounds. Results are checked first: a wrong path gets no number. Paths that run in one
round evict each other's caches from the last level, except where that holds them all.

torch paths, on one [batch, kv, 576] tensor per dtype:
* sdpa: scaled_dot_product_attention with one key head, the query heads as its rows;
* bmm: bmm, softmax in fp32, bmm;
* sdpa, v = k: the same with all 576 values as the value and the surplus cut off the output. Equal sizes let torch take
  its fused kernel. Not one of the paths that the targets were set against.

--without-bf16-dot shows a machine with AVX-512 that has no bf16 instructions: oneDNN, on which torch's bf16 products run, is
held to that level, and the backend computes in fp32.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

CASES = ((4, 8192, 16), (1, 65536, 16), (256, 1024, 16), (4, 8192, 128))
PAGE = 64
SM_SCALE = 576**-0.5


@dataclass(frozen=True)
class Target:
    """``path`` takes at most ``ratio`` times as long as the faster of the sdpa and bmm paths in ``dtype``."""

    path: str
    dtype: str
    ratio: float


#: Set for batch 4, kv 8192, 16 heads.
TARGETS = (
    Target("leanmla bf16", "bf16", 0.30),
    Target("leanmla fp8", "bf16", 0.35),
    Target("leanmla mxfp4", "bf16", 0.35),
    Target("leanmla bf16", "fp32", 0.80),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", action="append", help="batch,kv,heads; may be repeated")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds of sleep before each timing")
    parser.add_argument("--without-bf16-dot", action="store_true")
    args = parser.parse_args()
    if args.without_bf16_dot:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"  # read when oneDNN loads, hence before torch

    import torch
    from rich.console import Console

    from leanmla.bench.environment import environment
    from leanmla.bench.results import check_writable, write_json

    if args.json:
        check_writable(args.json)
    cases = [tuple(int(n) for n in case.split(",")) for case in args.case] if args.case else CASES
    console = Console()
    console.width = max(console.width, 120)
    torch.manual_seed(0)
    results = []
    for batch, kv, heads in cases:
        paths, errors = _paths(batch, kv, heads, args.without_bf16_dot)
        times = _time(paths, args.rounds, args.idle)
        results.append(_result((batch, kv, heads), times, errors))
        console.print(_table(results[-1]))
    if args.json:
        document = {
            "command": shlex.join(["python", *sys.argv]),
            "environment": environment("cpu"),
            "without_bf16_dot": args.without_bf16_dot,
            "rounds": args.rounds,
            "idle_seconds": args.idle,
            "results": results,
        }
        write_json(args.json, document)
    return 0


def _paths(batch: int, kv: int, heads: int, without_bf16_dot: bool) -> tuple[dict, dict]:
    """(name -> callable, name -> relative L2 error against fp64)."""
    import torch

    from leanmla import LatentCache, PageTable, checks
    from leanmla.kernels.cpu.backend import CpuBackend

    keys = torch.randn(batch * kv, 576).to(torch.bfloat16)
    q = torch.randn(batch, heads, 576).to(torch.bfloat16)
    paths = {}
    for dtype, cast in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        k, x = keys.view(batch, kv, 576).to(cast), q.to(cast)
        paths[f"torch sdpa {dtype}"] = lambda k=k, x=x: _sdpa(x, k, k[..., :512])
        paths[f"torch bmm {dtype}"] = lambda k=k, x=x: _bmm(x, k)
        paths[f"torch sdpa, v = k, {dtype}"] = lambda k=k, x=x: _sdpa(x, k, k)[..., :512]
    errors = {name: _error(path(), q, keys.view(batch, kv, 576)) for name, path in paths.items()}

    pages = batch * kv // PAGE
    table = PageTable.from_block_table(
        torch.randperm(pages).int().view(batch, -1), torch.full((batch,), kv, dtype=torch.int32), page_size=PAGE
    )
    backend = CpuBackend(bf16_dot=False if without_bf16_dot else None)
    slots = torch.stack([table.slots(b) for b in range(batch)])
    for fmt in ("bf16", "fp8", "mxfp4", "fp8_tile128"):
        cache = LatentCache.allocate(pages, PAGE, format=fmt, device="cpu")
        cache.append(keys, slots.flatten())
        out = torch.empty(batch, heads, 512, dtype=q.dtype)
        call = checks.check_call(
            q, cache, table, sm_scale=SM_SCALE, qo_indptr=None, causal=True, logit_cap=0.0, out=out, return_lse=False,
            num_kv_splits=None, split_size=None, max_q_len=None, check_contents=True,
        )  # fmt: skip
        workspace = backend.make_workspace(call.problem, q.device)

        def path(call=call, workspace=workspace):
            backend.run(call, workspace)
            return call.out

        name = f"leanmla {fmt}"
        # The first and the last sequence stand for all: fp64 over the dequantised cache.
        errors[name] = _error(path(), q, {b: cache.gather(slots[b], torch.float64) for b in {0, batch - 1}})
        paths[name] = path
    for name, error in errors.items():
        if not error < 2e-2:
            raise SystemExit(f"{name}: relative error {error:.1e} against fp64, nothing was timed.")
    return paths, errors


def _sdpa(q, k, v):
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), scale=SM_SCALE).squeeze(1)


def _bmm(q, k):
    import torch

    logits = torch.bmm(q, k.transpose(1, 2)) * SM_SCALE
    return torch.bmm(torch.softmax(logits.float(), -1).to(q.dtype), k[..., :512])


def _error(out, q, keys) -> float:
    """Relative L2 error over the first and the last sequence."""
    import torch

    got, want = [], []
    for b in {0, len(q) - 1}:
        k = keys[b].double()
        want.append(torch.softmax(q[b].double() @ k.T * SM_SCALE, -1) @ k[:, :512])
        got.append(out[b].double())
    return float((torch.stack(got) - torch.stack(want)).norm() / torch.stack(want).norm())


def _time(paths: dict, rounds: int, idle: float) -> dict[str, list[float]]:
    """Milliseconds of each round."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    for r in range(rounds + 1):
        for name, path in paths.items():
            time.sleep(idle)
            start = time.perf_counter()
            path()
            if r:  # the first round warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def _result(case: tuple[int, int, int], times: dict[str, list[float]], errors: dict[str, float]) -> dict:
    batch, kv, heads = case
    median = {name: statistics.median(t) for name, t in times.items()}
    least = {name: min(t) for name, t in times.items()}
    rows = []
    for name in times:
        best = {d: min((f"torch sdpa {d}", f"torch bmm {d}"), key=median.__getitem__) for d in ("bf16", "fp32")}
        row = {"path": name, "median_ms": median[name], "least_ms": least[name], "error": errors[name]}
        for d in ("bf16", "fp32"):
            row[f"ratio_{d}"] = median[name] / median[best[d]]
            row[f"ratio_least_{d}"] = least[name] / min(least[f"torch sdpa {d}"], least[f"torch bmm {d}"])
        if case == CASES[0]:
            row["targets"] = [
                {"dtype": t.dtype, "ratio": t.ratio, "reached": row[f"ratio_{t.dtype}"] <= t.ratio}
                for t in TARGETS
                if t.path == name
            ]
        rows.append(row)
    return {"batch": batch, "kv": kv, "heads": heads, "rows": rows, "times_ms": times}


def _table(result: dict):
    from rich.table import Table

    table = Table(title=f"batch {result['batch']}, kv {result['kv']}, {result['heads']} heads", title_justify="left")
    for column in ("path", "ms", "least", "/ torch bf16", "/ torch fp32", "error", "target"):
        table.add_column(column, justify="left" if column in ("path", "target") else "right")
    for row in result["rows"]:
        verdicts = [
            f"{'[green]pass' if t['reached'] else '[red]miss'}[/] {t['dtype']} <= {t['ratio']:.2f}"
            for t in row.get("targets", ())
        ]
        digits = 2 if row["median_ms"] < 100 else 0
        table.add_row(
            row["path"], f"{row['median_ms']:.{digits}f}", f"{row['least_ms']:.{digits}f}",
            f"{row['ratio_bf16']:.2f}", f"{row['ratio_fp32']:.2f}", f"{row['error']:.1e}" if math.isfinite(row["error"]) else "nan",
            ", ".join(verdicts),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
