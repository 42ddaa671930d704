"""Code written for aiter, run as it is, then step by step as LeanMLA: same numbers, fewer arguments, a smaller cache.

Run: python examples/06_port_from_aiter.py
"""

import torch

from leanmla import LatentCache, PageTable, compat, mla_decode
from leanmla.reference import mla_decode_reference

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
heads, page_size, sm_scale = 16, 64, 576**-0.5
kv_lens = torch.tensor([1000, 64, 2300, 1])
pages = -(-kv_lens // page_size)


def int32(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(device)


# What an engine that uses aiter has at hand.
qo_indptr = int32(range(5))
kv_indptr = int32([0, *pages.cumsum(0)])
kv_indices = int32(torch.randperm(int(pages.sum())))
kv_last_page_lens = int32((kv_lens - 1) % page_size + 1)
kv_buffer = torch.randn(int(pages.sum()), page_size, 1, 576, device=device).to(torch.bfloat16)
q = torch.randn(4, heads, 576, device=device).to(torch.bfloat16)

# 1. Its code, unchanged. Where the real aiter is installed, force=True puts ours in front of it until the block ends.
with compat.install("aiter", force=True):
    import aiter
    from aiter.mla import mla_decode_fwd

    info = aiter.get_mla_metadata_info_v1(4, 1, heads, torch.bfloat16, torch.bfloat16, is_sparse=False, fast_mode=True)
    metadata, work_indptr, work_info, reduce_indptr, reduce_final, reduce_partial = (
        torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in info
    )
    aiter.get_mla_metadata_v1(
        qo_indptr, kv_indptr, kv_last_page_lens, heads, 1, True, metadata, work_info, work_indptr, reduce_indptr, reduce_final,
        reduce_partial, page_size=page_size, max_seqlen_qo=1,
    )  # fmt: skip
    o = torch.empty(4, heads, 512, dtype=torch.bfloat16, device=device)
    _, their_lse = mla_decode_fwd(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, 1, page_size=page_size, sm_scale=sm_scale,
        work_meta_data=metadata, work_indptr=work_indptr, work_info_set=work_info, reduce_indptr=reduce_indptr,
        reduce_final_map=reduce_final, reduce_partial_map=reduce_partial, return_lse=True,
    )  # fmt: skip
print(f"1. aiter's calls, answered by {mla_decode_fwd.__module__}")
print(f"   {int(work_indptr[-1])} work items for {len(kv_lens)} sequences in {work_indptr.numel() - 1} compute units' lists")

# 2. The same step as LeanMLA: the cache and the page list are wrapped, not copied; there is no metadata to keep.
cache = LatentCache.from_tensors(kv_buffer, format="bf16", page_size=page_size)
table = PageTable.from_csr(kv_indptr, kv_indices, kv_last_page_lens, page_size=page_size)
out, lse = mla_decode(q, cache, table, sm_scale=sm_scale, return_lse=True)
exact, exact_lse = mla_decode_reference(q, cache, table, sm_scale=sm_scale)
for name, result, its_lse in (("aiter's way", o, their_lse), ("LeanMLA's way", out, lse)):
    error = float((result.double() - exact).norm() / exact.norm())
    print(f"2. {name:<14} error {error:.1e} against fp64, lse off by {float((its_lse - exact_lse).abs().max()):.0e}")

# 3. What the port buys: the same call over a cache of a quarter of the bytes.
slots = torch.cat([table.slots(b) for b in range(table.batch)])
for name in ("fp8", "mxfp4"):
    smaller = LatentCache.allocate(cache.num_pages, page_size, format=name, device=device)
    smaller.append(cache.gather(slots).to(torch.bfloat16), slots)
    out = mla_decode(q, smaller, table, sm_scale=sm_scale)
    cost = float((out.double() - exact).norm() / exact.norm())
    print(
        f"3. {name:<6} {smaller.bytes_per_token:>4} bytes a token instead of {cache.bytes_per_token}: the format costs {cost:.0%} here"
    )
