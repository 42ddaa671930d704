"""``fp8``: 576 e4m3fn bytes a token and one fp32 scale for the whole tensor; value = fp8 * scale."""

from __future__ import annotations

import torch

from ..errors import MissingScale
from ..problem import DIMS
from .base import CacheFormat, Quantized
from .elements import E4M3_MAX

__all__ = ["E4M3_SATURATES_ABOVE", "FP8", "MIN_AMAX", "e4m3_scale", "finite_amax", "quantize_e4m3"]

#: amax is taken to be at least this, so that an all-zero tensor has a scale.
MIN_AMAX = 1e-12
#: 448 is e4m3's largest value and 480 would be the next, so up to 464 rounding, not clipping, leads to 448.
E4M3_SATURATES_ABOVE = 464.0


def quantize_e4m3(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide by the scale in fp32, clamp to +-448, round to nearest even. NaN stays NaN (0x7F).

    Args:
        x: fp32 values; scale: fp32, broadcasts against x.

    Returns:
        uint8 bytes of x's shape, and an int64 scalar counting the values that clamping changed beyond rounding.
    """
    y = x / scale
    saturated = (y.abs() > E4M3_SATURATES_ABOVE).sum()
    return y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8), saturated


def finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude along the last dim, infinities and NaN left out: fp32 [..., n] -> [...]."""
    magnitude = x.abs()
    return torch.where(magnitude.isfinite(), magnitude, 0.0).amax(-1)


def e4m3_scale(amax: torch.Tensor) -> torch.Tensor:
    """The scale that puts ``amax``, at least 1e-12, at e4m3's largest value."""
    return amax.clamp(min=MIN_AMAX) / E4M3_MAX


class FP8(CacheFormat):
    """Half of bf16's bytes; one scale a tensor."""

    name = "fp8"
    data_width = DIMS.qk_head_dim
    storage_dtype = torch.uint8
    accepted_dtypes = (torch.float8_e4m3fn, torch.uint8)
    scale_kind = "per_tensor"
    bytes_per_token = DIMS.qk_head_dim
    layout = "576 e4m3fn; one fp32 scale per tensor"

    @staticmethod
    def scale_of(latent: torch.Tensor) -> torch.Tensor:
        """fp32 [1]: amax / 448, with amax at least 1e-12. Infinities and NaN do not count: one must not void the rest."""
        amax = finite_amax(latent.float().flatten()) if latent.numel() else latent.new_zeros((), dtype=torch.float32)
        return e4m3_scale(amax).reshape(1)

    def quantize(self, latent, *, scale=None, mx_scale_rule="even") -> Quantized:
        """value = fp8 * scale; see :func:`quantize_e4m3`. Without a scale it comes from these rows."""
        self._check_latent(latent)
        if scale is None:
            scale = self.scale_of(latent)
        data, saturated = quantize_e4m3(latent.float(), scale)
        return Quantized(data, scale, saturated)

    def dequantize(self, data, scale, dtype=torch.float32) -> torch.Tensor:
        """fp8 * scale, one multiplication in ``dtype``."""
        if scale is None:
            raise MissingScale("scale: format 'fp8' needs its fp32 [1] scale, got None. Pass the tensor's scale.")
        return data.view(torch.float8_e4m3fn).to(dtype) * scale.to(dtype)
