"""MLA decode over an OCP MXFP4 latent cache on Hopper, at 16-bit accuracy.

As in ``decode_fp8_sm90`` the operands are swapped, S^T = K Q^T and O^T += V^T P^T, and schedule, reduction and the query's
hi + lo terms are the same. What differs is that a second warpgroup, the *expander*, stands between memory and the products:

* It turns 64 rows of nibbles into a tile of e5m2 bytes, which serves both as keys and as values. A byte permute looks up four
  values at a time in a table that already holds the block's scale, relative to the largest scale of the token:

      byte = E2M1 value * 2^13 * 2^(block exponent - token exponent),   exact while the difference is at most 26

  26 octaves below its token's largest block, a block is taken for one that is 26 below. Latent and rope part have token exponents
  of their own. Every byte is finite, whatever the cache holds, so rows past the end of a sequence need no clearing.
* Values 0..3 and values 4..7 of every eight go to different halves of the tile, so that the permute's result is stored as it is:

      column c < 256:    d = 8 (c / 4) + c % 4          column 256 + c:    d = 8 (c / 4) + c % 4 + 4
      rope column c:     d = 512 + 32 (c / 32) + 8 (c / 4 % 4) + 4 (c / 16 % 2) + c % 4

  The query is loaded in that order, outputs are stored from it.
* The token's exponent e goes into the logits, x 2^e, and its power of two into the probabilities: P' = exp2(x + e - max(x + e))
  is what weights the stored values. The denominator sums P' 2^(c - e); c is the largest exponent of the segment's first tile, which
  keeps the sum in range while exponents of tokens differ by less than 2^126. A scale byte 255 makes the token's logits NaN.
* P' is fp16 scaled by 2^15 (29 octaves at full precision) and values are widened to fp16, one byte operation for two of them.

| step of tile i | expander                                     | mathematicians              |
|----------------|----------------------------------------------|-----------------------------|
| in flight      | nibbles of tile i + 1, scales of tile i + 1  | products of tile i - 1      |

Two blocks an SM for ROWS = 16. Nibbles come by tensor maps where pages hold a multiple of 16 keys, otherwise by plain loads a
tile ahead; scales, whose rows are 18 bytes, always by plain loads. Those are issued after the proxy fence, which waits for loads.
"""

import torch

from ...errors import InvalidArgument
from ...problem import DecodeArgs
from .arguments import NOT_SPECIALISED, cache_view, constants, tensors
from .dependent_launch import let_kernel_after_begin, wait_for_kernel_before
from .fp8_operands import round_e4m3, row_factor, score_part, sum_terms
from .gluon_names import (
    BlockedLayout,
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .launch import HopperLaunch
from .loader import _places, uniform
from .pages import BLOCK, Pages
from .reduction import column_of, counter_of, meet, store_columns, turn_over
from .schedule import has_work, plan_piece, segment, split_slots
from .softmax import LOG2E, _cap_logits, _rescale, log2, reciprocal, row_limits

__all__ = ["decode_mxfp4", "launch", "power_factor", "weights"]

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
LN2 = gl.constexpr(0.6931471805599453)
#: Latent values of a running sum of the scores: fp8 wgmma keeps about 14 bits of one.
SUM_VALUES = gl.constexpr(64)
#: Probabilities are scaled by 2^15, the most that fp16 holds with room for rounding.
P_SHIFT = gl.constexpr(15)
#: Stored bytes are values times 2^13: 6 becomes 1.5 * 2^15, the largest e5m2 of its form.
V_SHIFT = gl.constexpr(13)


@constexpr_function
def byte_pairs_half(warps):
    """[16 keys, 128 byte pairs] by ldmatrix.trans, in the order of a 16-bit A fragment."""
    bits = warps.bit_length() - 1
    pairs = [[0, 16 << w] for w in range(3)]
    return DistributedLinearLayout(
        [[1, 0], [0, 8], [8, 0]] + pairs[bits:], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], pairs[:bits], [], [16, 128]
    )


# ---- the expander


