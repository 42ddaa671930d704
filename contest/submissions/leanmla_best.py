"""LeanMLA's submission to the mixed-mla contest: the cache format that is fastest here, one plan a shape.

Nothing is kept but plans, which hold scratch memory and no values: every call reads q, the cache, its scale and the offsets
where they are at that moment.
"""

from __future__ import annotations

import torch

from leanmla import DecodePlan, LatentCache, PageTable
from leanmla.contest.timing import time_call
from leanmla.device import describe

#: Fastest format by architecture, over the ranked cases. Where none is named, the first call of each shape measures.
BEST_FORMAT: dict[str, str] = {
    # 2 cores with AVX-512, ms for bf16 / mxfp4 / fp8: (4, 1024) 0.77 / 0.83 / 1.51, (32, 4096) 67 / 79 / 89. Few cores are short of
    # arithmetic, not of bandwidth, so the format that needs no decoding wins.
    "cpu": "bf16",
}
#: All lie within the contest's tolerance, 0.1 + 0.1 * |reference| but for 5 % of the elements: mxfp4 has a relative L2 error of
#: 0.13 at 1024 keys and 0.07 at 8192, where outputs are about 0.06 and 0.05, so that not one element is outside.
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


def _measure(name: str, data, repeats: int = 7) -> float:
    """Nanoseconds of the fastest of a few cold calls, timed as the contest does, after one that compiles."""
    _run(name, data)
    return min(time_call(lambda: _run(name, data), data[0].device)[1] for _ in range(repeats))


def custom_kernel(data):
    """Contest entry point: bf16 [total_q, num_heads, 512]."""
    q, config = data[0], data[4]
    shape = (config["batch_size"], config["q_seq_len"], config["kv_seq_len"], q.shape[1], q.device)
    name = _formats.get(shape)
    if name is None:
        name = BEST_FORMAT.get(describe(q.device).arch) or min(FORMATS, key=lambda f: _measure(f, data))
        _formats[shape] = name
    return _run(name, data)
