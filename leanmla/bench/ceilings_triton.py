"""Triton kernels behind the GPU ceilings: read everything and keep a sum; do nothing."""

import triton
import triton.language as tl

__all__ = ["nothing", "read_all"]


@triton.jit
def read_all(
    x_ptr,  # [n] int32
    sums_ptr,  # [programs] int32; the sums keep the loads alive
    n,  # elements, a multiple of BLOCK
    BLOCK: tl.constexpr,
):
    total = tl.zeros([BLOCK], tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for at in tl.range(start, n, step, num_stages=4):
        total += tl.load(x_ptr + at + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def nothing(x_ptr):
    pass
