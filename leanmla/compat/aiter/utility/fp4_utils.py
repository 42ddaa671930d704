"""``aiter.utility.fp4_utils``: quantise rows to MXFP4 and read them back."""

from __future__ import annotations

import torch

from ....errors import InvalidArgument, InvalidDtype
from ....formats.elements import MX_BLOCK, e2m1_decode, e2m1_encode, e8m0_decode, mx_scale_byte
from ..._arguments import refuse
from .. import dtypes

__all__ = ["dynamic_mxfp4_quant", "e8m0_to_f32", "mxfp4_to_f32"]

_VALUES_AT_A_TIME = 1 << 25  # bounds the fp32 temporaries to ~0.5 GB whatever the tensor


def dynamic_mxfp4_quant(
    x: torch.Tensor, scaling_mode: str = "even", shuffle: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to MXFP4: E2M1 pairs (low nibble first) and one E8M0 scale per 32 values of a row.

    Args:
        x: [rows, n], bf16, fp16 or fp32, n a multiple of 32.
        scaling_mode: only "even": amax rounds up when its mantissa is at least 1.75.
        shuffle: must be False.

    Returns:
        fp4x2 [rows, n/2] and fp8_e8m0 [rows, n/32].

    Differs from the original: the scales are not padded to whole tiles of rows and columns (the original's size varies, so
    callers slice), there is no shuffled layout, and a block that contains NaN gets scale 255 (NaN).
    """
    if not isinstance(x, torch.Tensor) or x.ndim != 2 or x.shape[1] % MX_BLOCK:
        got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidArgument(f"x: expected [rows, n] with n a multiple of {MX_BLOCK}, got {got}. Flatten the leading dims.")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InvalidDtype(f"x: expected bfloat16, float16 or float32, got {x.dtype}.")
    if scaling_mode != "even":
        raise refuse("scaling_mode", scaling_mode, "Only 'even' is offered here.")
    if shuffle:
        raise refuse("shuffle", shuffle, "There is no shuffled scale layout here; pass False.")
    rows, n = x.shape
    packed = torch.empty(rows, n // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, n // MX_BLOCK, dtype=torch.uint8, device=x.device)
    step = max(1, _VALUES_AT_A_TIME // max(n, 1))
    for lo in range(0, rows, step):
        blocks = x[lo : lo + step].float().unflatten(1, (n // MX_BLOCK, MX_BLOCK))
        nan_block = torch.isnan(blocks).any(-1)
        byte = mx_scale_byte(torch.where(nan_block, torch.nan, blocks.abs().amax(-1)))
        # 2**(127 - byte) as fp32 bits: a normal number for every byte 0..253, so the division is exact.
        inverse = ((254 - byte.int()).clamp(min=1) << 23).view(torch.float32)
        codes = e2m1_encode(torch.where(nan_block[..., None], 0.0, blocks * inverse[..., None])).flatten(1)
        packed[lo : lo + step] = codes[:, 0::2] | (codes[:, 1::2] << 4)
        scales[lo : lo + step] = byte
    return packed.view(dtypes.fp4x2), scales.view(dtypes.fp8_e8m0)


def mxfp4_to_f32(x: torch.Tensor) -> torch.Tensor:
    """Values of packed E2M1 pairs without their block scales: fp4x2 or uint8 [..., n] -> fp32 [..., 2n].

    Differs from the original: nothing.
    """
    return e2m1_decode(x if x.dtype == torch.uint8 else x.view(torch.uint8))


def e8m0_to_f32(scale_e8m0_biased: torch.Tensor) -> torch.Tensor:
    """Scales of E8M0 bytes: 2**(byte - 127) in fp32, NaN for 255. fp8_e8m0 or uint8 of any shape.

    Differs from the original: byte 0 is 2**-127, as the format says.
    """
    t = scale_e8m0_biased
    return e8m0_decode(t if t.dtype == torch.uint8 else t.view(torch.uint8))
