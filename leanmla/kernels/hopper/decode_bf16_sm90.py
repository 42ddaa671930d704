"""MLA decode over a bf16 latent cache on Hopper: one launch, both products on the tensor cores straight from shared memory.

The operands are swapped, so that a few query rows never have to be padded to the 64 rows of wgmma:

    S^T [64 keys, ROWS]  = K [64, 576] Q^T [576, ROWS]          36 wgmma m64 nROWS k16
    O^T [512, ROWS]     += V^T [512, 64 keys] P^T [64, ROWS]    32 wgmma m64 nROWS k16, V^T is the K tile read transposed

Rows are (query token, head) pairs, heads fastest; a tile has ROWS = 16, 32 or 64 of them and the rest of a tile is masked.

Grid: ``workers * row_tiles`` blocks, block = worker * row_tiles + tile, so that the row tiles of one piece of the cache run
side by side and share it in L2. ``schedule`` says what a worker reads, ``reduction`` how partial results meet.

Two roles a block (warp specialisation) for ROWS = 16 and 32; three for ROWS = 64, see ``decode_bf16_wide_sm90``:

    loader (1 warp, or 4 for gathered pages)      | mathematicians (1 warpgroup)
    ----------------------------------------------+------------------------------------------------------------
    wait empty[s]; fetch tile i+1 into stage s    | wait full[s]; S^T = K Q^T
    (runs on over segment borders, so the next    | softmax; P^T to shared memory
    sequence's keys arrive during the epilogue)   | O^T += V^T P^T; arrive empty[s]

A tile is nine panels of [64 keys, 64 values], 128-byte rows, 128-byte swizzle: one tensor-map box a panel for pages of 64k
tokens, 64/BOX boxes for pages of 16k or 32k, and cp.async of single rows for any other page size (GATHER).

Keys past the end of a sequence: the score is replaced by -inf, and the rows of the tile are overwritten with zeros before
the tensor cores read them as values (0 * NaN is NaN). The gather fetches zeros there in the first place.
"""

import torch

