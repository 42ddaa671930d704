"""The loading role, shared by the formats whose tiles go to shared memory as they are: tensor-map boxes or gathered rows.

A tile of 64 keys is ``512 / PANEL`` latent panels of [64 keys, PANEL values], 128-byte rows in 128-byte swizzle, and a rope
panel of 64 values. One tensor-map box fills a whole panel where pages hold a multiple of 64 keys, and BOX keys of it where
they hold a multiple of 32 or 16. Any other page size is gathered: cp.async, 16 bytes a lane, one row at a time.
"""

from .gluon_names import (
    BlockedLayout,
    SliceLayout,
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
)
from .pages import BLOCK
from .schedule import has_work, segment

__all__ = ["clear_rows", "loader"]


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
        places = (_place(pages, first_id, token, kv_len, BOX), _place(pages, first_id, token + 32, kv_len, BOX))
    else:
        places = (
            _place(pages, first_id, token, kv_len, BOX),
            _place(pages, first_id, token + 16, kv_len, BOX),
            _place(pages, first_id, token + 32, kv_len, BOX),
            _place(pages, first_id, token + 48, kv_len, BOX),
        )
    return places


@gluon.jit
def _fetch_panels(desc, desc_rope, latent, rope, full, stage, places, BOX: gl.constexpr, PANEL: gl.constexpr, BYTES: gl.constexpr):
    """A tile into ``stage`` by boxes of [BOX keys, PANEL values]."""
    PARTS: gl.constexpr = BLOCK // BOX
    PANELS: gl.constexpr = 512 // PANEL
    mbarrier.expect(full.index(stage), BLOCK * BYTES)
    for j in gl.static_range(PARTS):
        for p in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                desc, [places[j][0], places[j][1], p * PANEL], full.index(stage), latent.index((stage * PANELS + p) * PARTS + j)
            )
        tma.async_copy_global_to_shared(desc_rope, [places[j][0], places[j][1], 512], full.index(stage), rope.index(stage * PARTS + j))


@gluon.jit
def _rows(pages, first_id, token, kv_len, page_stride, token_stride, VEC: gl.constexpr):
    """Element offsets of a tile's keys, for the latent and for the rope copy."""
    L: gl.constexpr = BlockedLayout([1, VEC], [1, 32], [gl.num_warps(), 1], [1, 0])
    LR: gl.constexpr = BlockedLayout([1, VEC], [VEC // 2, 64 // VEC], [gl.num_warps(), 1], [1, 0])
    t = token + gl.arange(0, BLOCK, SliceLayout(1, L))
    tr = token + gl.arange(0, BLOCK, SliceLayout(1, LR))
    at = pages.offsets(first_id, t, t < kv_len, page_stride, token_stride)
    at_r = pages.offsets(first_id, tr, tr < kv_len, page_stride, token_stride)
    return at, at_r


@gluon.jit
def _gather_rows(cache_ptr, at, at_r, latent, rope, full, stage, left, VEC: gl.constexpr):
    """A tile by cp.async. Only ``left`` keys are read; the rows of the others become zeros."""
    L: gl.constexpr = BlockedLayout([1, VEC], [1, 32], [gl.num_warps(), 1], [1, 0])
    LR: gl.constexpr = BlockedLayout([1, VEC], [VEC // 2, 64 // VEC], [gl.num_warps(), 1], [1, 0])
    d = gl.arange(0, 512, SliceLayout(0, L))[None, :]
    dr = gl.arange(0, 64, SliceLayout(0, LR))[None, :]
    ok = (gl.arange(0, BLOCK, SliceLayout(1, L)) < left)[:, None] & (d >= 0)
    ok_r = (gl.arange(0, BLOCK, SliceLayout(1, LR)) < left)[:, None] & (dr >= 0)
    async_copy.async_copy_global_to_shared(latent.index(stage), cache_ptr + (at[:, None] + d), mask=ok)
    async_copy.async_copy_global_to_shared(rope.index(stage), cache_ptr + (at_r[:, None] + (512 + dr)), mask=ok_r)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def loader(
    desc, desc_rope, cache_ptr, page_stride, token_stride, latent, rope, full, empty, pages, piece, first_row,
    HEADS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, PANEL: gl.constexpr, BYTES: gl.constexpr,
    GATHER: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Fetches every tile of the worker's segments, in order, as stages become free. BYTES: of one key."""
    b = piece.b
    at = piece.start
    base = piece.base
    more = has_work(piece, MODE)
    fetched = 0
    while more:
        kv_len, first_id, lo, hi, follow = segment(pages, piece, b, at, base, MODE)
        q_first, q_count = pages.query(b)
        if first_row < q_count * HEADS:
            for i in range(lo, hi):
                # Page ids are asked for before the wait, so that they come in during it.
                stage = fetched % STAGES
                parity = ((fetched // STAGES) & 1) ^ 1
                if GATHER:
                    at_rows, at_rope = _rows(pages, first_id, i * BLOCK, kv_len, page_stride, token_stride, 16 * 576 // BYTES)
                    mbarrier.wait(empty.index(stage), parity)
                    _gather_rows(cache_ptr, at_rows, at_rope, latent, rope, full, stage, kv_len - i * BLOCK, 16 * 576 // BYTES)
                else:
                    places = _places(pages, first_id, i * BLOCK, kv_len, BOX)
                    mbarrier.wait(empty.index(stage), parity)
                    _fetch_panels(desc, desc_rope, latent, rope, full, stage, places, BOX, PANEL, BYTES)
                fetched += 1
        base = follow
        at = follow
        b += 1
        more = (follow < piece.end) & (MODE == 0)
    if GATHER:
        async_copy.wait_group(0)


@gluon.jit
def clear_rows(words, valid):
    """Zeros into rows ``valid:64`` of a tile given as [64, N] int32 words; groups of eight rows before ``valid`` are left alone.

    Masked probabilities are 0, and 0 times what lies past the end of a sequence may be NaN.
    """
    L: gl.constexpr = BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    for g in gl.static_range(BLOCK // 8):
        if valid < (g + 1) * 8:
            part = words.slice(g * 8, 8)
            rows = g * 8 + gl.arange(0, 8, SliceLayout(1, L))
            part.store(gl.where((rows < valid)[:, None], part.load(L), 0))
    fence_async_shared()
