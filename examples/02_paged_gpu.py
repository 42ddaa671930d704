"""The same step on a GPU: a paged bf16 cache, ragged query rows (speculative decoding), no host synchronisation.

Run: python examples/02_paged_gpu.py
"""

import sys

import torch

from leanmla import LatentCache, PageTable, mla_decode
from leanmla.reference import mla_decode_reference

if not torch.cuda.is_available():
    print("this example needs a GPU that torch can use; examples/01_first_decode.py runs anywhere")
    sys.exit(0)

torch.manual_seed(0)
device, page_size, heads = "cuda", 64, 16
kv_lens = torch.tensor([8000, 1200, 64, 4097], dtype=torch.int32)
q_lens = torch.tensor([1, 4, 2, 1])  # rows a sequence: 1 for plain decode, more when drafts are verified

pages_of = -(-kv_lens // page_size)
kv_indptr = torch.tensor([0, *pages_of.cumsum(0)], dtype=torch.int32)
kv_indices = torch.randperm(int(kv_indptr[-1])).to(torch.int32)
last = (kv_lens - 1) % page_size + 1
table = PageTable.from_csr(kv_indptr.to(device), kv_indices.to(device), last.to(device), page_size=page_size)
qo_indptr = torch.tensor([0, *q_lens.cumsum(0)], dtype=torch.int32, device=device)

cache = LatentCache.allocate(int(kv_indptr[-1]), page_size, format="bf16", device=device)
slots = torch.cat([table.slots(b) for b in range(table.batch)])
cache.append(torch.randn(len(slots), 576, device=device, dtype=torch.bfloat16), slots)

q = torch.randn(int(q_lens.sum()), heads, 576, device=device, dtype=torch.bfloat16)
out, lse = mla_decode(q, cache, table, sm_scale=576**-0.5, qo_indptr=qo_indptr, max_q_len=4, return_lse=True)

exact, exact_lse = mla_decode_reference(q, cache, table, sm_scale=576**-0.5, qo_indptr=qo_indptr)
print(f"{torch.cuda.get_device_name()}: {cache}")
print(f"rows {q_lens.tolist()} over keys {kv_lens.tolist()}")
print(
    f"error of out {float((out.double() - exact).norm() / exact.norm()):.1e}, of lse {float((lse - exact_lse).abs().max()):.1e}"
)
