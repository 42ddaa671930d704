"""``aiter.get_mla_metadata_*_v1``: a decode step's work list, as six tensors filled on the device they live on.

What the tensors hold (all int32 but the first):

====================  ==========  ==========================================================================================
work_metadata_ptrs    [2] uint64  addresses of work_indptr and work_info_set
work_indptr           [units+1]   rows of work_info_set that each compute unit takes; the last entry is the number of items
work_info_set         [n, 8]      one item a row: sequence; first row in the partial buffer, or -1 when the sequence is not
                                  split; q_start, q_end (rows of q); kv_start, kv_end (positions in kv_indices, pages); tokens
                                  left from kv_end to the sequence's end; 0
reduce_indptr         [m+1]       group g (= sequence g) merges reduce_partial_map[reduce_indptr[g]:reduce_indptr[g+1]]
reduce_final_map      [m, 2]      q_start, q_end of each group
reduce_partial_map    [p]         first row of each partial result in the partial buffer
====================  ==========  ==========================================================================================

An item covers all query rows of its sequence. A sequence without keys has one item with kv_start == kv_end, so that whoever
runs the items also writes its output. Sequences are cut in *blocks* of ``kv_granularity`` tokens, in one of three modes:

* **fast**: the blocks of all sequences lie end to end and every compute unit takes an equal stretch;
* **default** (``fast_mode=False``): a sequence is cut in equal items of at most ceil(all blocks / compute units) blocks;
* **intra-batch**: every sequence is cut in the same number of items, fewer only when it has fewer blocks.
"""

from __future__ import annotations

import torch

from ... import device
from ...errors import CapacityExceeded, InvalidArgument, InvalidTable
from .._arguments import check_tensor, refuse

__all__ = ["decode_update_mla_metadata_v1", "get_mla_metadata_info_v1", "get_mla_metadata_v1"]

_NOWHERE = 1 << 62  # sorts behind every block


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{name}: expected a positive integer, got {value!r}.")


