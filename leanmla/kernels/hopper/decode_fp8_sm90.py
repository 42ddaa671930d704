"""MLA decode over an fp8 (e4m3) latent cache on Hopper, at 16-bit accuracy and without unpacking the cache.

As in ``decode_bf16_sm90`` the operands are swapped, S^T = K Q^T and O^T += V^T P^T, roles and grid are the same; what differs:

* Keys go from shared memory straight into fp8 wgmma. The query is scaled by a power of two per row (its latent and its rope
  part apart) and split into two e4m3 terms, hi + lo, stacked as twice the rows: S^T [64, 2 ROWS]. Their sum is a bf16 exactly.
  What limits a logit is the 14 bits that fp8 wgmma keeps of a running sum: about 1e-3 for logits of order 1.
* Values are the A operand, from registers, because fp8 wgmma reads shared memory only along k and k is the key here.
  A 16-bit transposed load (ldmatrix.trans) brings byte pairs (two values d, d+1 of one key); one byte permute per two
  registers separates even from odd d, which go to separate accumulators. Nothing is converted.

  Which lane holds what, for one 32-key step of the fp8 fragment (row = lane / 4, four consecutive k a register):

      k bit          5   4   3 2        1   0
      key bit       32  16   4 2        8   1     (loaded register bits: 1, 8; lane bits 0, 1: 2, 4)

  P^T is stored with its keys in the same order (``_fragment_order``), so the sum over keys is the same sum.
* ROWS = 16: P = 256 exp2(s - max) is split into hi + lo e4m3 terms; four 64-key products a tile start from zero and are
  added to fp32 accumulators, since fp8 wgmma keeps too few bits over a long sum.
* ROWS >= 32: registers for that are not there. V is widened to fp16 after the load (exact), P is fp16 and the tensor
  cores accumulate in fp32 directly.
* ROWS = 64: three roles, see ``decode_fp8_wide_sm90``.

Two blocks an SM for ROWS = 16: while one is in its softmax the other keeps the tensor cores and the memory busy.
"""

import torch

from ...problem import DecodeArgs
from .arguments import NOT_SPECIALISED, cache_view, constants, tensors
from .decode_fp8_wide_sm90 import scorer, summer
from .dependent_launch import let_kernel_after_begin, wait_for_kernel_before
from .fp8_operands import byte_pairs_f16, interleave, load_query, ready, round_e4m3, score_part, sum_terms, widen
from .gluon_names import (
    DistributedLinearLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    SliceLayout,
    SwizzledSharedLayout,
    TensorDescriptor,
    constexpr_function,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .launch import HopperLaunch
from .loader import clear_hidden, loader, prefetch_rows, uniform, warm_up
from .pages import BLOCK, Pages
from .reduction import column_of, counter_of, meet, store_columns
from .roles import handover
from .schedule import has_work, plan_piece, segment, split_slots
from .softmax import LOG2E, log2, probabilities, reciprocal, row_limits

__all__ = ["decode_fp8", "launch"]

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
LN2 = gl.constexpr(0.6931471805599453)


@constexpr_function
def byte_pairs_fp8(warps):
    """[64 keys, 16 * warps byte pairs] by ldmatrix.trans: registers (key 1, key 8, pair 8, key 16, key 32)."""
    return DistributedLinearLayout(
        [[1, 0], [8, 0], [0, 8], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 16 << w] for w in range(warps.bit_length() - 1)],
        [],
        [64, 16 * warps],
    )


