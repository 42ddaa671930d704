"""Tensors for a case: shuffled pages, and poison wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import formats
from ..cache import LatentCache
from ..page_table import PageTable
from ..problem import DIMS
from .cases import DecodeCase

__all__ = ["DecodeInputs", "hard_rows", "make_inputs", "poison_storage", "uneven_rows"]

#: Stands in page-table slots that hold no page: any use of it as an address faults or is caught by the checks.
UNUSED_PAGE_ID = 2147480000


@dataclass
class DecodeInputs:
    """Everything a call needs; ``out`` is pre-filled with NaN."""

    case: DecodeCase
    q: torch.Tensor
    cache: LatentCache
    table: PageTable
    qo_indptr: torch.Tensor | None
    out: torch.Tensor
    key_slots: torch.Tensor  #: int64, slots that hold keys; every other slot is unused

    @property
    def options(self) -> dict:
        """Keyword arguments shared by mla_decode, DecodePlan.run and the reference."""
        return {
            "sm_scale": self.case.sm_scale,
            "qo_indptr": self.qo_indptr,
            "causal": self.case.causal,
            "logit_cap": self.case.logit_cap,
        }

    @property
    def splits(self) -> dict:
        """Keyword arguments that choose the splits."""
        return {"num_kv_splits": self.case.num_kv_splits, "split_size": self.case.split_size}


def poison_storage(cache: LatentCache, slots: torch.Tensor) -> None:
    """Overwrite slots with the worst their format can hold: NaN values, NaN scales."""
    page, offset = slots // cache.page_size, slots % cache.page_size
    if cache.format.name == "bf16":
        cache.data[page, offset] = torch.nan
    elif cache.format.name == "mxfp4":
        cache.data[page, offset] = 0x77
        assert cache.scale is not None
        cache.scale[page, offset] = 255
    elif cache.format.name == "mxfp4_row320":
        cache.data[page, offset] = 0xFF  # NaN blocks whose bytes break every rule of the format
    else:
        # 0x7F is NaN as e4m3fn; 0x7F7F7F7F is a huge fp32 scale and 0x7F7F a huge bf16.
        cache.data[page, offset] = 0x7F


def make_inputs(case: DecodeCase, *, seed: int = 0, device: torch.device | str = "cpu", poison: bool = True) -> DecodeInputs:
    """Fresh random data for a case.

    Pages are shuffled over a pool with spare pages. With ``poison`` every slot that holds no key is NaN and unused table
    entries are absurd; without, they are zeros and page 0: the two must give the same result bit for bit.
    """
    gen = torch.Generator().manual_seed(seed)
    device = torch.device(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.q_dtype]
    rows, lens, page = case.rows, case.kv_lens, case.page_size
    total_q = sum(rows)

    # -- where the keys lie
    if case.table == "contiguous":
        offsets = torch.tensor([0, *lens]).cumsum(0)
        table = PageTable.contiguous(offsets.to(torch.int32).to(device))
        num_pages = -(-(int(offsets[-1]) + 3) // page)
        slots = torch.arange(int(offsets[-1]))
    else:
        pages_of = [-(-n // page) for n in lens]
        num_pages = sum(pages_of) + 3
        pool = torch.randperm(num_pages, generator=gen)
        starts = torch.tensor([0, *pages_of]).cumsum(0)
        ids = [pool[int(starts[b]) : int(starts[b + 1])] for b in range(case.batch)]
        slots = torch.cat(
            [(ids[b][:, None] * page + torch.arange(page)).flatten()[:n] for b, n in enumerate(lens)] or [torch.zeros(0)]
        ).long()
        unused = UNUSED_PAGE_ID if poison else 0
        if case.table == "csr":
            flat = torch.cat([*ids, torch.full((5,), unused)]).to(torch.int32)
            last = torch.tensor([(n - 1) % page + 1 if n else 0 for n in lens], dtype=torch.int32)
            table = PageTable.from_csr(starts.to(torch.int32).to(device), flat.to(device), last.to(device), page_size=page)
        else:
            block_table = torch.full((case.batch, max(pages_of, default=0) + 1), unused, dtype=torch.int32)
            for b, own in enumerate(ids):
                block_table[b, : len(own)] = own.to(torch.int32)
                if poison and not len(own):
                    block_table[b] = -1
            table = PageTable.from_block_table(
                block_table.to(device), torch.tensor(lens, dtype=torch.int32).to(device), page_size=page
            )

    # -- the keys
    latent = torch.randn(len(slots), DIMS.qk_head_dim, generator=gen)
    if case.logit_shift:
        # One rope coordinate carries the shift: exact powers of two times the row factor, in every format.
        latent[:, -1] = 1.0
        latent[:, DIMS.kv_lora_rank : -1] *= 0.0
    if case.cache_scale is None and not len(slots):
        case = case.replace(cache_scale=1.0)  # nothing to take a scale from
    cache = _cache(case, num_pages, device)
    cache.append(latent.to(torch.bfloat16).to(device), slots.to(device))
    if poison:
        unused_slots = torch.ones(cache.num_tokens, dtype=torch.bool)
        unused_slots[slots] = False
        poison_storage(cache, unused_slots.nonzero().flatten().to(device))

    # -- the queries
    q = torch.randn(total_q, case.num_heads, DIMS.qk_head_dim, generator=gen) * case.q_std
    if case.logit_shift:
        q[..., DIMS.kv_lora_rank :] = 0.0
        q[..., -1] = case.logit_shift / case.sm_scale
    q = q.to(dtype).to(device)
    out = torch.full((total_q, case.num_heads, DIMS.v_head_dim), torch.nan, dtype=dtype, device=device)
    if case.strided:
        wide = torch.full((total_q, case.num_heads + 2, DIMS.qk_head_dim + 24), torch.nan, dtype=dtype, device=device)
        wide[:, 1:-1, 8:-16] = q
        q = wide[:, 1:-1, 8:-16]
        wide_out = torch.full((total_q, case.num_heads + 2, DIMS.v_head_dim + 8), torch.nan, dtype=dtype, device=device)
        out = wide_out[:, 1:-1, :-8]
    qo_indptr = None
    if isinstance(case.q_lens, tuple):
        qo_indptr = torch.tensor([0, *rows]).cumsum(0).to(torch.int32).to(device)
    return DecodeInputs(case, q, cache, table, qo_indptr, out, slots.to(device))


def _cache(case: DecodeCase, num_pages: int, device: torch.device) -> LatentCache:
    scale = case.cache_scale
    if not case.strided:
        given = scale if case.format == "fp8" else None
        return LatentCache.allocate(num_pages, case.page_size, format=case.format, device=device, scale=given)
    # One plane of a buffer for several layers, with a gap between tokens too.
    fmt = formats.get(case.format)
    gap = 16 if fmt.storage_dtype == torch.uint8 else 8
    planes = torch.zeros(3, num_pages, case.page_size, fmt.data_width + gap, dtype=fmt.storage_dtype, device=device)
    data = planes.transpose(0, 1)[:, 1, :, : fmt.data_width]
    scales: torch.Tensor | float | None = None
    if fmt.scale_kind == "block":
        scales = torch.full((num_pages * case.page_size + 7, 24), 255, dtype=torch.uint8, device=device)
    elif fmt.scale_kind == "per_tensor":
        scales = torch.full((1,), 4.5 / 448 if scale is None else scale, dtype=torch.float32, device=device)
    return LatentCache.from_tensors(data, scales, format=fmt, page_size=case.page_size)


def hard_rows(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[n, 576] latents, n >= 9, for quantisers: zero blocks, ties, both sides of every threshold, subnormals, saturation."""
    gen = torch.Generator().manual_seed(0)
    width = DIMS.qk_head_dim
    x = torch.randn(n, width, generator=gen) * torch.exp2(torch.randint(-20, 12, (n, 1), generator=gen).float())
    x[0] = 0.0
    x[1, 5] = -0.0
    x[2] = torch.linspace(-8, 8, width)
    x[3] = 7.0
    x[4] = 6.9999995
    x[5] = torch.randn(width, generator=gen) * 1e-40
    x[6, ::3] = 1000.0
    x[7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(width // 8)
    x[8] = torch.linspace(-500, 500, width) * 0.037
    return x.to(dtype)


def uneven_rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[48, 576] latents, for formats with block scales: blocks of 32 up to 2**85 apart, each of them the largest in its turn,
    with blocks of zeros, tiny values, NaN and infinity among them."""
    gen = torch.Generator().manual_seed(1)
    blocks = torch.randn(48, 18, 32, generator=gen)
    apart = (torch.arange(18) + torch.arange(48)[:, None]) % 18  # of block b of row i, in steps of the row
    x = blocks * torch.exp2(-(apart * (torch.arange(48) % 6)[:, None]).float())[..., None]
    x[6:12] *= 2.0**-110
    x[12:18, ::3] = 0.0
    x[18:24, 1::4] *= -0.0
    x[24:30, 2, 5] = torch.nan
    x[30:32] = torch.nan
    x[32:34] = 0.0
    x[34, :, 7] = torch.nan
    x[35, 3] = torch.inf
    x[36, 0, 0], x[36, 1:] = torch.nan, 0.0
    return x.flatten(1).to(dtype)
