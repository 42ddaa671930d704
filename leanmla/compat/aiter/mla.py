"""``aiter.mla``: ``mla_decode_fwd``."""

from __future__ import annotations

import itertools
import math
import numbers

import torch

from ... import device
from ...cache import LatentCache
from ...decode import mla_decode
from ...errors import InvalidArgument, InvalidDtype, InvalidTable, MissingScale
from ...page_table import PageTable
from ...problem import DIMS
from .._arguments import check_tensor, csr_page_table, latent_cache, refuse, reword
from .reduce import mla_reduce_v1

__all__ = ["mla_decode_fwd"]

_THEIR_NAMES = {
    "out": "o", "data": "kv_buffer", "scale": "kv_scale", "cache": "kv_buffer", "table": "kv_indices",
    "kv_last_page_len": "kv_last_page_lens", "max_q_len": "max_seqlen_q", "page": "kv_indices",
}  # fmt: skip
_ANEW = "Make the metadata anew when lengths change."


def mla_decode_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: torch.Tensor | None = None,
    work_meta_data: torch.Tensor | None = None,
    work_indptr: torch.Tensor | None = None,
    work_info_set: torch.Tensor | None = None,
    reduce_indptr: torch.Tensor | None = None,
    reduce_final_map: torch.Tensor | None = None,
    reduce_partial_map: torch.Tensor | None = None,
    q_scale: torch.Tensor | float | None = None,
    kv_scale: torch.Tensor | float | None = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
    g_kv_indptr: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    causal: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """MLA decode over a paged cache; writes ``o`` in place.

    Args:
        q: [total_q, H, 576], bf16, fp16, or fp8 (e4m3fn) with ``q_scale``.
        kv_buffer: [pages, page_size, 1, 576], bf16, or fp8 (e4m3fn) with ``kv_scale``.
        o: [total_q, H, 512], bf16 or fp16; q's dtype unless q is fp8.
        qo_indptr: int32 [batch+1], query rows. kv_indptr: int32 [batch+1], pages. kv_indices: int32, page ids.
        kv_last_page_lens: int32 [batch]; for page_size 1 it may hold the whole length.
        max_seqlen_q: most query rows of one sequence.
        page_size, nhead_kv: tokens a page; KV heads (1).
        sm_scale: factor on the logits, 1/sqrt(576) by default.
        logit_cap: above 0, logits become cap * tanh(logits / cap).
        num_kv_splits: without metadata: items a sequence; None lets our planner choose.
        num_kv_splits_indptr: accepted, not read: every sequence gets num_kv_splits.
        work_meta_data ... reduce_partial_map: the metadata of :mod:`leanmla.compat.aiter.metadata`, all six or none.
        q_scale, kv_scale: fp32 [1] (or a number) for fp8 q and kv_buffer; ignored for 16-bit ones, as there.
        intra_batch_mode: the metadata were made in that mode.
        return_logits, return_lse: what to return.
        g_kv_indptr, cp_world_size, cp_rank: refused.
        causal: bottom-right aligned causal mask.

    Returns:
        ``(logits, lse)``. lse: fp32 [total_q, H], natural log, -inf for rows without keys; None unless ``return_lse``.
        logits: the partial results, fp32; with metadata [reduce_partial_map.numel() * max_seqlen_q, 1, H, 512], otherwise
        [total_q, num_kv_splits, H, 512]; None unless ``return_logits``.

    Metadata drive the split. On the CPU and with ``return_logits`` each item of work_info_set runs over exactly its range of
    keys and :func:`mla_reduce_v1` merges; with ``return_logits`` on a GPU that waits for the device. Otherwise a GPU runs our
    fused kernels, which neither wait nor read the metadata's contents, so that the call can be captured: intra-batch metadata
    give every sequence as many items as they have room for (fewer where the batch alone fills the device), the other modes ask
    for balance and get our planner's. Scratch comes from PyTorch's allocator in every call, as the original's does; in a capture
    it comes from the graph's memory, so replays allocate nothing. On the CPU, lists that would read other sequences' keys, leave
    rows without an item or a partial result unmerged are refused (InvalidTable).

    Differs from the original: any number of heads and page size, logit_cap works, q may be fp16; logits are returned on request
    only, and carry 16-bit values; fp8 is e4m3fn everywhere; a missing scale is refused, not taken as 1. ``q_scale`` given as a
    tensor on a GPU is multiplied into the query, which is then rounded to 16 bits (at most 2^-9 of a value, against e4m3's own
    2^-4), because reading it into the logit scale would wait for the device; elsewhere it is exact.
    """
    if cp_world_size != 1 or cp_rank != 0 or g_kv_indptr is not None:
        for name, value, off in (
            ("cp_world_size", cp_world_size, 1),
            ("cp_rank", cp_rank, 0),
            ("g_kv_indptr", g_kv_indptr, None),
        ):
            if value is not off and not (isinstance(value, int) and value == off):
                raise refuse(name, value, "Context parallelism is not offered through this function; see leanmla.parallel.")
    if nhead_kv != 1:
        raise refuse("nhead_kv", nhead_kv, "MLA has one KV head; pass 1.")
    if sm_scale is None:
        sm_scale = DIMS.qk_head_dim**-0.5
    if not isinstance(o, torch.Tensor):
        raise InvalidArgument(f"o: expected a tensor [total_q, H, {DIMS.v_head_dim}] to write to, got {type(o).__name__}.")
    try:
        cache = _cache(kv_buffer, page_size, kv_scale)
        query, sm_scale = _query(q, o, q_scale, sm_scale)
        table = csr_page_table(kv_indptr, kv_indices, kv_last_page_lens, page_size)
        persistent = work_meta_data is not None
        if persistent:
            for name, t in (
                ("work_meta_data", work_meta_data), ("work_indptr", work_indptr), ("work_info_set", work_info_set),
                ("reduce_indptr", reduce_indptr), ("reduce_final_map", reduce_final_map), ("reduce_partial_map", reduce_partial_map),
            ):  # fmt: skip
                if not isinstance(t, torch.Tensor):
                    raise InvalidArgument(
                        f"{name}: expected a tensor, since work_meta_data is given, got {type(t).__name__}. Pass all six."
                    )
        if return_logits or (persistent and q.device.type == "cpu"):
            step = _Step(query, cache, table, qo_indptr, sm_scale, causal, logit_cap, max_seqlen_q)
            _check_against_call(step, o)
            if persistent:
                return _run_metadata(step, o, return_lse, return_logits, work_indptr, work_info_set, reduce_indptr,
                                     reduce_final_map, reduce_partial_map)  # fmt: skip
            return _run_splits(step, o, return_lse, num_kv_splits or 1)
        splits = num_kv_splits
        if persistent:
            assert work_info_set is not None
            splits = None
            if intra_batch_mode:
                asked = work_info_set.shape[0] // max(1, table.batch)
                splits = max(1, min(asked, _useful_splits(q, table.batch, max_seqlen_q)))
        result = mla_decode(
            query, cache, table, sm_scale=sm_scale, qo_indptr=qo_indptr, causal=causal, logit_cap=logit_cap,
            out=o, return_lse=return_lse, num_kv_splits=splits, max_q_len=max_seqlen_q,
        )  # fmt: skip
    except InvalidArgument as error:
        reword(error, _THEIR_NAMES)
        raise
    return None, result[1] if return_lse else None


