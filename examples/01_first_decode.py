"""A first decode step on the CPU: 8 sequences of different lengths over a paged fp8 cache.

Run: python examples/01_first_decode.py
"""

import torch

from leanmla import LatentCache, PageTable, mla_decode
from leanmla.reference import mla_decode_reference

torch.manual_seed(0)
page_size, heads = 64, 16
kv_lens = torch.tensor([1500, 3, 640, 1, 2048, 100, 0, 777], dtype=torch.int32)

# 1. A cache of pages. Each row is one token's latent vector: 512 values that are key and value, 64 rope values.
pages_of = -(-kv_lens // page_size)
cache = LatentCache.allocate(int(pages_of.sum()) + 8, page_size, format="fp8")

# 2. A page table: which pages belong to which sequence. Pages may lie anywhere.
free_pages = torch.randperm(cache.num_pages).to(torch.int32)
block_table = torch.full((len(kv_lens), int(pages_of.max())), -1, dtype=torch.int32)
taken = 0
for b, n in enumerate(pages_of.tolist()):
    block_table[b, :n] = free_pages[taken : taken + n]
    taken += n
table = PageTable.from_block_table(block_table, kv_lens, page_size=page_size)

# 3. Write the latents the model computed to their slots; they are quantised on the way.
slots = torch.cat([table.slots(b) for b in range(table.batch)])
cache.append(torch.randn(len(slots), 576).to(torch.bfloat16), slots)

# 4. Decode one token per sequence.
q = torch.randn(table.batch, heads, 576).to(torch.bfloat16)
out, lse = mla_decode(q, cache, table, sm_scale=576**-0.5, return_lse=True)

exact, _ = mla_decode_reference(q, cache, table, sm_scale=576**-0.5)
print(f"cache:  {cache}")
print(f"out:    {list(out.shape)} {out.dtype}, lse {list(lse.shape)}")
print(f"error:  {float((out.double() - exact).norm() / exact.norm()):.1e} relative to fp64 on the same cache")
print(f"empty sequence (row 6): out is {float(out[6].abs().max())}, lse is {float(lse[6, 0])}")
