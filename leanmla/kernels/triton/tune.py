"""Time the candidate block sizes of the Triton decode kernel on this GPU: ``python -m leanmla.kernels.triton.tune fp8 mxfp4``.

For whoever edits ``launch_configs.py``; nothing is tuned at run time. A candidate whose result is wrong gets no time. Cold
cache: one CUDA graph holds calls on as many copies of the cache as exceed three times L2; the figure is the median of
replays divided by the number of calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import torch

from ... import checks
from ...cache import LatentCache
from ...device import describe
from ...formats import get
from ...page_table import PageTable
from ...problem import DIMS, DecodeArgs
from ...reference import mla_decode_reference
from ..launch_configs import TritonConfig, candidates
from .backend import BACKEND, FORMATS, Launches

#: (batch, keys a sequence)
SHAPES = ((4, 1024), (32, 1024), (64, 8192), (256, 8192))
_CHECKED = 3  #: sequences compared with the definition
_COPIES_BYTES = 160e6  #: three times an H200's L2 cache and a little


def _call(fmt: str, batch: int, kv: int, heads: int, page_size: int) -> DecodeArgs:
    n = batch * kv
    scale = {"scale": 5.5 / 448} if fmt == "fp8" else {}
    cache = LatentCache.allocate(n // page_size, page_size, format=fmt, device="cuda", **scale)  # type: ignore[arg-type]
    for lo in range(0, n, 1 << 18):
        slots = torch.arange(lo, min(n, lo + (1 << 18)), device="cuda")
        cache.append(torch.randn(slots.numel(), DIMS.qk_head_dim, device="cuda", dtype=torch.bfloat16), slots)
    pages = torch.randperm(n // page_size, device="cuda").to(torch.int32).view(batch, -1)
    table = PageTable.from_block_table(pages, torch.full((batch,), kv, dtype=torch.int32, device="cuda"), page_size=page_size)
    q = torch.randn(batch, heads, DIMS.qk_head_dim, device="cuda", dtype=torch.bfloat16)
    args = checks.check_call(
        q, cache, table, sm_scale=DIMS.qk_head_dim**-0.5, qo_indptr=None, causal=True, logit_cap=0.0, out=None,
        return_lse=False, num_kv_splits=None, split_size=None, max_q_len=None, check_contents=False,
    )  # fmt: skip
    return dataclasses.replace(args, out=torch.full((batch, heads, DIMS.v_head_dim), torch.nan, device="cuda", dtype=q.dtype))


def _error(args: DecodeArgs) -> float:
    """Relative L2 error of the first sequences."""
    n = min(_CHECKED, args.table.batch)
    assert args.table.page_ids is not None and args.table.cache_seqlens is not None
    table = PageTable.from_block_table(args.table.page_ids[:n], args.table.cache_seqlens[:n], page_size=args.table.page_size)
    want, _ = mla_decode_reference(args.q[:n], args.cache, table, sm_scale=args.sm_scale)
    return float((args.out[:n].double() - want).norm() / want.norm())


def _microseconds(calls: list, replays: int = 9) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    times = sorted(times[2:])
    return times[len(times) // 2]


def _name(c: TritonConfig) -> str:
    order = ("swapped, hoisted" if c.hoist else "swapped") if c.swapped else "straight"
    return f"{c.rows}x{c.block_kv} keys, {c.num_warps} warps, {c.num_stages} stages, {c.blocks_per_sm}/SM, {order}"


def main() -> None:
    """Print one line a candidate and shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=64)
    options = parser.parse_args()
    device = describe("cuda")
    print(f"{device.name}, torch {torch.__version__}")
    for fmt in options.formats:
        for batch, kv in SHAPES:
            copies = min(48, math.ceil(_COPIES_BYTES / (batch * kv * get(fmt).bytes_per_token)))
            calls = [_call(fmt, batch, kv, options.heads, options.page_size) for _ in range(copies)]
            for config in candidates(calls[0].problem, device):
                workspace = BACKEND.make_workspace(calls[0].problem, torch.device("cuda"), config)
                step = Launches(calls[0], workspace, config, device)
                runs = [lambda a=a, w=workspace, s=step: s(a, w) for a in calls]
                runs[0]()
                error = _error(calls[0])
                time = _microseconds(runs) if error < 3e-3 else math.nan
                print(f"{fmt:12} b{batch} kv{kv}: {time:8.1f} us, error {error:.1e}  {_name(config)}", flush=True)


if __name__ == "__main__":
    main()
