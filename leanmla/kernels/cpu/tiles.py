"""Dequantises tokens of every cache format into a tile that stays in the processor's cache.

A tile row is one token's 576 values, as key and (its first 512) as value at once, in one of two forms:

* fp32, 2304 bytes: in each block of 32 values first the 16 with even index, then the 16 with odd index. That is the
  order in which a 32-bit lane gives up a pair (low half, high half) without any shuffle; queries are packed and
  outputs written in the same order.
* bf16, 1152 bytes: natural order, that is lane l of block j holds the pair (32 j + 2 l, 32 j + 2 l + 1). Exact for
  bf16, fp8, mxfp4 and mxfp4_row320 values, whose mantissas have at most 8 bits. fp8_tile128 values have 24 and need the fp32 form.

The per-tensor scale of fp8 is not applied here; the caller multiplies logits and outputs by it.
"""

from __future__ import annotations

from numba import njit

from ...formats import mxfp4_row320 as row320
from .calls import TILE
from .simd import (
    any_half_outside,
    as_float,
    as_int,
    broadcast_f,
    load_i,
    load_u8,
    load_u8_pairs,
    lookup16,
    prefetch,
    scalar_i,
    scalar_i64,
    scalar_u8,
    splat_f,
    splat_i,
    store_f,
    store_i,
    store_scalar_i,
    store_scalar_i64,
    store_scalar_u8,
    where_equal_i,
    where_less_i,
)  # fmt: skip

BF16, FP8, MXFP4, FP8_TILE128, MXFP4_ROW320 = range(5)
FORMAT_CODES = {"bf16": BF16, "fp8": FP8, "mxfp4": MXFP4, "fp8_tile128": FP8_TILE128, "mxfp4_row320": MXFP4_ROW320}

ROW_FP32 = 576 * 4
ROW_BF16 = 576 * 2
TOKENS = 16  # bytes before the addresses of a list of tokens
TOKEN_LIST_BYTES = TOKENS + 2 * TILE * 8
BLOCKS = 18  # of 32 values
LATENT_BLOCKS = 16

# What mxfp4 tokens need at hand: byte offsets of its parts.
_VALUES = 0  # 16 int32, see write_e2m1_table
_OCP_CODES = 64  # one token of mxfp4_row320 as mxfp4: 288 bytes of codes in five vectors, 18 scales
_OCP_SCALES = _OCP_CODES + 5 * 64
TABLE_BYTES = _OCP_SCALES + 64

DEFICIT_AT = row320.DEFICIT_AT
DEFICIT_UNIT, NAN_DEFICIT = row320.DEFICIT_UNIT, row320.NAN_DEFICIT
EXPONENT_AT, FINITE_EXPONENT_AT = row320.EXPONENT_AT, row320.FINITE_EXPONENT_AT

#: High halves of the fp32 values of the 16 E2M1 codes, as int32: 0 .5 1 1.5 2 3 4 6, then the same with a sign.
E2M1_HIGH = (0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0)


@njit(nogil=True, inline="always")
def _e4m3_any(code):
    """fp32 bits of the e4m3fn byte in each lane, whatever it is; 0x7F and 0xFF are NaN."""
    magnitude = code & splat_i(0x7F)
    normal = (magnitude << 20) + splat_i(120 << 23)  # exponent bias 7 -> 127
    # Subnormal m * 2^-9: put m below the leading one of 2^-6, then take 2^-6 away. Exact, and no subnormal fp32 occurs.
    subnormal = as_float(normal + splat_i(1 << 23)) - splat_f(0.015625)
    value = as_int(where_less_i(magnitude, splat_i(8), subnormal, as_float(normal)))
    value = where_equal_i(magnitude, splat_i(0x7F), splat_i(0x7FC00000), value)
    return value | ((code & splat_i(0x80)) << 24)


@njit(nogil=True)
def e4m3_pairs(codes):
    """An e4m3fn byte in each 16-bit half of each lane -> its value as bf16 there. Exact.

    A normal number only needs its exponent moved and its bias raised. Subnormals, zeros and NaN take another way, for
    all lanes if any needs it: they are rare in a cache scaled by its largest value (in 4 % of vectors where that is 50
    standard deviations), and the check costs less than handling them always.
    """
    magnitude = codes & splat_i(0x007F007F)
    if any_half_outside(magnitude, 8, 127 - 8):
        return (_e4m3_any(codes & splat_i(0xFF)) >> 16) | _e4m3_any(codes >> 16)
    return ((magnitude << 4) + splat_i(0x3C003C00)) | ((codes << 8) & splat_i(0x80008000))


