"""One captured CUDA graph for a whole generation: keys grow, a sequence ends, the graph stays right.

Run: python examples/04_cuda_graph.py
"""

import sys

import torch

from leanmla import DecodePlan, LatentCache, PageTable
from leanmla.reference import mla_decode_reference

if not torch.cuda.is_available():
    print("this example needs a GPU that torch can use; on a CPU plan.capture() returns a callable that reruns the step")
    sys.exit(0)

torch.manual_seed(0)
device, page_size, heads, batch, max_kv = "cuda", 64, 16, 4, 2048
pages = max_kv // page_size
cache = LatentCache.allocate(batch * pages, page_size, format="mxfp4", device=device)
block_table = torch.randperm(batch * pages, device=device, dtype=torch.int32).view(batch, pages)
kv_lens = torch.tensor([500, 30, 1000, 63], dtype=torch.int32, device=device)
table = PageTable.from_block_table(block_table, kv_lens, page_size=page_size)
for b in range(batch):
    slots = table.slots(b)
    cache.append(torch.randn(len(slots), 576, device=device, dtype=torch.bfloat16), slots)

plan = DecodePlan(num_heads=heads, format="mxfp4", page_size=page_size, max_batch=batch, max_kv_len=max_kv, device=device)
q = torch.empty(batch, heads, 576, device=device, dtype=torch.bfloat16)
step = plan.capture(q.normal_(), cache, table, sm_scale=576**-0.5, return_lse=True)

for token in range(4):
    # The new token of each running sequence goes to the next slot; the lengths change in place.
    row = torch.arange(batch, device=device)
    running = kv_lens > 0
    slot = block_table[row, kv_lens // page_size] * page_size + kv_lens % page_size
    cache.append(torch.randn(batch, 576, device=device, dtype=torch.bfloat16), torch.where(running, slot, -1))
    kv_lens += running.to(torch.int32)
    if token == 2:
        kv_lens[1] = 0  # this sequence is done: a padded row from now on
    q.normal_()
    out, lse = step()
    exact, _ = mla_decode_reference(q, cache, table, sm_scale=576**-0.5)
    error = float((out.double() - exact).norm() / exact.norm())
    print(f"token {token}: kv {kv_lens.tolist()}  error {error:.1e}  lse of row 1: {float(lse[1, 0]):.4f}")
