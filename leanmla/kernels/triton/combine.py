"""Merge the partial results of a sequence's items: softmax over their lse, then the weighted sum.

Grid: (batch * row groups * column blocks,). A program merges ROWS query rows, one after the other, x COLS columns. Sequences
with one item have been written by the decode kernel and are left alone; ROWS keeps down how many programs only find that
out (8192 of them cost 6 us).

A part with weight 0 is skipped, never multiplied: its partial output may not have been written (0 * NaN). The order of
summation depends only on the number of items, so results repeat bit for bit.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def combine_kernel(
    out_ptr,  # [total_q, num_heads, 512] bf16 | fp16
    lse_ptr,  # [total_q, num_heads] fp32, natural log
    partial_out_ptr,  # [items, row_tiles, R, 512] fp32
    partial_lse_ptr,  # [items, row_tiles, R] fp32, base 2
    splits_ptr,  # [batch] int32
    first_ptr,  # [batch] int32
    qo_indptr_ptr,  # [batch+1] int32 (RAGGED_Q)
    batch,
    num_splits,  # PLAN == "fixed"
    q_len,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    row_groups,  # groups of ROWS query rows a sequence
    H: tl.constexpr,
    R: tl.constexpr,
    ROW_TILES: tl.constexpr,
    RAGGED_Q: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PLAN: tl.constexpr,
    PARTS: tl.constexpr,  # items read at a time
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,  # launched while the decode kernel still runs: wait for its results
):
    COL_BLOCKS: tl.constexpr = 512 // COLS
    pid = tl.program_id(0)
    column = pid % COL_BLOCKS
    group = pid // COL_BLOCKS % row_groups
    b = pid // (COL_BLOCKS * row_groups)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PLAN == "fixed":
        n = num_splits
        first = b * num_splits
    else:
        n = tl.load(splits_ptr + b)
        first = tl.load(first_ptr + b)
    if n == 1:
        return
    if RAGGED_Q:
        q_first = tl.load(qo_indptr_ptr + b)
        n_tokens = tl.load(qo_indptr_ptr + b + 1) - q_first
    else:
        q_first = b * q_len
        n_tokens = q_len
    part = tl.arange(0, PARTS)
    d = column * COLS + tl.arange(0, COLS)
    for i in range(tl.minimum(ROWS, n_tokens * H - group * ROWS)):
        row = group * ROWS + i
        at = (first.to(tl.int64) * ROW_TILES + row // R) * R + row % R  # of part 0
        step = ROW_TILES * R
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        acc = tl.zeros([COLS], tl.float32)
        for s0 in range(0, n, PARTS):
            lse = tl.load(partial_lse_ptr + at + (s0 + part).to(tl.int64) * step, mask=s0 + part < n, other=float("-inf"))
            has = lse != float("-inf")  # NaN has
            x = tl.load(
                partial_out_ptr + (at + (s0 + part).to(tl.int64) * step)[:, None] * 512 + d[None, :], mask=has[:, None], other=0.0
            )
            new = tl.maximum(top, tl.max(lse, 0))
            reference = tl.where(new == float("-inf"), 0.0, new)
            w = tl.where(has, tl.exp2(lse - reference), 0.0)
            keep = tl.exp2(top - reference)
            acc = acc * keep + tl.sum(w[:, None] * x, 0)
            total = total * keep + tl.sum(w, 0)
            top = new
        seen = total != 0.0
        o = tl.where(seen, acc / tl.where(seen, total, 1.0), 0.0)
        token = (q_first + row // H).to(tl.int64)
        head = (row % H).to(tl.int64)
        tl.store(out_ptr + token * stride_out_token + head * stride_out_head + d, o.to(out_ptr.dtype.element_ty))
        if WRITE_LSE and column == 0:
            value = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) / LOG2E, float("-inf"))
            tl.store(lse_ptr + token * stride_lse_token + head, value)
