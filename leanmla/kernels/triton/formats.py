"""Cache formats inside kernels: how a tile of stored keys becomes 16-bit matrix operands.

A tile is read as 32-bit words and decoded with word-wide integer operations that work on two values at once. To keep
every value in the lane that loaded it, the key's dimensions are split by d mod 2 (fp8) or d mod 4 (mxfp4) into
separate operands: word operations then produce whole registers of an operand, and no byte or nibble ever has to move.
Queries are split the same way, and so are the accumulators of the output, which are interleaved once at the end.

======== ============================================== ============= ============================================
format   a word holds                                   operands      what the operand is
======== ============================================== ============= ============================================
bf16     --                                             1 x bf16      the key
fp8      4 e4m3: d = 4i .. 4i+3                         2 x fp16      key * 2**-8 / scale, exact
mxfp4    8 e2m1: d = 8i .. 8i+7, low nibble first       4 x bf16      the key, exact
tile128  4 e4m3; rope: 2 bf16                           8 x fp16,     latent / scale * 2**-8, exact (4 tiles of d x
                                                        1 x bf16      even, odd); rope, exact
======== ============================================== ============= ============================================

Scales that differ within a key cannot leave a sum over d. mxfp4's are powers of two and go into the operand, exactly.
tile128's are any fp32 numbers: they multiply the partial sums of their 128 dimensions (logits) and the weights (values).

NaN codes decode to NaN. A NaN in the values would reach rows that do not see its key as 0 * NaN; the decode kernel looks
for that at the end and repairs it (``careful_pass``).
"""

import triton
import triton.language as tl