def _compute_units() -> int:
    return device.describe("cuda" if torch.cuda.is_available() else "cpu").num_sms


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
) -> tuple[tuple[object, torch.dtype], ...]:
    """Shapes and dtypes of the six tensors that :func:`get_mla_metadata_v1` fills.

    Args:
        batch_size, max_seqlen_qo, num_head_qo: largest batch, query rows a sequence, query heads.
        q_dtype, kv_dtype: accepted, without influence.
        is_sparse: must be False.
        fast_mode, intra_batch_mode: the mode, see the module's docstring.
        num_kv_splits: intra-batch mode: items a sequence.
        max_split_per_batch: accepted, without influence on the sizes (it only lowers the number of items).

    Returns:
        (shape, dtype) of work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map,
        reduce_partial_map.

    Differs from the original: any number of heads; heads and query rows are never spread over several items, so the sizes do
    not depend on them; the default mode needs no more room than the fast one; on a machine without a GPU the compute units
    are the CPU's threads.
    """
    _positive("batch_size", batch_size)
    _positive("max_seqlen_qo", max_seqlen_qo)
    _positive("num_head_qo", num_head_qo)
    if is_sparse:
        raise refuse("is_sparse", is_sparse, "Sparse metadata is not offered; use leanmla.compat.flash_mla with indices.")
    units = _compute_units()
    if intra_batch_mode:
        _positive("num_kv_splits", num_kv_splits)
        work = partials = batch_size * num_kv_splits
    else:
        work = batch_size + units - 1
        partials = max(1, min(work, 2 * (units - 1)))
    return (
        ((2,), torch.uint64),
        ((units + 1,), torch.int32),
        ((work, 8), torch.int32),
        ((batch_size + 1,), torch.int32),
        ((batch_size, 2), torch.int32),
        ((partials,), torch.int32),
    )


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    is_cp_round_robin: bool = False,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
    dtype_q_nope: torch.dtype | None = None,
    dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    dtype_kv_rope: torch.dtype | None = None,
) -> None:
    """Fill the six tensors for a batch, on their device, without waiting for it.

    Args:
        seqlens_qo_indptr: int32 [batch+1], query row offsets; ragged lengths are fine.
        seqlens_kv_indptr: int32 [batch+1], offsets in kv_indices (pages).
        kv_last_page_lens: int32 [batch], tokens in each last page; not read for page_size 1.
        num_heads_per_head_k, num_heads_k: query heads per KV head, and KV heads (1).
        is_causal: accepted, without influence: an item's range is cut per query row when it runs.
        work_metadata_ptrs ... reduce_partial_map: the tensors to fill (work_info_set before work_indptr here).
        page_size: tokens a page.
        kv_granularity: tokens a block, rounded up to whole pages: items begin at multiples of it.
        max_seqlen_qo, uni_seqlen_qo: above 0, checked against seqlens_qo_indptr when that lies on the CPU.
        fast_mode, intra_batch_mode: the mode, see the module's docstring.
        max_split_per_batch: above 0, most items a sequence. Intra-batch mode: the number of items a sequence; when it is not
            given, work_info_set has room for exactly that number.

    Differs from the original: ``max_split_per_batch`` binds each sequence by itself (there it is a budget for the batch);
    ``topk`` and ``is_cp_round_robin`` are refused; the dtypes have no influence; unused rows are zeros.
    """
    _check_batch(seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, page_size)
    if num_heads_k != 1:
        raise refuse("num_heads_k", num_heads_k, "MLA has one KV head; pass 1.")
    _positive("num_heads_per_head_k", num_heads_per_head_k)
    _positive("kv_granularity", kv_granularity)
    if topk > 0:
        raise refuse("topk", topk, "Sparse metadata is not offered; use leanmla.compat.flash_mla with indices.")
    if is_cp_round_robin:
        raise refuse("is_cp_round_robin", is_cp_round_robin, "Context parallelism is not offered through this function.")
    tensors = {
        "work_metadata_ptrs": work_metadata_ptrs, "work_info_set": work_info_set, "work_indptr": work_indptr,
        "reduce_indptr": reduce_indptr, "reduce_final_map": reduce_final_map, "reduce_partial_map": reduce_partial_map,
    }  # fmt: skip
    _check_tensors(seqlens_kv_indptr.device, tensors)
    for name, value in (
        ("max_seqlen_qo", max_seqlen_qo), ("uni_seqlen_qo", uni_seqlen_qo), ("max_split_per_batch", max_split_per_batch)
    ):  # fmt: skip
        if not isinstance(value, int):
            raise InvalidArgument(f"{name}: expected an integer (-1 for none), got {value!r}.")
    _check_q_lens(seqlens_qo_indptr, max_seqlen_qo, uni_seqlen_qo)
    batch = seqlens_kv_indptr.numel() - 1
    units = work_indptr.numel() - 1
    capacity = work_info_set.shape[0]
    limit = max_split_per_batch if max_split_per_batch > 0 else None
    if intra_batch_mode and limit is None:
        limit = max(1, capacity // max(batch, 1))
    if intra_batch_mode:
        assert limit is not None
        needed, needed_partials = batch * limit, batch * limit if limit > 1 else 0
    else:
        needed = batch + units - 1 if batch else 0
        needed_partials = 0 if limit == 1 else min(needed, 2 * (units - 1))
        if limit is not None:
            needed = min(needed, batch * limit)
    _check_room(batch, needed, needed_partials, tensors)

    # fill_ takes its number along as a kernel argument; assigning to one element would copy it over and wait for that.
    pointers = work_metadata_ptrs.view(torch.int64)
    pointers[:1].fill_(work_indptr.data_ptr())
    pointers[1:2].fill_(work_info_set.data_ptr())
    if batch == 0:
        for t in (work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map):
            t.zero_()
        return

    unit_pages = -(-kv_granularity // page_size)
    kv = seqlens_kv_indptr.long()
    # An empty sequence counts as one block: it needs an item, and the item costs something.
    blocks = ((kv[1:] - kv[:-1] + unit_pages - 1) // unit_pages).clamp(min=1)
    first = torch.cumsum(blocks, 0) - blocks  # each sequence's first block, all sequences end to end
    total = blocks.sum()

    if intra_batch_mode or not fast_mode:
        if intra_batch_mode:
            splits = blocks.clamp(max=limit)
        else:
            chunk = (total + units - 1) // units
            splits = (blocks + chunk - 1) // chunk
            if limit is not None:
                splits = splits.clamp(max=limit)
        seq, split, valid = _enumerate(splits, capacity)
        lo = split * blocks[seq] // splits[seq]
        hi = (split + 1) * blocks[seq] // splits[seq]
        unit = (first[seq] + lo) * units // total
    else:
        share = (total + units - 1) // units
        if limit is not None and limit > 1:
            # A stretch of n blocks meets at most ceil(n / share) + 1 units.
            share = torch.maximum(share, (blocks.max() + limit - 2) // (limit - 1))
        starts = first
        if limit != 1 and units > 1:
            cuts = torch.arange(1, units, device=kv.device) * share
            at = torch.searchsorted(first, cuts).clamp(max=batch - 1)
            new = (cuts < total) & (first[at] != cuts)
            starts = torch.sort(torch.cat((first, torch.where(new, cuts, _NOWHERE)))).values
        valid = starts < _NOWHERE
        seq = (torch.searchsorted(first, starts, right=True) - 1).clamp(min=0)
        ends = torch.minimum(torch.cat((starts[1:], starts.new_full((1,), _NOWHERE))), total)
        lo, hi = starts - first[seq], ends - first[seq]
        splits = torch.zeros_like(blocks).scatter_add_(0, seq, valid.long())
        unit = torch.minimum(starts, total) // share
    # The unit of an item never falls from one item to the next, so a unit's items are a range of rows.
    unit = torch.where(valid, unit.clamp(max=units - 1), units)
    work_indptr.copy_(torch.searchsorted(unit, torch.arange(units + 1, device=kv.device)))
    _write_items(
        seq, lo, hi, valid, splits, seqlens_qo_indptr, kv, kv_last_page_lens, page_size, unit_pages, work_info_set,
        reduce_indptr, reduce_final_map, reduce_partial_map,
    )  # fmt: skip


def decode_update_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = 1,
    dtype_q: torch.dtype = torch.bfloat16,
    dtype_kv: torch.dtype = torch.bfloat16,
    num_reject_tokens: torch.Tensor | None = None,
) -> None:
    """Bring filled metadata up to date after the same sequences grew or shrank, on the device, without waiting for it.

    Each sequence keeps its number of items and its compute units; its keys, whatever their number is now, are cut anew in
    equal items. Query rows are taken anew from seqlens_qo_indptr (callers go from several rows a sequence to one).

    Args:
        as in :func:`get_mla_metadata_v1`; seqlens_qo_indptr, seqlens_kv_indptr and kv_last_page_lens describe the new state.
        num_reject_tokens: accepted, not needed: the new offsets say what was rejected.

    Differs from the original: any page size and granularity; sequences may change by any number of keys, not by one; items
    are re-cut, not shifted. The tensors must come from :func:`get_mla_metadata_v1`.
    """
    _check_batch(seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, page_size)
    if num_heads_k != 1:
        raise refuse("num_heads_k", num_heads_k, "MLA has one KV head; pass 1.")
    _positive("kv_granularity", kv_granularity)
    batch = seqlens_kv_indptr.numel() - 1
    tensors = {
        "work_metadata_ptrs": work_metadata_ptrs, "work_info_set": work_info_set, "work_indptr": work_indptr,
        "reduce_indptr": reduce_indptr, "reduce_final_map": reduce_final_map, "reduce_partial_map": reduce_partial_map,
    }  # fmt: skip
    _check_tensors(seqlens_kv_indptr.device, tensors)
    _check_room(batch, 0, 0, tensors)
    if batch == 0 or work_info_set.shape[0] == 0:
        return
    unit_pages = -(-kv_granularity // page_size)
    kv = seqlens_kv_indptr.long()
    blocks = ((kv[1:] - kv[:-1] + unit_pages - 1) // unit_pages).clamp(min=1)
    item = torch.arange(work_info_set.shape[0], device=kv.device)
    valid = item < work_indptr[-1]
    old = work_info_set[:, 0].long().clamp(0, batch - 1)
    splits = torch.zeros_like(blocks).scatter_add_(0, old, valid.long())
    seq, split, valid = _enumerate(splits, work_info_set.shape[0])
    count = splits[seq].clamp(min=1)
    lo, hi = split * blocks[seq] // count, (split + 1) * blocks[seq] // count
    _write_items(
        seq, lo, hi, valid, splits, seqlens_qo_indptr, kv, kv_last_page_lens, page_size, unit_pages, work_info_set,
        reduce_indptr, reduce_final_map, reduce_partial_map,
    )  # fmt: skip


def _enumerate(splits: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Item k of ``capacity``: its sequence, its number within the sequence, and whether there is such an item."""
    end = torch.cumsum(splits, 0)
    k = torch.arange(capacity, device=splits.device)
    seq = torch.searchsorted(end, k, right=True).clamp(max=splits.numel() - 1)
    return seq, k - (end - splits)[seq], k < end[-1]


def _write_items(
    seq: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, valid: torch.Tensor, splits: torch.Tensor, qo_indptr: torch.Tensor,
    kv: torch.Tensor, last_page: torch.Tensor, page_size: int, unit_pages: int, work_info_set: torch.Tensor,
    reduce_indptr: torch.Tensor, reduce_final_map: torch.Tensor, reduce_partial_map: torch.Tensor,
) -> None:  # fmt: skip
    """Write items [blocks lo:hi of sequence seq] and what their reduction needs."""
    batch = splits.numel()
    q = qo_indptr.long()
    end = kv[seq + 1]
    kv_start = torch.minimum(kv[seq] + lo * unit_pages, end)
    kv_end = torch.minimum(kv[seq] + hi * unit_pages, end)
    pages_left = end - kv_end
    last = 1 if page_size == 1 else last_page.long()[seq]
    tokens_left = torch.where(pages_left > 0, (pages_left - 1) * page_size + last, 0)

    partial = valid & (splits[seq] > 1)
    rows = torch.where(partial, q[seq + 1] - q[seq], 0)
    row = torch.cumsum(rows, 0) - rows
    info = torch.stack(
        (seq, torch.where(partial, row, -1), q[seq], q[seq + 1], kv_start, kv_end, tokens_left, torch.zeros_like(seq)), dim=1
    )
    n = min(info.shape[0], work_info_set.shape[0])
    work_info_set[:n] = torch.where(valid[:n, None], info[:n], 0)
    work_info_set[n:].zero_()

    merged = torch.cumsum(torch.where(splits > 1, splits, 0), 0)
    reduce_indptr[:1].zero_()
    reduce_indptr[1 : batch + 1] = merged
    reduce_indptr[batch + 1 :] = merged[-1]  # groups that do not exist merge nothing
    reduce_final_map[:batch, 0] = q[:-1]
    reduce_final_map[:batch, 1] = q[1:]
    reduce_final_map[batch:].zero_()
    size = reduce_partial_map.numel()
    slot = torch.where(partial, torch.cumsum(partial.long(), 0) - 1, size).clamp(max=size)
    filled = row.new_zeros(size + 1).scatter_(0, slot, torch.where(partial, row, 0))
    reduce_partial_map.copy_(filled[:size])


def _check_batch(qo: torch.Tensor, kv: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
    _positive("page_size", page_size)
    for name, t in (("seqlens_kv_indptr", kv), ("seqlens_qo_indptr", qo), ("kv_last_page_lens", last)):
        check_tensor(name, t, torch.int32, (None,), kv.device if isinstance(kv, torch.Tensor) else None)
    if kv.numel() < 1 or qo.numel() != kv.numel():
        raise InvalidArgument(f"seqlens_qo_indptr: expected [batch+1] = [{kv.numel()}] entries, got {list(qo.shape)}.")
    if page_size > 1 and last.numel() != kv.numel() - 1:
        raise InvalidArgument(f"kv_last_page_lens: expected [batch] = [{kv.numel() - 1}], got {list(last.shape)}.")
    if kv.device.type != "cpu":
        return
    for name, t in (("seqlens_qo_indptr", qo), ("seqlens_kv_indptr", kv)):
        if int(t[0]) != 0 or bool((t[1:] < t[:-1]).any()):
            raise InvalidTable(f"{name}: expected offsets rising from 0, got {t[:8].tolist()}...")
    if page_size > 1:
        for b in ((last < 0) | (last > page_size)).nonzero().flatten().tolist()[:1]:
            raise InvalidTable(f"kv_last_page_lens[{b}]: expected at most page_size = {page_size} tokens, got {int(last[b])}.")


def _check_q_lens(qo: torch.Tensor, max_seqlen_qo: int, uni_seqlen_qo: int) -> None:
    if qo.device.type != "cpu" or qo.numel() < 2:
        return
    lens = qo[1:] - qo[:-1]
    if max_seqlen_qo > 0 and int(lens.max()) > max_seqlen_qo:
        raise CapacityExceeded(
            f"max_seqlen_qo: a sequence has {int(lens.max())} query rows, more than {max_seqlen_qo}. Raise it."
        )
    if uni_seqlen_qo > 0 and bool((lens != uni_seqlen_qo).any()):
        b = int((lens != uni_seqlen_qo).nonzero()[0])
        raise InvalidArgument(
            f"uni_seqlen_qo: sequence {b} has {int(lens[b])} query rows, not {uni_seqlen_qo}. Pass -1 for ragged lengths."
        )


def _check_tensors(device: torch.device, tensors: dict[str, torch.Tensor]) -> None:
    for name, t in tensors.items():
        dtype = torch.uint64 if name == "work_metadata_ptrs" else torch.int32
        if name == "work_metadata_ptrs" and isinstance(t, torch.Tensor) and t.dtype == torch.int64:
            dtype = torch.int64
        width = {"work_info_set": 8, "reduce_final_map": 2}.get(name)
        check_tensor(name, t, dtype, (None,) if width is None else (None, width), device)


def _check_room(batch: int, work: int, partials: int, tensors: dict[str, torch.Tensor]) -> None:
    room = {
        "work_metadata_ptrs": 2,
        "work_info_set": work,
        "work_indptr": 2,
        "reduce_indptr": batch + 1,
        "reduce_final_map": batch,
        "reduce_partial_map": partials,
    }
    for name, t in tensors.items():
        if t.shape[0] < room[name]:
            raise CapacityExceeded(
                f"{name}: this batch needs {room[name]} entries, got {t.shape[0]}. Allocate what get_mla_metadata_info_v1 says."
            )
