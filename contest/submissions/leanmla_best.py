"""LeanMLA's submission to the mixed-mla contest: the cache format that is fastest here, one plan a shape.

Nothing is kept but plans, which hold scratch memory and no values: every call reads q, the cache, its scale and the offsets
where they are at that moment.
"""

from __future__ import annotations

import time

import torch

from leanmla import DecodePlan, LatentCache, PageTable
from leanmla.device import describe

#: Fastest format by architecture, over the ranked cases. Where none is named, the first call of each shape measures.
BEST_FORMAT: dict[str, str] = {}
#: All lie within the contest's tolerance; mxfp4's relative error to the reference is 0.18, of which 5 % may exceed 0.1 + 0.1 |ref|.
FORMATS = ("mxfp4", "fp8", "bf16")

_plans: dict[tuple, DecodePlan] = {}
_formats: dict[tuple, str] = {}


def _run(name: str, data) -> torch.Tensor:
    q, kv_data, _, kv_indptr, config = data
    values, scale = (kv_data[name], None) if name == "bf16" else kv_data[name]
    key = (name, config["batch_size"], config["q_seq_len"], config["kv_seq_len"], q.shape[1], q.device)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = DecodePlan(
            num_heads=q.shape[1], format=name, page_size=1, max_batch=config["batch_size"], max_kv_len=config["kv_seq_len"],
            max_q_len=config["q_seq_len"], device=q.device,
        )  # fmt: skip
    # A result of its own for every call: the plan's buffer would be overwritten by the next one.
    out = torch.empty(q.shape[0], q.shape[1], config["v_head_dim"], dtype=q.dtype, device=q.device)
    cache = LatentCache.from_tensors(values, scale, format=name, page_size=1)
    return plan.run(
        q, cache, PageTable.contiguous(kv_indptr), sm_scale=config["sm_scale"], out=out, check_contents=False
    )  # fmt: skip


def _measure(name: str, data, repeats: int = 5) -> float:
    """Seconds of the fastest of a few calls, after one that compiles."""
    on_gpu = data[0].is_cuda
    best = float("inf")
    for i in range(repeats + 1):
        begin = time.perf_counter()
        _run(name, data)
        if on_gpu:
            torch.cuda.synchronize()
        if i:
            best = min(best, time.perf_counter() - begin)
    return best


def custom_kernel(data):
    """Contest entry point: bf16 [total_q, num_heads, 512]."""
    q, config = data[0], data[4]
    shape = (config["batch_size"], config["q_seq_len"], config["kv_seq_len"], q.shape[1], q.device)
    name = _formats.get(shape)
    if name is None:
        name = BEST_FORMAT.get(describe(q.device).arch) or min(FORMATS, key=lambda f: _measure(f, data))
        _formats[shape] = name
    return _run(name, data)