def _useful_splits(q: torch.Tensor, batch: int, max_seqlen_q: int) -> int:
    """Items a sequence that keep every multiprocessor busy twice; more would only add partial results to merge.

    256 sequences of 16 heads in the usual 32 items are 8192 partial results, 268 MB; one item each keeps 132 multiprocessors busy.
    """
    row_tiles = -(-q.shape[1] * max_seqlen_q // 64)
    return 2 * device.describe(q.device).num_sms // max(1, batch * row_tiles)


def _cache(kv_buffer: torch.Tensor, page_size: int, kv_scale: torch.Tensor | float | None) -> LatentCache:
    if not isinstance(kv_buffer, torch.Tensor) or kv_buffer.ndim != 4:
        got = list(kv_buffer.shape) if isinstance(kv_buffer, torch.Tensor) else type(kv_buffer).__name__
        raise InvalidArgument(f"kv_buffer: expected [pages, page_size, 1, {DIMS.qk_head_dim}], got {got}.")
    if kv_buffer.dtype == torch.bfloat16:
        return latent_cache(kv_buffer, format="bf16", page_size=page_size)
    if not str(kv_buffer.dtype).startswith("torch.float8_e4m3"):  # fnuz passes on to the format's refusal, which explains it
        raise InvalidDtype(f"kv_buffer: expected bfloat16 or float8_e4m3fn, got {kv_buffer.dtype}.")
    if kv_scale is None:
        raise MissingScale(
            "kv_scale: an fp8 kv_buffer needs its fp32 [1] scale, got None. Pass 1.0 if the values are unscaled."
        )
    return latent_cache(kv_buffer, kv_scale, format="fp8", page_size=page_size)


def _query(
    q: torch.Tensor, o: torch.Tensor, q_scale: torch.Tensor | float | None, sm_scale: float
) -> tuple[torch.Tensor, float]:
    """The query at 16 bits and the logit scale that goes with it."""
    if not isinstance(q, torch.Tensor) or q.dtype != torch.float8_e4m3fn:
        if isinstance(q, torch.Tensor) and q.dtype not in (torch.bfloat16, torch.float16):
            raise InvalidDtype(f"q: expected bfloat16, float16 or float8_e4m3fn, got {q.dtype}.")
        return q, sm_scale
    if o.dtype not in (torch.bfloat16, torch.float16):
        raise InvalidDtype(f"o: expected bfloat16 or float16 for an fp8 q, got {o.dtype}.")
    if q_scale is None:
        raise MissingScale("q_scale: an fp8 q needs its fp32 [1] scale, got None. Pass 1.0 if the values are unscaled.")
    # e4m3's 3 mantissa bits fit both 16-bit formats, its exponents too: this cast is exact.
    if isinstance(q_scale, torch.Tensor):
        if q_scale.numel() != 1 or q_scale.dtype != torch.float32:
            raise InvalidArgument(f"q_scale: expected float32 [1], got {q_scale.dtype} {list(q_scale.shape)}.")
        if q_scale.device.type != "cpu" and q_scale.device != q.device:
            raise InvalidArgument(f"q_scale: expected on q's device {q.device}, got {q_scale.device}.")
        if q_scale.is_cuda:
            return (q.to(torch.float32) * q_scale.reshape(())).to(o.dtype), sm_scale
    elif not isinstance(q_scale, numbers.Real):
        raise InvalidArgument(f"q_scale: expected float32 [1] or a number, got {type(q_scale).__name__}.")
    factor = float(q_scale)
    if not math.isfinite(factor):
        raise InvalidArgument(f"q_scale: expected a finite number, got {factor}.")
    return q.to(o.dtype), sm_scale * factor if isinstance(sm_scale, numbers.Real) else sm_scale


class _Step:
    """One decode step, to be run over chosen ranges of keys. Host code: it reads the tables."""

    def __init__(self, q, cache, table, qo_indptr, sm_scale, causal, logit_cap, max_seqlen_q) -> None:
        self.q, self.cache, self.table, self.qo_indptr = q, cache, table, qo_indptr
        self.sm_scale, self.causal, self.logit_cap, self.max_seqlen_q = sm_scale, causal, logit_cap, max_seqlen_q

    def ranges(
        self, seq: torch.Tensor, q_start: torch.Tensor, q_end: torch.Tensor, kv_start: torch.Tensor, kv_end: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attend rows q_start:q_end of each item to its keys, pages kv_start:kv_end of kv_indices, all int64 [n].

        Returns:
            out [rows, H, 512] and lse [rows, H] of the items' rows one after the other, and each row's item and number in it.
        """
        page = self.table.page_size
        kv, qo, kv_lens = self.table.kv_indptr.long(), self.qo_indptr.long(), self.table.kv_lens()
        first_token = (kv_start - kv[seq]) * page
        tokens = torch.minimum((kv_end - kv_start) * page, kv_lens[seq] - first_token).clamp(min=0)
        item, i = _spread(q_end - q_start)
        # Keys of the item that each row sees: all of it, less what lies behind the row's causal bound.
        bound = kv_lens[seq]
        if self.causal:
            bound = bound - (qo[seq + 1] - qo[seq]) + 1 + (q_start - qo[seq])
        seen = torch.minimum((bound - first_token)[item] + (i if self.causal else 0), tokens[item]).clamp(min=0)
        # Rows of an item that see the same keys run as one sequence, so that its keys are read once.
        fresh = (i == 0) | (seen != seen.roll(1))
        if item.numel() == 0:
            fresh = fresh[:0]
        starts = fresh.nonzero().flatten()
        pages = -(-seen[starts] // page)
        entry, j = _spread(pages)
        source = kv_start[item[starts]][entry] + j
        table = PageTable.from_csr(
            _offsets(pages), self.table.page_ids[source], (seen[starts] - (pages - 1) * page).int(), page_size=page
        )
        rows = _offsets(torch.diff(torch.cat((starts, starts.new_tensor([item.numel()])))))
        out, lse = mla_decode(
            self.q[q_start[item] + i], self.cache, table, sm_scale=self.sm_scale, qo_indptr=rows, causal=False,
            logit_cap=self.logit_cap, return_lse=True, num_kv_splits=1, max_q_len=self.max_seqlen_q,
        )  # fmt: skip
        return out, lse, item, i


def _spread(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For counts [c0, c1, ..]: the owner and the number within the owner of each of their sum many members."""
    owner = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    return owner, torch.arange(owner.numel(), device=counts.device) - (torch.cumsum(counts, 0) - counts)[owner]


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0)).int()


