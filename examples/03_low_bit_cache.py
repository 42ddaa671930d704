"""What a smaller cache costs: the same latents in every format, decoded, compared with the unquantised result.

Run: python examples/03_low_bit_cache.py
"""

import torch

from leanmla import LatentCache, PageTable, formats, mla_decode
from leanmla.reference import mla_decode_reference

torch.manual_seed(0)
kv_len, heads = 4096, 16
latent = torch.randn(kv_len, 576).to(torch.bfloat16)
q = torch.randn(1, heads, 576).to(torch.bfloat16)
table = PageTable.contiguous(torch.tensor([0, kv_len], dtype=torch.int32))

print(f"{'format':<13} {'bytes/token':>11} {'of bf16':>8} {'kernel error':>13} {'quantisation error':>19}")
for name, fmt in formats.FORMATS.items():
    cache = LatentCache.allocate(kv_len, 1, format=name)
    cache.append(latent, torch.arange(kv_len))
    out = mla_decode(q, cache, table, sm_scale=576**-0.5)
    exact, _ = mla_decode_reference(q, cache, table, sm_scale=576**-0.5)  # exact arithmetic on this cache
    if name == "bf16":
        unquantised = exact
    kernel = float((out.double() - exact).norm() / exact.norm())
    quantisation = float((exact - unquantised).norm() / unquantised.norm())
    print(f"{name:<13} {fmt.bytes_per_token:>11} {fmt.bytes_per_token / 1152:>8.0%} {kernel:>13.1e} {quantisation:>19.1e}")
