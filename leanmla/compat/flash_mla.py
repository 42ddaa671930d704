"""``flash_mla``: ``get_mla_metadata`` and ``flash_mla_with_kvcache``, dense and sparse decode over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import device
from ..cache import LatentCache
from ..decode import mla_decode
from ..errors import InvalidArgument, InvalidDtype
from ..page_table import PageTable
from ..problem import DIMS
from ._arguments import pages_as_bf16, refuse, renamed

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

_SCHEDULE_INTS = 8  # width of a row of the original's tile_scheduler_metadata
_THEIR_NAMES = {"data": "k_cache", "cache": "k_cache", "table": "block_table", "sm_scale": "softmax_scale", "page": "block_table"}


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
    format of ours: the blocks that block_table has room for are copied to bf16 in every call (slow, and values lose three
    bits); with ``indices`` the whole cache is.
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
    with renamed(**_THEIR_NAMES):
        _check_cache(k_cache, is_fp8_kvcache)
        if indices is None:
            for name, value in (("topk_length", topk_length),):
                if value is not None:
                    raise refuse(name, value, "It belongs to sparse attention; pass indices too.")
            cache, table = _dense(k_cache, block_table, cache_seqlens, batch, is_fp8_kvcache)
        else:
            if causal:
                raise refuse("causal", causal, "With indices the mask is in the indices; pass False.")
            cache, table = _sparse(k_cache, indices, topk_length, batch, s_q, is_fp8_kvcache)
        out, lse = mla_decode(q.flatten(0, 1), cache, table, sm_scale=softmax_scale, causal=causal, return_lse=True)
    out = out.view(batch, s_q, heads, DIMS.v_head_dim)
    lse = lse.view(batch, s_q, heads)
    if attn_sink is not None:
        out = _sink(out, lse, attn_sink)
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
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
        raise InvalidDtype(f"is_fp8_kvcache: k_cache is {k_cache.dtype}, expected bfloat16 or float16. Pass is_fp8_kvcache=True.")
    if not is_fp8 and k_cache.dtype not in (torch.bfloat16, torch.float16):
        raise InvalidDtype(f"k_cache: expected bfloat16 or float16, got {k_cache.dtype}.")


def _latent(pages: torch.Tensor, is_fp8: bool) -> LatentCache:
    """[blocks, page, 656 | 576] as a cache."""
    if is_fp8:
        rows = pages.view(torch.uint8) if pages.dtype == torch.int8 else pages
        return LatentCache.from_tensors(rows, format="fp8_tile128", page_size=pages.shape[1])
    return LatentCache.from_tensors(pages, format="bf16", page_size=pages.shape[1])


def _dense(
    k_cache: torch.Tensor, block_table: torch.Tensor | None, cache_seqlens: torch.Tensor | None, batch: int, is_fp8: bool
) -> tuple[LatentCache, PageTable]:
    for name, t in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if t is None:
            raise InvalidArgument(f"{name}: expected an int32 tensor, got None. Only sparse attention does without it.")
    assert block_table is not None and cache_seqlens is not None
    if block_table.ndim == 2 and block_table.shape[0] != batch:
        raise InvalidArgument(f"block_table: expected [{batch}, max_blocks] for q's batch, got {list(block_table.shape)}.")
    page = k_cache.shape[1]
    pages = k_cache.squeeze(2)
    table = PageTable.from_block_table(block_table, cache_seqlens, page_size=page)
    if pages.dtype == torch.float16:
        if not k_cache.is_cuda:
            table.check_contents(pages.shape[0])
        column = torch.arange(block_table.shape[1], device=block_table.device)
        used = column < (cache_seqlens[:, None] + page - 1) // page
        pages = pages_as_bf16((pages,), block_table.flatten(), used.flatten())
        ids = torch.arange(block_table.numel(), dtype=torch.int32, device=block_table.device).view(block_table.shape)
        table = PageTable.from_block_table(ids, cache_seqlens, page_size=page)
    return _latent(pages, is_fp8), table


def _sparse(
    k_cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None, batch: int, s_q: int, is_fp8: bool
) -> tuple[LatentCache, PageTable]:
    """Every query row as a sequence of its own over pages of one token."""
    if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int32 or indices.ndim != 3 or indices.shape[:2] != (batch, s_q):
        got = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, torch.Tensor) else type(indices).__name__
        raise InvalidArgument(f"indices: expected int32 [{batch}, {s_q}, topk], got {got}.")
    keep = indices >= 0
    if topk_length is not None:
        if topk_length.dtype != torch.int32 or list(topk_length.shape) != [batch]:
            raise InvalidArgument(f"topk_length: expected int32 [{batch}], got {topk_length.dtype} {list(topk_length.shape)}.")
        keep &= torch.arange(indices.shape[2], device=indices.device) < topk_length[:, None, None]
    keep, slots = keep.flatten(0, 1), indices.flatten(0, 1)
    # Holes move behind the keys, whose order stays: a stable sort by "is a hole", which waits for nothing.
    order = torch.sort((~keep).to(torch.uint8), dim=1, stable=True).indices
    slots = torch.where(keep, slots, -1).gather(1, order)

    pages = k_cache.squeeze(2)
    if pages.dtype == torch.float16:
        pages = pages.to(torch.bfloat16)
    page = pages.shape[1]
    if pages.shape[0] > 1 and pages.stride(0) != page * pages.stride(1):
        # Gaps between pages: token slots of the underlying memory, as long as a page is a whole number of tokens long.
        tokens, rest = divmod(pages.stride(0), pages.stride(1))
        if rest or page == 0:
            raise InvalidArgument(
                f"k_cache: with indices the block stride must be a multiple of the token stride, got {pages.stride(0)} and "
                f"{pages.stride(1)}. Make the cache contiguous."
            )
        slots = torch.where(slots >= 0, slots // page * tokens + slots % page, -1)
        count = (pages.shape[0] - 1) * tokens + page
        pages = pages.as_strided((count, 1, pages.shape[2]), (pages.stride(1), pages.stride(1), 1))
        cache = _latent(pages, is_fp8)
    else:
        cache = _latent(pages, is_fp8).as_tokens()
    return cache, PageTable.from_block_table(slots.int().contiguous(), keep.sum(1, dtype=torch.int32), page_size=1)


def _sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    if attn_sink.shape != lse.shape[2:] or attn_sink.dtype != torch.float32:
        raise InvalidArgument(f"attn_sink: expected float32 [{lse.shape[2]}], got {attn_sink.dtype} {list(attn_sink.shape)}.")
    factor = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - attn_sink))
    return (out.float() * factor[..., None]).to(out.dtype)
