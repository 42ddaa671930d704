"""Tensors for a case that are as cold as asked: several copies of the cache, filled fast.

Quantising gigabytes takes longer than decoding them, so a few thousand latents are drawn and quantised once a format, and
their rows repeated until the cache is full. No cache line is shared, so reads are as cold as with fresh values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import formats
from ..cache import LatentCache
from ..formats import Quantized
from ..page_table import PageTable
from ..problem import DIMS, DecodeProblem
from ..testing import DecodeCase, DecodeInputs
from .cases import BenchCase

__all__ = ["Copy", "LatentPool", "bytes_of", "make_copies", "pick_sequences", "problem_of", "sequences"]

#: Distinct latents. More than the keys of most sequences, and quantised in about a second on a CPU.
POOL_TOKENS = 16384


class LatentPool:
    """Standard normal latents on a device and their rows in each format, each quantised when first asked for."""

    def __init__(self, device: torch.device, *, tokens: int | None = None, seed: int = 0) -> None:
        self.device, self.seed = device, seed
        tokens = tokens or POOL_TOKENS
        gen = torch.Generator(device).manual_seed(seed)
        self.latent = torch.randn(tokens, DIMS.qk_head_dim, generator=gen, device=device).to(torch.bfloat16)
        self._rows: dict[str, Quantized] = {}

    def rows(self, format: str) -> Quantized:
        """The pool in a format: an ``fp8`` scale is that of the pool, hence of every cache filled from it."""
        if format not in self._rows:
            self._rows[format] = formats.get(format).quantize(self.latent)
        return self._rows[format]

    def cache(self, format: str, num_pages: int, page_size: int) -> LatentCache:
        """A new cache, full of the pool's rows over and over."""
        rows = self.rows(format)
        tokens = num_pages * page_size
        scale = rows.scale
        if formats.get(format).scale_kind == "block":
            assert scale is not None
            scale = _repeated(scale, tokens)
        return LatentCache.from_tensors(_repeated(rows.data, tokens), scale, format=format, page_size=page_size)


def _repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    full = rows.new_empty(count, rows.shape[1])
    for start in range(0, count, rows.shape[0]):
        part = full[start : start + rows.shape[0]]
        part.copy_(rows[: part.shape[0]])
    return full


@dataclass
class Copy:
    """A call's tensors. Copies of one case differ in q and lie in different memory; page ids are the same."""

    case: BenchCase
    q: torch.Tensor
    cache: LatentCache
    table: PageTable
    out: torch.Tensor


def bytes_of(case: BenchCase, format: str) -> int:
    """Bytes of one copy's cache."""
    return case.pages * case.page_size * formats.get(format).bytes_per_token


def make_copies(case: BenchCase, format: str, pool: LatentPool, count: int) -> list[Copy]:
    """Copies of a case with shuffled pages. The same case has the same q and pages in every format."""
    device = pool.device
    gen = torch.Generator(device).manual_seed(pool.seed + 1)
    page_ids = torch.randperm(case.pages, generator=gen, device=device).to(torch.int32)
    pages_of = [-(-n // case.page_size) for n in case.kv_lens]
    block_table = torch.zeros(case.batch, max(pages_of), dtype=torch.int32, device=device)
    start = 0
    for b, n in enumerate(pages_of):
        block_table[b, :n] = page_ids[start : start + n]
        start += n
    lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)

    copies = []
    for _ in range(count):
        q = torch.randn(case.batch * case.q_len, case.num_heads, DIMS.qk_head_dim, generator=gen, device=device)
        out = torch.full((*q.shape[:2], DIMS.v_head_dim), torch.nan, dtype=torch.bfloat16, device=device)
        table = PageTable.from_block_table(block_table.clone(), lens.clone(), page_size=case.page_size)
        copies.append(Copy(case, q.to(torch.bfloat16), pool.cache(format, case.pages, case.page_size), table, out))
    return copies


def problem_of(case: BenchCase, format: str) -> DecodeProblem:
    """The case as a backend sees it."""
    width = -(-max(case.kv_lens) // case.page_size) * case.page_size
    return DecodeProblem(
        format=format, num_heads=case.num_heads, batch=case.batch, total_q=case.batch * case.q_len, max_q_len=case.q_len,
        ragged_q=False, page_size=case.page_size, table_kind="block_table", max_kv_len=width, total_kv=case.batch * width,
    )  # fmt: skip


def pick_sequences(kv_lens: Sequence[int], count: int) -> list[int]:
    """Sequences to check: the first, the last, the longest, the shortest, and others evenly between."""
    batch = len(kv_lens)
    ends = [0, batch - 1, max(range(batch), key=kv_lens.__getitem__), min(range(batch), key=kv_lens.__getitem__)]
    between = [math.floor(batch * (i + 0.5) / count) for i in range(count)]
    return sorted(list(dict.fromkeys(ends + between))[: max(1, count)])


def sequences(copy: Copy, format: str, picks: list[int]) -> DecodeInputs:
    """Some sequences of a call as inputs of the reference; ``out`` holds their results so far."""
    case = copy.case
    assert copy.table.page_ids is not None and copy.table.cache_seqlens is not None

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(0, (case.batch, case.q_len))[picks].flatten(0, 1)

    table = PageTable.from_block_table(
        copy.table.page_ids[picks].contiguous(), copy.table.cache_seqlens[picks].contiguous(), page_size=case.page_size
    )
    lens = tuple(case.kv_lens[b] for b in picks)
    part = DecodeCase(kv_lens=lens, num_heads=case.num_heads, q_lens=case.q_len, page_size=case.page_size, format=format,
                      sm_scale=case.sm_scale)  # fmt: skip
    none = torch.zeros(0, dtype=torch.int64, device=copy.q.device)
    return DecodeInputs(part, rows(copy.q), copy.cache, table, None, rows(copy.out), none)
