"""The contest's ``task`` module: the types of a submission's input and output.

``data = (q, kv_data, qo_indptr, kv_indptr, config)``:

* ``q`` bf16 [batch * q_len, num_heads, 576];
* ``kv_data`` the same cache three times: ``"bf16"`` bf16 [total_kv, 1, 576]; ``"fp8"`` (e4m3fn [total_kv, 1, 576], fp32 [1]);
  ``"mxfp4"`` (fp4x2 [total_kv, 1, 288], e8m0 [>= total_kv, >= 18]);
* ``qo_indptr``, ``kv_indptr`` int32 [batch + 1], in rows and tokens;
* ``config`` batch_size, num_heads, num_kv_heads, qk_head_dim, kv_lora_rank, qk_rope_head_dim, v_head_dim, q_seq_len,
  kv_seq_len, sm_scale.

The output is bf16 [batch * q_len, num_heads, 512].
"""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar

import torch

__all__ = ["TestSpec", "input_t", "output_t"]

input_t = TypeVar("input_t", bound=tuple[torch.Tensor, dict[str, Any], torch.Tensor, torch.Tensor, dict[str, Any]])
output_t = TypeVar("output_t", bound=torch.Tensor)


class TestSpec(TypedDict, total=False):
    """A case: the arguments of ``generate_input``."""

    batchsize: int
    qseqlen: int
    kvseqlen: int
    seed: int
    num_heads: int


TestSpec.__test__ = False  # type: ignore[attr-defined]  # not a test class, whatever its name suggests to pytest