from ...problem import DecodeArgs
from .arguments import NOT_SPECIALISED, cache_view, constants, tensors
from .decode_bf16_wide_sm90 import scorer, summer
from .dependent_launch import let_kernel_after_begin, wait_for_kernel_before
from .gluon_names import (
    BlockedLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    SliceLayout,
    SwizzledSharedLayout,
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .launch import HopperLaunch
from .loader import clear_hidden, clear_rows, loader, prefetch_rows, uniform, warm_up
from .pages import BLOCK, Pages
from .reduction import column_of, counter_of, meet, store_columns
from .roles import handover
from .schedule import has_work, plan_piece, segment, split_slots
from .softmax import LOG2E, log2, probabilities, reciprocal, row_limits

__all__ = ["decode_bf16", "launch"]

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _load_q(q_ptr, stride_token, stride_head, q_latent, q_rope, q_first, first_row, rows,
            HEADS: gl.constexpr, ROWS: gl.constexpr, TERM: gl.constexpr):  # fmt: skip
    """Query rows to shared memory as bf16. TERM 1: what a bf16 rounding of an fp16 query leaves over."""
    L: gl.constexpr = BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    LR: gl.constexpr = BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, ROWS, SliceLayout(1, L))
    at = (q_first + (first_row + r) // HEADS).to(gl.int64) * stride_token + (first_row + r) % HEADS * stride_head
    d = gl.arange(0, LATENT, SliceLayout(0, L))
    x = gl.load((q_ptr + at)[:, None] + d[None, :], mask=(r < rows)[:, None], other=0.0)
    rr = gl.arange(0, ROWS, SliceLayout(1, LR))
    at_r = (q_first + (first_row + rr) // HEADS).to(gl.int64) * stride_token + (first_row + rr) % HEADS * stride_head
    dr = LATENT + gl.arange(0, ROPE, SliceLayout(0, LR))
    xr = gl.load((q_ptr + at_r)[:, None] + dr[None, :], mask=(rr < rows)[:, None], other=0.0)
    if TERM == 1:
        xf = x.to(gl.float32)
        xrf = xr.to(gl.float32)
        q_latent.store((xf - xf.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16))
        q_rope.store((xrf - xrf.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16))
    else:
        q_latent.store(x.to(gl.bfloat16))
        q_rope.store(xr.to(gl.bfloat16))


@gluon.jit
def _scores(latent, rope, q_latent, q_rope, q_latent2, q_rope2, full, used, i, kv_len,
            S: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr, SPLIT_Q: gl.constexpr):  # fmt: skip
    """Wait for tile i (the block's ``used``-th) and start S^T = K Q^T; the result is still in flight."""
    stage = uniform(used % STAGES)
    zero = uniform(gl.minimum(i, 0))  # i >= 0: keeps the query's 36 descriptors out of vector registers
    mbarrier.wait(full.index(stage), (used // STAGES) & 1)
    k = latent.index(stage)
    if GATHER:
        fence_async_shared()  # cp.async writes like an ordinary store
    elif i * BLOCK + BLOCK > kv_len:
        clear_rows(latent, stage, kv_len - i * BLOCK, 16)
    x = gl.zeros([BLOCK, ROWS], gl.float32, S)
    x = warpgroup_mma(k, q_latent.index(zero).permute((1, 0)), x, use_acc=False, is_async=True)
    x = warpgroup_mma(rope.index(stage), q_rope.index(zero).permute((1, 0)), x, is_async=True)
    if SPLIT_Q:
        x = warpgroup_mma(k, q_latent2.index(zero).permute((1, 0)), x, is_async=True)
        x = warpgroup_mma(rope.index(stage), q_rope2.index(zero).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def _values(latent, p_tile, p, alpha, acc, used, O: gl.constexpr, STAGES: gl.constexpr):
    """Start O^T = alpha O^T + V^T P^T; the result is still in flight."""
    p_tile.store(p.to(gl.bfloat16))
    fence_async_shared()
    acc = acc * gl.convert_layout(alpha, SliceLayout(0, O))[None, :]
    return warpgroup_mma(latent.index(uniform(used % STAGES)).permute((1, 0)), p_tile, acc, is_async=True)


@gluon.jit
def _mathematician(
    q_ptr, q_stride_token, q_stride_head, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    part_out_ptr, part_lse_ptr, counter_ptr, counters, turn, latent, rope, q_latent, q_rope, q_latent2, q_rope2, p_tile, full, empty,
    pages, piece, workers, tile, tiles, sm_scale, logit_cap, may_wait,
    HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr, MODE: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, SPLIT_Q: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, values and the way out, segment after segment."""
    S: gl.constexpr = NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    O: gl.constexpr = S
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
            _load_q(q_ptr, q_stride_token, q_stride_head, q_latent.index(0), q_rope.index(0), q_first, first_row, rows, HEADS, ROWS, 0)
            if SPLIT_Q:
                _load_q(q_ptr, q_stride_token, q_stride_head, q_latent2.index(0), q_rope2.index(0), q_first, first_row, rows, HEADS, ROWS, 1)
            fence_async_shared()
            if MODE == 0 and not pages.RAGGED_Q and follow < piece.end:
                prefetch_rows(q_ptr, q_stride_token, q_stride_head, q_first + q_count, first_row, rows, HEADS, ROWS)
            limit = row_limits(gl.arange(0, ROWS, SliceLayout(0, S)), first_row, HEADS, q_count, kv_len, CAUSAL)
            # keys that every row of the tile sees
            shared_keys = kv_len
            if CAUSAL:
                shared_keys = gl.minimum(kv_len, kv_len - q_count + 1 + first_row // HEADS)
            acc = gl.zeros([LATENT, ROWS], gl.float32, O)
            m = gl.full([ROWS], float("-inf"), gl.float32, SliceLayout(0, S))
            den = gl.zeros([BLOCK, ROWS], gl.float32, S)
            for i in range(lo, hi):
                x = _scores(latent, rope, q_latent, q_rope, q_latent2, q_rope2, full, used, i, kv_len, S, ROWS, STAGES, GATHER, SPLIT_Q)
                x = warpgroup_mma_wait(0, deps=[x])
                p, m, den, alpha = probabilities(x * scale, m, den, i, limit, shared_keys, logit_cap, S, HAS_CAP, 0.0)
                if CAUSAL and i * BLOCK + BLOCK > shared_keys:
                    clear_hidden(latent, used % STAGES, shared_keys - i * BLOCK, kv_len - i * BLOCK, STAGES, 16)
                acc = _values(latent, p_tile, p, alpha, acc, used, O, STAGES)
                acc = warpgroup_mma_wait(0, deps=[acc])
                thread_barrier()
                mbarrier.arrive(empty.index(used % STAGES), count=1)
                used += 1

            if (follow >= piece.end) | (MODE != 0):
                let_kernel_after_begin()
            total = gl.sum(den, 0)
            none = total == 0.0
            lse2 = gl.where(none, float("-inf"), m + log2(total))
            inv = gl.where(none, 0.0, reciprocal(total))
            acc = acc * gl.convert_layout(inv, SliceLayout(0, O))[None, :]
            r = gl.arange(0, ROWS, SliceLayout(0, O))
            rs = gl.arange(0, ROWS, SliceLayout(0, S))
            d = gl.arange(0, LATENT, SliceLayout(1, O))
            splits, rank, stay, first_slot, next_slot, slot_step = split_slots(piece, b, base, kv_len, workers, tile, tiles, MODE)
            if splits == 1:
                token = (q_first + (first_row + r) // HEADS).to(gl.int64)
                at_out = token * out_stride_token + (first_row + r) % HEADS * out_stride_head
                gl.store((out_ptr + at_out)[None, :] + d[:, None], acc.to(out_ptr.dtype.element_ty), mask=(r < rows)[None, :])
                if WRITE_LSE:
                    token_s = (q_first + (first_row + rs) // HEADS).to(gl.int64)
                    gl.store(lse_ptr + token_s * lse_stride + (first_row + rs) % HEADS, lse2 * LN2, mask=rs < rows)
            else:
                slot = gl.where(rank == 0, first_slot, next_slot + (rank - 1) * slot_step).to(gl.int64) * ROWS
                store_columns(part_out_ptr + slot * LATENT, acc, d, LATENT, ROWS)
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
def decode_bf16(
    desc,  # tensor map of the cache [pages, page_size, 576] bf16, box [1, BOX, 64]; unused if GATHER
    cache_ptr, page_stride, token_stride,  # the same cache, strides in elements
    q_ptr, q_stride_token, q_stride_head,  # [total_q, HEADS, 576] bf16 or fp16
    out_ptr, out_stride_token, out_stride_head,  # [total_q, HEADS, 512] like q
    lse_ptr, lse_stride,  # [total_q, HEADS] fp32, if WRITE_LSE
    part_out_ptr, part_lse_ptr,  # fp32 [slots, 512, ROWS] and [slots, ROWS]
    counter_ptr, counters,  # int32 [4 + 2 * counters], counters >= batch * row tiles, see reduction
    lens_ptr, last_ptr, ids_ptr, ids_stride, qo_ptr, q_len, batch,  # see pages.Pages
    workers, splits, tiles, sm_scale, logit_cap, may_wait,
    KIND: gl.constexpr, PAGE_SIZE: gl.constexpr, RAGGED_Q: gl.constexpr, LENS: gl.constexpr, ONE_PASS: gl.constexpr,
    MODE: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
    GATHER: gl.constexpr, CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, SPLIT_Q: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """See the top of this file. Launch with ``num_warps`` = 4 for ROWS <= 32 and 8, the summer's, for ROWS = 64."""
    K: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    PANEL: gl.constexpr = NVMMASharedLayout(128, 16, 3)
    P: gl.constexpr = NVMMASharedLayout(2 * ROWS, 16, 2)
    FLAT: gl.constexpr = SwizzledSharedLayout(1, 1, 1, [0])
    BOXES: gl.constexpr = BLOCK // BOX
    LOADER_WARPS: gl.constexpr = 4 if GATHER else 1
    PARTS: gl.constexpr = 5 if ROWS == 64 and not GATHER else 1

    latent = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, LATENT], K)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, ROPE], K)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, LATENT], K)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, ROPE], K)
    if SPLIT_Q:
        q_latent2 = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, LATENT], K)
        q_rope2 = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, ROPE], K)
    else:
        q_latent2 = q_latent
        q_rope2 = q_rope
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, ROWS], P)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PARTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES * PARTS, 1], mbarrier.MBarrierLayout())
    if GATHER:
        warm = full  # not used; a barrier that nobody waits for would lie under scratch memory
    else:
        warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(warm, 1)
    for s in gl.static_range(STAGES * PARTS):
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
        latent_parts = latent._reinterpret(gl.bfloat16, [STAGES * 8 * BOXES, 1, BOX, 64], PANEL)
        rope_parts = rope._reinterpret(gl.bfloat16, [STAGES * BOXES, 1, BOX, 64], PANEL)
        thread_barrier()
        warm_up(desc, desc, latent_parts, rope_parts, warm, BOX, 64, 1152)

    tile = gl.program_id(0) % tiles
    pages = Pages(lens_ptr, last_ptr, ids_ptr, ids_stride, qo_ptr, q_len, batch, KIND, PAGE_SIZE, RAGGED_Q)
    pages.prefetch_ids(gl.program_id(0) // tiles, workers)
    # the query of the sequence that this worker would start with if all were as long
    guess = gl.program_id(0) // tiles * batch // workers if MODE == 0 else gl.program_id(0) // tiles // workers
    prefetch_rows(q_ptr, q_stride_token, q_stride_head, guess * q_len, tile * ROWS, gl.minimum(q_len * HEADS - tile * ROWS, ROWS), HEADS, ROWS)
    wait_for_kernel_before()
    turn = gl.load(counter_ptr)
    piece = plan_piece(pages, gl.program_id(0) // tiles, workers, splits, MODE, LENS, ONE_PASS)
    thread_barrier()
    if ROWS == 64:
        gl.warp_specialize(
            [
                (summer, (
                    q_ptr, q_stride_token, q_stride_head, q_latent, q_rope, q_ready,
                    out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride, part_out_ptr, part_lse_ptr, counter_ptr, counters, turn,
                    latent, p_tile, alphas, raised, p_handover, closing, end_handover, empty, pages, piece, workers, tile, tiles, may_wait,
                    HEADS, ROWS, STAGES, PARTS, MODE, WRITE_LSE, MANY_SPLITS)),
                (scorer, (
                    q_ptr, q_stride_token, q_stride_head, latent, rope, q_latent, q_rope, p_tile, alphas, raised, p_handover, votes, closing, end_handover, q_ready, full, empty,
                    pages, piece, tile, sm_scale, logit_cap,
                    HEADS, ROWS, STAGES, PARTS, GATHER, MODE, CAUSAL, HAS_CAP)),
                (loader, (
                    desc, desc, cache_ptr, page_stride, token_stride, latent_parts, rope_parts, full, empty, warm, counter_ptr, counters, turn, pages, piece, tile * ROWS,
                    HEADS, STAGES, BOX, 64, 1152, GATHER, MODE, PARTS)),
            ],
            [4, LOADER_WARPS], [152, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_mathematician, (
                    q_ptr, q_stride_token, q_stride_head, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                    part_out_ptr, part_lse_ptr, counter_ptr, counters, turn, latent, rope, q_latent, q_rope, q_latent2, q_rope2, p_tile, full, empty,
                    pages, piece, workers, tile, tiles, sm_scale, logit_cap, may_wait,
                    HEADS, ROWS, STAGES, GATHER, MODE, CAUSAL, HAS_CAP, SPLIT_Q, WRITE_LSE, MANY_SPLITS)),
                (loader, (
                    desc, desc, cache_ptr, page_stride, token_stride, latent_parts, rope_parts, full, empty, warm, counter_ptr, counters, turn, pages, piece, tile * ROWS,
                    HEADS, STAGES, BOX, 64, 1152, GATHER, MODE)),
            ],
            [LOADER_WARPS], [120 if GATHER else 40],
        )  # fmt: skip


_PANEL = NVMMASharedLayout(128, 16, 3)


def launch(args: DecodeArgs, launch: HopperLaunch, workspace) -> None:
    """Run :func:`decode_bf16` for a checked call."""
    cache = cache_view(args)
    desc = cache if launch.gather else TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, launch.box, 64], _PANEL)
    decode_bf16[(launch.grid,)](
        desc,
        cache,
        cache.stride(0),
        cache.stride(1),
        **tensors(args, launch, workspace),
        **constants(args, launch),
        SPLIT_Q=args.q.dtype == torch.float16,
        num_warps=launch.num_warps,
    )
