"""``mxfp4``: OCP MX with E2M1 elements: 288 bytes of nibble pairs and 18 E8M0 block scales a token, 306 bytes.

The low nibble holds the value with the even index. The scales lie in a second tensor, one row a token, whose rows and
columns may be padded; padding is never read.
"""

from __future__ import annotations

import torch

from ..errors import InvalidArgument, MissingScale
from ..problem import DIMS
from .base import CacheFormat, Quantized
from .elements import E8M0_NAN, MX_BLOCK, MX_SCALE_RULES, e2m1_decode, e2m1_encode, e8m0_decode, mx_scale_byte

__all__ = ["MXFP4", "NUM_BLOCKS", "block_codes", "block_scales", "pack_codes", "unpack_codes"]

NUM_BLOCKS = DIMS.qk_head_dim // MX_BLOCK  #: 18 scales a token


def block_scales(latent: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 32 values and the E8M0 byte of each from its exact fp32 amax, 255 where a block holds a NaN.

    Args:
        latent: [n, 576] bf16, fp16 or fp32; rule: ``"even"`` or ``"floor"``.

    Returns:
        fp32 [n, 18, 32] and uint8 [n, 18].
    """
    if rule not in MX_SCALE_RULES:
        raise InvalidArgument(f"mx_scale_rule: expected one of {MX_SCALE_RULES}, got {rule!r}.")
    blocks = latent.float().unflatten(1, (NUM_BLOCKS, MX_BLOCK))
    # amax would lose a NaN on some devices; the mask decides.
    nan_block = torch.isnan(blocks).any(-1)
    return blocks, mx_scale_byte(torch.where(nan_block, torch.nan, blocks.abs().amax(-1)), rule)


def block_codes(blocks: torch.Tensor, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes of blocks under given scales; blocks of scale 255 get codes 0.

    Args:
        blocks: fp32 [..., 32]; byte: uint8 [...], 0..253 or 255.

    Returns:
        uint8 codes [..., 32], and an int64 scalar counting the values that were clipped.
    """
    # 2**(127 - byte) is a normal fp32 number for every byte 0..253, so this scaling is exact.
    inverse = ((254 - byte.int()).clamp(min=1) << 23).view(torch.float32)
    y = torch.where((byte == E8M0_NAN)[..., None], 0.0, blocks * inverse[..., None])
    # Up to 7 rounding, not clipping, leads to 6: 8 would be the next value and the tie goes to the even code.
    return e2m1_encode(y), (y.abs() >= 7.0).sum()


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes a byte, low nibble first: uint8 [..., 2n] -> [..., n]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_codes`: uint8 [..., n] -> [..., 2n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


class MXFP4(CacheFormat):
    """A quarter of bf16's bytes; one power-of-two scale per 32 values."""

    name = "mxfp4"
    data_width = DIMS.qk_head_dim // 2
    storage_dtype = torch.uint8
    accepted_dtypes = tuple(t for t in (getattr(torch, "float4_e2m1fn_x2", None), torch.uint8) if t is not None)
    scale_kind = "block"
    has_mx_rule = True
    bytes_per_token = DIMS.qk_head_dim // 2 + NUM_BLOCKS
    layout = "288 bytes of E2M1 pairs (low nibble first); 18 E8M0 scales in a second tensor"

    def quantize(self, latent, *, scale=None, mx_scale_rule="even") -> Quantized:
        """Scale each block of 32 by a power of two from its exact fp32 amax, round to E2M1.

        A zero block becomes exact zeros; a block with a NaN gets scale byte 255 and codes 0. Infinity counts as
        saturated, as does everything that rounds beyond 6 (only possible under the rule ``"floor"``).
        """
        self._check_latent(latent)
        blocks, byte = block_scales(latent, mx_scale_rule)
        codes, saturated = block_codes(blocks, byte)
        return Quantized(pack_codes(codes.flatten(1)), byte, saturated)

    def dequantize(self, data, scale, dtype=torch.float32) -> torch.Tensor:
        """E2M1 value * 2**(byte - 127); exact in fp32 and fp64."""
        if scale is None:
            raise MissingScale("scale: format 'mxfp4' needs its E8M0 scales [tokens, >=18], got None. Pass the second tensor.")
        values = e2m1_decode(data, dtype).unflatten(-1, (NUM_BLOCKS, MX_BLOCK))
        return (values * e8m0_decode(scale[..., :NUM_BLOCKS], dtype)[..., None]).flatten(-2)