@gluon.jit
def _fragment_order(x, COLS: gl.constexpr):
    """[64 keys, COLS] -> [COLS, 64], keys from (32 16 8 4 2 1) to the fragment's k order (32 16 4 2 8 1)."""
    x = gl.permute(gl.reshape(x, [BLOCK // 16, 2, 4, 2, COLS]), (4, 0, 2, 1, 3))
    return gl.reshape(x, [COLS, BLOCK])


@gluon.jit
def _separate(pairs, A: gl.constexpr, COLS: gl.constexpr):
    """Byte pairs [64 keys, COLS] -> e4m3 A operands [COLS, 64] of the even and of the odd d."""
    e, o = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=&r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    e = gl.convert_layout(_fragment_order(e.to(gl.float8e4nv, bitcast=True), COLS), A, assert_trivial=True)
    o = gl.convert_layout(_fragment_order(o.to(gl.float8e4nv, bitcast=True), COLS), A, assert_trivial=True)
    return e, o


@gluon.jit
def _products(pairs, p_hi, p_lo, A: gl.constexpr, O: gl.constexpr, COLS: gl.constexpr, ROWS: gl.constexpr):
    """V^T P^T of one tile for COLS byte pairs: (even, odd), each [COLS, ROWS], still in flight."""
    e, o = _separate(pairs, A, COLS)
    zero = gl.zeros([COLS, ROWS], gl.float32, O)
    even = warpgroup_mma(e, p_hi, zero, use_acc=False, is_async=True)
    odd = warpgroup_mma(o, p_hi, zero, use_acc=False, is_async=True)
    even = warpgroup_mma(e, p_lo, even, is_async=True)
    odd = warpgroup_mma(o, p_lo, odd, is_async=True)
    return even, odd


@gluon.jit
def _scores(latent, rope, q_latent, q_rope, full, used, i, kv_len,
            S2: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
            PARTS: gl.constexpr):  # fmt: skip
    """S^T = K [hi | lo]^T of tile i: (latent part, rope part), which are scaled differently.

    PARTS 4: each panel of 128 latent values gets an accumulator of its own and the four are added in fp32, because fp8 wgmma
    keeps about 14 bits of a running sum (error of lse, worst case of the tests: 1.6e-3 against 3.1e-3). PARTS 1: one accumulator,
    after the rope part is done, where registers are short.
    """
    stage = ready(latent, full, used, i, kv_len, STAGES, GATHER)
    zero = uniform(gl.minimum(i, 0))  # i >= 0: keeps the query's 18 descriptors out of vector registers
    k = latent.index(stage)
    q = q_latent.index(zero)
    r = score_part(rope.index(stage), q_rope.index(zero), S2, ROWS)
    if PARTS == 4:
        a0 = score_part(k.slice(0, 128, dim=1), q.slice(0, 128, dim=1), S2, ROWS)
        a1 = score_part(k.slice(128, 128, dim=1), q.slice(128, 128, dim=1), S2, ROWS)
        a2 = score_part(k.slice(256, 128, dim=1), q.slice(256, 128, dim=1), S2, ROWS)
        a3 = score_part(k.slice(384, 128, dim=1), q.slice(384, 128, dim=1), S2, ROWS)
        r, a0, a1, a2, a3 = warpgroup_mma_wait(0, deps=[r, a0, a1, a2, a3])
        both = (a0 + a1) + (a2 + a3)
        rot = sum_terms(r, S, ROWS, GROUPS)
    else:
        r = warpgroup_mma_wait(0, deps=[r])
        rot = sum_terms(r, S, ROWS, GROUPS)
        both = score_part(k, q, S2, ROWS)
        both = warpgroup_mma_wait(0, deps=[both])
    return sum_terms(both, S, ROWS, GROUPS), rot


@gluon.jit
def _values_f16(latent, p_tile, p, alpha, even, odd, used, O: gl.constexpr, A: gl.constexpr, V16: gl.constexpr, STAGES: gl.constexpr):
    """O^T = alpha O^T + V^T P^T with values widened to fp16, 16 keys at a time; the last products are still in flight."""
    PAIRS: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    pairs = latent.index(uniform(used % STAGES))._reinterpret(gl.int16, [BLOCK, LATENT // 2], PAIRS)
    p_tile.store(p.to(gl.float16))
    fence_async_shared()
    factor = gl.convert_layout(alpha, SliceLayout(0, O))[None, :]
    even = even * factor
    odd = odd * factor
    ve, vo = widen(pairs.slice(0, 16).load(V16), A)
    for c in gl.static_range(BLOCK // 16):
        pc = p_tile.slice(c * 16, 16)
        even = warpgroup_mma(ve, pc, even, is_async=True)
        odd = warpgroup_mma(vo, pc, odd, is_async=True)
        # the next 16 keys are loaded and widened while these products run
        if c + 1 < BLOCK // 16:
            ve_next, vo_next = widen(pairs.slice((c + 1) * 16, 16).load(V16), A)
            even, odd, ve, vo = warpgroup_mma_wait(0, deps=[even, odd, ve, vo])
            ve = ve_next
            vo = vo_next
    return even, odd


@gluon.jit
def _mathematician(
    q_ptr, q_stride_token, q_stride_head, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    part_out_ptr, part_lse_ptr, counter_ptr, counters, turn, kv_scale, latent, rope, q_latent, q_rope, q_scale, q_scale_rope, p_hi, p_lo, full, empty,
    pages, piece, workers, tile, tiles, sm_scale, logit_cap, may_wait,
    HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr, MODE: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, FP8_P: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, values and the way out, segment after segment, for ROWS = 16 and 32."""
    GROUPS: gl.constexpr = NUM_WARPS // 4
    S2: gl.constexpr = NVMMADistributedLayout([3, 0], [4, GROUPS], [16, 2 * ROWS // GROUPS, 32])
    S: gl.constexpr = NVMMADistributedLayout([3, 0], [4, GROUPS], [16, ROWS // GROUPS, 32])
    O: gl.constexpr = NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, ROWS, 32 if FP8_P else 16])
    A: gl.constexpr = DotOperandLayout(0, O, 4 if FP8_P else 2)
    PAIRS: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    COLS: gl.constexpr = 16 * NUM_WARPS  # byte pairs a product
    V8: gl.constexpr = byte_pairs_fp8(NUM_WARPS)
    V16: gl.constexpr = byte_pairs_f16(NUM_WARPS, LATENT // 2)
    PARTS: gl.constexpr = 4 if ROWS == 16 else 1
    # exp2 of scores is scaled so that its e4m3 terms keep small weights
    P_SHIFT: gl.constexpr = 8.0 if FP8_P else 0.0
    scale = sm_scale * LOG2E * kv_scale
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
            load_query(q_ptr, q_stride_token, q_stride_head, q_latent.index(0), q_rope.index(0), q_scale, q_scale_rope, scale, q_first, first_row, rows, HEADS, ROWS, GROUPS)
            fence_async_shared()
            if MODE == 0 and not pages.RAGGED_Q and follow < piece.end:
                prefetch_rows(q_ptr, q_stride_token, q_stride_head, q_first + q_count, first_row, rows, HEADS, ROWS)
            row_scale = q_scale.load(SliceLayout(0, S))
            rope_scale = q_scale_rope.load(SliceLayout(0, S))
            limit = row_limits(gl.arange(0, ROWS, SliceLayout(0, S)), first_row, HEADS, q_count, kv_len, CAUSAL)
            # keys that every row of the tile sees
            shared_keys = kv_len
            if CAUSAL:
                shared_keys = gl.minimum(kv_len, kv_len - q_count + 1 + first_row // HEADS)
            if FP8_P:
                none_yet = gl.zeros([COLS, ROWS], gl.float32, O)
                e0 = none_yet
                o0 = none_yet
                e1 = none_yet
                o1 = none_yet
                e2 = none_yet
                o2 = none_yet
                e3 = none_yet
                o3 = none_yet
            else:
                even = gl.zeros([LATENT // 2, ROWS], gl.float32, O)
                odd = gl.zeros([LATENT // 2, ROWS], gl.float32, O)
            m = gl.full([ROWS], float("-inf"), gl.float32, SliceLayout(0, S))
            den = gl.zeros([BLOCK, ROWS], gl.float32, S)
            if FP8_P:
                for i in range(lo, hi):
                    lat, rot = _scores(latent, rope, q_latent, q_rope, full, used, i, kv_len, S2, S, ROWS, GROUPS, STAGES, GATHER, PARTS)
                    x = lat * row_scale[None, :] + rot * rope_scale[None, :]
                    p, m, den, alpha = probabilities(x, m, den, i, limit, shared_keys, logit_cap, S, HAS_CAP, P_SHIFT)
                    if CAUSAL and i * BLOCK + BLOCK > shared_keys:
                        clear_hidden(latent, used % STAGES, shared_keys - i * BLOCK, kv_len - i * BLOCK, STAGES, 8)
                    factor = gl.convert_layout(alpha, SliceLayout(0, O))[None, :]
                    stage = uniform(used % STAGES)
                    pairs = latent.index(stage)._reinterpret(gl.int16, [BLOCK, LATENT // 2], PAIRS)
                    hi_p = round_e4m3(p)
                    p_hi.store(_fragment_order(hi_p.to(gl.float8e4nv), ROWS))
                    p_lo.store(_fragment_order((p - hi_p).to(gl.float8e4nv), ROWS))
                    fence_async_shared()
                    ph = p_hi.permute((1, 0))
                    pl = p_lo.permute((1, 0))
                    # two products in flight while the one before is added up
                    t0, u0 = _products(pairs.slice(0, COLS, dim=1).load(V8), ph, pl, A, O, COLS, ROWS)
                    t1, u1 = _products(pairs.slice(COLS, COLS, dim=1).load(V8), ph, pl, A, O, COLS, ROWS)
                    t0, u0 = warpgroup_mma_wait(4, deps=[t0, u0])
                    e0 = e0 * factor + t0
                    o0 = o0 * factor + u0
                    t2, u2 = _products(pairs.slice(2 * COLS, COLS, dim=1).load(V8), ph, pl, A, O, COLS, ROWS)
                    t1, u1 = warpgroup_mma_wait(4, deps=[t1, u1])
                    e1 = e1 * factor + t1
                    o1 = o1 * factor + u1
                    t3, u3 = _products(pairs.slice(3 * COLS, COLS, dim=1).load(V8), ph, pl, A, O, COLS, ROWS)
                    # the values of this tile are all in registers now
                    thread_barrier()
                    mbarrier.arrive(empty.index(stage), count=1)
                    t2, u2 = warpgroup_mma_wait(4, deps=[t2, u2])
                    e2 = e2 * factor + t2
                    o2 = o2 * factor + u2
                    t3, u3 = warpgroup_mma_wait(0, deps=[t3, u3])
                    e3 = e3 * factor + t3
                    o3 = o3 * factor + u3
                    used += 1
            else:
                for i in range(lo, hi):
                    lat, rot = _scores(latent, rope, q_latent, q_rope, full, used, i, kv_len, S2, S, ROWS, GROUPS, STAGES, GATHER, PARTS)
                    x = lat * row_scale[None, :] + rot * rope_scale[None, :]
                    p, m, den, alpha = probabilities(x, m, den, i, limit, shared_keys, logit_cap, S, HAS_CAP, P_SHIFT)
                    if CAUSAL and i * BLOCK + BLOCK > shared_keys:
                        clear_hidden(latent, used % STAGES, shared_keys - i * BLOCK, kv_len - i * BLOCK, STAGES, 8)
                    even, odd = _values_f16(latent, p_hi, p, alpha, even, odd, used, O, A, V16, STAGES)
                    even, odd = warpgroup_mma_wait(0, deps=[even, odd])
                    thread_barrier()
                    mbarrier.arrive(empty.index(used % STAGES), count=1)
                    used += 1

            if (follow >= piece.end) | (MODE != 0):
                let_kernel_after_begin()
            total = gl.sum(den, 0)
            none = total == 0.0
            lse2 = gl.where(none, float("-inf"), m + log2(total) - P_SHIFT)
            inv = gl.convert_layout(gl.where(none, 0.0, kv_scale * reciprocal(total)), SliceLayout(0, O))[None, :]
            r = gl.arange(0, ROWS, SliceLayout(0, O))
            rs = gl.arange(0, ROWS, SliceLayout(0, S))
            splits, rank, stay, first_slot, next_slot, slot_step = split_slots(piece, b, base, kv_len, workers, tile, tiles, MODE)
            if splits == 1:
                token = (q_first + (first_row + r) // HEADS).to(gl.int64)
                row_ptr = out_ptr + token * out_stride_token + (first_row + r) % HEADS * out_stride_head
                if FP8_P:
                    interleave(e0 * inv, o0 * inv, row_ptr, r < rows, 0)
                    interleave(e1 * inv, o1 * inv, row_ptr, r < rows, 2 * COLS)
                    interleave(e2 * inv, o2 * inv, row_ptr, r < rows, 4 * COLS)
                    interleave(e3 * inv, o3 * inv, row_ptr, r < rows, 6 * COLS)
                else:
                    interleave(even * inv, odd * inv, row_ptr, r < rows, 0)
                if WRITE_LSE:
                    token_s = (q_first + (first_row + rs) // HEADS).to(gl.int64)
                    gl.store(lse_ptr + token_s * lse_stride + (first_row + rs) % HEADS, lse2 * LN2, mask=rs < rows)
            else:
                slot = gl.where(rank == 0, first_slot, next_slot + (rank - 1) * slot_step).to(gl.int64) * ROWS
                part_ptr = part_out_ptr + slot * LATENT
                if FP8_P:
                    d = 2 * gl.arange(0, COLS, SliceLayout(1, O))
                    store_columns(part_ptr, e0 * inv, d, COLS, ROWS)
                    store_columns(part_ptr, o0 * inv, d + 1, COLS, ROWS)
                    store_columns(part_ptr, e1 * inv, d + 2 * COLS, COLS, ROWS)
                    store_columns(part_ptr, o1 * inv, d + 2 * COLS + 1, COLS, ROWS)
                    store_columns(part_ptr, e2 * inv, d + 4 * COLS, COLS, ROWS)
                    store_columns(part_ptr, o2 * inv, d + 4 * COLS + 1, COLS, ROWS)
                    store_columns(part_ptr, e3 * inv, d + 6 * COLS, COLS, ROWS)
                    store_columns(part_ptr, o3 * inv, d + 6 * COLS + 1, COLS, ROWS)
                else:
                    dw = 2 * gl.arange(0, LATENT // 2, SliceLayout(1, O))
                    store_columns(part_ptr, even * inv, dw, LATENT // 2, ROWS)
                    store_columns(part_ptr, odd * inv, dw + 1, LATENT // 2, ROWS)
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
def decode_fp8(
    desc, desc_rope,  # tensor maps of the cache [pages, page_size, 576] e4m3, boxes [1, BOX, 128] and [1, BOX, 64]; unused if GATHER
    cache_ptr, page_stride, token_stride,  # the same cache, strides in elements
    kv_scale_ptr,  # [1] fp32: value = e4m3 * scale
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
    """See the top of this file. Launch with ``num_warps`` = 4 for ROWS = 16, 8 for 32 and 8, the summer's, for 64."""
    K: gl.constexpr = NVMMASharedLayout(128, 8, 2)
    R: gl.constexpr = NVMMASharedLayout(64, 8, 2)
    PANEL: gl.constexpr = NVMMASharedLayout(128, 8, 3)
    ROPE_PANEL: gl.constexpr = NVMMASharedLayout(64, 8, 3)
    FLAT: gl.constexpr = SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = BLOCK // BOX
    LOADER_WARPS: gl.constexpr = 4 if GATHER else 1
    FP8_P: gl.constexpr = ROWS == 16

    latent = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, LATENT], K)
    rope = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, ROPE], R)
    q_latent = gl.allocate_shared_memory(gl.float8e4nv, [1, 2 * ROWS, LATENT], K)
    q_rope = gl.allocate_shared_memory(gl.float8e4nv, [1, 2 * ROWS, ROPE], R)
    q_scale = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    q_scale_rope = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    if FP8_P:
        p_hi = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, BLOCK], R)
        p_lo = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, BLOCK], R)
    else:
        p_hi = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], NVMMASharedLayout(2 * ROWS, 16, 2))
        p_lo = p_hi
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if GATHER:
        warm = full  # not used; a barrier that nobody waits for would lie under scratch memory
    else:
        warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(warm, 1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), 32 * LOADER_WARPS if GATHER else 1)
        mbarrier.init(empty.index(s), 1)
    if ROWS == 64:
        alphas = gl.allocate_shared_memory(gl.float32, [1, ROWS], FLAT)
        raised = gl.allocate_shared_memory(gl.int32, [1], FLAT)
        votes = gl.allocate_shared_memory(gl.int32, [32, 4], SwizzledSharedLayout(1, 1, 1, [1, 0]))
        closing = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
        q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(q_ready, 1)
        p_handover = handover()
        end_handover = handover()
    fence_async_shared()

    if GATHER:
        latent_parts = latent
        rope_parts = rope
    else:
        latent_parts = latent._reinterpret(gl.float8e4nv, [STAGES * 4 * PARTS, 1, BOX, 128], PANEL)
        rope_parts = rope._reinterpret(gl.float8e4nv, [STAGES * PARTS, 1, BOX, 64], ROPE_PANEL)
        thread_barrier()
        warm_up(desc, desc_rope, latent_parts, rope_parts, warm, BOX, 128, 576)

    tile = gl.program_id(0) % tiles
    pages = Pages(lens_ptr, last_ptr, ids_ptr, ids_stride, qo_ptr, q_len, batch, KIND, PAGE_SIZE, RAGGED_Q)
    pages.prefetch_ids(gl.program_id(0) // tiles, workers)
    # the query of the sequence that this worker would start with if all were as long
    guess = gl.program_id(0) // tiles * batch // workers if MODE == 0 else gl.program_id(0) // tiles // workers
    prefetch_rows(q_ptr, q_stride_token, q_stride_head, guess * q_len, tile * ROWS, gl.minimum(q_len * HEADS - tile * ROWS, ROWS), HEADS, ROWS)
    wait_for_kernel_before()
    turn = gl.load(counter_ptr)
    kv_scale = gl.load(kv_scale_ptr)
    piece = plan_piece(pages, gl.program_id(0) // tiles, workers, splits, MODE, LENS, ONE_PASS)
    thread_barrier()
    if ROWS == 64:
        gl.warp_specialize(
            [
                (summer, (
                    q_ptr, q_stride_token, q_stride_head, kv_scale, sm_scale, q_latent, q_rope, q_scale, q_scale_rope, q_ready,
                    out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride, part_out_ptr, part_lse_ptr, counter_ptr, counters, turn,
                    latent, p_hi, alphas, raised, p_handover, closing, end_handover, empty, pages, piece, workers, tile, tiles, may_wait,
                    HEADS, ROWS, STAGES, MODE, WRITE_LSE, MANY_SPLITS)),
                (scorer, (
                    q_ptr, q_stride_token, q_stride_head, kv_scale, latent, rope, q_latent, q_rope, q_scale, q_scale_rope, p_hi, alphas, raised, p_handover, votes,
                    closing, end_handover, q_ready, full, pages, piece, tile, sm_scale, logit_cap,
                    HEADS, ROWS, STAGES, GATHER, MODE, CAUSAL, HAS_CAP)),
                (loader, (
                    desc, desc_rope, cache_ptr, page_stride, token_stride, latent_parts, rope_parts, full, empty, warm, counter_ptr, counters, turn, pages, piece, tile * ROWS,
                    HEADS, STAGES, BOX, 128, 576, GATHER, MODE)),
            ],
            [4, LOADER_WARPS], [120, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_mathematician, (
                    q_ptr, q_stride_token, q_stride_head, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                    part_out_ptr, part_lse_ptr, counter_ptr, counters, turn, kv_scale, latent, rope, q_latent, q_rope, q_scale, q_scale_rope, p_hi, p_lo, full, empty,
                    pages, piece, workers, tile, tiles, sm_scale, logit_cap, may_wait,
                    HEADS, ROWS, STAGES, GATHER, MODE, CAUSAL, HAS_CAP, FP8_P, WRITE_LSE, MANY_SPLITS, num_warps)),
                (loader, (
                    desc, desc_rope, cache_ptr, page_stride, token_stride, latent_parts, rope_parts, full, empty, warm, counter_ptr, counters, turn, pages, piece, tile * ROWS,
                    HEADS, STAGES, BOX, 128, 576, GATHER, MODE)),
            ],
            [LOADER_WARPS], [40],
        )  # fmt: skip


_PANEL = NVMMASharedLayout(128, 8, 3)
_ROPE_PANEL = NVMMASharedLayout(64, 8, 3)


def launch(args: DecodeArgs, launch: HopperLaunch, workspace) -> None:
    """Run :func:`decode_fp8` for a checked call."""
    cache = cache_view(args).view(torch.float8_e4m3fn)
    if launch.gather:
        desc = desc_rope = cache
    else:
        shape, strides = list(cache.shape), list(cache.stride())
        desc = TensorDescriptor(cache, shape, strides, [1, launch.box, 128], _PANEL)
        desc_rope = TensorDescriptor(cache, shape, strides, [1, launch.box, 64], _ROPE_PANEL)
    # Two blocks an SM share its 64 Ki registers: 128 for each of 2 x 256 threads at the start.
    registers = {"maxnreg": 128} if launch.blocks_per_sm == 2 else {}
    decode_fp8[(launch.grid,)](
        desc,
        desc_rope,
        cache,
        cache.stride(0),
        cache.stride(1),
        args.cache.scale,
        **tensors(args, launch, workspace),
        **constants(args, launch),
        num_warps=launch.num_warps,
        **registers,
    )