@gluon.jit
def _expand(x, deficit):
    """Words of eight E2M1 codes [64, blocks, 4] -> two words of e5m2 bytes each, of values 0..3 and 4..7.

    ``deficit`` [64, blocks]: octaves by which the block's scale is below the token's, 0..26.
    """
    lo = gl.expand_dims(0x72706C00 - deficit * 0x04040400, 2)  # 0, 0.5, 1, 1.5 in e5m2, times 2^13
    hi = gl.expand_dims(0x7A787674 - deficit * 0x04040404, 2)  # 2, 3, 4, 6
    lo, _ = gl.broadcast(lo, x)
    hi, _ = gl.broadcast(hi, x)
    return gl.inline_asm_elementwise(
        """
        { .reg .b32 s, u, t, a, b;
          and.b32 s, $2, 0x77777777;
          shr.u32 u, s, 16;
          prmt.b32 a, $3, $4, s;
          prmt.b32 b, $3, $4, u;
          shl.b32 t, $2, 4;
          prmt.b32 s, t, $2, 0x5140;
          prmt.b32 u, t, $2, 0x7362;
          lop3.b32 $0, a, s, 0x80808080, 0xF8;
          lop3.b32 $1, b, u, 0x80808080, 0xF8; }""",
        "=&r,=&r,r,r,r", [x, lo, hi], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@constexpr_function
def block_layout(warps, blocks):
    """[64 keys, blocks, 4 words]: a lane holds the 16 bytes of a block, the lanes of a warp hold whole rows."""
    return BlockedLayout([1, 1, 4], [32 // blocks, blocks, 1], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def _keys_of(L: gl.constexpr):
    return gl.arange(0, BLOCK, SliceLayout(1, SliceLayout(2, L)))


@gluon.jit
def _load_scales(scale_ptr, page_stride, token_stride, pages, page, place, first_id, token, kv_len, FIRST: gl.constexpr, BLOCKS: gl.constexpr,
                 WHOLE: gl.constexpr, L: gl.constexpr):  # fmt: skip
    """E8M0 bytes [64 keys, BLOCKS] of a tile, from block FIRST on; 0 for keys past the end. WHOLE: all keys lie in the page of ``place``."""
    key = _keys_of(L)
    block = gl.arange(0, BLOCKS, SliceLayout(0, SliceLayout(2, L)))
    ok = token + key < kv_len
    if WHOLE:
        base = scale_ptr + place[0].to(gl.int64) * page_stride + place[1].to(gl.int64) * token_stride
        at = key * token_stride.to(gl.int32)  # the launcher checks that 64 strides fit
    else:
        base = scale_ptr
        at = pages.offsets(page, first_id, token + key, ok, page_stride, token_stride)
    e = gl.load(base + (gl.expand_dims(at, 1) + gl.expand_dims(FIRST + block, 0)), mask=gl.expand_dims(ok, 1) & gl.expand_dims(block >= 0, 0), other=0)
    return e.to(gl.int32)


@gluon.jit
def _load_words(cache_ptr, page_stride, token_stride, pages, page, first_id, token, kv_len, FIRST: gl.constexpr, BLOCKS: gl.constexpr, L: gl.constexpr):
    """Words [64 keys, BLOCKS, 4] of a tile, from block FIRST on. Strides in 16 bytes, so that loads are seen to be aligned."""
    key = _keys_of(L)
    ok = token + key < kv_len
    at = pages.offsets(page, first_id, token + key, ok, page_stride, token_stride) * 4
    block = gl.arange(0, BLOCKS, SliceLayout(0, SliceLayout(2, L)))
    word = gl.arange(0, 4, SliceLayout(0, SliceLayout(1, L)))
    at = gl.expand_dims(at, 1) + gl.expand_dims((FIRST + block) * 4, 0)
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    return gl.load(cache_ptr + (gl.expand_dims(at, 2) + word), mask=gl.expand_dims(gl.expand_dims(ok, 1), 2) & (word >= 0), other=0)


@gluon.jit
def _fetch(desc, desc_rope, packed, packed_rope, arrived, places, BOX: gl.constexpr):
    """Nibbles of a tile by boxes of [BOX keys, 32 words], two side by side, and [BOX, 8] for the rope part."""
    PARTS: gl.constexpr = BLOCK // BOX
    mbarrier.expect(arrived, BLOCK * 288)
    for j in gl.static_range(PARTS):
        # Only now a uniform register: made one where it was loaded, a page id would be waited for there.
        page = uniform(places[j][0])
        for p in gl.static_range(2):
            tma.async_copy_global_to_shared(desc, [page, places[j][1], p * 32], arrived, packed.index(p * PARTS + j))
        tma.async_copy_global_to_shared(desc_rope, [page, places[j][1], 64], arrived, packed_rope.index(j))


@gluon.jit
def _warm_up(desc, desc_rope, packed, packed_rope, arrived, BOX: gl.constexpr):
    """Make the copy engine fetch its tensor maps while the schedule is worked out: boxes wholly outside the cache read nothing."""
    mbarrier.expect(arrived, BOX * (128 + 32))
    tma.async_copy_global_to_shared(desc, [0, 0, 1024], arrived, packed.index(0))
    tma.async_copy_global_to_shared(desc_rope, [0, 0, 1024], arrived, packed_rope.index(0))


@gluon.jit
def _put(x, xr, e, er, keys, rope, top, top_rope, L: gl.constexpr, LR: gl.constexpr):
    """Expand a tile into ``keys`` and ``rope``; ``top``, ``top_rope``: the largest scale byte of every key."""
    r = gl.max(e, 1)
    rr = gl.max(er, 1)
    top.store(r)
    top_rope.store(rr)
    a, b = _expand(x, gl.minimum(gl.expand_dims(r, 1) - e, 26))
    keys.slice(0, 64, dim=1).store(gl.reshape(a, [BLOCK, 64]))
    keys.slice(64, 64, dim=1).store(gl.reshape(b, [BLOCK, 64]))
    c, d = _expand(xr, gl.minimum(gl.expand_dims(rr, 1) - er, 26))
    rope.store(gl.reshape(gl.permute(gl.join(c, d), (0, 1, 3, 2)), [BLOCK, 16]))


@gluon.jit
def _expander(
    desc, desc_rope, cache_ptr, page_stride, token_stride, scale_ptr, scale_page_stride, scale_token_stride,
    packed, packed_rope, arrived, keys, rope, top, top_rope, full, empty,
    counter_ptr, counters, turn, pages, piece, first_row,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, GATHER: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Fetches and expands every tile of the worker's segments, in order, as stages become free."""
    L: gl.constexpr = block_layout(gl.num_warps(), 16)
    LR: gl.constexpr = block_layout(gl.num_warps(), 2)
    L2: gl.constexpr = BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    LR2: gl.constexpr = BlockedLayout([1, 4], [16, 2], [gl.num_warps(), 1], [1, 0])
    WORDS: gl.constexpr = NVMMASharedLayout(128, 32, 2)
    ROPE_WORDS: gl.constexpr = NVMMASharedLayout(32, 32, 2)
    WHOLE: gl.constexpr = BOX == 64 and not GATHER
    b = piece.b
    at = piece.start
    base = piece.base
    more = has_work(piece, MODE)
    done = 0
    if not GATHER:
        mbarrier.wait(arrived, 0)
    while more:
        kv_len, first_id, lo, hi, follow = segment(pages, piece, b, at, base, MODE)
        _, q_count = pages.query(b)
        if (first_row < q_count * HEADS) & (lo < hi):
            token = lo * BLOCK
            key = _keys_of(L)
            key_r = _keys_of(LR)
            page = key
            page_r = key_r
            place = (0, 0)
            if not WHOLE:
                page = pages.row_pages(first_id, token + key, token + key < kv_len)
                page_r = pages.row_pages(first_id, token + key_r, token + key_r < kv_len)
            if not GATHER:
                places = _places(pages, first_id, token, kv_len, BOX)
                place = places[0]
                _fetch(desc, desc_rope, packed, packed_rope, arrived, places, BOX)
            else:
                x = _load_words(cache_ptr, page_stride, token_stride, pages, page, first_id, token, kv_len, 0, 16, L)
                xr = _load_words(cache_ptr, page_stride, token_stride, pages, page_r, first_id, token, kv_len, 16, 2, LR)
            e = _load_scales(scale_ptr, scale_page_stride, scale_token_stride, pages, page, place, first_id, token, kv_len, 0, 16, WHOLE, L)
            er = _load_scales(scale_ptr, scale_page_stride, scale_token_stride, pages, page_r, place, first_id, token, kv_len, 16, 2, WHOLE, LR)
            # page ids are asked for a tile before they are needed
            token += BLOCK
            if not WHOLE:
                page = pages.row_pages(first_id, token + key, token + key < kv_len)
                page_r = pages.row_pages(first_id, token + key_r, token + key_r < kv_len)
            if not GATHER:
                places = _places(pages, first_id, token, kv_len, BOX)
            for i in range(lo, hi):
                stage = done % STAGES
                if not GATHER:
                    place = places[0]
                    mbarrier.wait(arrived, (done + 1) & 1)
                    words = packed._reinterpret(gl.int32, [BLOCK, 64], WORDS)
                    rope_words = packed_rope._reinterpret(gl.int32, [BLOCK, 8], ROPE_WORDS)
                    x = gl.convert_layout(gl.reshape(words.load(L2), [BLOCK, 16, 4]), L, assert_trivial=True)
                    xr = gl.convert_layout(gl.reshape(rope_words.load(LR2), [BLOCK, 2, 4]), LR, assert_trivial=True)
                    thread_barrier()
                    if i + 1 < hi:
                        _fetch(desc, desc_rope, packed, packed_rope, arrived, places, BOX)
                    # The fence in front of the copies waits for loads, hence the next scales come after it.
                    e_next = _load_scales(scale_ptr, scale_page_stride, scale_token_stride, pages, page, place, first_id, token, kv_len, 0, 16, WHOLE, L)
                    er_next = _load_scales(scale_ptr, scale_page_stride, scale_token_stride, pages, page_r, place, first_id, token, kv_len, 16, 2, WHOLE, LR)
                    if not WHOLE:
                        page = pages.row_pages(first_id, token + BLOCK + key, token + BLOCK + key < kv_len)
                        page_r = pages.row_pages(first_id, token + BLOCK + key_r, token + BLOCK + key_r < kv_len)
                    places = _places(pages, first_id, token + BLOCK, kv_len, BOX)
                mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
                _put(x, xr, e, er, keys.index(stage), rope.index(stage), top.index(stage), top_rope.index(stage), L, LR)
                fence_async_shared()
                thread_barrier()
                mbarrier.arrive(full.index(stage), count=1)
                if GATHER:
                    e = _load_scales(scale_ptr, scale_page_stride, scale_token_stride, pages, page, place, first_id, token, kv_len, 0, 16, WHOLE, L)
                    er = _load_scales(scale_ptr, scale_page_stride, scale_token_stride, pages, page_r, place, first_id, token, kv_len, 16, 2, WHOLE, LR)
                    x = _load_words(cache_ptr, page_stride, token_stride, pages, page, first_id, token, kv_len, 0, 16, L)
                    xr = _load_words(cache_ptr, page_stride, token_stride, pages, page_r, first_id, token, kv_len, 16, 2, LR)
                    page = pages.row_pages(first_id, token + BLOCK + key, token + BLOCK + key < kv_len)
                    page_r = pages.row_pages(first_id, token + BLOCK + key_r, token + BLOCK + key_r < kv_len)
                else:
                    e = e_next
                    er = er_next
                token += BLOCK
                done += 1
        base = follow
        at = follow
        b += 1
        more = (follow < piece.end) & (MODE == 0)
    turn_over(counter_ptr, counters, turn)
    let_kernel_after_begin()


# ---- the mathematicians


@gluon.jit
def _load_q_part(q_ptr, stride_token, stride_head, q_first, first_row, rows, d, HEADS: gl.constexpr, R0: gl.constexpr, L: gl.constexpr):
    """Query rows R0 .. R0 + 15 of the tile at values ``d``, fp32 [16, len(d)]."""
    r = R0 + gl.arange(0, 16, SliceLayout(1, L))
    at = (q_first + (first_row + r) // HEADS).to(gl.int64) * stride_token + (first_row + r) % HEADS * stride_head
    return gl.load((q_ptr + at)[:, None] + d[None, :], mask=(r < rows)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _put_terms(x, q, FIRST: gl.constexpr, WIDTH: gl.constexpr, HI: gl.constexpr, HALF: gl.constexpr):
    """hi and lo e4m3 terms of x [16, WIDTH] to columns FIRST on."""
    hi = round_e4m3(x)
    q.slice(HI, 16).slice(FIRST, WIDTH, dim=1).store(hi.to(gl.float8e4nv))
    q.slice(HI + HALF, 16).slice(FIRST, WIDTH, dim=1).store((x - hi).to(gl.float8e4nv))


@gluon.jit
def _load_q_rows(q_ptr, stride_token, stride_head, q_latent, q_rope, q_scale, q_scale_rope, q_first, first_row, rows,
                 HEADS: gl.constexpr, HALF: gl.constexpr, R0: gl.constexpr):  # fmt: skip
    """Query rows R0 .. R0 + 15 of the tile as hi and lo e4m3 terms; ``q_scale`` and ``q_scale_rope`` get what undoes their scaling."""
    L: gl.constexpr = BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    LR: gl.constexpr = BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    HI: gl.constexpr = R0 // HALF * 2 * HALF + R0 % HALF
    c = gl.arange(0, LATENT // 2, SliceLayout(0, L))
    d = c // 4 * 8 + c % 4
    cr = gl.arange(0, ROPE, SliceLayout(0, LR))
    dr = LATENT + cr // 32 * 32 + cr // 4 % 4 * 8 + cr // 16 % 2 * 4 + cr % 4
    x = _load_q_part(q_ptr, stride_token, stride_head, q_first, first_row, rows, d, HEADS, R0, L)
    y = _load_q_part(q_ptr, stride_token, stride_head, q_first, first_row, rows, d + 4, HEADS, R0, L)
    z = _load_q_part(q_ptr, stride_token, stride_head, q_first, first_row, rows, dr, HEADS, R0, LR)
    # A row lies in one warp in both layouts, so its largest magnitudes need shuffles only.
    factor, back = row_factor(gl.max(gl.maximum(gl.abs(x), gl.abs(y)), 1))
    factor_r, back_r = row_factor(gl.max(gl.abs(z), 1))
    q_scale.slice(R0, 16).store(back)
    q_scale_rope.slice(R0, 16).store(back_r)
    _put_terms(x * factor[:, None], q_latent, 0, LATENT // 2, HI, HALF)
    _put_terms(y * factor[:, None], q_latent, LATENT // 2, LATENT // 2, HI, HALF)
    _put_terms(z * factor_r[:, None], q_rope, 0, ROPE, HI, HALF)


@gluon.jit
def _load_q(q_ptr, stride_token, stride_head, q_latent, q_rope, q_scale, q_scale_rope, q_first, first_row, rows,
            HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr):  # fmt: skip
    """Query rows to shared memory in the order [warpgroup][hi, lo][row of the warpgroup] and the tile's order of values."""
    for r0 in gl.static_range(0, ROWS, 16):
        _load_q_rows(q_ptr, stride_token, stride_head, q_latent, q_rope, q_scale, q_scale_rope, q_first, first_row, rows, HEADS, ROWS // GROUPS, r0)


@gluon.jit
def _power_of_two(byte):
    """2^(byte - 127) for a scale byte 0..254, NaN for 255."""
    x = gl.maximum(byte << 23, 0x400000).to(gl.float32, bitcast=True)
    return gl.where(byte == 255, float("nan"), x)


@gluon.jit
def power_factor(byte):
    """2^(byte - 127), byte taken into 1..254."""
    return (gl.minimum(gl.maximum(byte, 1), 254) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _largest(top):
    """A reference exponent for a segment: the largest scale byte of its first tile, NaN aside, 1..254. Shuffles only."""
    x = top.load(BlockedLayout([2], [32], [gl.num_warps()], [0]))
    return gl.maximum(gl.max(gl.where(x == 255, 0, x), 0), 1)


@gluon.jit
def _scores(keys, rope, q_latent, q_rope, top, top_rope, full, used, row_scale, rope_scale,
            S2: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """Base-2 logits [64, ROWS] of the block's ``used``-th tile, and the token bytes [64].

    PARTS accumulators, each of 512 / PARTS values, are added in fp32, because fp8 wgmma keeps about 14 bits of a running sum. Error of
    lse with logits of +-80: 4.4e-2 for 2 parts, 2.0e-2 for 4. Two take turns, one being added while the other is computed.
    """
    K: gl.constexpr = NVMMASharedLayout(128, 8, 2)
    R: gl.constexpr = NVMMASharedLayout(64, 8, 2)
    stage = uniform(used % STAGES)
    mbarrier.wait(full.index(stage), (used // STAGES) & 1)
    zero = uniform(gl.minimum(used, 0))  # used >= 0: keeps the query's descriptors out of vector registers
    k = keys.index(stage)._reinterpret(gl.float8e5, [BLOCK, LATENT], K)
    q = q_latent.index(zero)
    r = score_part(rope.index(stage)._reinterpret(gl.float8e5, [BLOCK, ROPE], R), q_rope.index(zero), S2, ROWS)
    WIDTH: gl.constexpr = LATENT // PARTS
    a = score_part(k.slice(0, WIDTH, dim=1), q.slice(0, WIDTH, dim=1), S2, ROWS)
    if PARTS > 1:
        b = score_part(k.slice(WIDTH, WIDTH, dim=1), q.slice(WIDTH, WIDTH, dim=1), S2, ROWS)
    e = top.index(stage).load(SliceLayout(1, S))
    er = top_rope.index(stage).load(SliceLayout(1, S))
    factor = _power_of_two(e)
    rope_factor = _power_of_two(er)
    if PARTS > 1:
        r, a = warpgroup_mma_wait(1, deps=[r, a])
        rot = sum_terms(r, S, ROWS, GROUPS)
        lat = sum_terms(a, S, ROWS, GROUPS)
        for at in gl.static_range(2 * WIDTH, LATENT, 2 * WIDTH):
            a = score_part(k.slice(at, WIDTH, dim=1), q.slice(at, WIDTH, dim=1), S2, ROWS)
            b = warpgroup_mma_wait(1, deps=[b])
            lat += sum_terms(b, S, ROWS, GROUPS)
            b = score_part(k.slice(at + WIDTH, WIDTH, dim=1), q.slice(at + WIDTH, WIDTH, dim=1), S2, ROWS)
            a = warpgroup_mma_wait(1, deps=[a])
            lat += sum_terms(a, S, ROWS, GROUPS)
        b = warpgroup_mma_wait(0, deps=[b])
        lat += sum_terms(b, S, ROWS, GROUPS)
    else:
        r, a = warpgroup_mma_wait(0, deps=[r, a])
        rot = sum_terms(r, S, ROWS, GROUPS)
        lat = sum_terms(a, S, ROWS, GROUPS)
    x = lat * factor[:, None] * row_scale[None, :] + rot * rope_factor[:, None] * rope_scale[None, :]
    return x, e


@gluon.jit
def weights(x, e, c, m, den, i, limit, shared_keys, logit_cap, S: gl.constexpr, HAS_CAP: gl.constexpr, P_SHIFT: gl.constexpr):
    """One step of the online softmax, see ``softmax.probabilities``, with the maximum over x + token exponent.

    Args: base-2 logits ``x`` [64, ROWS], token bytes ``e`` [64] (exponents plus 127), the segment's reference byte ``c``.
    Returns P' 2^P_SHIFT, the new m, the new den (the sum of exp2(x + c - 127 - m)) and the factor for what was summed before.
    """
    if HAS_CAP:
        x = _cap_logits(x, logit_cap)
    x = x + (e - 127).to(gl.float32)[:, None]
    if i * BLOCK + BLOCK > shared_keys:
        key = i * BLOCK + gl.arange(0, BLOCK, SliceLayout(1, S))
        x = gl.where(key[:, None] < limit[None, :], x, float("-inf"))
    m, ref, alpha = _rescale(m, x)
    p = gl.exp2(x - (ref - P_SHIFT)[None, :])
    den = den * alpha[None, :] + p * power_factor(127 - P_SHIFT + c - e)[:, None]
    return p, m, den, alpha


@gluon.jit
def widen(pairs, A: gl.constexpr):
    """Byte pairs [16 keys, 128] -> fp16 A operands [128, 16] of the even and of the odd bytes. e5m2 is the upper half of fp16."""
    e, o = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
        "=&r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    e = gl.convert_layout(gl.permute(e, (1, 0)), A, assert_trivial=True)
    o = gl.convert_layout(gl.permute(o, (1, 0)), A, assert_trivial=True)
    return e, o


@gluon.jit
def _store_pairs(even, odd, ptr_row, ok, FIRST: gl.constexpr):
    """Store even and odd bytes' sums side by side: row m of [128, ROWS] is d = FIRST + 8 (m / 2) + 2 (m % 2), and d + 1."""
    x = gl.join(even, odd)
    L: gl.constexpr = x.type.layout
    m = gl.arange(0, x.shape[0], SliceLayout(1, SliceLayout(2, L)))
    side = gl.arange(0, 2, SliceLayout(0, SliceLayout(1, L)))
    ptr = gl.convert_layout(ptr_row, SliceLayout(0, SliceLayout(2, L)), assert_trivial=True)
    okc = gl.convert_layout(ok, SliceLayout(0, SliceLayout(2, L)), assert_trivial=True)
    at = ptr[None, :, None] + (FIRST + m // 2 * 8 + m % 2 * 2)[:, None, None] + side[None, None, :]
    gl.store(at, x.to(ptr_row.dtype.element_ty), mask=okc[None, :, None])


@gluon.jit
def _mathematician(
    q_ptr, q_stride_token, q_stride_head, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    part_out_ptr, part_lse_ptr, counter_ptr, counters, turn, keys, rope, top, top_rope, q_latent, q_rope, q_scale, q_scale_rope, p_tile, full, empty,
    pages, piece, workers, tile, tiles, sm_scale, logit_cap, may_wait,
    HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, values and the way out, segment after segment."""
    GROUPS: gl.constexpr = NUM_WARPS // 4
    S2: gl.constexpr = NVMMADistributedLayout([3, 0], [4, GROUPS], [16, 2 * ROWS // GROUPS, 32])
    S: gl.constexpr = NVMMADistributedLayout([3, 0], [4, GROUPS], [16, ROWS // GROUPS, 32])
    O: gl.constexpr = NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, ROWS, 16])
    A: gl.constexpr = DotOperandLayout(0, O, 2)
    V: gl.constexpr = byte_pairs_half(NUM_WARPS)
    PAIRS: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = LATENT // SUM_VALUES if ROWS == 16 else 1
    scale = sm_scale * (LOG2E * 2.0**-V_SHIFT)
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
            _load_q(q_ptr, q_stride_token, q_stride_head, q_latent.index(0), q_rope.index(0), q_scale, q_scale_rope, q_first, first_row, rows, HEADS, ROWS, GROUPS)
            fence_async_shared()
            row_scale = q_scale.load(SliceLayout(0, S)) * scale
            rope_scale = q_scale_rope.load(SliceLayout(0, S)) * scale
            limit = row_limits(gl.arange(0, ROWS, SliceLayout(0, S)), first_row, HEADS, q_count, kv_len, CAUSAL)
            # keys that every row of the tile sees
            shared_keys = kv_len
            if CAUSAL:
                shared_keys = gl.minimum(kv_len, kv_len - q_count + 1 + first_row // HEADS)
            even_a = gl.zeros([128, ROWS], gl.float32, O)
            odd_a = gl.zeros([128, ROWS], gl.float32, O)
            even_b = gl.zeros([128, ROWS], gl.float32, O)
            odd_b = gl.zeros([128, ROWS], gl.float32, O)
            m = gl.full([ROWS], float("-inf"), gl.float32, SliceLayout(0, S))
            den = gl.zeros([BLOCK, ROWS], gl.float32, S)
            c = 127
            if lo < hi:
                mbarrier.wait(full.index(used % STAGES), (used // STAGES) & 1)
                c = _largest(top.index(used % STAGES))
            for i in range(lo, hi):
                x, e = _scores(keys, rope, q_latent, q_rope, top, top_rope, full, used, row_scale, rope_scale, S2, S, ROWS, GROUPS, STAGES, PARTS)
                p, m, den, alpha = weights(x, e, c, m, den, i, limit, shared_keys, logit_cap, S, HAS_CAP, P_SHIFT)
                p_tile.store(p.to(gl.float16))
                fence_async_shared()
                factor = gl.convert_layout(alpha, SliceLayout(0, O))[None, :]
                even_a = even_a * factor
                odd_a = odd_a * factor
                even_b = even_b * factor
                odd_b = odd_b * factor
                stage = uniform(used % STAGES)
                pairs = keys.index(stage)._reinterpret(gl.int16, [BLOCK, LATENT // 2], PAIRS)
                # while the products of one half of the tile's columns run, the other half is loaded and widened
                ve, vo = widen(pairs.slice(0, 16).slice(0, 128, dim=1).load(V), A)
                we, wo = ve, vo
                for k in gl.static_range(BLOCK // 16):
                    pk = p_tile.slice(k * 16, 16)
                    even_a = warpgroup_mma(ve, pk, even_a, is_async=True)
                    odd_a = warpgroup_mma(vo, pk, odd_a, is_async=True)
                    if k > 0:
                        even_b, odd_b, we, wo = warpgroup_mma_wait(2, deps=[even_b, odd_b, we, wo])
                    we, wo = widen(pairs.slice(k * 16, 16).slice(128, 128, dim=1).load(V), A)
                    even_b = warpgroup_mma(we, pk, even_b, is_async=True)
                    odd_b = warpgroup_mma(wo, pk, odd_b, is_async=True)
                    even_a, odd_a, ve, vo = warpgroup_mma_wait(2, deps=[even_a, odd_a, ve, vo])
                    if k + 1 < BLOCK // 16:
                        ve, vo = widen(pairs.slice(k * 16 + 16, 16).slice(0, 128, dim=1).load(V), A)
                # the values of this tile are all in registers now
                thread_barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                even_b, odd_b, we, wo = warpgroup_mma_wait(0, deps=[even_b, odd_b, we, wo])
                used += 1

            if (follow >= piece.end) | (MODE != 0):
                let_kernel_after_begin()
            total = gl.sum(den, 0)
            none = total == 0.0
            lse2 = gl.where(none, float("-inf"), m + log2(total) - (c - 127).to(gl.float32))  # type: ignore[attr-defined]
            inv = gl.where(none, 0.0, reciprocal(total) * 2.0 ** -(P_SHIFT + V_SHIFT))
            inv = gl.convert_layout(inv, SliceLayout(0, O))[None, :]
            # a multiplication of its own: with inv it may leave fp32's range
            power = (c << 23).to(gl.float32, bitcast=True)  # type: ignore[attr-defined]
            even_a = even_a * inv * power
            odd_a = odd_a * inv * power
            even_b = even_b * inv * power
            odd_b = odd_b * inv * power
            r = gl.arange(0, ROWS, SliceLayout(0, O))
            rs = gl.arange(0, ROWS, SliceLayout(0, S))
            splits, rank, stay, first_slot, next_slot, slot_step = split_slots(piece, b, base, kv_len, workers, tile, tiles, MODE)
            if splits == 1:
                token = (q_first + (first_row + r) // HEADS).to(gl.int64)
                row_ptr = out_ptr + token * out_stride_token + (first_row + r) % HEADS * out_stride_head
                _store_pairs(even_a, odd_a, row_ptr, r < rows, 0)
                _store_pairs(even_b, odd_b, row_ptr, r < rows, 4)
                if WRITE_LSE:
                    token_s = (q_first + (first_row + rs) // HEADS).to(gl.int64)
                    gl.store(lse_ptr + token_s * lse_stride + (first_row + rs) % HEADS, lse2 * LN2, mask=rs < rows)
            else:
                slot = gl.where(rank == 0, first_slot, next_slot + (rank - 1) * slot_step).to(gl.int64) * ROWS
                part_ptr = part_out_ptr + slot * LATENT
                u = gl.arange(0, 128, SliceLayout(1, O))
                d = u // 2 * 8 + u % 2 * 2
                store_columns(part_ptr, even_a, d, 128, ROWS)
                store_columns(part_ptr, odd_a, d + 1, 128, ROWS)
                store_columns(part_ptr, even_b, d + 4, 128, ROWS)
                store_columns(part_ptr, odd_b, d + 5, 128, ROWS)
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
def decode_mxfp4(
    desc, desc_rope,  # tensor maps of the nibbles [pages, page_size, 72] int32, boxes [1, BOX, 32] and [1, BOX, 8]; unused if GATHER
    cache_ptr, page_stride, token_stride,  # the same nibbles, strides in 16 bytes
    scale_ptr, scale_page_stride, scale_token_stride,  # [pages, page_size, >= 18] E8M0 bytes
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
    """See the top of this file. Launch with ``num_warps`` = 4 for ROWS = 16 and 8 above."""
    K: gl.constexpr = NVMMASharedLayout(128, 8, 2)
    R: gl.constexpr = NVMMASharedLayout(64, 8, 2)
    PARTS: gl.constexpr = BLOCK // BOX
    FLAT: gl.constexpr = SwizzledSharedLayout(1, 1, 1, [0])

    keys = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, LATENT // 4], NVMMASharedLayout(128, 32, 2))
    rope = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, ROPE // 4], NVMMASharedLayout(64, 32, 2))
    q_latent = gl.allocate_shared_memory(gl.float8e4nv, [1, 2 * ROWS, LATENT], K)
    q_rope = gl.allocate_shared_memory(gl.float8e4nv, [1, 2 * ROWS, ROPE], R)
    p_tile = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], NVMMASharedLayout(2 * ROWS, 16, 2))
    q_scale = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    q_scale_rope = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    top = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK], FLAT)
    top_rope = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if GATHER:
        arrived = full  # not used; a barrier that nobody waits for would lie under scratch memory
    else:
        arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(arrived, 1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), 1)
        mbarrier.init(empty.index(s), 1)
    fence_async_shared()

    if GATHER:
        packed = top
        packed_rope = top_rope
    else:
        packed = gl.allocate_shared_memory(gl.int32, [2 * PARTS, 1, BOX, 32], NVMMASharedLayout(128, 32, 3))
        packed_rope = gl.allocate_shared_memory(gl.int32, [PARTS, 1, BOX, 8], NVMMASharedLayout(32, 32, 3))
        thread_barrier()
        _warm_up(desc, desc_rope, packed, packed_rope, arrived, BOX)

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
                part_out_ptr, part_lse_ptr, counter_ptr, counters, turn, keys, rope, top, top_rope, q_latent, q_rope, q_scale, q_scale_rope, p_tile, full, empty,
                pages, piece, workers, tile, tiles, sm_scale, logit_cap, may_wait,
                HEADS, ROWS, STAGES, MODE, CAUSAL, HAS_CAP, WRITE_LSE, MANY_SPLITS, num_warps)),
            (_expander, (
                desc, desc_rope, cache_ptr, page_stride, token_stride, scale_ptr, scale_page_stride, scale_token_stride,
                packed, packed_rope, arrived, keys, rope, top, top_rope, full, empty,
                counter_ptr, counters, turn, pages, piece, tile * ROWS,
                HEADS, STAGES, BOX, GATHER, MODE)),
        ],
        [4], [96 if num_warps == 4 else 120],
    )  # fmt: skip


_PANEL = NVMMASharedLayout(128, 32, 3)
_ROPE_PANEL = NVMMASharedLayout(32, 32, 3)


def _scale_view(args: DecodeArgs) -> tuple[torch.Tensor, int, int]:
    """(E8M0 bytes, page stride, token stride); a contiguous table sees one page that holds every token."""
    if args.table.kind == "contiguous":
        scale = args.cache.as_tokens().scale
        assert scale is not None
        return scale, 0, scale.stride(0)
    scale = args.cache.scale
    assert scale is not None
    return scale, scale.stride(0), scale.stride(1)


def launch(args: DecodeArgs, launch: HopperLaunch, workspace) -> None:
    """Run :func:`decode_mxfp4` for a checked call."""
    words = cache_view(args).view(torch.int32)
    if launch.gather:
        desc = desc_rope = words
    else:
        shape, strides = list(words.shape), list(words.stride())
        desc = TensorDescriptor(words, shape, strides, [1, launch.box, 32], _PANEL)
        desc_rope = TensorDescriptor(words, shape, strides, [1, launch.box, 8], _ROPE_PANEL)
    scale, scale_page_stride, scale_token_stride = _scale_view(args)
    if scale_token_stride >= 1 << 24:
        raise InvalidArgument(
            f"scale: backend 'hopper' takes a token stride below 2^24 bytes, got {scale_token_stride}. Use backend='triton'."
        )
    # Two blocks an SM share its 64 Ki registers: 128 for each of 2 x 256 threads at the start.
    registers = {"maxnreg": 128} if launch.blocks_per_sm == 2 else {}
    decode_mxfp4[(launch.grid,)](
        desc,
        desc_rope,
        words,
        words.stride(0) // 4,
        words.stride(1) // 4,
        scale,
        scale_page_stride,
        scale_token_stride,
        **tensors(args, launch, workspace),
        **constants(args, launch),
        num_warps=launch.num_warps,
        **registers,
    )
