"""``bf16``: 576 bf16 values a token, 1152 bytes. Nothing to scale."""

from __future__ import annotations

import torch

from ..problem import DIMS
from .base import CacheFormat, Quantized

__all__ = ["BF16"]


class BF16(CacheFormat):
    """The latent as the model computes it."""

    name = "bf16"
    data_width = DIMS.qk_head_dim
    storage_dtype = torch.bfloat16
    accepted_dtypes = (torch.bfloat16,)
    scale_kind = "none"
    bytes_per_token = 2 * DIMS.qk_head_dim
    layout = "576 bf16"

    def quantize(self, latent, *, scale=None, mx_scale_rule="even") -> Quantized:
        """Round to bf16 (nearest even); infinities and NaN pass through."""
        self._check_latent(latent)
        return Quantized(latent.to(torch.bfloat16), None, torch.zeros((), dtype=torch.int64, device=latent.device))

    def dequantize(self, data, scale, dtype=torch.float32) -> torch.Tensor:
        """Widen; exact."""
        return data.to(dtype)
