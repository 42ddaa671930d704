"""Quantise new latent vectors and scatter them to cache slots, in one launch, bit for bit as ``leanmla.formats`` does.

One program a token: it reads 512 + 64 values, which may lie apart (the compressed latent and the rope part, as models
produce them), rounds them with integer arithmetic on fp32 bits, and writes the row. Integer rounding and IEEE divisions
make the bytes independent of the device's conversion instructions. Slots of -1 are skipped.

NaN: an e4m3 byte keeps the sign of the NaN it came from, everything else has one pattern.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["append", "append_kernel", "append_split"]


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def is_nan(x):
    return (bits_of(x) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def bf16_of(x):
    """fp32 -> bf16, nearest even; NaN becomes the quiet NaN 0x7FC0."""
    b = bits_of(x)
    rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return tl.where(is_nan(x), 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e4m3_of(y, negative):
    """fp32 within +-448 or NaN -> e4m3fn byte as int32, nearest even. The sign bit is ``negative``."""
    b = bits_of(tl.abs(y))
    normal = ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - 960  # exponent bias 127 -> 7, with 3 mantissa bits
    # Below 2**-6 the code counts units of 2**-9; adding 2**14 leaves their rounded number in the mantissa.
    small = bits_of(tl.abs(y) + 16384.0) - 0x46800000
    code = tl.where(b < 0x3C800000, small, normal)
    code = tl.where(b > 0x7F800000, 0x7F, code)
    return code | (negative.to(tl.int32) << 7)


@triton.jit
def quantized_e4m3(x, scale):
    """(e4m3 bytes of x / scale, int32 1 where clamping did more than rounding would)."""
    y = tl.math.div_rn(x, scale)
    saturated = (tl.abs(y) > 464.0).to(tl.int32)
    negative = bits_of(tl.where(is_nan(y) & (is_nan(x) == 0), tl.abs(x), x)) < 0
    # Selects keep NaN, minimum and maximum would not.
    y = tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y))
    return e4m3_of(y, negative), saturated


@triton.jit
def e2m1_of(y):
    """fp32, not NaN -> e2m1 codes: nearest, ties to the even code, saturating at 6."""
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((bits_of(y) < 0).to(tl.int32) << 3)


@triton.jit
def mx_scales(x, EVEN: tl.constexpr):
    """[blocks, 32] values -> E8M0 bytes [blocks] as int32, 255 where a block holds a NaN."""
    nan = tl.max(is_nan(x).to(tl.int32), 1) != 0
    magnitude = bits_of(tl.abs(tl.where(is_nan(x), 0.0, x)))  # ordered like the values
    amax = tl.max(magnitude, 1)
    if EVEN:
        amax += 0x200000  # round up to the next power of two from 1.75 on
    return tl.where(nan, 255, tl.maximum((amax >> 23) - 2, 0))


@triton.jit
def mx_codes(x, byte):
    """[blocks, 32] values under the scales ``byte`` -> (e2m1 codes, int32 saturation flags), both [blocks, 32]."""
    inverse = (tl.maximum(254 - byte, 1) << 23).to(tl.float32, bitcast=True)
    y = tl.where((byte == 255)[:, None], 0.0, x * inverse[:, None])
    return e2m1_of(y), (tl.abs(y) >= 7.0).to(tl.int32)


@triton.jit
def mx_blocks(x, EVEN: tl.constexpr):
    """[n] values -> (packed e2m1 bytes [n // 2], E8M0 bytes [n // 32] as int32, int32 [n // 32, 32] saturation flags)."""
    x = tl.reshape(x, [x.shape[0] // 32, 32])
    byte = mx_scales(x, EVEN)
    codes, saturated = mx_codes(x, byte)
    low, high = tl.split(tl.reshape(codes, [x.shape[0], 16, 2]))
    return tl.reshape(low | (high << 4), [x.shape[0] * 16]), byte, saturated


@triton.jit
def row320_bytes(codes):
    """e2m1 codes [blocks, 32] -> bytes [blocks * 16] with the signs where mxfp4_row320 wants them.

    Of eight codes, byte m takes the magnitudes of codes 2m and 2m + 1 and the signs of codes m (bit 7) and 4 + m (bit 3).
    """
    words: tl.constexpr = codes.shape[0] * 4
    low, high = tl.split(tl.reshape(codes & 7, [words, 4, 2]))
    first, second = tl.split(tl.permute(tl.reshape(codes & 8, [words, 2, 4]), (0, 2, 1)))
    return tl.reshape(low | (high << 4) | second | (first << 4), [words * 4])


@triton.jit
def largest_of(byte, counts):
    """Largest byte among the blocks that count, -1 if none does."""
    return tl.max(tl.where(counts, byte, -1), 0)


@triton.jit
def append_row320(row, x, xr, EVEN: tl.constexpr):
    """Write a row of mxfp4_row320 (leanmla/formats/mxfp4_row320.py); returns the number of values that were clipped."""
    x = tl.reshape(x, [16, 32])
    xr = tl.reshape(xr, [2, 32])
    byte = mx_scales(x, EVEN)
    byte_r = mx_scales(xr, EVEN)
    nan = byte == 255
    nan_r = byte_r == 255
    lowest = tl.maximum(largest_of(byte, nan == 0), largest_of(byte_r, nan_r == 0)) - 26
    byte = tl.maximum(byte, lowest)
    byte_r = tl.maximum(byte_r, lowest)
    codes, saturated = mx_codes(x, byte)
    codes_r, saturated_r = mx_codes(xr, byte_r)
    # Blocks of zeros and NaN blocks have no exponent.
    counts = tl.max(codes & 7, 1) != 0
    counts_r = tl.max(codes_r & 7, 1) != 0
    exponent = tl.maximum(largest_of(byte, counts), largest_of(byte_r, counts_r))
    exponent = tl.where(exponent < 0, 127, tl.maximum(exponent, 14))
    deficit = 4 * tl.where(nan, 27, tl.where(counts, exponent - byte, 0))
    deficit_r = 4 * tl.where(nan_r, 27, tl.where(counts_r, exponent - byte_r, 0))
    has_nan = tl.maximum(tl.max(nan.to(tl.int32), 0), tl.max(nan_r.to(tl.int32), 0)) != 0
    tl.store(row + tl.arange(0, 256), row320_bytes(codes).to(tl.uint8))
    tl.store(row + 256 + tl.arange(0, 32), row320_bytes(codes_r).to(tl.uint8))
    b = tl.arange(0, 16)
    tl.store(row + 288 + 4 * (b % 4) + b // 4, deficit.to(tl.uint8))
    tl.store(row + 304 + tl.arange(0, 2), deficit_r.to(tl.uint8))
    # Bytes 306..319: the exponent, or 255 and then the exponent, and zeros.
    rest = tl.where(b == 2, tl.where(has_nan, 255, exponent), tl.where((b == 3) & has_nan, exponent, 0))
    tl.store(row + 304 + b, rest.to(tl.uint8), mask=b >= 2)
    return tl.sum(saturated) + tl.sum(saturated_r)


@triton.jit
def append_kernel(
    data_ptr,  # [num_pages, page_size, W] bf16 | uint8
    scale_ptr,  # fp8: fp32 [1]; mxfp4: uint8 [num_pages, page_size, 18]
    saturated_ptr,  # [] int64, added to
    latent_ptr,  # [n, 512] bf16 | fp16 | fp32
    rope_ptr,  # [n, 64], same dtype
    slots_ptr,  # [n] int32 | int64
    num_slots,  # slots of the cache
    stride_latent,
    stride_latent_d,
    stride_rope,
    stride_rope_d,
    stride_slots,
    stride_page,  # elements
    stride_token,
    stride_scale_page,
    stride_scale_token,
    FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EVEN: tl.constexpr,  # mxfp4, mxfp4_row320: scale rule "even", else "floor"
):
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i * stride_slots).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    row = data_ptr + page * stride_page + offset * stride_token
    d = tl.arange(0, 512)
    dr = tl.arange(0, 64)
    latent = tl.load(latent_ptr + i * stride_latent + d * stride_latent_d)
    rope = tl.load(rope_ptr + i * stride_rope + dr * stride_rope_d)
    if FORMAT == "bf16":
        if latent.dtype == tl.bfloat16:
            tl.store(row + d, latent)
            tl.store(row + 512 + dr, rope)
        else:
            tl.store(row + d, bf16_of(latent.to(tl.float32)))
            tl.store(row + 512 + dr, bf16_of(rope.to(tl.float32)))
        return
    x = latent.to(tl.float32)
    xr = rope.to(tl.float32)
    if FORMAT == "fp8":
        scale = tl.load(scale_ptr)
        code, saturated = quantized_e4m3(x, scale)
        code_r, saturated_r = quantized_e4m3(xr, scale)
        tl.store(row + d, code.to(tl.uint8))
        tl.store(row + 512 + dr, code_r.to(tl.uint8))
        count = tl.sum(saturated) + tl.sum(saturated_r)
    elif FORMAT == "mxfp4":
        packed, byte, saturated = mx_blocks(x, EVEN)
        packed_r, byte_r, saturated_r = mx_blocks(xr, EVEN)
        tl.store(row + tl.arange(0, 256), packed.to(tl.uint8))
        tl.store(row + 256 + tl.arange(0, 32), packed_r.to(tl.uint8))
        scales = scale_ptr + page * stride_scale_page + offset * stride_scale_token
        tl.store(scales + tl.arange(0, 16), byte.to(tl.uint8))
        tl.store(scales + 16 + tl.arange(0, 2), byte_r.to(tl.uint8))
        count = tl.sum(saturated) + tl.sum(saturated_r)
    elif FORMAT == "mxfp4_row320":
        count = append_row320(row, x, xr, EVEN)
    else:
        tiles = tl.reshape(x, [4, 128])
        magnitude = bits_of(tl.abs(tiles))
        # Infinities and NaN do not count, as in the host codec: one must not void the other 127.
        finite = tl.where(magnitude < 0x7F800000, magnitude, 0)
        amax = tl.max(finite, 1).to(tl.float32, bitcast=True)
        amax = tl.where(amax < 1e-12, 1e-12, amax)
        scale = tl.math.div_rn(amax, tl.full([4], 448.0, tl.float32))
        code, saturated = quantized_e4m3(tiles, tl.broadcast_to(scale[:, None], [4, 128]))
        tl.store(row + d, tl.reshape(code, [512]).to(tl.uint8))
        scale_row = (row + 512).to(tl.pointer_type(tl.float32))
        tl.store(scale_row + tl.arange(0, 4), scale)
        rope_row = (row + 528).to(tl.pointer_type(tl.bfloat16))
        if rope.dtype == tl.bfloat16:
            tl.store(rope_row + dr, rope)
        else:
            tl.store(rope_row + dr, bf16_of(xr))
        count = tl.sum(saturated)
    if count > 0:
        tl.atomic_add(saturated_ptr, count.to(tl.int64))


def append(cache, latent: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise rows and write them to slots; :meth:`leanmla.LatentCache.append` has checked the arguments.

    Args:
        cache: a :class:`leanmla.LatentCache` that has its scale.
        latent: [n, 576] bf16, fp16 or fp32, any strides.
        slots: int32 or int64 [n]; -1 skips a row.
    """
    _launch(cache, latent[:, :512], latent[:, 512:], slots)


def append_split(cache, latent_c: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
    """:func:`append` with the compressed latent [n, 512] and the rope part [n, 64] apart; same dtype, any strides."""
    _launch(cache, latent_c, rope, slots)


def _launch(cache, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
    n = latent.shape[0]
    if n == 0:
        return
    data, scale = cache.data, cache.scale
    counter = cache.saturation_counter
    scale_page, scale_token = (scale.stride(0), scale.stride(1)) if scale is not None and scale.ndim == 3 else (0, 0)
    append_kernel[(n,)](
        data, scale if scale is not None else counter, counter, latent, rope, slots, cache.num_pages * cache.page_size,
        latent.stride(0), latent.stride(1), rope.stride(0), rope.stride(1), slots.stride(0),
        data.stride(0), data.stride(1), scale_page, scale_token,
        FORMAT=cache.format.name, PAGE_SIZE=cache.page_size, EVEN=cache.mx_scale_rule == "even", num_warps=4,
    )  # fmt: skip
