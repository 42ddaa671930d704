"""``flash_mla``: ``get_mla_metadata`` and ``flash_mla_with_kvcache``, dense and sparse decode over a paged cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from .. import device
from ..cache import LatentCache
from ..checks import check_call
from ..decode import mla_decode
from ..errors import InvalidArgument, InvalidDtype
from ..page_table import PageTable
from ..problem import DIMS
from ._arguments import block_page_table, check_tensor, latent_cache, refuse, reword
from ._fp16 import decode_fp16

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

flash_mla_interface = sys.modules[__name__]  # the original's functions live in a module of this name
_SCHEDULE_INTS = 8  # width of a row of the original's tile_scheduler_metadata
_THEIR_NAMES = {
    "data": "k_cache",
    "cache": "k_cache",
    "table": "block_table",
    "sm_scale": "softmax_scale",
    "page": "block_table",
}


@dataclass
class FlashMLASchedMeta:
    """What the new form of :func:`get_mla_metadata` returns. Ours holds nothing: the split is planned in every call, on the device."""

    have_initialized: bool = False
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *args: object,
    **kwargs: object,
) -> tuple[FlashMLASchedMeta | torch.Tensor, torch.Tensor | None]:
    """Scheduling metadata in the form that the caller's version of the library has.

    Args:
        cache_seqlens: int32 [batch]: the old form. Without it, or with anything that is not a tensor: the new form.
        others: without influence.

    Returns:
        Old form: ``(tile_scheduler_metadata int32 [multiprocessors, 8], num_splits int32 [batch+1])``, whose shapes depend
        on the device and the batch only, so that callers may keep and refill buffers. New form: ``(FlashMLASchedMeta, None)``.

    Differs from the original: neither is read by :func:`flash_mla_with_kvcache`, which plans on the device from
    cache_seqlens; the old form's contents are zeros and 0..batch (one split a sequence).
    """
    if not isinstance(cache_seqlens, torch.Tensor):
        return FlashMLASchedMeta(), None
    if cache_seqlens.ndim != 1 or cache_seqlens.dtype != torch.int32:
        raise InvalidDtype(f"cache_seqlens: expected int32 [batch], got {cache_seqlens.dtype} {list(cache_seqlens.shape)}.")
    dev = cache_seqlens.device
    parts = device.describe(dev).num_sms
    return (
        torch.zeros(parts, _SCHEDULE_INTS, dtype=torch.int32, device=dev),
        torch.arange(cache_seqlens.numel() + 1, dtype=torch.int32, device=dev),
    )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode over a paged cache, dense, or sparse with a list of keys for every query row.

    Args:
        q: [batch, s_q, h_q, 576], bf16 or fp16.
        k_cache: [blocks, page, 1, 576] bf16 or fp16; with ``is_fp8_kvcache`` [blocks, page, 1, 656] bytes (uint8, int8 or
            float8_e4m3fn): 512 e4m3 values, four fp32 scales, 64 bf16 rope values.
        block_table: int32 [batch, max_blocks]; entries past a sequence's blocks may hold anything. Not used when sparse.
        cache_seqlens: int32 [batch], keys of each sequence. Not used when sparse.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: either form of :func:`get_mla_metadata`, or None; not read.
        softmax_scale: factor on the logits, 1/sqrt(576) by default.
        causal: bottom-right aligned causal mask; dense only.
        is_fp8_kvcache: the cache has 656-byte rows.
        indices: int32 [batch, s_q, topk]: each query row's keys as slots, block * page + offset; negative entries are holes.
        attn_sink: fp32 [h_q]: out is scaled by exp(lse) / (exp(lse) + exp(attn_sink)); lse stays as it is.
        topk_length: int32 [batch]: only that many leading entries of indices count.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: refused.

    Returns:
        out [batch, s_q, h_q, 512] in q's dtype, and lse fp32 [batch, h_q, s_q], natural log, **+inf** for rows without keys
        (whose out is 0).

    Differs from the original: any number of heads and page size; q and cache need not have the same 16-bit dtype; dense calls
    may use the 656-byte cache and sparse calls the 16-bit one; zero lengths need no special care. A float16 cache is not a
    format of our kernels: it is served by plain fp32 PyTorch, which is exact and slow. Scratch and results come from PyTorch's
    allocator in every call, as there; in a capture from the graph's memory, so replays allocate nothing.
    """
    for name, value in (
        ("extra_k_cache", extra_k_cache),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache),
        ("extra_topk_length", extra_topk_length),
    ):
        if value is not None:
            raise refuse(name, value, "A second cache is not offered; merge two calls with leanmla.merge_states.")
    if not isinstance(q, torch.Tensor) or q.ndim != 4:
        got = list(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        raise InvalidArgument(f"q: expected [batch, s_q, h_q, {DIMS.qk_head_dim}], got {got}.")
    if head_dim_v != DIMS.v_head_dim:
        raise InvalidArgument(f"head_dim_v: expected {DIMS.v_head_dim}, got {head_dim_v!r}.")
    if softmax_scale is None:
        softmax_scale = DIMS.qk_head_dim**-0.5
    batch, s_q, heads = q.shape[:3]
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, torch.float32, (heads,), q.device)
    try:
        _check_cache(k_cache, is_fp8_kvcache)
        if indices is None:
            if topk_length is not None:
                raise refuse("topk_length", topk_length, "It belongs to sparse attention; pass indices too.")
            pages, table = _dense(k_cache, block_table, cache_seqlens, batch)
        else:
            if causal:
                raise refuse("causal", causal, "With indices the mask is in the indices; pass False.")
            pages, table = _sparse(k_cache, indices, topk_length, batch, s_q)
        out, lse = _attend(q.flatten(0, 1), pages, table, softmax_scale, causal, is_fp8_kvcache)
    except InvalidArgument as error:
        reword(error, _THEIR_NAMES)
        raise
    out = out.view(batch, s_q, heads, DIMS.v_head_dim)
    lse = lse.view(batch, s_q, heads)
    if attn_sink is not None:
        out = _sink(out, lse, attn_sink)
    lse.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)  # -inf alone changes, in one pass
    return out, lse.transpose(1, 2).contiguous()