@njit(nogil=True, inline="always")
def e8m0(byte):
    """2^(byte - 127) in all lanes: byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    bits = byte << 23
    if byte == 0:
        bits = 0x00400000
    elif byte == 255:
        bits = 0x7FC00000
    return as_float(splat_i(bits))


@njit(nogil=True, inline="always")
def _even(pairs):
    return as_float(pairs << 16)


@njit(nogil=True, inline="always")
def _odd(pairs):
    return as_float(pairs & splat_i(0xFFFF0000))


@njit(nogil=True, inline="always")
def _store_pairs(row, block, pairs, as_bf16):
    """A block of 32 values given as bf16 pairs."""
    if as_bf16:
        store_i(row + block * 64, pairs)
    else:
        store_f(row + block * 128, _even(pairs))
        store_f(row + block * 128 + 64, _odd(pairs))


@njit(nogil=True, inline="always")
def bf16_token(row, source, as_bf16):
    """source: 576 bf16."""
    for block in range(BLOCKS):
        _store_pairs(row, block, load_i(source + block * 64), as_bf16)


@njit(nogil=True)
def fp8_token(row, source, as_bf16):
    """source: 576 e4m3fn bytes. The tensor's scale is left to the caller."""
    for block in range(BLOCKS):
        _store_pairs(row, block, e4m3_pairs(load_u8_pairs(source + block * 32)), as_bf16)


@njit(nogil=True)
def mxfp4_token(row, source, scales, table, as_bf16):
    """source: 288 bytes, low nibble first; scales: 18 E8M0 bytes; table: see write_e2m1_table."""
    values = load_i(table + _VALUES)
    for block in range(BLOCKS):
        scale = e8m0(scalar_u8(scales + block))
        codes = load_u8(source + block * 16)
        even = as_float(lookup16(values, codes)) * scale
        odd = as_float(lookup16(values, codes >> 4)) * scale
        if as_bf16:
            store_i(row + block * 64, (as_int(even) >> 16) | (as_int(odd) & splat_i(0xFFFF0000)))
        else:
            store_f(row + block * 128, even)
            store_f(row + block * 128 + 64, odd)


@njit(nogil=True, inline="always")
def _close_up(bits):
    """Bits 3, 11, 19, 27 of each lane to 3, 7, 11, 15; the others have to be 0."""
    bits = (bits | (bits >> 4)) & splat_i(0x00880088)
    return (bits | (bits >> 8)) & splat_i(0x8888)


@njit(nogil=True)
def mxfp4_row320_token(row, source, table, as_bf16):
    """source: a row of 320 bytes, see formats/mxfp4_row320.py. Rewritten as mxfp4 first, which costs little: signs move in
    128 values at once."""
    for vector in range(5):  # the last one also rewrites the 32 bytes behind the codes, for nobody
        words = load_i(source + vector * 64)
        first = _close_up((words >> 4) & splat_i(0x08080808))
        second = _close_up(words & splat_i(0x08080808))
        store_i(table + _OCP_CODES + vector * 64, (words & splat_i(0x77777777)) | first | (second << 16))
    exponent = scalar_u8(source + EXPONENT_AT)
    has_nan = exponent == 255
    if has_nan:
        exponent = scalar_u8(source + FINITE_EXPONENT_AT)
    for block in range(BLOCKS):
        deficit = scalar_u8(source + DEFICIT_AT[block]) // DEFICIT_UNIT
        scale = max(exponent - deficit, 0)
        if has_nan and deficit >= NAN_DEFICIT:
            scale = 255
        store_scalar_u8(table + _OCP_SCALES + block, scale)
    mxfp4_token(row, table + _OCP_CODES, table + _OCP_SCALES, table, as_bf16)


