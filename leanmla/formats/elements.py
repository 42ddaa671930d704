"""The small number formats, spelled out from their definitions and as exhaustive tables.

E2M1 and E8M0: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 5.4.1. E4M3 in its "fn" form (finite,
no infinities): OCP 8-bit Floating Point (OFP8) v1.0. The tables are built from bit fields in plain Python, not from a
library's cast, so that they can serve to test one.
"""

from __future__ import annotations

import math

import torch

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_VALUES",
    "E8M0_NAN",
    "E8M0_VALUES",
    "MX_BLOCK",
    "MX_SCALE_RULES",
    "e2m1_decode",
    "e2m1_encode",
    "e8m0_decode",
    "mx_scale_byte",
]

MX_BLOCK = 32  #: consecutive values that share one E8M0 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_NAN = 255

#: How the block scale follows from amax: see :func:`mx_scale_byte`.
MX_SCALE_RULES = ("even", "floor")


def _e2m1(code: int) -> float:
    """s eem m: exponent bias 1, one mantissa bit, no infinities, no NaN."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(magnitude, sign)


def _e4m3(byte: int) -> float:
    """s eeee mmm: exponent bias 7; only S.1111.111 is NaN, so the largest value is 448."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.copysign(magnitude, sign)


#: Value of each of the 16 E2M1 codes.
E2M1_VALUES: tuple[float, ...] = tuple(_e2m1(c) for c in range(16))
#: Value of each of the 256 E8M0 bytes: 2**(byte - 127), and NaN for 255. There is no zero and no sign.
E8M0_VALUES: tuple[float, ...] = tuple(2.0 ** (b - 127) for b in range(255)) + (math.nan,)
#: Value of each of the 256 E4M3FN bytes.
E4M3_VALUES: tuple[float, ...] = tuple(_e4m3(b) for b in range(256))


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of fp32 values: nearest, ties to the even code, saturating at 6, sign kept (also of zero).

    Args:
        x: fp32 of any shape. NaN has no code and becomes 0; the caller marks it in the block scale.

    Returns:
        uint8 codes 0..15 of the same shape.
    """
    a = x.abs()
    # A tie goes to the code with an even last bit, which alternates: so does strictness.
    code = (a > 0.25).to(torch.uint8)
    for threshold, tie_rounds_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= threshold) if tie_rounds_up else (a > threshold)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of packed E2M1 pairs, low nibble first: uint8 [..., n] -> [..., 2n]."""
    table = torch.tensor(E2M1_VALUES, dtype=dtype, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()]


def e8m0_decode(byte: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Scales of E8M0 bytes: uint8 [...] -> [...]. Byte 0 is 2**-127 (an fp32 subnormal), 255 is NaN."""
    table = torch.tensor(E8M0_VALUES, dtype=dtype, device=byte.device)
    return table[byte.int()]


def mx_scale_byte(amax: torch.Tensor, rule: str = "even") -> torch.Tensor:
    """The E8M0 byte of a block from its exact fp32 amax.

    The scale puts amax near E2M1's top binade, 4..6, so it is the exponent of amax minus 2:

    * ``"floor"`` takes the exponent as it is (OCP MX v1.0, section 6.3): amax in (6, 8) * 2**e clips to 6 * 2**e;
    * ``"even"`` first rounds amax up to the next power of two when its mantissa is at least 1.75, by adding 0x200000
      to its fp32 bits, so that what rounds to 8 stays 8 (the rule of aiter's ``dynamic_mxfp4_quant``).

    Args:
        amax: fp32, not negative. NaN gives 255.
        rule: ``"even"`` or ``"floor"``.

    Returns:
        uint8 of the same shape: 0..253, or 255 for NaN.
    """
    bits = amax.contiguous().view(torch.int32)
    if rule == "even":
        bits = bits + 0x200000
    # 0 <= exponent field <= 255 here: amax is not negative and adding 0x200000 to infinity stays below the sign bit.
    byte = ((bits >> 23) - 2).clamp(min=0)
    return torch.where(torch.isnan(amax), E8M0_NAN, byte).to(torch.uint8)
