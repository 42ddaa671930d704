"""fp32 vector functions of the softmax, and the conversion of a finished row."""

from __future__ import annotations

import math

from numba import njit

from .simd import as_float, as_int, fma, load_f, splat_f, splat_i, store_i, to_half, where_less, where_nan

LOG2E = math.log2(math.e)
HIGH = 0xFFFF0000  # the high half of a lane


@njit(nogil=True)
def exp2_neg(x):
    """2^x for x <= 0, to 1e-7; 0 below -126, so that no subnormal appears. NaN stays NaN."""
    bounded = where_less(x, splat_f(-126.0), splat_f(-126.0), x)
    shifted = bounded + splat_f(12582912.0)  # 1.5 * 2^23: rounds to an integer, which stands in the low bits
    f = bounded - (shifted - splat_f(12582912.0))
    # (2^f - 1) / f on [-1/2, 1/2], minimax: 2e-9.
    p = splat_f(0.00015353785613104272)
    p = fma(p, f, splat_f(0.0013398910582912678))
    p = fma(p, f, splat_f(0.00961843589629279))
    p = fma(p, f, splat_f(0.05550332343769562))
    p = fma(p, f, splat_f(0.24022647924719895))
    p = fma(p, f, splat_f(0.6931472029557222))
    p = fma(p, f, splat_f(1.0))
    power = as_float((as_int(shifted) + splat_i(127)) << 23)
    return where_less(x, splat_f(-126.0), splat_f(0.0), p * power)


@njit(nogil=True)
def capped(x, cap):
    """cap * tanh(x / cap); NaN stays NaN."""
    cap = max(cap, 1e-30)  # fp32 holds its reciprocal; a smaller cap gives no other output
    y = x * splat_f(1.0 / cap)
    magnitude = as_float(as_int(y) & splat_i(0x7FFFFFFF))
    # 1 - 2 / (exp(2 |y|) + 1), without cancellation down to 1/4 ...
    e = exp2_neg(magnitude * splat_f(-2.0 * LOG2E))
    large = (splat_f(1.0) - e) / (splat_f(1.0) + e)
    large = as_float(as_int(large) | (as_int(y) & splat_i(0x80000000)))
    # ... and the series below: under a large cap x must come through unharmed. Relative error 1e-7 at 1/4.
    square = y * y
    series = splat_f(62.0 / 2835)
    series = fma(series, square, splat_f(-17.0 / 315))
    series = fma(series, square, splat_f(2.0 / 15))
    series = fma(series, square, splat_f(-1.0 / 3))
    series = fma(series * square, x, x)  # times cap: x stands for cap * y, and keeps what x / cap rounds off
    return where_less(magnitude, splat_f(0.25), series, splat_f(cap) * large)


@njit(nogil=True, inline="always")
def round_bf16(x):
    """fp32 -> nearest bf16, ties to even, in the high half of each lane; NaN becomes the quiet NaN."""
    bits = as_int(x)
    rounded = bits + splat_i(0x7FFF) + ((bits >> 16) & splat_i(1))
    return where_nan(x, splat_i(0x7FC00000), rounded) & splat_i(HIGH)


@njit(nogil=True)
def store_row(source, factor, target, as_fp16):
    """512 fp32 in tile order times ``factor``, to 512 bf16 or fp16 in natural order."""
    f = splat_f(factor)
    for j in range(16):
        even, odd = load_f(source + j * 128) * f, load_f(source + j * 128 + 64) * f
        if as_fp16:
            store_i(target + j * 64, to_half(even) | (to_half(odd) << 16))
        else:
            store_i(target + j * 64, (round_bf16(even) >> 16) | round_bf16(odd))
