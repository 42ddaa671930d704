"""The operator, defined: MLA decode attention in fp64, one query row at a time.

Everything else in this package is an implementation of this file. It is written to be read, not to be fast.
"""

from __future__ import annotations

import itertools

import torch

from .cache import LatentCache
from .page_table import PageTable
from .problem import DIMS

__all__ = ["mla_decode_reference", "query_rows"]


def query_rows(total_q: int, batch: int, qo_indptr: torch.Tensor | None) -> list[tuple[int, int]]:
    """(first row, end row) of each sequence's query rows; uniform when there is no ``qo_indptr``."""
    if qo_indptr is None:
        q_len = total_q // batch if batch else 0
        return [(b * q_len, (b + 1) * q_len) for b in range(batch)]
    offsets = qo_indptr.tolist()
    return list(itertools.pairwise(offsets))


def mla_decode_reference(
    q: torch.Tensor,
    cache: LatentCache,
    table: PageTable,
    *,
    sm_scale: float,
    qo_indptr: torch.Tensor | None = None,
    causal: bool = True,
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA decode in fp64 over the dequantised cache (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    Args:
        q: [total_q, num_heads, 576], any float dtype.
        cache, table: keys and where each sequence's lie.
        sm_scale: factor on the logits.
        qo_indptr: int32 [batch+1] query row offsets, or None for total_q // batch rows a sequence.
        causal: row i of q_len sees keys j <= kv_len - q_len + i; otherwise every row sees all keys.
        logit_cap: above 0, logits become cap * tanh(logits / cap).

    Returns:
        out fp64 [total_q, num_heads, 512] and lse fp64 [total_q, num_heads] (natural log). A row that sees no key has
        out 0 and lse -inf.
    """
    if table.kind == "contiguous":
        cache = cache.as_tokens()
    out = torch.zeros(*q.shape[:2], DIMS.v_head_dim, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for b, (first, end) in enumerate(query_rows(q.shape[0], table.batch, qo_indptr)):
        keys = cache.gather(table.slots(b), torch.float64)  # [kv_len, 576]
        kv_len, q_len = keys.shape[0], end - first
        for i in range(q_len):
            visible = max(0, kv_len - q_len + i + 1) if causal else kv_len
            if visible == 0:
                continue
            k = keys[:visible]
            v = k[:, : DIMS.v_head_dim]
            logits = sm_scale * (q[first + i].double() @ k.T)  # [num_heads, visible]
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            lse[first + i] = torch.logsumexp(logits, dim=-1)
            out[first + i] = torch.softmax(logits, dim=-1) @ v
    return out, lse