@njit(nogil=True)
def fp8_tile128_token(row, source):
    """source: 512 e4m3fn, 4 fp32 scales, 64 bf16. fp32 form only."""
    for block in range(LATENT_BLOCKS):
        scale = broadcast_f(source + 512 + (block // 4) * 4)
        pairs = e4m3_pairs(load_u8_pairs(source + block * 32))
        store_f(row + block * 128, _even(pairs) * scale)
        store_f(row + block * 128 + 64, _odd(pairs) * scale)
    for block in range(LATENT_BLOCKS, BLOCKS):
        _store_pairs(row, block, load_i(source + 528 + (block - LATENT_BLOCKS) * 64), False)


@njit(nogil=True)
def write_e2m1_table(address):
    """16 int32: the fp32 bits of every E2M1 code."""
    for code in range(8):
        high = E2M1_HIGH[code]
        store_scalar_i(address + 4 * code, high << 16)
        store_scalar_i(address + 4 * code + 32, (high | 0x8000) << 16)


@njit(nogil=True)
def find_tokens(
    tokens,  # out, int64: count, bytes a token, TILE addresses of data, TILE addresses of mxfp4 scales
    start, end,  # token range of the sequence, at most TILE
    token_bytes, data, page_stride, token_stride,  # address and byte strides of the cache
    scales, scale_page_stride, scale_token_stride,  # the same of the mxfp4 scales; 0 elsewhere
    page_ids,  # address of the sequence's int32 page ids; 0: token t is `first_slot + t`
    first_slot, page_size,
):  # fmt: skip
    """Walk the page table for tokens ``start:end``, a run within one page at a time. Reads no other entry of it."""
    store_scalar_i64(tokens, end - start)
    store_scalar_i64(tokens + 8, token_bytes)
    t = start
    while t < end:
        page, slot, run = 0, first_slot + t, end - t
        if page_ids != 0:
            page, slot = scalar_i(page_ids + 4 * (t // page_size)), t % page_size
            run = min(page_size - slot, run)
        source = data + page * page_stride + slot * token_stride
        scale = scales + page * scale_page_stride + slot * scale_token_stride
        for i in range(run):
            at = tokens + TOKENS + (t - start + i) * 8
            store_scalar_i64(at, source + i * token_stride)
            store_scalar_i64(at + TILE * 8, scale + i * scale_token_stride)
        t += run


@njit(nogil=True)
def load_tile(tile, as_bf16, format_code, tokens, table):
    """Dequantise the tokens of a list. ``table``: TABLE_BYTES, whose beginning is from write_e2m1_table."""
    row_bytes = ROW_BF16 if as_bf16 else ROW_FP32
    for i in range(scalar_i64(tokens)):
        row, source = tile + i * row_bytes, scalar_i64(tokens + TOKENS + i * 8)
        if format_code == BF16:
            bf16_token(row, source, as_bf16)
        elif format_code == FP8:
            fp8_token(row, source, as_bf16)
        elif format_code == MXFP4:
            mxfp4_token(row, source, scalar_i64(tokens + TOKENS + (TILE + i) * 8), table, as_bf16)
        elif format_code == MXFP4_ROW320:
            mxfp4_row320_token(row, source, table, as_bf16)
        else:
            fp8_tile128_token(row, source)


@njit(nogil=True, inline="always")
def prefetch_half_token(tokens, half):
    """Ask for the first (``half`` even) or second half of the data of token ``half // 2`` of a list; a list of 0 has none."""
    if tokens != 0 and half < 2 * scalar_i64(tokens):
        token_bytes = scalar_i64(tokens + 8)
        source = scalar_i64(tokens + TOKENS + half // 2 * 8)
        middle = token_bytes // 128 * 64
        start, end = (middle, token_bytes) if half & 1 else (0, middle)
        for line in range(start, end, 64):
            prefetch(source + line)
        scale = scalar_i64(tokens + TOKENS + (TILE + half // 2) * 8)
        if scale != 0:
            prefetch(scale)


@njit(nogil=True)
def even_spacing(tokens):
    """Bytes from token to token of a full list if all are equal, otherwise 0."""
    first = tokens + TOKENS
    spacing = scalar_i64(first + 8) - scalar_i64(first)
    for i in range(2, TILE):
        if scalar_i64(first + i * 8) - scalar_i64(first + (i - 1) * 8) != spacing:
            return 0
    return spacing
