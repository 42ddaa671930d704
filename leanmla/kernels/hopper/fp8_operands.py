"""Operands of fp8 (e4m3) products at 16-bit accuracy: queries in two terms, values widened to fp16. See ``decode_fp8_sm90``."""

from .gluon_names import (
    BlockedLayout,
    DistributedLinearLayout,
    SliceLayout,
    constexpr_function,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
)
from .loader import clear_rows, uniform
from .pages import BLOCK

__all__ = ["byte_pairs_f16", "interleave", "load_query", "ready", "round_e4m3", "row_factor", "score_part", "sum_terms", "widen"]

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)


@constexpr_function
def byte_pairs_f16(warps, pairs):
    """[16 keys, byte pairs] by ldmatrix.trans, in the order of a 16-bit A fragment."""
    bits = warps.bit_length() - 1
    higher = [[0, 16 << w] for w in range((pairs // 16).bit_length() - 1)]
    return DistributedLinearLayout(
        [[1, 0], [0, 8], [8, 0]] + higher[bits:], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], higher[:bits], [], [16, pairs]
    )


@gluon.jit
def round_e4m3(x):
    """x rounded to four significant bits, by integer arithmetic: converting to e4m3 and back is miscompiled by ptxas 12.8 and 12.9."""
    return ((x.to(gl.int32, bitcast=True) + 0x80000) & -0x100000).to(gl.float32, bitcast=True)


@gluon.jit
def widen(pairs, A: gl.constexpr):
    """Byte pairs [16 keys, 256] -> fp16 A operands [256, 16] of the even and of the odd d."""
    e, o = gl.inline_asm_elementwise(
        """
        { .reg .b32 t; .reg .b16 l, h;
          prmt.b32 t, $2, 0, 0x3120;
          mov.b32 {l, h}, t;
          cvt.rn.f16x2.e4m3x2 $0, l;
          cvt.rn.f16x2.e4m3x2 $1, h; }""",
        "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    e = gl.convert_layout(gl.permute(e, (1, 0)), A, assert_trivial=True)
    o = gl.convert_layout(gl.permute(o, (1, 0)), A, assert_trivial=True)
    return e, o


@gluon.jit
def row_factor(top):
    """What takes a row with largest magnitude ``top`` to [128, 256), a power of two, and what takes it back.

    The eight significant bits of a bf16 then split exactly: hi is a multiple of 16 of its last bit, and what is left is at most 8
    of them, four bits again.
    """
    exponent = (gl.maximum(top, 1e-20).to(gl.int32, bitcast=True) >> 23) & 0xFF
    return ((261 - exponent) << 23).to(gl.float32, bitcast=True), ((exponent - 7) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _load_q_rows(q_ptr, stride_token, stride_head, q_latent, q_rope, q_scale, q_scale_rope, scale, q_first, first_row, rows,
                 HEADS: gl.constexpr, HALF: gl.constexpr, R0: gl.constexpr):  # fmt: skip
    """Query rows R0 .. R0 + 15 of the tile as hi and lo e4m3 terms. The latent and the rope part are scaled apart, since one may be
    far larger than the other; ``q_scale`` and ``q_scale_rope`` get what undoes it, times ``scale``."""
    L: gl.constexpr = BlockedLayout([1, 16], [1, 32], [gl.num_warps(), 1], [1, 0])
    LR: gl.constexpr = BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    HI: gl.constexpr = R0 // HALF * 2 * HALF + R0 % HALF
    r = R0 + gl.arange(0, 16, SliceLayout(1, L))
    at = (q_first + (first_row + r) // HEADS).to(gl.int64) * stride_token + (first_row + r) % HEADS * stride_head
    d = gl.arange(0, LATENT, SliceLayout(0, L))
    x = gl.load((q_ptr + at)[:, None] + d[None, :], mask=(r < rows)[:, None], other=0.0).to(gl.float32)
    rr = R0 + gl.arange(0, 16, SliceLayout(1, LR))
    at_r = (q_first + (first_row + rr) // HEADS).to(gl.int64) * stride_token + (first_row + rr) % HEADS * stride_head
    dr = LATENT + gl.arange(0, ROPE, SliceLayout(0, LR))
    xr = gl.load((q_ptr + at_r)[:, None] + dr[None, :], mask=(rr < rows)[:, None], other=0.0).to(gl.float32)
    # A row lies in one warp in both layouts, so its largest magnitudes need shuffles only.
    factor, back = row_factor(gl.max(gl.abs(x), 1))
    factor_r, back_r = row_factor(gl.max(gl.abs(xr), 1))
    q_scale.slice(R0, 16).store(back * scale)
    q_scale_rope.slice(R0, 16).store(back_r * scale)
    x = x * factor[:, None]
    xr = xr * factor_r[:, None]
    hi = round_e4m3(x)
    hi_r = round_e4m3(xr)
    q_latent.slice(HI, 16).store(hi.to(gl.float8e4nv))
    q_latent.slice(HI + HALF, 16).store((x - hi).to(gl.float8e4nv))
    q_rope.slice(HI, 16).store(hi_r.to(gl.float8e4nv))
    q_rope.slice(HI + HALF, 16).store((xr - hi_r).to(gl.float8e4nv))


@gluon.jit
def load_query(q_ptr, stride_token, stride_head, q_latent, q_rope, q_scale, q_scale_rope, scale, q_first, first_row, rows,
            HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr):  # fmt: skip
    """Query rows to shared memory in the order [warpgroup][hi, lo][row of the warpgroup]: a warpgroup finds both terms of its rows."""
    for r0 in gl.static_range(0, ROWS, 16):
        _load_q_rows(q_ptr, stride_token, stride_head, q_latent, q_rope, q_scale, q_scale_rope, scale, q_first, first_row, rows, HEADS, ROWS // GROUPS, r0)


@gluon.jit
def interleave(even, odd, ptr_row, ok, first_d):
    """Store even and odd d of rows side by side: even and odd [M, ROWS] -> ptr_row[row] + first_d + 2 m, 2 m + 1."""
    x = gl.join(even, odd)
    L: gl.constexpr = x.type.layout
    m = gl.arange(0, x.shape[0], SliceLayout(1, SliceLayout(2, L)))
    side = gl.arange(0, 2, SliceLayout(0, SliceLayout(1, L)))
    ptr = gl.convert_layout(ptr_row, SliceLayout(0, SliceLayout(2, L)), assert_trivial=True)
    okc = gl.convert_layout(ok, SliceLayout(0, SliceLayout(2, L)), assert_trivial=True)
    at = ptr[None, :, None] + (first_d + 2 * m)[:, None, None] + side[None, None, :]
    gl.store(at, x.to(ptr_row.dtype.element_ty), mask=okc[None, :, None])


@gluon.jit
def ready(latent, full, used, i, kv_len, STAGES: gl.constexpr, GATHER: gl.constexpr):
    """Wait for tile i, the block's ``used``-th; returns its stage."""
    stage = uniform(used % STAGES)
    mbarrier.wait(full.index(stage), (used // STAGES) & 1)
    if GATHER:
        fence_async_shared()  # cp.async writes like an ordinary store
    elif i * BLOCK + BLOCK > kv_len:
        clear_rows(latent, stage, kv_len - i * BLOCK, 8)
    return stage


@gluon.jit
def score_part(keys, q, S2: gl.constexpr, ROWS: gl.constexpr):
    return warpgroup_mma(keys, q.permute((1, 0)), gl.zeros([BLOCK, 2 * ROWS], gl.float32, S2), use_acc=False, is_async=True)


@gluon.jit
def sum_terms(both, S: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr):
    """hi + lo of the scores: both terms of a row lie in the same thread."""
    hi, lo = gl.split(gl.permute(gl.reshape(both, [BLOCK, GROUPS, 2, ROWS // GROUPS]), (0, 1, 3, 2)))
    return gl.convert_layout(gl.reshape(hi + lo, [BLOCK, ROWS]), S, assert_trivial=True)
