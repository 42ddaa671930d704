"""Decode over a float16 cache, which is not a cache format here: plain fp32 PyTorch over gathered pages.

bf16 could not hold its values (three bits would go), and callers of libraries that have such caches expect better than that.
It is exact to fp32 and slow: every call copies the pages that the table has room for. Shapes alone decide what it does, so it
neither waits for a GPU nor minds being captured.
"""

from __future__ import annotations

import torch

from ..problem import DIMS

__all__ = ["decode_fp16"]

_VALUES_AT_A_TIME = 1 << 26  # gathered keys at a time: 256 MiB of fp32


def decode_fp16(
    q: torch.Tensor,
    parts: tuple[torch.Tensor, ...],
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool,
    qo_indptr: torch.Tensor | None = None,
    max_q_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode; the arguments are checked by the caller.

    Args:
        q: [total_q, H, 576], bf16 or fp16.
        parts: fp16 [num_pages, page, width], whose widths add up to 576.
        page_table: int32 [batch, max_pages]; entries past a sequence's pages may hold anything.
        kv_lens: int32 [batch], tokens.
        sm_scale, causal: as everywhere.
        qo_indptr, max_q_len: int32 [batch+1] and the most rows of a sequence; without them total_q / batch rows each.

    Returns:
        out [total_q, H, 512] in q's dtype, lse fp32 [total_q, H] (natural log, -inf for rows without keys).
    """
    total_q, heads = q.shape[:2]
    batch, width = page_table.shape
    page, dev = parts[0].shape[1], q.device
    out = q.new_zeros(total_q + 1, heads, DIMS.v_head_dim)  # the last row takes what belongs nowhere
    lse = torch.full((total_q + 1, heads), -torch.inf, device=dev)
    if total_q == 0 or batch == 0 or width == 0:
        return out[:-1], lse[:-1]
    if qo_indptr is None:
        max_q_len = total_q // batch
        qo = torch.arange(batch + 1, device=dev) * max_q_len
    else:
        assert max_q_len is not None
        qo = qo_indptr.long()
    if max_q_len == 0:
        return out[:-1], lse[:-1]
    token = torch.arange(width * page, device=dev)
    i = torch.arange(max_q_len, device=dev)
    step = max(1, _VALUES_AT_A_TIME // (width * page * DIMS.qk_head_dim))
    for lo in range(0, batch, step):
        s = slice(lo, min(lo + step, batch))
        n = kv_lens[s].long()[:, None]
        used = torch.arange(width, device=dev) * page < n
        ids = torch.where(used, page_table[s], 0).long()
        keys = torch.cat([part[ids] for part in parts], dim=-1).flatten(1, 2).float()
        # Selected, not multiplied: what lies past a sequence may be NaN.
        keys = torch.where((token < n)[..., None], keys, 0.0)
        rows = qo[:-1][s, None] + i
        q_len = (qo[1:] - qo[:-1])[s, None]
        real = i < q_len
        query = q[rows.clamp(max=total_q - 1)].float().flatten(1, 2)
        logits = (sm_scale * (query @ keys.transpose(1, 2))).view(-1, max_q_len, heads, width * page)
        bound = (n - q_len + i + 1) if causal else n.expand(-1, max_q_len)
        hidden = token >= torch.minimum(bound, n)[..., None]
        logits = logits.masked_fill(hidden[:, :, None], -torch.inf)
        total = torch.logsumexp(logits, dim=-1)
        weight = torch.exp(logits - torch.where(total == -torch.inf, 0.0, total)[..., None])
        values = weight.flatten(1, 2) @ keys[..., : DIMS.v_head_dim]
        to = torch.where(real, rows, total_q).flatten()
        out.index_copy_(0, to, values.view(-1, heads, DIMS.v_head_dim).to(q.dtype))
        lse.index_copy_(0, to, total.flatten(0, 1))
    return out[:-1], lse[:-1]
