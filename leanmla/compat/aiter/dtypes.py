"""``aiter.dtypes``: names of number formats.

Differs from the original: ``fp8`` is always float8_e4m3fn, also on GPUs whose native fp8 is the "fnuz" kind, because every
cache format here is e4m3fn.
"""

from __future__ import annotations

import torch

fp8 = torch.float8_e4m3fn
fp8_e8m0 = torch.float8_e8m0fnu
#: two E2M1 values a byte
fp4x2 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
bf16 = torch.bfloat16
fp16 = torch.float16
fp32 = torch.float32
fp64 = torch.float64
i8 = torch.int8
i16 = torch.int16
i32 = torch.int32
i64 = torch.int64
u8 = torch.uint8