def _check_against_call(step: _Step, o: torch.Tensor) -> None:
    """The refusals that a plain call would make, for a call that runs in pieces."""
    from ...checks import check_call

    check_call(
        step.q, step.cache, step.table, sm_scale=step.sm_scale, qo_indptr=step.qo_indptr, causal=step.causal,
        logit_cap=step.logit_cap, out=o, return_lse=False, num_kv_splits=None, split_size=None,
        max_q_len=step.max_seqlen_q, check_contents=None,
    )  # fmt: skip


def _run_metadata(
    step: _Step, o, return_lse, keep_partials, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run the work list as it is written."""
    dev = step.q.device
    check_tensor("work_indptr", work_indptr, torch.int32, (None,), dev)
    check_tensor("work_info_set", work_info_set, torch.int32, (None, 8), dev)
    check_tensor("reduce_indptr", reduce_indptr, torch.int32, (None,), dev)
    check_tensor("reduce_final_map", reduce_final_map, torch.int32, (None, 2), dev)
    check_tensor("reduce_partial_map", reduce_partial_map, torch.int32, (None,), dev)
    count = int(work_indptr[-1]) if work_indptr.numel() else -1
    if not 0 <= count <= work_info_set.shape[0]:
        raise InvalidArgument(
            f"work_indptr[-1]: expected 0..{work_info_set.shape[0]} (rows of work_info_set), got {count}. Fill the metadata first."
        )
    info = work_info_set[:count].long()
    _check_items(step, info)
    _check_reduction(info, reduce_indptr, reduce_final_map, reduce_partial_map)
    seq, partial, q_start, q_end, kv_start, kv_end = info[:, :6].unbind(1)
    heads, total_q = step.q.shape[1], step.q.shape[0]
    size = reduce_partial_map.numel() * step.max_seqlen_q  # rows of the partial buffer
    lse = torch.full((total_q, heads), -torch.inf, device=dev) if return_lse else None
    out, out_lse, item, i = step.ranges(seq, q_start, q_end, kv_start, kv_end)
    whole = partial[item] < 0
    to = (q_start[item] + i)[whole]
    o[to] = out[whole]
    if lse is not None:
        lse[to] = out_lse[whole]
    to = (partial[item] + i)[~whole]
    if to.numel() and int(to.max()) >= size:
        raise InvalidArgument(
            f"work_info_set: partial row {int(to.max())} lies outside the {size} rows that reduce_partial_map and max_seqlen_q make room for."
        )
    if keep_partials:
        logits = torch.zeros(size, 1, heads, DIMS.v_head_dim, device=dev)
        partial_lse = torch.full((size, 1, heads, 1), -torch.inf, device=dev)
        logits[to, 0] = out[~whole].float()
        partial_lse[to, 0, :, 0] = out_lse[~whole]
        rows = reduce_partial_map
    else:
        # The partial buffer is mostly room: merge the rows where they are, and say so in the map.
        logits, partial_lse = out, out_lse
        place = torch.zeros(max(size, 1), dtype=torch.int32, device=dev)
        place[to] = (~whole).nonzero().flatten().int()
        rows = place[reduce_partial_map.long().clamp(0, max(size - 1, 0))]
    mla_reduce_v1(logits, partial_lse, reduce_indptr, reduce_final_map, rows, step.max_seqlen_q, 0, o, lse)
    return (logits if keep_partials else None), lse


def _check_items(step: _Step, info: torch.Tensor) -> None:
    """Stale or foreign metadata would read other sequences' keys: refuse it."""
    kv, qo, batch = step.table.kv_indptr.long(), step.qo_indptr.long(), step.table.batch
    seq = info[:, 0].clamp(0, max(batch - 1, 0))
    q_start, q_end, kv_start, kv_end = info[:, 2:6].unbind(1)
    wrong = info[:, 0] != seq
    if batch:
        wrong |= (q_start < qo[seq]) | (q_end < q_start) | (q_end > qo[seq + 1]) | (q_end - q_start > step.max_seqlen_q)
        wrong |= (kv_start < kv[seq]) | (kv_end < kv_start) | (kv_end > kv[seq + 1])
    for k in wrong.nonzero().flatten().tolist()[:1]:
        raise InvalidTable(
            f"work_info_set[{k}]: {info[k].tolist()} does not fit this batch (sequence, query rows or pages out of range). {_ANEW}"
        )
    if batch == 0:
        return
    # What an item leaves out of its sequence's keys is left out: the list drives the split. Rows that no item covers would stay
    # as they were in ``o``.
    q_len = torch.diff(qo)
    got = torch.zeros_like(q_len).index_add_(0, seq, q_end - q_start)
    for b in (got < q_len).nonzero().flatten().tolist()[:1]:
        raise InvalidTable(f"work_info_set: covers {int(got[b])} of sequence {b}'s {int(q_len[b])} query rows. {_ANEW}")


def _check_reduction(
    info: torch.Tensor, reduce_indptr: torch.Tensor, reduce_final_map: torch.Tensor, reduce_partial_map: torch.Tensor
) -> None:
    """Every partial result is merged once, into its own rows; anything else would leave rows of ``o`` as they were."""
    pending = {p: (lo, hi) for _, p, lo, hi in info[:, :4].tolist() if p >= 0 and hi > lo}
    offsets, starts = reduce_indptr.tolist(), reduce_partial_map.tolist()
    for (begin, end), (lo, hi) in zip(itertools.pairwise(offsets), reduce_final_map.tolist()):
        for start in starts[begin:end] if hi > lo else ():
            if pending.pop(start, None) != (lo, hi):
                raise InvalidTable(f"reduce_partial_map: no item of work_info_set leaves rows {lo}..{hi} at {start}. {_ANEW}")
    if pending:
        start, (lo, hi) = next(iter(pending.items()))
        raise InvalidTable(f"reduce_partial_map: nothing merges the partial result of rows {lo}..{hi} at {start}. {_ANEW}")


def _run_splits(step: _Step, o: torch.Tensor, return_lse: bool, splits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Without metadata, for the sake of the partial results: every sequence in ``splits`` equal ranges of pages."""
    table, dev = step.table, step.q.device
    total_q, heads = step.q.shape[:2]
    kv, qo = table.kv_indptr.long(), step.qo_indptr.long()
    seq = torch.arange(table.batch, device=dev)
    logits = torch.zeros(total_q, splits, heads, DIMS.v_head_dim, device=dev)
    lses = torch.full((total_q, splits, heads), -torch.inf, device=dev)
    pages = kv[1:] - kv[:-1]
    cuts = [kv[:-1] + pages * s // splits for s in range(splits + 1)]
    for s, (lo, hi) in enumerate(itertools.pairwise(cuts)):
        out, lse, item, i = step.ranges(seq, qo[:-1], qo[1:], lo, hi)
        row = qo[:-1][item] + i
        logits[row, s] = out.float()
        lses[row, s] = lse
    merged, lse = _merge(logits, lses)
    o.copy_(merged)
    return logits, lse if return_lse else None


def _merge(logits: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from ...decode import merge_states

    return merge_states(logits.transpose(0, 1), lses.transpose(0, 1))