@triton.jit
def half_words(w, DTYPE: tl.constexpr):
    """Words [m, n] of two 16-bit values each -> values [m, 2n], low half first. Register relabelling, no instruction."""
    low = (w & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (w >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.reshape(tl.join(low, high), [w.shape[0], 2 * w.shape[1]])


@triton.jit
def mark_nan(magnitude, PTX: tl.constexpr):
    """Words of two fp16 magnitudes from e4m3, with all bits of a half set where it is the NaN code's 0x3F80 (1.875)."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 c; mov.b32 c, 0x3F803F80; set.eq.u32.f16x2 c, $1, c; or.b32 $0, $1, c; }",
            "=r,r",
            [magnitude],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        top = ((magnitude + 0x00800080) >> 14) & 0x00010001
        return magnitude | (top * 0x7FFF)


@triton.jit
def e4m3_pairs(w, PTX: tl.constexpr):
    """Words of e4m3 bytes b3 b2 b1 b0 -> (words of fp16 (b2, b0), of (b3, b1)), each value * 2**-8.

    e4m3 shifted left by 7 is fp16 with an exponent bias that is 8 too small: exact for every finite code, subnormals
    included.
    """
    even = mark_nan((w << 7) & 0x3F803F80, PTX)
    odd = mark_nan((w >> 1) & 0x3F803F80, PTX)
    return ((w << 8) & -2147450880) | even, (w & -2147450880) | odd  # -2147450880 = 0x80008000


@triton.jit
def e2m1_pairs(w, J: tl.constexpr):
    """Words of 8 nibbles -> words of bf16 (nibble J+4, nibble J), each value * 2**-126.

    e2m1's exponent bias is 1 and bf16's 127, so magnitude bits at 6..8 are the value * 2**-126; the one subnormal, 0.5,
    becomes the bf16 subnormal 2**-127.
    """
    if J == 0:
        return ((w << 12) & -2147450880) | ((w << 6) & 0x01C001C0)
    elif J == 1:
        return ((w << 8) & -2147450880) | ((w << 2) & 0x01C001C0)
    elif J == 2:
        return ((w << 4) & -2147450880) | ((w >> 2) & 0x01C001C0)
    else:
        return (w & -2147450880) | ((w >> 6) & 0x01C001C0)


@triton.jit
def scaled_bf16(w, scale_bits, PTX: tl.constexpr):
    """Words of bf16 pairs * 2**126 * scale -> bf16 values [m, 2n]; scale_bits: words of the scale's bf16 bits, twice.

    Two multiplications because 2**126 * scale may pass bf16's range; each is exact.
    """
    if PTX:
        # fma with -0.0: packed bf16 multiplication of sm_80 and newer; subnormals are honoured.
        w = tl.inline_asm_elementwise(
            "{ .reg .b32 z, c; mov.b32 z, 0x80008000; mov.b32 c, 0x7E807E80;"
            " fma.rn.bf16x2 c, $1, c, z; fma.rn.bf16x2 $0, c, $2, z; }",
            "=r,r,r",
            [w, scale_bits],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return half_words(w, tl.bfloat16)
    else:
        value = half_words(w, tl.bfloat16).to(tl.float32) * 85070591730234615865843651857942052864.0  # 2**126
        return (value * half_words(scale_bits, tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def e8m0_bits(byte):
    """E8M0 bytes as words of the bf16 bits twice. Byte 0 is 2**-127, a bf16 subnormal; 255 is NaN."""
    bits = tl.where(byte == 0, 0x40, byte << 7)
    bits = tl.where(byte == 255, 0x7FC0, bits)
    return bits | (bits << 16)


@triton.jit
def spread(x, W: tl.constexpr):
    """[m, n] -> [m, W], each column repeated W / n times."""
    m: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(tl.expand_dims(x, 2), [m, n, W // n]), [m, W])


@triton.jit
def load_words(
    data_ptr,  # int32 words of the cache
    scale_ptr,  # mxfp4: uint8 E8M0
    at,  # [BN]: word offset of each token's row
    at_scale,  # [BN]: byte offset of each token's scales (mxfp4)
    FORMAT: tl.constexpr,
):
    """A tile as stored, undecoded: a tuple whose parts depend on the format."""
    row = data_ptr + at[:, None]
    if FORMAT == "fp8":
        return tl.load(row + tl.arange(0, 128)[None, :]), tl.load(row + (128 + tl.arange(0, 16))[None, :])
    elif FORMAT == "mxfp4":
        # One 16-byte load is one block of 32 values, so a lane needs one scale byte a row.
        scales = scale_ptr + at_scale[:, None]
        return (
            tl.load(row + tl.arange(0, 64)[None, :]),
            tl.load(row + (64 + tl.arange(0, 8))[None, :]),
            tl.load(scales + tl.arange(0, 16)[None, :]).to(tl.int32),
            tl.load(scales + (16 + tl.arange(0, 2))[None, :]).to(tl.int32),
        )
    else:
        word = tl.arange(0, 32)[None, :]
        one = data_ptr + at
        return (
            tl.load(row + word),
            tl.load(row + (32 + word)),
            tl.load(row + (64 + word)),
            tl.load(row + (96 + word)),
            tl.load(row + (132 + word)),
            tl.load(one + 128).to(tl.float32, bitcast=True),
            tl.load(one + 129).to(tl.float32, bitcast=True),
            tl.load(one + 130).to(tl.float32, bitcast=True),
            tl.load(one + 131).to(tl.float32, bitcast=True),
        )


@triton.jit
def e4m3_halves(w, CLEAN: tl.constexpr, ISA: tl.constexpr):
    """int16 of two e4m3 each -> (fp16 of the low bytes, of the high bytes), each value * 2**-8, or unscaled with ISA 89.

    Elementwise, so it works in whatever layout the matrix instruction wants its operand in: the tile stays as stored in
    shared memory and is decoded between there and the instruction. CLEAN: NaN becomes a number, for values, whose
    NaN reaches a row through the key's logit and must not reach rows that do not see the key.

    ISA: NVIDIA architecture (80: packed integer operations, 89: conversion instructions), 0: no inline assembly.
    """
    if ISA >= 89:
        if CLEAN:  # min takes the operand that is not NaN
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t, u, v, c; .reg .b16 lo, hi; prmt.b32 t, $2, $2, 0x3120; mov.b32 {lo, hi}, t; mov.b32 c, 0x7BFF7BFF;"
                " cvt.rn.f16x2.e4m3x2 u, lo; cvt.rn.f16x2.e4m3x2 v, hi; min.f16x2 $0, u, c; min.f16x2 $1, v, c; }",
                "=r,=r,r",
                [w],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $2, $2, 0x3120; mov.b32 {lo, hi}, t;"
                " cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
                "=r,=r,r",
                [w],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    elif ISA >= 80:
        if CLEAN:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a, b; shl.b32 a, $2, 8; and.b32 a, a, 0x80008000; shl.b32 b, $2, 7; and.b32 b, b, 0x3F803F80;"
                " or.b32 $0, a, b; and.b32 a, $2, 0x80008000; shr.b32 b, $2, 1; and.b32 b, b, 0x3F803F80; or.b32 $1, a, b; }",
                "=&r,=r,r",
                [w],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, c, e; mov.b32 c, 0x3F803F80;"
                " shl.b32 a, $2, 8; and.b32 a, a, 0x80008000; shl.b32 b, $2, 7; and.b32 b, b, c; set.eq.u32.f16x2 e, b, c;"
                " or.b32 a, a, b; or.b32 $0, a, e;"
                " and.b32 a, $2, 0x80008000; shr.b32 b, $2, 1; and.b32 b, b, c; set.eq.u32.f16x2 e, b, c;"
                " or.b32 a, a, b; or.b32 $1, a, e; }",
                "=&r,=r,r",
                [w],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    else:
        low = (w << 7) & 0x3F80
        high = (w >> 1) & 0x3F80
        if not CLEAN:
            low = tl.where(low == 0x3F80, 0x7FFF, low)
            high = tl.where(high == 0x3F80, 0x7FFF, high)
        low = low | ((w << 8) & -32768)
        high = high | (w & -32768)
        return low.to(tl.int16).to(tl.float16, bitcast=True), high.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def hide_rows(raw, keep):
    """A tile with zero words, which are zero values in every format, in the rows that are not kept."""
    new = ()
    for j in tl.static_range(len(raw)):
        if len(raw[j].shape) == 2:
            new = new + (tl.where(keep[:, None], raw[j], tl.zeros_like(raw[j])),)
        else:
            new = new + (tl.where(keep, raw[j], tl.zeros_like(raw[j])),)
    return new


@triton.jit
def e4m3_operands(w, PTX: tl.constexpr):
    """Words of e4m3 -> fp16 operands of even and of odd d."""
    even, odd = e4m3_pairs(w, PTX)
    return half_words(even, tl.float16), half_words(odd, tl.float16)


@triton.jit
def e2m1_operands(w, scale_bytes, PTX: tl.constexpr):
    """Words of e2m1 and the E8M0 bytes of their blocks -> bf16 operands of d mod 4 = 0, 1, 2, 3."""
    z = spread(e8m0_bits(scale_bytes), w.shape[1])
    return (
        scaled_bf16(e2m1_pairs(w, 0), z, PTX),
        scaled_bf16(e2m1_pairs(w, 1), z, PTX),
        scaled_bf16(e2m1_pairs(w, 2), z, PTX),
        scaled_bf16(e2m1_pairs(w, 3), z, PTX),
    )


@triton.jit
def decode(raw, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """(latent operands, rope operands) of a tile."""
    if FORMAT == "fp8":
        return e4m3_operands(raw[0], PTX), e4m3_operands(raw[1], PTX)
    elif FORMAT == "mxfp4":
        return e2m1_operands(raw[0], raw[2], PTX), e2m1_operands(raw[1], raw[3], PTX)
    else:
        low = e4m3_operands(raw[0], PTX) + e4m3_operands(raw[1], PTX)
        high = e4m3_operands(raw[2], PTX) + e4m3_operands(raw[3], PTX)
        return low + high, (half_words(raw[4], tl.bfloat16),)


@triton.jit
def tile_scales(raw, FORMAT: tl.constexpr):
    """tile128: its four scales [BN]. Otherwise ()."""
    if FORMAT == "fp8_tile128":
        return raw[5], raw[6], raw[7], raw[8]
    else:
        return ()
