"""The loading role, shared by the formats whose tiles go to shared memory as they are: tensor-map boxes or gathered rows.

A tile of 64 keys is ``512 / PANEL`` latent panels of [64 keys, PANEL values], 128-byte rows in 128-byte swizzle, and a rope
panel of 64 values. One tensor-map box fills a whole panel where pages hold a multiple of 64 keys, and BOX keys of it where
they hold a multiple of 32 or 16. Any other page size is gathered: cp.async, 16 bytes a lane, one row at a time.
"""

from .dependent_launch import let_kernel_after_begin
from .gluon_names import (
    BlockedLayout,
    DistributedLinearLayout,
    NVMMASharedLayout,
    SliceLayout,
    async_copy,
    constexpr_function,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
)
from .pages import BLOCK
from .reduction import turn_over
from .schedule import has_work, segment

__all__ = ["clear_hidden", "clear_rows", "loader", "prefetch_rows", "uniform", "warm_up"]

#: Lanes of a gathering warp that share a row.
LANES = gl.constexpr(8)


@gluon.jit
def _place(pages, first_id, token, kv_len, BOX: gl.constexpr):
    """(page, row) of a box. One past the end repeats the last that holds a key: its keys are masked, its page id is a valid one."""
    return pages.place(first_id, gl.minimum(token, (kv_len - 1) // BOX * BOX))


@gluon.jit
def _places(pages, first_id, token, kv_len, BOX: gl.constexpr):
    """Where the boxes of the tile of 64 keys from ``token`` on lie."""
    if BOX == 64:
        places = (_place(pages, first_id, token, kv_len, BOX),)
    elif BOX == 32:
        places = (_place(pages, first_id, token, kv_len, BOX), _place(pages, first_id, token + 32, kv_len, BOX))  # type: ignore[assignment]
    else:
        places = (  # type: ignore[assignment]
            _place(pages, first_id, token, kv_len, BOX),
            _place(pages, first_id, token + 16, kv_len, BOX),
            _place(pages, first_id, token + 32, kv_len, BOX),
            _place(pages, first_id, token + 48, kv_len, BOX),
        )
    return places


@constexpr_function
def _panels_before(part, parts, panels):
    """Latent panels before part ``part`` of a stage: the whole is one part, or the rope panel is the first and the others have equal shares."""
    return panels * part if parts == 1 else panels * max(part - 1, 0) // (parts - 1)


@constexpr_function
def _values_in(part, parts, panels):
    """Values of a key in that part."""
    return (_panels_before(part + 1, parts, panels) - _panels_before(part, parts, panels)) * 512 // panels + (64 if part == 0 else 0)


@gluon.jit
def _fetch_panels(desc, desc_rope, latent, rope, full, empty, stage, parity, places, BOX: gl.constexpr, PANEL: gl.constexpr, BYTES: gl.constexpr,
                  PARTS: gl.constexpr):  # fmt: skip
    """A tile into ``stage`` by boxes of [BOX keys, PANEL values], part after part as each becomes free."""
    BOXES: gl.constexpr = BLOCK // BOX
    PANELS: gl.constexpr = 512 // PANEL
    for part in gl.static_range(PARTS):
        landed = full.index(stage * PARTS + part)
        mbarrier.wait(empty.index(stage * PARTS + part), parity)
        mbarrier.expect(landed, BLOCK * BYTES // 576 * _values_in(part, PARTS, PANELS))
        for j in gl.static_range(BOXES):
            for p in gl.static_range(_panels_before(part, PARTS, PANELS), _panels_before(part + 1, PARTS, PANELS)):
                tma.async_copy_global_to_shared(
                    desc, [places[j][0], places[j][1], p * PANEL], landed, latent.index((stage * PANELS + p) * BOXES + j)
                )
            if part == 0:
                tma.async_copy_global_to_shared(desc_rope, [places[j][0], places[j][1], 512], landed, rope.index(stage * BOXES + j))


@constexpr_function
def _rows_layout(keys, width, vec, lanes, warps):
    """[keys, width values] for cp.async of ``vec`` values a lane: ``lanes`` lanes side by side in a row, the others in the rows below,
    the rest of a row in further registers, so that a lane has few rows and reaches the rest of each by a constant offset.

    A warp has keys / warps rows in a line in every such layout. What is left of a row comes before the next row.
    """

    def powers(start, stop):
        return [start << k for k in range((stop // start).bit_length() - 1)]

    in_row = powers(1, vec) + powers(vec * lanes, width)
    rows = powers(32 // lanes, keys // warps)
    registers = [[0, d] for d in in_row] + [[r, 0] for r in rows]
    lane_bits = [[0, d] for d in powers(vec, vec * lanes)] + [[r, 0] for r in powers(1, 32 // lanes)]
    return DistributedLinearLayout(registers, lane_bits, [[r, 0] for r in powers(keys // warps, keys)], [], [keys, width])


@gluon.jit
def _row_pages(pages, first_id, token, kv_len, VEC: gl.constexpr):
    """Page ids of a tile's keys, as the latent and as the rope copy need them."""
    L: gl.constexpr = _rows_layout(BLOCK, 512, VEC, LANES, gl.num_warps())
    LR: gl.constexpr = _rows_layout(BLOCK, 64, VEC, 64 // VEC, gl.num_warps())
    t = token + gl.arange(0, BLOCK, SliceLayout(1, L))
    tr = token + gl.arange(0, BLOCK, SliceLayout(1, LR))
    return pages.row_pages(first_id, t, t < kv_len), pages.row_pages(first_id, tr, tr < kv_len)


@gluon.jit
def _gather_rows(cache_ptr, page_stride, token_stride, latent, rope, full, stage, pages, page, page_r, first_id, token, kv_len, VEC: gl.constexpr):
    """A tile by cp.async. Keys past the end are not read; their rows become zeros."""
    L: gl.constexpr = _rows_layout(BLOCK, 512, VEC, LANES, gl.num_warps())
    LR: gl.constexpr = _rows_layout(BLOCK, 64, VEC, 64 // VEC, gl.num_warps())
    t = token + gl.arange(0, BLOCK, SliceLayout(1, L))
    tr = token + gl.arange(0, BLOCK, SliceLayout(1, LR))
    d = gl.arange(0, 512, SliceLayout(0, L))[None, :]
    dr = 512 + gl.arange(0, 64, SliceLayout(0, LR))[None, :]
    row = cache_ptr + pages.places_of(page, first_id, t, page_stride, token_stride)
    row_r = cache_ptr + pages.places_of(page_r, first_id, tr, page_stride, token_stride)
    if token + BLOCK <= kv_len:
        async_copy.async_copy_global_to_shared(latent.index(stage), row[:, None] + d)
        async_copy.async_copy_global_to_shared(rope.index(stage), row_r[:, None] + dr)
    else:
        async_copy.async_copy_global_to_shared(latent.index(stage), row[:, None] + d, mask=(t < kv_len)[:, None] & (d >= 0))
        async_copy.async_copy_global_to_shared(rope.index(stage), row_r[:, None] + dr, mask=(tr < kv_len)[:, None] & (dr >= 0))
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def warm_up(desc, desc_rope, latent, rope, warm, BOX: gl.constexpr, PANEL: gl.constexpr, BYTES: gl.constexpr):
    """Make the copy engine fetch its tensor maps while the schedule is worked out: boxes wholly outside the cache read nothing."""
    mbarrier.expect(warm, BOX * (PANEL + 64) * (BYTES // 576))
    tma.async_copy_global_to_shared(desc, [0, 0, 1024], warm, latent.index(0))
    tma.async_copy_global_to_shared(desc_rope, [0, 0, 1024], warm, rope.index(0))


@gluon.jit
def prefetch_rows(q_ptr, stride_token, stride_head, first_token, first_row, rows, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Bring query rows (1152 bytes each) to L2, ahead of the keys: a query that is asked for behind two tiles of keys of every block
    comes in after them (5 us later at 32 sequences of 8192 keys). A wrong guess costs nothing.
    """
    L: gl.constexpr = BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
    if rows > 0:
        r = first_row + gl.minimum(gl.arange(0, ROWS, SliceLayout(1, L)), rows - 1)
        at = (first_token + r // HEADS).to(gl.int64) * stride_token + r % HEADS * stride_head
        line, _ = gl.broadcast(gl.arange(0, 16, SliceLayout(0, L))[None, :], at[:, None])
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.s32 p, $2, 9; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r", [(q_ptr + at[:, None] + line * 64).to(gl.int64), line], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def loader(
    desc, desc_rope, cache_ptr, page_stride, token_stride, latent, rope, full, empty, warm, counter_ptr, counters, turn, pages, piece, first_row,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, PANEL: gl.constexpr, BYTES: gl.constexpr,
    GATHER: gl.constexpr, MODE: gl.constexpr, PARTS: gl.constexpr = 1,
):  # fmt: skip
    """Fetches every tile of the worker's segments, in order, as stages become free. BYTES: of one key. PARTS: of a stage, which
    become free and arrive one after the other, each with barriers of its own (see :func:`_panels_before`); 1 for gathered rows."""
    b = piece.b
    at = piece.start
    base = piece.base
    more = has_work(piece, MODE)
    fetched = 0
    if not GATHER:
        mbarrier.wait(warm, 0)
    while more:
        kv_len, first_id, lo, hi, follow = segment(pages, piece, b, at, base, MODE)
        _, q_count = pages.query(b)
        if first_row < q_count * HEADS:
            if GATHER:
                VEC: gl.constexpr = 16 * 576 // BYTES
                page, page_r = _row_pages(pages, first_id, lo * BLOCK, kv_len, VEC)
            for i in range(lo, hi):
                stage = fetched % STAGES
                parity = ((fetched // STAGES) & 1) ^ 1
                if GATHER:
                    # the next tile's page ids come in while this tile is waited for and copied
                    page_next, page_r_next = _row_pages(pages, first_id, (i + 1) * BLOCK, kv_len, VEC)
                    mbarrier.wait(empty.index(stage), parity)
                    _gather_rows(cache_ptr, page_stride, token_stride, latent, rope, full, stage, pages, page, page_r, first_id, i * BLOCK, kv_len, VEC)
                    page = page_next
                    page_r = page_r_next
                else:
                    # page ids are asked for before the wait, so that they come in during it
                    places = _places(pages, first_id, i * BLOCK, kv_len, BOX)
                    _fetch_panels(desc, desc_rope, latent, rope, full, empty, stage, parity, places, BOX, PANEL, BYTES, PARTS)
                fetched += 1
        base = follow
        at = follow
        b += 1
        more = (follow < piece.end) & (MODE == 0)
    if GATHER:
        async_copy.wait_group(0)
    turn_over(counter_ptr, counters, turn)
    let_kernel_after_begin()


@gluon.jit
def uniform(x):
    """x, known to be the same in all lanes. A value that went through shfl is uniform to ptxas, so wgmma descriptors made from it
    stay in uniform registers; otherwise each one is held in vector registers and moved over (88 moves a tile, and spills)."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def clear_rows(latent, stage, valid, BITS: gl.constexpr):
    """Zeros into rows ``valid:64`` of a stage of latent tiles, values of BITS 16 (bf16) or 8 (e4m3); groups of eight rows before
    ``valid`` are left alone.

    Masked probabilities are 0, and 0 times what lies past the end of a sequence may be NaN.
    """
    L: gl.constexpr = BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    words = latent.index(stage)._reinterpret(gl.int32, [BLOCK, 16 * BITS], NVMMASharedLayout(128, 32, 2))
    for g in gl.static_range(BLOCK // 8):
        if valid < (g + 1) * 8:
            part = words.slice(g * 8, 8)
            rows = g * 8 + gl.arange(0, 8, SliceLayout(1, L))
            part.store(gl.where((rows < valid)[:, None], part.load(L), 0))
    fence_async_shared()


@gluon.jit
def clear_hidden(latent, stage, first, end, STAGES: gl.constexpr, BITS: gl.constexpr):
    """Zeros for NaN and infinity among the values of rows ``first:end`` of a stage, once the scores have been computed from them.

    These are keys that some rows of the query see and others do not. A probability of 0 must not meet a NaN in them; a row that does
    see such a key is NaN already, because values are part of the key and so of its score. At most two groups of eight rows a
    sequence, for up to nine query tokens: a loop is shorter than it is slow.

    Args: the latent tiles, values of BITS 16 (bf16) or 8 (e4m3).
    """
    L: gl.constexpr = BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    PANELS: gl.constexpr = BITS // 2
    # eight rows of a panel lie together
    groups = latent._reinterpret(gl.int32, [STAGES * PANELS * 8, 8, 32], NVMMASharedLayout(128, 32, 2))
    thread_barrier()  # no warp still reads the tile as keys
    for g in range(gl.maximum(first, 0) // 8, gl.minimum(gl.cdiv(end, 8), BLOCK // 8)):
        rows = g * 8 + gl.arange(0, 8, SliceLayout(1, L))
        hidden = ((rows >= first) & (rows < end))[:, None]
        for panel in range(PANELS):
            part = groups.index((stage * PANELS + panel) * 8 + g)
            w = part.load(L)
            if BITS == 16:
                # a half whose exponent bits are all ones carries into its sign bit
                special = ((((w & 0x7F807F80) + 0x00800080) >> 15) & 0x00010001) * 0xFFFF
            else:
                special = ((((w & 0x7F7F7F7F) + 0x01010101) >> 7) & 0x01010101) * 0xFF
            part.store(gl.where(hidden, w & ~special, w))
    fence_async_shared()
    thread_barrier()
