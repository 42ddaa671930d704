"""LeanMLA's submission to the mixed-mla contest: the cache format that ranks best here, one plan a shape, graphs on a GPU.

Nothing is kept but plans, which hold scratch and no values, and recordings of a step, which hold addresses: every call reads
q, the cache, its scale and the offsets where they are at that moment.
"""

from __future__ import annotations

import torch

from leanmla import DecodePlan, LatentCache, PageTable
from leanmla.contest.timing import time_call
from leanmla.device import describe

#: Format by architecture, over the ranked cases. Where none is named, the first call of each shape measures.
BEST_FORMAT: dict[str, str] = {
    # 2 cores with AVX-512, ms for bf16 / mxfp4 / fp8: (4, 1024) 0.77 / 0.83 / 1.51, (32, 4096) 67 / 79 / 89. Few cores are short of
    # arithmetic, not of bandwidth, so the format that needs no decoding wins.
    "cpu": "bf16",
    # H200, µs for bf16 / fp8 by the hopper backend / mxfp4 by the triton backend: (4, 1024) 11.9 / 12.8 / 15.7,
    # (4, 8192) 23.8 / 20.8 / 29.6, (32, 1024) 23.1 / 20.0 / 27.8, (32, 8192) 87 / 59 / 97, (64, 1024) 35.0 / 27.4 / 49.3,
    # (64, 8192) 156 / 93 / 176.
    "sm_90": "fp8",
}
#: All lie within the contest's tolerance, 0.1 + 0.1 * |reference| but for 5 % of the elements: mxfp4 has a relative L2 error of
#: 0.13 at 1024 keys and 0.07 at 8192, where outputs are about 0.06 and 0.05, so that not one element is outside.
FORMATS = ("mxfp4", "fp8", "bf16")
#: Kinds of device where a recorded step starts sooner than a plain call.
RECORDED_ON = ("cuda",)
#: Recordings kept. Each belongs to one set of addresses; benchmarks use one set, or take turns with a few.
MOST_RECORDINGS = 32

_plans: dict[tuple, DecodePlan] = {}
_formats: dict[tuple, str] = {}
_recorded: dict[tuple, object] = {}


def _parts(name: str, data):
    """(plan, arguments of a run) for a format."""
    q, kv_data, _, kv_indptr, config = data
    values, scale = (kv_data[name], None) if name == "bf16" else kv_data[name]
    key = (name, config["batch_size"], config["q_seq_len"], config["kv_seq_len"], q.shape[1], q.device)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = DecodePlan(
            num_heads=q.shape[1], format=name, page_size=1, max_batch=config["batch_size"], max_kv_len=config["kv_seq_len"],
            max_q_len=config["q_seq_len"], device=q.device,
        )  # fmt: skip
    return plan, (q, LatentCache.from_tensors(values, scale, format=name, page_size=1), PageTable.contiguous(kv_indptr))


def _run(name: str, data) -> torch.Tensor:
    """One step, into a tensor of its own."""
    plan, arguments = _parts(name, data)
    q, config = data[0], data[4]
    out = torch.empty(q.shape[0], q.shape[1], config["v_head_dim"], dtype=q.dtype, device=q.device)
    return plan.run(*arguments, sm_scale=config["sm_scale"], out=out, check_contents=False)


def _record(name: str, data):
    """One step as a callable that repeats it on the same addresses: a CUDA graph, whose launch takes the host 10 µs instead of 160."""
    plan, arguments = _parts(name, data)
    return plan.capture(*arguments, sm_scale=data[4]["sm_scale"])


def _measure(name: str, data, repeats: int = 7) -> float:
    """Nanoseconds of the fastest of a few cold calls, timed as the contest does, after one that compiles."""
    step = _record(name, data)
    step()
    return min(time_call(step, data[0].device)[1] for _ in range(repeats))


def _addresses(name: str, data) -> tuple:
    q, kv_data, _, kv_indptr, _ = data
    tensors = (q, kv_indptr, *((kv_data[name],) if name == "bf16" else kv_data[name]))
    return tuple((t.data_ptr(), t.stride()) for t in tensors)


def custom_kernel(data):
    """Contest entry point: bf16 [total_q, num_heads, 512]. On a GPU a repeated call on the same tensors overwrites its result."""
    q, config = data[0], data[4]
    shape = (config["batch_size"], config["q_seq_len"], config["kv_seq_len"], q.shape[1], config["sm_scale"], q.device)
    name = _formats.get(shape)
    new = name is None
    if name is None:
        name = BEST_FORMAT.get(describe(q.device).arch) or min(FORMATS, key=lambda f: _measure(f, data))
        _formats[shape] = name
    if q.device.type not in RECORDED_ON:
        return _run(name, data)
    # A shape's first call compiles and may as well record. Later a set of addresses is recorded when it is seen again: recording
    # takes longer than one plain call, and inputs that are new every time never come back.
    key = (name, shape, _addresses(name, data))
    step = _recorded.get(key)
    if step is None and (new or key in _recorded):
        step = _recorded[key] = _record(name, data)
    if step is not None:
        return step()
    if len(_recorded) >= MOST_RECORDINGS:
        _recorded.pop(next(iter(_recorded)))
    _recorded[key] = None
    return _run(name, data)
