"""The roles of ``decode_fp8_sm90`` for 64 query rows: the scores of one tile are worked out while the values of the one before are summed.

    loader (1 or 4 warps) | scorer (1 warpgroup)            | summer (2 warpgroups, 128 of the 256 pairs of values each)
    ----------------------+---------------------------------+-----------------------------------------------------------
    tile i+3:             | wait full[s]                    | wait for P^T; O^T = alpha O^T where it must
    wait empty[s]         | S^T = K (lo + hi)^T             | 16 keys at a time: byte pairs to registers, to fp16,
    and fetch             | weights; wait until P is free   | O^T += V^T P^T
                          | P^T (and alpha) to shared memory| arrive empty[s] once the last are in registers; P is free

As in ``decode_bf16_wide_sm90`` weights are 2^(score - reference), and a reference follows only when a score lies more than LEEWAY
above it. Here P is fp16: a reference is put HEADROOM below the largest score, so that weights reach
from 2^LEEWAY = 2^15, within fp16, down to the 2^-14 where fp16 begins to lose bits: 2^21 below the largest at the least.

Every tile takes the tensor cores 36 x 32 cycles for the scores, whether n = 128 holds both terms of 64 rows or, as here, n = 64 one
after the other. One accumulator for both takes half the registers, so rope and latent part can be in flight together. Values take
32 x 32 cycles and 36864 bytes about 2000 at an SM's share of the memory.

Registers: O^T is 128 a thread of the summer, operands of the products in flight 16 and 4 of bytes; ptxas puts a wait behind every
product if it has fewer than 176. Of the scorer's 120, S^T takes 32, the rope part's scores 32, references and denominators (sums of
key pairs) 16 each. The factors of the rows are read anew every tile.
Shared memory: three stages 108 KiB, the query 72 KiB, P^T 8 KiB.
"""

