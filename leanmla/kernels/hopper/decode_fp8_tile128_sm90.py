"""MLA decode over an ``fp8_tile128`` latent cache on Hopper: e4m3 values with four fp32 scales a key, and a bf16 rope part.

The fp8 kernel's roles and operand order (``decode_fp8_sm90``). What differs:

* Every panel of 128 values has a score accumulator of its own anyway; each is multiplied by its key's scale before the four are
  added. The rope part is a bf16 product of its own, the query's as two bf16 terms where it is fp16.
* Values are weighted by P_t = P * scale[key, t], one fp16 probability tile for each panel t of 128 values, and widened to fp16.
  So that P_t fits fp16 whatever the scales are, the softmax runs on x + e, e the exponent of the key's largest scale, as in
  ``decode_mxfp4_sm90``: P' = exp2(x + e - max(x + e)), P_t = P' * scale_t / 2^e <= 2 P'.
* Rows of 656 bytes are five panels of 128 bytes (the rope part is one too) and one of 16, for the same tensor map boxes.

ROWS is 16 (two blocks an SM) or 32; more rows are several tiles, since four probability tiles need one warpgroup to hold all values.
"""

import torch

from ...problem import DecodeArgs
from .arguments import NOT_SPECIALISED, cache_view, constants, tensors
from .decode_mxfp4_sm90 import power_factor, weights
from .dependent_launch import let_kernel_after_begin, wait_for_kernel_before
from .fp8_operands import interleave, round_e4m3, row_factor, score_part, sum_terms, widen
from .gluon_names import (
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    SliceLayout,
    SwizzledSharedLayout,
    TensorDescriptor,
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .launch import HopperLaunch
from .loader import _places, clear_hidden, clear_rows, uniform
from .pages import BLOCK, Pages
from .reduction import column_of, counter_of, meet, store_columns, turn_over
from .schedule import has_work, plan_piece, segment, split_slots
from .softmax import LOG2E, log2, reciprocal, row_limits

__all__ = ["decode_fp8_tile128", "launch"]

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
ROW_BYTES = gl.constexpr(656)
SCALE_BYTE = gl.constexpr(512)
ROPE_BYTE = gl.constexpr(528)
LN2 = gl.constexpr(0.6931471805599453)
#: P' is scaled by 2^14: times a scale below 2^(e + 1) it still fits fp16.
P_SHIFT = gl.constexpr(14)
#: [64 keys, 4 scales] with the keys where the score accumulator has them.
_SCALES = gl.constexpr(
    DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
#: [16 keys, 64 byte pairs] by ldmatrix.trans, in the order of a 16-bit A fragment.
_PAIRS = gl.constexpr(
    DistributedLinearLayout(
        [[1, 0], [0, 8], [8, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [], [16, 64]
    )
)


# ---- the loader


@gluon.jit
def _fetch(desc, desc_scale, latent, rope, scales, full, stage, places, BOX: gl.constexpr):
    """A tile into ``stage`` by boxes of [BOX keys, 128 bytes], and [BOX, 4 scales]."""
    PARTS: gl.constexpr = BLOCK // BOX
    mbarrier.expect(full.index(stage), BLOCK * ROW_BYTES)
    for j in gl.static_range(PARTS):
        page = places[j][0]
        row = places[j][1]
        for p in gl.static_range(4):
            tma.async_copy_global_to_shared(desc, [page, row, p * 128], full.index(stage), latent.index((stage * 4 + p) * PARTS + j))
        tma.async_copy_global_to_shared(desc, [page, row, ROPE_BYTE], full.index(stage), rope.index(stage * PARTS + j))
        tma.async_copy_global_to_shared(desc_scale, [page, row, SCALE_BYTE // 4], full.index(stage), scales.index(stage * PARTS + j))


@gluon.jit
def _gather_part(ptr, page_stride, token_stride, smem, pages, first_id, token, kv_len, FIRST: gl.constexpr, WIDTH: gl.constexpr, VEC: gl.constexpr):
    """Elements FIRST .. FIRST + WIDTH of a tile's keys by cp.async, VEC (16 bytes) a lane; strides in 16 bytes. Keys past the end become zeros."""
    LANES: gl.constexpr = min(32, WIDTH // VEC)
    L: gl.constexpr = BlockedLayout([1, VEC], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    t = token + gl.arange(0, BLOCK, SliceLayout(1, L))
    ok = t < kv_len
    page = pages.row_pages(first_id, t, ok)
    at = pages.offsets(page, first_id, t, ok, page_stride, token_stride) * VEC
    d = FIRST + gl.arange(0, WIDTH, SliceLayout(0, L))[None, :]
    async_copy.async_copy_global_to_shared(smem, ptr + (at[:, None] + d), mask=ok[:, None] & (d >= 0))


@gluon.jit
def _loader(
    desc, desc_scale, cache_ptr, rope_ptr, scale_ptr, page_stride, token_stride, latent, rope, scales, full, empty,
    counter_ptr, counters, turn, pages, piece, first_row,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, GATHER: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Fetches every tile of the worker's segments, in order, as stages become free."""
    b = piece.b
    at = piece.start
    base = piece.base
    more = has_work(piece, MODE)
    fetched = 0
    while more:
        kv_len, first_id, lo, hi, follow = segment(pages, piece, b, at, base, MODE)
        _, q_count = pages.query(b)
        if first_row < q_count * HEADS:
            for i in range(lo, hi):
                stage = fetched % STAGES
                parity = ((fetched // STAGES) & 1) ^ 1
                if GATHER:
                    mbarrier.wait(empty.index(stage), parity)
                    token = i * BLOCK
                    _gather_part(scale_ptr, page_stride, token_stride, scales.index(stage), pages, first_id, token, kv_len, SCALE_BYTE // 4, 4, 4)
                    _gather_part(rope_ptr, page_stride, token_stride, rope.index(stage), pages, first_id, token, kv_len, ROPE_BYTE // 2, ROPE, 8)
                    _gather_part(cache_ptr, page_stride, token_stride, latent.index(stage), pages, first_id, token, kv_len, 0, LATENT, 16)
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                else:
                    # page ids are asked for before the wait, so that they come in during it
                    places = _places(pages, first_id, i * BLOCK, kv_len, BOX)
                    mbarrier.wait(empty.index(stage), parity)
                    _fetch(desc, desc_scale, latent, rope, scales, full, stage, places, BOX)
                fetched += 1
        base = follow
        at = follow
        b += 1
        more = (follow < piece.end) & (MODE == 0)
    if GATHER:
        async_copy.wait_group(0)
    turn_over(counter_ptr, counters, turn)
    let_kernel_after_begin()


# ---- the mathematicians


@gluon.jit
def _load_q_rows(q_ptr, stride_token, stride_head, q_latent, q_rope, q_scale, q_first, first_row, rows,
                 HEADS: gl.constexpr, ROWS: gl.constexpr, R0: gl.constexpr):  # fmt: skip
    """Query rows R0 .. R0 + 15 of the tile: the latent part as e4m3 terms hi and lo, ROWS apart, and ``q_scale``, which undoes their
    scaling; the rope part as bf16 terms hi and lo."""
    L: gl.constexpr = BlockedLayout([1, 16], [1, 32], [gl.num_warps(), 1], [1, 0])
    LR: gl.constexpr = BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    r = R0 + gl.arange(0, 16, SliceLayout(1, L))
    at = (q_first + (first_row + r) // HEADS).to(gl.int64) * stride_token + (first_row + r) % HEADS * stride_head
    d = gl.arange(0, LATENT, SliceLayout(0, L))
    x = gl.load((q_ptr + at)[:, None] + d[None, :], mask=(r < rows)[:, None], other=0.0).to(gl.float32)
    rr = R0 + gl.arange(0, 16, SliceLayout(1, LR))
    at_r = (q_first + (first_row + rr) // HEADS).to(gl.int64) * stride_token + (first_row + rr) % HEADS * stride_head
    dr = LATENT + gl.arange(0, ROPE, SliceLayout(0, LR))
    y = gl.load((q_ptr + at_r)[:, None] + dr[None, :], mask=(rr < rows)[:, None], other=0.0).to(gl.float32)
    factor, back = row_factor(gl.max(gl.abs(x), 1))
    q_scale.slice(R0, 16).store(back)
    x = x * factor[:, None]
    hi = round_e4m3(x)
    q_latent.slice(R0, 16).store(hi.to(gl.float8e4nv))
    q_latent.slice(R0 + ROWS, 16).store((x - hi).to(gl.float8e4nv))
    hi_r = y.to(gl.bfloat16)
    q_rope.slice(R0, 16).store(hi_r)
    q_rope.slice(R0 + ROWS, 16).store((y - hi_r.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _largest(scales, valid):
    """A reference exponent for a segment: that of the largest finite scale of the ``valid`` first keys of its first tile, 1..254."""
    L: gl.constexpr = BlockedLayout([2, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    byte = (scales.load(L).to(gl.int32, bitcast=True) >> 23) & 0xFF
    key = gl.arange(0, BLOCK, SliceLayout(1, L))
    return gl.maximum(gl.max(gl.max(gl.where((key < valid)[:, None] & (byte < 255), byte, 0), 1), 0), 1)


@gluon.jit
def _key_scales(scales, S: gl.constexpr):
    """The four scales of every key, and the exponent byte of the largest; each [64] as the rows of the scores."""
    x = gl.reshape(scales.load(_SCALES), [BLOCK, 2, 2])
    even, odd = gl.split(x)
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    s0 = gl.convert_layout(s0, SliceLayout(1, S), assert_trivial=True)
    s1 = gl.convert_layout(s1, SliceLayout(1, S), assert_trivial=True)
    s2 = gl.convert_layout(s2, SliceLayout(1, S), assert_trivial=True)
    s3 = gl.convert_layout(s3, SliceLayout(1, S), assert_trivial=True)
    bits = gl.maximum(
        gl.maximum(s0.to(gl.int32, bitcast=True) & 0x7FFFFFFF, s1.to(gl.int32, bitcast=True) & 0x7FFFFFFF),
        gl.maximum(s2.to(gl.int32, bitcast=True) & 0x7FFFFFFF, s3.to(gl.int32, bitcast=True) & 0x7FFFFFFF),
    )
    return s0, s1, s2, s3, bits >> 23


@gluon.jit
def _scores(latent, rope, q_latent, q_rope, stage, s0, s1, s2, s3, row_scale, scale,
            S2: gl.constexpr, SR: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Base-2 logits [64, ROWS] of a tile: one accumulator a panel, times the keys' scales; the next product runs meanwhile."""
    zero = uniform(gl.minimum(stage, 0))  # stage >= 0: keeps the query's descriptors out of vector registers
    k = latent.index(stage)
    q = q_latent.index(zero)
    r = warpgroup_mma(rope.index(stage), q_rope.index(zero).permute((1, 0)), gl.zeros([BLOCK, 2 * ROWS], gl.float32, SR), use_acc=False, is_async=True)
    a = score_part(k.slice(0, 128, dim=1), q.slice(0, 128, dim=1), S2, ROWS)
    r = warpgroup_mma_wait(1, deps=[r])
    x = sum_terms(r, S, ROWS, 1) * scale
    b = score_part(k.slice(128, 128, dim=1), q.slice(128, 128, dim=1), S2, ROWS)
    a = warpgroup_mma_wait(1, deps=[a])
    lat = sum_terms(a, S, ROWS, 1) * s0[:, None]
    a = score_part(k.slice(256, 128, dim=1), q.slice(256, 128, dim=1), S2, ROWS)
    b = warpgroup_mma_wait(1, deps=[b])
    lat += sum_terms(b, S, ROWS, 1) * s1[:, None]
    b = score_part(k.slice(384, 128, dim=1), q.slice(384, 128, dim=1), S2, ROWS)
    a = warpgroup_mma_wait(1, deps=[a])
    lat += sum_terms(a, S, ROWS, 1) * s2[:, None]
    b = warpgroup_mma_wait(0, deps=[b])
    lat += sum_terms(b, S, ROWS, 1) * s3[:, None]
    return x + lat * row_scale[None, :]


@gluon.jit
def _store_weights(p, s, undo, tile):
    """P_t = P' * scale / 2^e to its tile."""
    tile.store((p * (s * undo)[:, None]).to(gl.float16))


@gluon.jit
def _pair(pairs, K: gl.constexpr, T: gl.constexpr, A: gl.constexpr):
    """fp16 A operands of the even and odd values of panel T, keys 16 K on."""
    return widen(pairs.slice(K * 16, 16).slice(T * 64, 64, dim=1).load(_PAIRS), A)


@gluon.jit
def _mathematician(
    q_ptr, q_stride_token, q_stride_head, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    part_out_ptr, part_lse_ptr, counter_ptr, counters, turn, latent, rope, scales, q_latent, q_rope, q_scale, p0, p1, p2, p3, full, empty,
    pages, piece, workers, tile, tiles, sm_scale, logit_cap, may_wait,
    HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr, MODE: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, values and the way out, segment after segment."""
    S2: gl.constexpr = NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * ROWS, 32])
    SR: gl.constexpr = NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * ROWS, 16])
    S: gl.constexpr = NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    O: gl.constexpr = NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = DotOperandLayout(0, O, 2)
    PAIRS: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    scale = sm_scale * LOG2E
    b = piece.b
    at = piece.start
    base = piece.base
    more = has_work(piece, MODE)
    used = 0
    while more:
        kv_len, _, lo, hi, follow = segment(pages, piece, b, at, base, MODE)
        q_first, q_count = pages.query(b)
        # kv_len is never negative: the term keeps offsets of rows from being worked out once, before the loop, and spilled.
        first_row = tile * ROWS + gl.minimum(kv_len, 0)
        rows = gl.minimum(q_count * HEADS - first_row, ROWS)
        if rows > 0:
            for r0 in gl.static_range(0, ROWS, 16):
                _load_q_rows(q_ptr, q_stride_token, q_stride_head, q_latent.index(0), q_rope.index(0), q_scale, q_first, first_row, rows, HEADS, ROWS, r0)
            fence_async_shared()
            row_scale = q_scale.load(SliceLayout(0, S)) * scale
            limit = row_limits(gl.arange(0, ROWS, SliceLayout(0, S)), first_row, HEADS, q_count, kv_len, CAUSAL)
            # keys that every row of the tile sees
            shared_keys = kv_len
            if CAUSAL:
                shared_keys = gl.minimum(kv_len, kv_len - q_count + 1 + first_row // HEADS)
            none_yet = gl.zeros([64, ROWS], gl.float32, O)
            e0 = none_yet
            o0 = none_yet
            e1 = none_yet
            o1 = none_yet
            e2 = none_yet
            o2 = none_yet
            e3 = none_yet
            o3 = none_yet
            m = gl.full([ROWS], float("-inf"), gl.float32, SliceLayout(0, S))
            den = gl.zeros([BLOCK, ROWS], gl.float32, S)
            c = 127
            if lo < hi:
                mbarrier.wait(full.index(used % STAGES), (used // STAGES) & 1)
                c = _largest(scales.index(used % STAGES), kv_len - lo * BLOCK)
            for i in range(lo, hi):
                stage = uniform(used % STAGES)
                mbarrier.wait(full.index(stage), (used // STAGES) & 1)
                if GATHER:
                    fence_async_shared()  # cp.async writes like an ordinary store
                elif i * BLOCK + BLOCK > kv_len:
                    clear_rows(latent, stage, kv_len - i * BLOCK, 8)
                s0, s1, s2, s3, e = _key_scales(scales.index(stage), S)
                x = _scores(latent, rope, q_latent, q_rope, stage, s0, s1, s2, s3, row_scale, scale, S2, SR, S, ROWS)
                # a scale that is NaN or infinite voids the key's logits
                x = gl.where((e == 255)[:, None], float("nan"), x)
                p, m, den, alpha = weights(x, e, c, m, den, i, limit, shared_keys, logit_cap, S, HAS_CAP, P_SHIFT)
                undo = power_factor(254 - e)
                good = e < 255
                _store_weights(p, gl.where(good, s0, 1.0), undo, p0)
                _store_weights(p, gl.where(good, s1, 1.0), undo, p1)
                _store_weights(p, gl.where(good, s2, 1.0), undo, p2)
                _store_weights(p, gl.where(good, s3, 1.0), undo, p3)
                fence_async_shared()
                if CAUSAL and i * BLOCK + BLOCK > shared_keys:
                    clear_hidden(latent, stage, shared_keys - i * BLOCK, kv_len - i * BLOCK, STAGES, 8)
                factor = gl.convert_layout(alpha, SliceLayout(0, O))[None, :]
                e0 = e0 * factor
                o0 = o0 * factor
                e1 = e1 * factor
                o1 = o1 * factor
                e2 = e2 * factor
                o2 = o2 * factor
                e3 = e3 * factor
                o3 = o3 * factor
                pairs = latent.index(stage)._reinterpret(gl.int16, [BLOCK, LATENT // 2], PAIRS)
                # while the products of one panel run, the next is loaded and widened
                a0, b0 = _pair(pairs, 0, 0, A)
                a3, b3 = a0, b0
                for k in gl.static_range(BLOCK // 16):
                    e0 = warpgroup_mma(a0, p0.slice(k * 16, 16), e0, is_async=True)
                    o0 = warpgroup_mma(b0, p0.slice(k * 16, 16), o0, is_async=True)
                    if k > 0:
                        e3, o3, a3, b3 = warpgroup_mma_wait(2, deps=[e3, o3, a3, b3])
                    a1, b1 = _pair(pairs, k, 1, A)
                    e1 = warpgroup_mma(a1, p1.slice(k * 16, 16), e1, is_async=True)
                    o1 = warpgroup_mma(b1, p1.slice(k * 16, 16), o1, is_async=True)
                    e0, o0, a0, b0 = warpgroup_mma_wait(2, deps=[e0, o0, a0, b0])
                    a2, b2 = _pair(pairs, k, 2, A)
                    e2 = warpgroup_mma(a2, p2.slice(k * 16, 16), e2, is_async=True)
                    o2 = warpgroup_mma(b2, p2.slice(k * 16, 16), o2, is_async=True)
                    e1, o1, a1, b1 = warpgroup_mma_wait(2, deps=[e1, o1, a1, b1])
                    a3, b3 = _pair(pairs, k, 3, A)
                    e3 = warpgroup_mma(a3, p3.slice(k * 16, 16), e3, is_async=True)
                    o3 = warpgroup_mma(b3, p3.slice(k * 16, 16), o3, is_async=True)
                    e2, o2, a2, b2 = warpgroup_mma_wait(2, deps=[e2, o2, a2, b2])
                    if k + 1 < BLOCK // 16:
                        a0, b0 = _pair(pairs, k + 1, 0, A)
                # the values of this tile are all in registers now
                thread_barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                e3, o3, a3, b3 = warpgroup_mma_wait(0, deps=[e3, o3, a3, b3])
                used += 1

            if (follow >= piece.end) | (MODE != 0):
                let_kernel_after_begin()
            total = gl.sum(den, 0)
            none = total == 0.0
            lse2 = gl.where(none, float("-inf"), m + log2(total) - (c - 127).to(gl.float32))  # type: ignore[attr-defined]
            inv = gl.where(none, 0.0, reciprocal(total) * 2.0**-P_SHIFT)
            inv = gl.convert_layout(inv, SliceLayout(0, O))[None, :]
            # a multiplication of its own: with inv it may leave fp32's range
            power = (c << 23).to(gl.float32, bitcast=True)  # type: ignore[attr-defined]
            e0 = e0 * inv * power
            o0 = o0 * inv * power
            e1 = e1 * inv * power
            o1 = o1 * inv * power
            e2 = e2 * inv * power
            o2 = o2 * inv * power
            e3 = e3 * inv * power
            o3 = o3 * inv * power
            r = gl.arange(0, ROWS, SliceLayout(0, O))
            rs = gl.arange(0, ROWS, SliceLayout(0, S))
            splits, rank, stay, first_slot, next_slot, slot_step = split_slots(piece, b, base, kv_len, workers, tile, tiles, MODE)
            if splits == 1:
                token = (q_first + (first_row + r) // HEADS).to(gl.int64)
                row_ptr = out_ptr + token * out_stride_token + (first_row + r) % HEADS * out_stride_head
                interleave(e0, o0, row_ptr, r < rows, 0)
                interleave(e1, o1, row_ptr, r < rows, 128)
                interleave(e2, o2, row_ptr, r < rows, 256)
                interleave(e3, o3, row_ptr, r < rows, 384)
                if WRITE_LSE:
                    token_s = (q_first + (first_row + rs) // HEADS).to(gl.int64)
                    gl.store(lse_ptr + token_s * lse_stride + (first_row + rs) % HEADS, lse2 * LN2, mask=rs < rows)
            else:
                slot = gl.where(rank == 0, first_slot, next_slot + (rank - 1) * slot_step).to(gl.int64) * ROWS
                part_ptr = part_out_ptr + slot * LATENT
                d = 2 * gl.arange(0, 64, SliceLayout(1, O))
                store_columns(part_ptr, e0, d, 64, ROWS)
                store_columns(part_ptr, o0, d + 1, 64, ROWS)
                store_columns(part_ptr, e1, d + 128, 64, ROWS)
                store_columns(part_ptr, o1, d + 129, 64, ROWS)
                store_columns(part_ptr, e2, d + 256, 64, ROWS)
                store_columns(part_ptr, o2, d + 257, 64, ROWS)
                store_columns(part_ptr, e3, d + 384, 64, ROWS)
                store_columns(part_ptr, o3, d + 385, 64, ROWS)
                gl.store(part_lse_ptr + slot + column_of(rs), lse2)
                # a launch that may not wait has nobody who stays
                waits = may_wait & (follow >= piece.end).to(gl.int32)
                stay = stay * may_wait
                meet(counter_of(counter_ptr, counters, turn, b * tiles + tile), waits, part_out_ptr, part_lse_ptr,
                     out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride, first_slot, next_slot, slot_step, splits, rank, stay,
                     rows, q_first, first_row, HEADS, ROWS, WRITE_LSE, MANY_SPLITS)  # fmt: skip
        base = follow
        at = follow
        b += 1
        more = (follow < piece.end) & (MODE == 0)


@gluon.jit(do_not_specialize=NOT_SPECIALISED)
def decode_fp8_tile128(
    desc, desc_scale,  # tensor maps of the cache [pages, page_size, 656] bytes and [.., 164] fp32, boxes [1, BOX, 128], [1, BOX, 4]; unused if GATHER
    cache_ptr, rope_ptr, scale_ptr, page_stride, token_stride,  # the same cache as e4m3, bf16 and fp32, strides in 16 bytes
    q_ptr, q_stride_token, q_stride_head,  # [total_q, HEADS, 576] bf16 or fp16
    out_ptr, out_stride_token, out_stride_head,  # [total_q, HEADS, 512] like q
    lse_ptr, lse_stride,  # [total_q, HEADS] fp32, if WRITE_LSE
    part_out_ptr, part_lse_ptr,  # fp32 [slots, 512, ROWS] and [slots, ROWS]
    counter_ptr, counters,  # int32 [4 + 2 * counters], counters >= batch * row tiles, see reduction
    lens_ptr, last_ptr, ids_ptr, ids_stride, qo_ptr, q_len, batch,  # see pages.Pages
    workers, splits, tiles, sm_scale, logit_cap, may_wait,
    KIND: gl.constexpr, PAGE_SIZE: gl.constexpr, RAGGED_Q: gl.constexpr, LENS: gl.constexpr, ONE_PASS: gl.constexpr,
    MODE: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
    GATHER: gl.constexpr, CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """See the top of this file. Launch with ``num_warps`` = 4."""
    K: gl.constexpr = NVMMASharedLayout(128, 8, 2)
    R: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    P: gl.constexpr = NVMMASharedLayout(2 * ROWS, 16, 2)
    PANEL: gl.constexpr = NVMMASharedLayout(128, 8, 3)
    PARTS: gl.constexpr = BLOCK // BOX
    LOADER_WARPS: gl.constexpr = 4 if GATHER else 1

    latent = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, LATENT], K)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, ROPE], R)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK, 4], NVMMASharedLayout(0, 32, 2))
    q_latent = gl.allocate_shared_memory(gl.float8e4nv, [1, 2 * ROWS, LATENT], K)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 2 * ROWS, ROPE], R)
    q_scale = gl.allocate_shared_memory(gl.float32, [ROWS], SwizzledSharedLayout(1, 1, 1, [0]))
    p0 = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], P)
    p1 = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], P)
    p2 = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], P)
    p3 = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], P)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), 32 * LOADER_WARPS if GATHER else 1)
        mbarrier.init(empty.index(s), 1)
    fence_async_shared()

    if GATHER:
        latent_parts = latent
        rope_parts = rope
        scale_parts = scales
    else:
        latent_parts = latent._reinterpret(gl.float8e4nv, [STAGES * 4 * PARTS, 1, BOX, 128], PANEL)
        rope_parts = rope._reinterpret(gl.float8e4nv, [STAGES * PARTS, 1, BOX, 128], PANEL)
        scale_parts = scales._reinterpret(gl.float32, [STAGES * PARTS, 1, BOX, 4], NVMMASharedLayout(0, 32, 3))

    tile = gl.program_id(0) % tiles
    pages = Pages(lens_ptr, last_ptr, ids_ptr, ids_stride, qo_ptr, q_len, batch, KIND, PAGE_SIZE, RAGGED_Q)
    pages.prefetch_ids(gl.program_id(0) // tiles, workers)
    wait_for_kernel_before()
    turn = gl.load(counter_ptr)
    piece = plan_piece(pages, gl.program_id(0) // tiles, workers, splits, MODE, LENS, ONE_PASS)
    thread_barrier()
    gl.warp_specialize(
        [
            (_mathematician, (
                q_ptr, q_stride_token, q_stride_head, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                part_out_ptr, part_lse_ptr, counter_ptr, counters, turn, latent, rope, scales, q_latent, q_rope, q_scale, p0, p1, p2, p3, full, empty,
                pages, piece, workers, tile, tiles, sm_scale, logit_cap, may_wait,
                HEADS, ROWS, STAGES, GATHER, MODE, CAUSAL, HAS_CAP, WRITE_LSE, MANY_SPLITS)),
            (_loader, (
                desc, desc_scale, cache_ptr, rope_ptr, scale_ptr, page_stride, token_stride, latent_parts, rope_parts, scale_parts, full, empty,
                counter_ptr, counters, turn, pages, piece, tile * ROWS,
                HEADS, STAGES, BOX, GATHER, MODE)),
        ],
        [LOADER_WARPS], [72 if GATHER else 40],
    )  # fmt: skip


_PANEL = NVMMASharedLayout(128, 8, 3)
_SCALE_PANEL = NVMMASharedLayout(0, 32, 3)


def launch(args: DecodeArgs, launch: HopperLaunch, workspace) -> None:
    """Run :func:`decode_fp8_tile128` for a checked call."""
    data = cache_view(args)
    cache, rope, scale = data.view(torch.float8_e4m3fn), data.view(torch.bfloat16), data.view(torch.float32)
    if launch.gather:
        desc = desc_scale = cache
    else:
        desc = TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, launch.box, 128], _PANEL)
        desc_scale = TensorDescriptor(scale, list(scale.shape), list(scale.stride()), [1, launch.box, 4], _SCALE_PANEL)
    # Two blocks an SM share its 64 Ki registers: 128 for each of 2 x 256 threads at the start.
    registers = {"maxnreg": 128} if launch.blocks_per_sm == 2 else {}
    decode_fp8_tile128[(launch.grid,)](
        desc,
        desc_scale,
        cache,
        rope,
        scale,
        cache.stride(0) // 16,
        cache.stride(1) // 16,
        **tensors(args, launch, workspace),
        **constants(args, launch),
        num_warps=launch.num_warps,
        **registers,
    )
