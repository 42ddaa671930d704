"""``aiter.mla_reduce_v1``: merge partial results of split sequences."""

from __future__ import annotations

import torch

from ... import device
from ...errors import InvalidArgument, InvalidTable
from .._arguments import check_tensor

__all__ = ["mla_reduce_v1"]

_VALUES_AT_A_TIME = 1 << 24  # gathered at a time: 64 MiB of fp32


def mla_reduce_v1(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor | None,
    reduce_partial_map: torch.Tensor,
    max_seqlen_q: int,
    num_kv_splits: int,
    final_output: torch.Tensor,
    final_lse: torch.Tensor | None = None,
) -> None:
    """Merge each group of partial results into rows of ``final_output``: ``sum(exp(lse_i - lse) out_i)``.

    Args:
        partial_output: fp32 [rows, 1, H, D] or [rows, H, D], each normalised by its own softmax.
        partial_lse: fp32 [rows, 1, H, 1], [rows, H, 1] or [rows, H], natural log.
        reduce_indptr, reduce_final_map, reduce_partial_map: see :mod:`leanmla.compat.aiter.metadata`. Without
            reduce_final_map group g owns rows g * max_seqlen_q onwards.
        max_seqlen_q: most query rows of a group.
        num_kv_splits: on a GPU: most partials of a group, at least the number of multiprocessors being assumed. 0: that number.
        final_output: [total_q, H, D], written in place; rows of groups without partials are left alone.
        final_lse: fp32 [total_q, H] or None, written like final_output.

    Differs from the original: a partial whose lse is -inf is left out whatever it holds, and a group of only such ones gives
    0 and -inf; the result does not depend on the order of execution. Made of tensor operations that neither wait for the
    device nor allocate by content; :func:`mla_decode_fwd` on a GPU merges inside its kernels and does not call this.
    """
    for name, t in (("final_output", final_output), ("partial_output", partial_output), ("partial_lse", partial_lse)):
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(f"{name}: expected a tensor, got {type(t).__name__}.")
        if t.device != final_output.device:
            raise InvalidArgument(f"{name}: expected on final_output's device {final_output.device}, got {t.device}.")
    dev = final_output.device
    if partial_output.ndim == 4 and partial_output.shape[1] == 1:
        partial_output = partial_output.squeeze(1)
    if partial_output.ndim != 3:
        raise InvalidArgument(f"partial_output: expected [rows, 1, H, D] or [rows, H, D], got {list(partial_output.shape)}.")
    rows, heads = partial_output.shape[:2]
    if partial_lse.numel() != rows * heads:
        raise InvalidArgument(
            f"partial_lse: expected one value a row and head of partial_output {list(partial_output.shape)}, got {list(partial_lse.shape)}."
        )
    if final_output.ndim != 3 or final_output.shape[1:] != partial_output.shape[1:]:
        raise InvalidArgument(
            f"final_output: expected [total_q, {heads}, {partial_output.shape[-1]}] like partial_output, got {list(final_output.shape)}."
        )
    if final_lse is not None:
        check_tensor("final_lse", final_lse, torch.float32, final_output.shape[:2], dev)
    check_tensor("reduce_indptr", reduce_indptr, torch.int32, (None,), dev)
    check_tensor("reduce_partial_map", reduce_partial_map, torch.int32, (None,), dev)
    if reduce_final_map is not None:
        check_tensor("reduce_final_map", reduce_final_map, torch.int32, (None, 2), dev)
        if reduce_final_map.shape[0] < reduce_indptr.numel() - 1:
            raise InvalidArgument(
                f"reduce_final_map: expected a row for each of {reduce_indptr.numel() - 1} groups, got {list(reduce_final_map.shape)}."
            )
    if not isinstance(max_seqlen_q, int) or max_seqlen_q < 0:
        raise InvalidArgument(f"max_seqlen_q: expected an integer >= 0, got {max_seqlen_q!r}.")
    groups, slots, total_q = reduce_indptr.numel() - 1, reduce_partial_map.numel(), final_output.shape[0]
    if groups < 1 or slots < 1 or total_q < 1 or rows < 1:
        return
    lse = partial_lse.reshape(rows, heads).float()

    begin = reduce_indptr[:-1].long()
    count = reduce_indptr[1:].long() - begin
    if dev.type == "cpu":
        _check_contents(reduce_indptr, reduce_final_map, reduce_partial_map, max_seqlen_q, rows, total_q)
        most = int(count.max())
        if most == 0:
            return
    else:
        most = min(slots, max(num_kv_splits, device.describe(dev).num_sms))
    i = torch.arange(max_seqlen_q, device=dev)
    if reduce_final_map is None:
        target = torch.arange(groups, device=dev)[:, None] * max_seqlen_q + i
        real = (count > 0)[:, None] & (target < total_q)
    else:
        target = reduce_final_map[:groups, :1].long() + i
        real = (count > 0)[:, None] & (target < reduce_final_map[:groups, 1:].long())

    # [most, groups, max_seqlen_q]: the partial row that split s of a group holds for query row i.
    s = torch.arange(most, device=dev)[:, None]
    first = reduce_partial_map.long()[(begin + s).clamp(max=slots - 1)]
    there = (s < count)[..., None] & real
    source = torch.where(there, first[..., None] + i, 0)
    logs = torch.where(there[..., None], lse[source], -torch.inf)
    merged = torch.logsumexp(logs, dim=0)
    weight = torch.exp(logs - torch.where(merged == -torch.inf, 0.0, merged))
    out = torch.zeros(*target.shape, *partial_output.shape[1:], device=dev)
    step = max(1, _VALUES_AT_A_TIME // max(out.numel(), 1))
    for lo in range(0, most, step):
        part = weight[lo : lo + step, ..., None] * partial_output[source[lo : lo + step]].float()
        out += part.masked_fill_((logs[lo : lo + step] == -torch.inf)[..., None], 0.0).sum(0)

    _scatter_rows(final_output, target, real, out)
    if final_lse is not None:
        _scatter_rows(final_lse, target, real, merged)


def _check_contents(
    reduce_indptr: torch.Tensor, reduce_final_map: torch.Tensor | None, reduce_partial_map: torch.Tensor, max_seqlen_q: int,
    rows: int, total_q: int,
) -> None:  # fmt: skip
    """Refuse maps that lead outside the tensors, or past the rows that a group may have."""
    offsets, slots = reduce_indptr.long(), reduce_partial_map.numel()
    count = torch.diff(offsets)
    if int(offsets[0]) != 0 or bool((count < 0).any()) or int(offsets[-1]) > slots:
        raise InvalidTable(
            f"reduce_indptr: expected offsets rising from 0 to at most {slots}, reduce_partial_map's entries, got {offsets[:8].tolist()}..."
        )
    if reduce_final_map is None:
        lens = (total_q - torch.arange(count.numel()) * max_seqlen_q).clamp(0, max_seqlen_q)
    else:
        first, end = reduce_final_map[: count.numel()].long().unbind(1)
        lens = end - first
        for g in (
            ((count > 0) & ((first < 0) | (lens < 0) | (end > total_q) | (lens > max_seqlen_q)))
            .nonzero()
            .flatten()
            .tolist()[:1]
        ):
            raise InvalidTable(
                f"reduce_final_map[{g}]: expected at most max_seqlen_q = {max_seqlen_q} of final_output's {total_q} rows, "
                f"got {int(first[g])}..{int(end[g])}."
            )
    start = reduce_partial_map[: int(offsets[-1])].long()
    for k in ((start < 0) | (start + torch.repeat_interleave(lens, count) > rows)).nonzero().flatten().tolist()[:1]:
        raise InvalidTable(
            f"reduce_partial_map[{k}]: expected rows within partial_output's {rows}, got {int(start[k])} onwards."
        )


def _scatter_rows(to: torch.Tensor, target: torch.Tensor, real: torch.Tensor, rows: torch.Tensor) -> None:
    """``to[target] = rows`` where ``real``; no operation here depends on how many rows are real."""
    extended = torch.cat((to, to.new_empty(1, *to.shape[1:])))  # the last row takes what belongs nowhere
    index = torch.where(real, target, to.shape[0]).flatten()
    extended.index_copy_(0, index, rows.flatten(0, 1).to(to.dtype))
    to.copy_(extended[:-1])