def _check_cache(k_cache: torch.Tensor, is_fp8: bool) -> None:
    if not isinstance(k_cache, torch.Tensor) or k_cache.ndim != 4 or k_cache.shape[2] != 1:
        got = list(k_cache.shape) if isinstance(k_cache, torch.Tensor) else type(k_cache).__name__
        raise InvalidArgument(f"k_cache: expected [blocks, page, 1, {656 if is_fp8 else DIMS.qk_head_dim}], got {got}.")
    one_byte = k_cache.dtype.itemsize == 1
    if is_fp8 and (not one_byte or k_cache.shape[-1] != 656):
        raise InvalidArgument(
            f"k_cache: with is_fp8_kvcache a row has 656 bytes, got {k_cache.dtype} {list(k_cache.shape)}. Quantise with format 'fp8_tile128'."
        )
    if not is_fp8 and one_byte:
        raise InvalidDtype(
            f"is_fp8_kvcache: k_cache is {k_cache.dtype}, expected bfloat16 or float16. Pass is_fp8_kvcache=True."
        )
    if not is_fp8 and k_cache.dtype not in (torch.bfloat16, torch.float16):
        raise InvalidDtype(f"k_cache: expected bfloat16 or float16, got {k_cache.dtype}.")


def _attend(
    q: torch.Tensor, pages: torch.Tensor, table: PageTable, softmax_scale: float, causal: bool, is_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over [blocks, page, 656 | 576]."""
    if pages.dtype == torch.float16:
        bf16 = pages.new_empty(1, pages.shape[1], pages.shape[2], dtype=torch.bfloat16)  # only for its shape: checks the rest
        check_call(
            q, LatentCache.from_tensors(bf16, format="bf16", page_size=pages.shape[1]), table, sm_scale=softmax_scale,
            qo_indptr=None, causal=causal, logit_cap=0.0, out=None, return_lse=True, num_kv_splits=None,
            split_size=None, max_q_len=None, check_contents=False,
        )  # fmt: skip
        if not pages.is_cuda:
            table.check_contents(pages.shape[0])
        assert table.page_ids is not None and table.cache_seqlens is not None
        return decode_fp16(q, (pages,), table.page_ids, table.cache_seqlens, sm_scale=softmax_scale, causal=causal)
    if is_fp8:
        rows = pages.view(torch.uint8) if pages.dtype == torch.int8 else pages
        cache = latent_cache(rows, format="fp8_tile128", page_size=pages.shape[1])
    else:
        cache = latent_cache(pages, format="bf16", page_size=pages.shape[1])
    return mla_decode(q, cache, table, sm_scale=softmax_scale, causal=causal, return_lse=True)  # type: ignore[return-value]


def _dense(
    k_cache: torch.Tensor, block_table: torch.Tensor | None, cache_seqlens: torch.Tensor | None, batch: int
) -> tuple[torch.Tensor, PageTable]:
    for name, t in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if t is None:
            raise InvalidArgument(f"{name}: expected an int32 tensor, got None. Only sparse attention does without it.")
    assert block_table is not None and cache_seqlens is not None
    if isinstance(block_table, torch.Tensor) and block_table.ndim == 2 and block_table.shape[0] != batch:
        raise InvalidArgument(f"block_table: expected [{batch}, max_blocks] for q's batch, got {list(block_table.shape)}.")
    return k_cache.squeeze(2), block_page_table(block_table, cache_seqlens, k_cache.shape[1])


def _sparse(
    k_cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None, batch: int, s_q: int
) -> tuple[torch.Tensor, PageTable]:
    """Every query row as a sequence of its own over pages of one token."""
    check_tensor("indices", indices, torch.int32, (batch, s_q, None), k_cache.device)
    keep = indices >= 0
    if topk_length is not None:
        check_tensor("topk_length", topk_length, torch.int32, (batch,), k_cache.device)
        keep &= torch.arange(indices.shape[2], device=indices.device) < topk_length[:, None, None]
    keep, slots = keep.flatten(0, 1), indices.flatten(0, 1)
    # Holes move behind the keys, whose order stays: a stable sort by "is a hole", which waits for nothing.
    order = torch.sort((~keep).to(torch.uint8), dim=1, stable=True).indices
    slots = torch.where(keep, slots, -1).gather(1, order)

    pages = k_cache.squeeze(2)
    page, stride = pages.shape[1], pages.stride(1)
    # Token slots of the underlying memory; with gaps between blocks a block must be a whole number of tokens long.
    tokens, rest = divmod(pages.stride(0), stride) if pages.shape[0] > 1 else (page, 0)
    if rest or tokens < page:
        raise InvalidArgument(
            f"k_cache: with indices the block stride must be a multiple of the token stride, got {pages.stride(0)} and {stride}. "
            "Make the cache contiguous."
        )
    if tokens != page:
        slots = torch.where(slots >= 0, slots // page * tokens + slots % page, -1)
    count = (pages.shape[0] - 1) * tokens + page
    pages = pages.as_strided((count, 1, pages.shape[2]), (stride, stride, pages.stride(2)))
    return pages, block_page_table(slots.int().contiguous(), keep.sum(1, dtype=torch.int32), 1)


def _sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    factor = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - attn_sink))
    return (out.float() * factor[..., None]).to(out.dtype)