from .dependent_launch import let_kernel_after_begin
from .fp8_operands import byte_pairs_f16, interleave, load_query, ready
from .gluon_names import (
    BlockedLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    SliceLayout,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .loader import clear_hidden, prefetch_rows, uniform
from .pages import BLOCK
from .reduction import column_of, counter_of, meet, store_columns
from .schedule import has_work, segment, split_slots
from .softmax import LOG2E, NOTHING, any_above, log2, pair_sums, pairs_layout, reciprocal, row_limits, visible_scores

__all__ = ["scorer", "summer"]

LATENT = gl.constexpr(512)
#: Byte pairs that are multiplied at a time by the summer: one product a warpgroup.
HALF = gl.constexpr(128)
#: Products of a warpgroup that may still run when the next one is made ready.
IN_FLIGHT = gl.constexpr(2)
LN2 = gl.constexpr(0.6931471805599453)
#: How far, in powers of two, the largest score lies above a reference that has just followed, ...
HEADROOM = gl.constexpr(7.0)
#: ... and how far one may lie above the reference of its row before the references follow.
LEEWAY = gl.constexpr(15.0)


@gluon.jit
def _products(keys, q, S: gl.constexpr, ROWS: gl.constexpr):
    """Start K (lo + hi)^T: the sum of the small terms first, since fp8 wgmma loses bits of the largest running sum."""
    x = gl.zeros([BLOCK, ROWS], gl.float32, S)
    x = warpgroup_mma(keys, q.slice(ROWS, ROWS).permute((1, 0)), x, use_acc=False, is_async=True)
    return warpgroup_mma(keys, q.slice(0, ROWS).permute((1, 0)), x, is_async=True)


@gluon.jit
def _scores(latent, rope, q_latent, q_rope, row_scale, rope_scale, stage, zero, S: gl.constexpr, ROWS: gl.constexpr):
    """Base-2 scores S^T = K Q^T of a tile that has arrived: rope and latent part apart, as they are scaled differently."""
    r = _products(rope.index(stage), q_rope.index(zero), S, ROWS)
    x = _products(latent.index(stage), q_latent.index(zero), S, ROWS)
    r, x = warpgroup_mma_wait(0, deps=[r, x])
    return x * row_scale.load(SliceLayout(0, S))[None, :] + r * rope_scale.load(SliceLayout(0, S))[None, :]


@gluon.jit
def scorer(
    q_ptr, q_stride_token, q_stride_head, kv_scale, latent, rope, q_latent, q_rope, q_scale, q_scale_rope, p_tile, alphas, raised, p_handover, votes,
    closing, end_handover, q_ready, full, pages, piece, tile, sm_scale, logit_cap,
    HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Probabilities of every tile, and what they sum up to at the end of every segment."""
    S: gl.constexpr = NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 32])
    PAIRS: gl.constexpr = pairs_layout(ROWS)
    ONE: gl.constexpr = BlockedLayout([1], [32], [gl.num_warps()], [0])
    b = piece.b
    at = piece.start
    base = piece.base
    more = has_work(piece, MODE)
    used = 0
    ended = 0
    while more:
        kv_len, _, lo, hi, follow = segment(pages, piece, b, at, base, MODE)
        q_first, q_count = pages.query(b)
        # kv_len is never negative: the term keeps offsets of rows from being worked out once, before the loop, and spilled.
        first_row = tile * ROWS + gl.minimum(kv_len, 0)
        rows = gl.minimum(q_count * HEADS - first_row, ROWS)
        if rows > 0:
            if b == piece.b:
                mbarrier.wait(q_ready, 0)
            else:
                load_query(q_ptr, q_stride_token, q_stride_head, q_latent.index(0), q_rope.index(0), q_scale, q_scale_rope, sm_scale * LOG2E * kv_scale, q_first, first_row, rows, HEADS, ROWS, 1)
                fence_async_shared()
            if MODE == 0 and not pages.RAGGED_Q and follow < piece.end:
                prefetch_rows(q_ptr, q_stride_token, q_stride_head, q_first + q_count, first_row, rows, HEADS, ROWS)
            # keys that every row of the tile sees
            shared_keys = kv_len
            if CAUSAL:
                shared_keys = gl.minimum(kv_len, kv_len - q_count + 1 + first_row // HEADS)
            ref = gl.full([ROWS], NOTHING, gl.float32, SliceLayout(0, S))
            den = gl.zeros([BLOCK // 2, ROWS], gl.float32, PAIRS)
            for i in range(lo, hi):
                stage = ready(latent, full, used, i, kv_len, STAGES, GATHER)
                zero = uniform(gl.minimum(i, 0))  # i >= 0: keeps the query's 18 descriptors out of vector registers
                x = _scores(latent, rope, q_latent, q_rope, q_scale, q_scale_rope, stage, zero, S, ROWS)
                # i is never negative: limits are worked out where the tile needs them, not kept
                limit = row_limits(gl.arange(0, ROWS, SliceLayout(0, S)), first_row, HEADS, q_count, kv_len + gl.minimum(i, 0), CAUSAL)
                x = visible_scores(x, i, limit, shared_keys, logit_cap, S, HAS_CAP)
                above = x - ref[None, :]
                p = gl.exp2(above)
                above_leeway = any_above(above, LEEWAY, votes)
                p_handover.wait_for_room(used)
                if above_leeway != 0:
                    # a row's reference follows its own scores alone, so that its bits do not depend on other rows
                    highest = gl.max(x, 0)
                    new = gl.where(highest - ref > LEEWAY, highest - HEADROOM, ref)
                    alpha = gl.exp2(ref - new)
                    alphas.index(0).store(alpha)
                    den = den * gl.convert_layout(alpha, SliceLayout(0, PAIRS), assert_trivial=True)[None, :]
                    p = gl.exp2(x - new[None, :])
                    ref = new
                if CAUSAL and i * BLOCK + BLOCK > shared_keys:
                    clear_hidden(latent, used % STAGES, shared_keys - i * BLOCK, kv_len - i * BLOCK, STAGES, 8)
                p_tile.store(p.to(gl.float16))
                raised.store(gl.full([1], above_leeway, gl.int32, ONE))
                fence_async_shared()
                p_handover.give()
                den = den + pair_sums(p, PAIRS)
                used += 1

            total = gl.convert_layout(gl.sum(den, 0), SliceLayout(0, S), assert_trivial=True)
            none = total == 0.0
            end_handover.wait_for_room(ended)
            closing.index(0).store(gl.where(none, 0.0, kv_scale * reciprocal(total)))
            closing.index(1).store(gl.where(none, float("-inf"), ref + log2(total)))
            end_handover.give()
            ended += 1
        base = follow
        at = follow
        b += 1
        more = (follow < piece.end) & (MODE == 0)


@gluon.jit
def _even_values(pairs, A: gl.constexpr):
    """Byte pairs [16 keys, 256] -> fp16 A operand [256, 16] of the even d."""
    e = gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, 0x4420; mov.b32 {l, h}, t; cvt.rn.f16x2.e4m3x2 $0, l; }",
        "=r,r", [pairs], dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip
    return gl.convert_layout(gl.permute(e, (1, 0)), A, assert_trivial=True)


@gluon.jit
def _odd_values(pairs, A: gl.constexpr):
    """Byte pairs [16 keys, 256] -> fp16 A operand [256, 16] of the odd d."""
    o = gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, 0x4431; mov.b32 {l, h}, t; cvt.rn.f16x2.e4m3x2 $0, l; }",
        "=r,r", [pairs], dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip
    return gl.convert_layout(gl.permute(o, (1, 0)), A, assert_trivial=True)


@gluon.jit
def _add_values(pairs, p_tile, e0, o0, e1, o1, empty, A: gl.constexpr, V: gl.constexpr):
    """O^T += V^T P^T of a tile, 16 keys of half the values at a time, even and odd d in turn. What is multiplied next is loaded and
    widened while up to IN_FLIGHT products run. The stage is let go once the last bytes are in registers; the last products are still
    in flight."""
    for c in gl.static_range(BLOCK // 16):
        p = p_tile.slice(c * 16, 16)
        keys = pairs.slice(c * 16, 16)
        x = keys.slice(0, HALF, dim=1).load(V)
        if c > 0:
            # bytes are widened behind the wait, when registers of the operands before have become free
            e0, x = warpgroup_mma_wait(IN_FLIGHT, deps=[e0, x])
        e0 = warpgroup_mma(_even_values(x, A), p, e0, is_async=True)
        if c > 0:
            o0, x = warpgroup_mma_wait(IN_FLIGHT, deps=[o0, x])
        o0 = warpgroup_mma(_odd_values(x, A), p, o0, is_async=True)
        y = keys.slice(HALF, HALF, dim=1).load(V)
        if c + 1 == BLOCK // 16:
            thread_barrier()
            mbarrier.arrive(empty, count=1)
        if c > 0:
            e1, y = warpgroup_mma_wait(IN_FLIGHT, deps=[e1, y])
        e1 = warpgroup_mma(_even_values(y, A), p, e1, is_async=True)
        if c > 0:
            o1, y = warpgroup_mma_wait(IN_FLIGHT, deps=[o1, y])
        o1 = warpgroup_mma(_odd_values(y, A), p, o1, is_async=True)
    return e0, o0, e1, o1


@gluon.jit
def summer(
    q_ptr, q_stride_token, q_stride_head, kv_scale, sm_scale, q_latent, q_rope, q_scale, q_scale_rope, q_ready,
    out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride, part_out_ptr, part_lse_ptr, counter_ptr, counters, turn,
    latent, p_tile, alphas, raised, p_handover, closing, end_handover, empty, pages, piece, workers, tile, tiles, may_wait,
    HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr,
):  # fmt: skip
    """The query of the first segment; weighted sums of the values, and the way out, segment after segment."""
    O: gl.constexpr = NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    A: gl.constexpr = DotOperandLayout(0, O, 2)
    V: gl.constexpr = byte_pairs_f16(gl.num_warps(), HALF)
    PAIRS: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    ONE: gl.constexpr = BlockedLayout([1], [32], [gl.num_warps()], [0])
    b = piece.b
    at = piece.start
    base = piece.base
    more = has_work(piece, MODE)
    if more:
        # These warps have nothing else to do yet and are twice as many as the scorer's.
        first_token, tokens = pages.query(b)
        asked = gl.minimum(tokens * HEADS - tile * ROWS, ROWS)
        if asked > 0:
            load_query(q_ptr, q_stride_token, q_stride_head, q_latent.index(0), q_rope.index(0), q_scale, q_scale_rope, sm_scale * LOG2E * kv_scale, first_token, tile * ROWS, asked, HEADS, ROWS, 1)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(q_ready, count=1)
    used = 0
    ended = 0
    while more:
        kv_len, _, lo, hi, follow = segment(pages, piece, b, at, base, MODE)
        q_first, q_count = pages.query(b)
        # kv_len is never negative: the term keeps offsets of rows from being worked out once, before the loop, and spilled.
        first_row = tile * ROWS + gl.minimum(kv_len, 0)
        rows = gl.minimum(q_count * HEADS - first_row, ROWS)
        if rows > 0:
            e0 = gl.zeros([HALF, ROWS], gl.float32, O)
            o0 = gl.zeros([HALF, ROWS], gl.float32, O)
            e1 = gl.zeros([HALF, ROWS], gl.float32, O)
            o1 = gl.zeros([HALF, ROWS], gl.float32, O)
            for _tile in range(lo, hi):
                stage = uniform(used % STAGES)
                p_handover.receive(used)
                if gl.max(raised.load(ONE), 0) != 0:
                    alpha = alphas.index(0).load(SliceLayout(0, O))[None, :]
                    e0 = e0 * alpha
                    o0 = o0 * alpha
                    e1 = e1 * alpha
                    o1 = o1 * alpha
                pairs = latent.index(stage)._reinterpret(gl.int16, [BLOCK, LATENT // 2], PAIRS)
                e0, o0, e1, o1 = _add_values(pairs, p_tile, e0, o0, e1, o1, empty.index(stage), A, V)
                e0, o0, e1, o1 = warpgroup_mma_wait(0, deps=[e0, o0, e1, o1])
                thread_barrier()
                p_handover.give_back()
                used += 1

            if (follow >= piece.end) | (MODE != 0):
                let_kernel_after_begin()
            end_handover.receive(ended)
            inv = closing.index(0).load(SliceLayout(0, O))[None, :]
            e0 = e0 * inv
            o0 = o0 * inv
            e1 = e1 * inv
            o1 = o1 * inv
            lse2 = closing.index(1).load(SliceLayout(0, O))
            thread_barrier()
            end_handover.give_back()
            ended += 1
            r = gl.arange(0, ROWS, SliceLayout(0, O))
            splits, rank, stay, first_slot, next_slot, slot_step = split_slots(piece, b, base, kv_len, workers, tile, tiles, MODE)
            if splits == 1:
                token = (q_first + (first_row + r) // HEADS).to(gl.int64)
                row_ptr = out_ptr + token * out_stride_token + (first_row + r) % HEADS * out_stride_head
                interleave(e0, o0, row_ptr, r < rows, 0)
                interleave(e1, o1, row_ptr, r < rows, 2 * HALF)
                if WRITE_LSE:
                    gl.store(lse_ptr + token * lse_stride + (first_row + r) % HEADS, lse2 * LN2, mask=r < rows)
            else:
                slot = gl.where(rank == 0, first_slot, next_slot + (rank - 1) * slot_step).to(gl.int64) * ROWS
                d = 2 * gl.arange(0, HALF, SliceLayout(1, O))
                store_columns(part_out_ptr + slot * LATENT, e0, d, HALF, ROWS)
                store_columns(part_out_ptr + slot * LATENT, o0, d + 1, HALF, ROWS)
                store_columns(part_out_ptr + slot * LATENT, e1, 2 * HALF + d, HALF, ROWS)
                store_columns(part_out_ptr + slot * LATENT, o1, 2 * HALF + d + 1, HALF, ROWS)
                gl.store(part_lse_ptr + slot + column_of(r), lse2)
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
