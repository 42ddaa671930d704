"""The roles of ``decode_bf16_sm90`` for 64 query rows: the scores of one tile are worked out while the values of the one before are summed.

    loader (1 or 4 warps) | scorer (1 warpgroup)            | summer (2 warpgroups, 256 of the 512 values each)
    ----------------------+---------------------------------+---------------------------------------------------
    part by part of tile  | part by part:                   | wait for P^T; O^T = alpha O^T + V^T P^T,
    i+2: wait empty[s][n] | wait full[s][n]; S^T += K Q^T   | quarter by quarter
    and fetch             | weights; wait until P is free   | as each is complete: arrive empty[s][1 + quarter]
                          | P^T (and alpha) to shared memory| P is free
                          | arrive empty[s][0]              |

A stage is five parts: the rope panel and four quarters of the latent values, each of two panels, in the order in which they become
free, arrive and are used. A part arrives while the products of the one before run, and its place is taken by the next tile but
one as soon as it is free. With two stages that came and went as wholes a tile took 2.9 us, of which memory needs 2.1: a stage was taken
for its transfer and for all that happened to it, one after the other. Gathered rows come and go as wholes.

Weights are 2^(score - reference), and a reference need not be the largest score so far: it follows only when a
score lies more than LEEWAY above it. That is the first tile and seldom another. Any other tile takes one vote of the
warps in the place of a maximum over the keys of every row (half of the softmax's time), and neither sums nor denominators are
rescaled. Weights stay below 2^LEEWAY, so bf16 and the sums in fp32 hold them as well as those below 1. But the largest is no longer
1, which bf16 holds exactly: sums are divided by that of the rounded weights, so that a key that outweighs all others still comes out
as it is, and log-sum-exp is that of the weights before rounding.

Two warpgroups that did both in lockstep took about 6000 cycles a tile of 64 keys: each had half the rows of the scores, n32, which
is bound by shared memory (24 cycles an instruction, n64 32), and nothing ran beside the softmax and the barriers. The scorer's 36
products take 1152 cycles and the summer's 32 1024 beside a softmax of about 500; 73728 bytes take about 4000
cycles at an SM's share of the memory.

The query of the first segment is fetched by the summer, which waits anyway; of later ones by the scorer, beside the end of the one before.
At the end of a segment the scorer hands over 1 / denominator and log-sum-exp and goes on with the next segment; the way out is the
summer's.

Registers: O^T is 128 a thread of the summer; of the scorer S^T and the weights are 32 each, the references 16 and two denominators,
spread over threads and key pairs, 32. The launch has 65536 for 16 warps, so the summer gets what scorer and loader leave: 160 a thread.
Shared memory: two stages 144 KiB, the query 72 KiB, P^T 8 KiB; 3 KiB for the hand-over and for scratch, of which 250 bytes are left.
"""

