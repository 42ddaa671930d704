"""``fp8_tile128``: 656-byte rows with a scale per 128 latent values; the layout FlashMLA calls "FP8 with scale".

Byte offsets in a row: 0..511 the latent as e4m3fn, 512..527 four fp32 scales, 528..655 the 64 rope values in bf16,
not quantised. Little endian.
"""

from __future__ import annotations

import torch

from ..problem import DIMS
from .base import CacheFormat, Quantized
from .fp8 import e4m3_scale, finite_amax, quantize_e4m3

__all__ = ["FP8Tile128", "ROPE_OFFSET", "SCALE_OFFSET", "TILE"]

TILE = 128
NUM_TILES = DIMS.kv_lora_rank // TILE
SCALE_OFFSET = DIMS.kv_lora_rank
ROPE_OFFSET = SCALE_OFFSET + 4 * NUM_TILES


class FP8Tile128(CacheFormat):
    """fp8 latent with local scales, exact rope part."""

    name = "fp8_tile128"
    data_width = ROPE_OFFSET + 2 * DIMS.qk_rope_head_dim
    storage_dtype = torch.uint8
    accepted_dtypes = (torch.uint8, torch.float8_e4m3fn)
    scale_kind = "none"
    bytes_per_token = data_width
    layout = "512 e4m3fn, 4 fp32 scales (one per 128 values), 64 bf16 rope values, in one row"

    def quantize(self, latent, *, scale=None, mx_scale_rule="even") -> Quantized:
        """scale = amax / 448 of each 128 values (amax at least 1e-12); the rope part is rounded to bf16.

        Infinities (clipped and counted) and NaN (kept) do not count for amax: one must not void the other 127 values.
        """
        self._check_latent(latent)
        tiles = latent[:, : DIMS.kv_lora_rank].float().unflatten(1, (NUM_TILES, TILE))
        scales = e4m3_scale(finite_amax(tiles))
        values, saturated = quantize_e4m3(tiles, scales[..., None])
        rope = latent[:, DIMS.kv_lora_rank :].to(torch.bfloat16).contiguous()
        row = torch.cat((values.flatten(1), scales.view(torch.uint8), rope.view(torch.uint8)), dim=1)
        return Quantized(row, None, saturated)

    def dequantize(self, data, scale, dtype=torch.float32) -> torch.Tensor:
        """fp8 * tile scale, one multiplication in ``dtype``; the rope part widened."""
        values = data[..., :SCALE_OFFSET].view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (NUM_TILES, TILE))
        scales = data[..., SCALE_OFFSET:ROPE_OFFSET].contiguous().view(torch.float32).to(dtype)
        rope = data[..., ROPE_OFFSET:].contiguous().view(torch.bfloat16).to(dtype)
        return torch.cat(((values * scales[..., None]).flatten(-2), rope), dim=-1)