from .dependent_launch import let_kernel_after_begin
from .gluon_names import (
    BlockedLayout,
    NVMMADistributedLayout,
    SliceLayout,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .loader import clear_hidden, clear_rows, prefetch_rows, uniform
from .pages import BLOCK
from .reduction import column_of, counter_of, meet, store_columns
from .schedule import has_work, segment, split_slots
from .softmax import LOG2E, NOTHING, any_above, log2, pair_sums, pairs_layout, reciprocal, row_limits, visible_scores

__all__ = ["scorer", "summer"]

LATENT = gl.constexpr(512)
#: Values of a key that arrive, are summed and become free together.
QUARTER = gl.constexpr(128)
ROPE = gl.constexpr(64)
LN2 = gl.constexpr(0.6931471805599453)
#: How far, in powers of two, a score may lie above the reference of its row before the references follow.
LEEWAY = gl.constexpr(8.0)


@gluon.jit
def _load_q(q_ptr, stride_token, stride_head, q_latent, q_rope, q_first, first_row, rows, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Query rows to shared memory as bf16, as many at a time as take 64 registers a thread."""
    PART: gl.constexpr = gl.num_warps() * 8
    L: gl.constexpr = BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    LR: gl.constexpr = BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    d = gl.arange(0, LATENT, SliceLayout(0, L))
    dr = LATENT + gl.arange(0, ROPE, SliceLayout(0, LR))
    for r0 in gl.static_range(0, ROWS, PART):
        r = r0 + gl.arange(0, PART, SliceLayout(1, L))
        at = (q_first + (first_row + r) // HEADS).to(gl.int64) * stride_token + (first_row + r) % HEADS * stride_head
        x = gl.load((q_ptr + at)[:, None] + d[None, :], mask=(r < rows)[:, None], other=0.0)
        rr = r0 + gl.arange(0, PART, SliceLayout(1, LR))
        at_r = (q_first + (first_row + rr) // HEADS).to(gl.int64) * stride_token + (first_row + rr) % HEADS * stride_head
        xr = gl.load((q_ptr + at_r)[:, None] + dr[None, :], mask=(rr < rows)[:, None], other=0.0)
        q_latent.slice(r0, PART).store(x.to(gl.bfloat16))
        q_rope.slice(r0, PART).store(xr.to(gl.bfloat16))


@gluon.jit
def _scores(latent, rope, q_latent, q_rope, full, used, i, kv_len,
            S: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr):  # fmt: skip
    """Start S^T = K Q^T of tile i (the block's ``used``-th) part after part as they arrive; the result is still in flight."""
    stage = uniform(used % STAGES)
    parity = (used // STAGES) & 1
    zero = uniform(gl.minimum(i, 0))  # i >= 0: keeps the query's 36 descriptors out of vector registers
    k = latent.index(stage)
    q = q_latent.index(zero)
    if GATHER:
        mbarrier.wait(full.index(stage), parity)
        fence_async_shared()  # cp.async writes like an ordinary store
    elif i * BLOCK + BLOCK > kv_len:
        for part in gl.static_range(PARTS):
            mbarrier.wait(full.index(stage * PARTS + part), parity)
        clear_rows(latent, stage, kv_len - i * BLOCK, 16)
    if not GATHER:
        mbarrier.wait(full.index(stage * PARTS), parity)
    x = gl.zeros([BLOCK, ROWS], gl.float32, S)
    x = warpgroup_mma(rope.index(stage), q_rope.index(zero).permute((1, 0)), x, use_acc=False, is_async=True)
    for n in gl.static_range(LATENT // QUARTER):
        if not GATHER:
            mbarrier.wait(full.index(stage * PARTS + 1 + n), parity)
        keys = k.slice(n * QUARTER, QUARTER, dim=1)
        x = warpgroup_mma(keys, q.slice(n * QUARTER, QUARTER, dim=1).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def scorer(
    q_ptr, q_stride_token, q_stride_head, latent, rope, q_latent, q_rope, p_tile, alphas, raised, p_handover, votes, closing, end_handover, q_ready, full, empty,
    pages, piece, tile, sm_scale, logit_cap,
    HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr, MODE: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Probabilities of every tile, and what they sum up to at the end of every segment."""
    S: gl.constexpr = NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    PAIRS: gl.constexpr = pairs_layout(ROWS)
    ONE: gl.constexpr = BlockedLayout([1], [32], [gl.num_warps()], [0])
    scale = sm_scale * LOG2E
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
                _load_q(q_ptr, q_stride_token, q_stride_head, q_latent.index(0), q_rope.index(0), q_first, first_row, rows, HEADS, ROWS)
                fence_async_shared()
            if MODE == 0 and not pages.RAGGED_Q and follow < piece.end:
                prefetch_rows(q_ptr, q_stride_token, q_stride_head, q_first + q_count, first_row, rows, HEADS, ROWS)
            # keys that every row of the tile sees
            shared_keys = kv_len
            if CAUSAL:
                shared_keys = gl.minimum(kv_len, kv_len - q_count + 1 + first_row // HEADS)
            ref = gl.full([ROWS], NOTHING, gl.float32, SliceLayout(0, S))
            den = gl.zeros([BLOCK // 2, ROWS], gl.float32, PAIRS)
            rounded_den = gl.zeros([BLOCK // 2, ROWS], gl.float32, PAIRS)
            for i in range(lo, hi):
                x = _scores(latent, rope, q_latent, q_rope, full, used, i, kv_len, S, ROWS, STAGES, PARTS, GATHER)
                x = warpgroup_mma_wait(0, deps=[x])
                # i is never negative: limits are worked out where the tile needs them, not kept
                limit = row_limits(gl.arange(0, ROWS, SliceLayout(0, S)), first_row, HEADS, q_count, kv_len + gl.minimum(i, 0), CAUSAL)
                x = visible_scores(x * scale, i, limit, shared_keys, logit_cap, S, HAS_CAP)
                above = x - ref[None, :]
                p = gl.exp2(above)
                above_leeway = any_above(above, LEEWAY, votes)
                p_handover.wait_for_room(used)
                if above_leeway != 0:
                    # a row's reference follows its own scores alone, so that its bits do not depend on other rows
                    highest = gl.max(x, 0)
                    highest = gl.where(highest - ref > LEEWAY, highest, ref)
                    alpha = gl.exp2(ref - highest)
                    alphas.index(0).store(alpha)
                    factor = gl.convert_layout(alpha, SliceLayout(0, PAIRS), assert_trivial=True)[None, :]
                    den = den * factor
                    rounded_den = rounded_den * factor
                    p = gl.exp2(x - highest[None, :])
                    ref = highest
                if CAUSAL and i * BLOCK + BLOCK > shared_keys:
                    clear_hidden(latent, used % STAGES, shared_keys - i * BLOCK, kv_len - i * BLOCK, STAGES, 16)
                rounded = p.to(gl.bfloat16)
                p_tile.store(rounded)
                raised.store(gl.full([1], above_leeway, gl.int32, ONE))
                fence_async_shared()
                p_handover.give()
                den = den + pair_sums(p, PAIRS)
                rounded_den = rounded_den + pair_sums(rounded.to(gl.float32), PAIRS)
                if not GATHER:
                    mbarrier.arrive(empty.index(used % STAGES * PARTS), count=1)  # the rope panel; all threads have met in give
                used += 1

            total = gl.convert_layout(gl.sum(den, 0), SliceLayout(0, S), assert_trivial=True)
            none = total == 0.0
            end_handover.wait_for_room(ended)
            rounded_total = gl.convert_layout(gl.sum(rounded_den, 0), SliceLayout(0, S), assert_trivial=True)
            closing.index(0).store(gl.where(none, 0.0, reciprocal(rounded_total)))
            closing.index(1).store(gl.where(none, float("-inf"), ref + log2(total)))
            end_handover.give()
            ended += 1
        base = follow
        at = follow
        b += 1
        more = (follow < piece.end) & (MODE == 0)


@gluon.jit
def _add_values(values, n: gl.constexpr, p_tile, o):
    """Start O^T += V^T P^T for quarter n of the values; the result is still in flight."""
    return warpgroup_mma(values.slice(n * QUARTER, QUARTER, dim=1).permute((1, 0)), p_tile, o, is_async=True)


@gluon.jit
def _let_go(empty, part):
    """A part of a stage, of which this thread's products have been completed."""
    thread_barrier()
    mbarrier.arrive(empty.index(part), count=1)


@gluon.jit
def summer(
    q_ptr, q_stride_token, q_stride_head, q_latent, q_rope, q_ready,
    out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride, part_out_ptr, part_lse_ptr, counter_ptr, counters, turn,
    latent, p_tile, alphas, raised, p_handover, closing, end_handover, empty, pages, piece, workers, tile, tiles, may_wait,
    HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, MODE: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr,
):  # fmt: skip
    """The query of the first segment; weighted sums of the values, and the way out, segment after segment."""
    O: gl.constexpr = NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    ONE: gl.constexpr = BlockedLayout([1], [32], [gl.num_warps()], [0])
    b = piece.b
    at = piece.start
    base = piece.base
    more = has_work(piece, MODE)
    if more:
        # These warps have nothing else to do yet and are twice as many as the scorer's: one round trip instead of two.
        first_token, tokens = pages.query(b)
        asked = gl.minimum(tokens * HEADS - tile * ROWS, ROWS)
        if asked > 0:
            _load_q(q_ptr, q_stride_token, q_stride_head, q_latent.index(0), q_rope.index(0), first_token, tile * ROWS, asked, HEADS, ROWS)
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
            o0 = gl.zeros([QUARTER, ROWS], gl.float32, O)
            o1 = gl.zeros([QUARTER, ROWS], gl.float32, O)
            o2 = gl.zeros([QUARTER, ROWS], gl.float32, O)
            o3 = gl.zeros([QUARTER, ROWS], gl.float32, O)
            for _tile in range(lo, hi):
                stage = uniform(used % STAGES)
                p_handover.receive(used)
                if gl.max(raised.load(ONE), 0) != 0:
                    alpha = alphas.index(0).load(SliceLayout(0, O))[None, :]
                    o0 = o0 * alpha
                    o1 = o1 * alpha
                    o2 = o2 * alpha
                    o3 = o3 * alpha
                values = latent.index(stage)
                o0 = _add_values(values, 0, p_tile, o0)
                o1 = _add_values(values, 1, p_tile, o1)
                o2 = _add_values(values, 2, p_tile, o2)
                o3 = _add_values(values, 3, p_tile, o3)
                if PARTS > 1:
                    o0 = warpgroup_mma_wait(3, deps=[o0])
                    _let_go(empty, stage * PARTS + 1)
                    o1 = warpgroup_mma_wait(2, deps=[o1])
                    _let_go(empty, stage * PARTS + 2)
                    o2 = warpgroup_mma_wait(1, deps=[o2])
                    _let_go(empty, stage * PARTS + 3)
                    o3 = warpgroup_mma_wait(0, deps=[o3])
                else:
                    o0, o1, o2, o3 = warpgroup_mma_wait(0, deps=[o0, o1, o2, o3])
                _let_go(empty, stage * PARTS + (PARTS - 1))
                p_handover.give_back()
                used += 1

            if (follow >= piece.end) | (MODE != 0):
                let_kernel_after_begin()
            end_handover.receive(ended)
            inv = closing.index(0).load(SliceLayout(0, O))[None, :]
            o0 = o0 * inv
            o1 = o1 * inv
            o2 = o2 * inv
            o3 = o3 * inv
            lse2 = closing.index(1).load(SliceLayout(0, O))
            thread_barrier()
            end_handover.give_back()
            ended += 1
            r = gl.arange(0, ROWS, SliceLayout(0, O))
            d = gl.arange(0, QUARTER, SliceLayout(1, O))
            splits, rank, stay, first_slot, next_slot, slot_step = split_slots(piece, b, base, kv_len, workers, tile, tiles, MODE)
            if splits == 1:
                token = (q_first + (first_row + r) // HEADS).to(gl.int64)
                at_out = (out_ptr + (token * out_stride_token + (first_row + r) % HEADS * out_stride_head))[None, :]
                gl.store(at_out + d[:, None], o0.to(out_ptr.dtype.element_ty), mask=(r < rows)[None, :])
                gl.store(at_out + (QUARTER + d)[:, None], o1.to(out_ptr.dtype.element_ty), mask=(r < rows)[None, :])
                gl.store(at_out + (2 * QUARTER + d)[:, None], o2.to(out_ptr.dtype.element_ty), mask=(r < rows)[None, :])
                gl.store(at_out + (3 * QUARTER + d)[:, None], o3.to(out_ptr.dtype.element_ty), mask=(r < rows)[None, :])
                if WRITE_LSE:
                    gl.store(lse_ptr + token * lse_stride + (first_row + r) % HEADS, lse2 * LN2, mask=r < rows)
            else:
                slot = gl.where(rank == 0, first_slot, next_slot + (rank - 1) * slot_step).to(gl.int64) * ROWS
                store_columns(part_out_ptr + slot * LATENT, o0, d, QUARTER, ROWS)
                store_columns(part_out_ptr + slot * LATENT, o1, QUARTER + d, QUARTER, ROWS)
                store_columns(part_out_ptr + slot * LATENT, o2, 2 * QUARTER + d, QUARTER, ROWS)
                store_columns(part_out_ptr + slot * LATENT, o3, 3 * QUARTER + d, QUARTER, ROWS)
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
