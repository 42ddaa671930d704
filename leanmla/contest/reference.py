"""The contest's ``reference`` module: inputs, the reference answer (fp8 query x fp8 cache), and the check.

The reference is plain fp32 PyTorch over the dequantised fp8 values and calls none of our kernels, so that it can judge them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat.aiter.utility.fp4_utils import dynamic_mxfp4_quant
from ..formats.fp8 import FP8
from ..problem import DIMS
from . import utils

__all__ = ["ATOL", "RTOL", "SM_SCALE", "check_implementation", "generate_input", "quantize_fp8", "quantize_mxfp4", "ref_kernel"]

NUM_HEADS = 16
NUM_KV_HEADS = 1
KV_LORA_RANK = DIMS.kv_lora_rank
QK_ROPE_HEAD_DIM = DIMS.qk_rope_head_dim
QK_HEAD_DIM = DIMS.qk_head_dim
V_HEAD_DIM = DIMS.v_head_dim
SM_SCALE = QK_HEAD_DIM**-0.5
RTOL = ATOL = 0.1

#: Where generate_input puts things when it is not told: None means a GPU if there is one.
DEVICE: str | None = None

_ROWS_AT_A_TIME = 1 << 16  # quantised at a time: ~150 MB of fp32 temporaries, however large the cache
_VALUES_AT_A_TIME = 1 << 26  # dequantised at a time by the reference: 256 MiB of fp32


def quantize_fp8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3fn values and one fp32 scale [1]: value = fp8 * scale, scale = amax / 448.

    Args:
        tensor: [..., n] of any float dtype.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    amax = torch.zeros((), device=tensor.device)
    for lo in range(0, rows.shape[0], _ROWS_AT_A_TIME):
        amax = torch.maximum(amax, rows[lo : lo + _ROWS_AT_A_TIME].abs().amax().float())
    scale = FP8.scale_of(amax.reshape(1))
    out = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=tensor.device)
    for lo in range(0, rows.shape[0], _ROWS_AT_A_TIME):
        out[lo : lo + _ROWS_AT_A_TIME] = (rows[lo : lo + _ROWS_AT_A_TIME].float() / scale).clamp(-448.0, 448.0)
    return out.view(tensor.shape), scale


def quantize_mxfp4(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp4x2 [b, m, n/2] and e8m0 scales [b*m, n/32] of a [b, m, n] tensor."""
    b, m, n = tensor.shape
    data, scale = dynamic_mxfp4_quant(tensor.reshape(b * m, n))
    return data.view(b, m, n // 2), scale


def generate_input(
    batchsize: int, qseqlen: int, kvseqlen: int, seed: int, num_heads: int = NUM_HEADS, device: str | torch.device | None = None
) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Inputs of one case: standard normal q, then kv, from one seeded generator on the device; then three caches of that kv.

    Args:
        batchsize, qseqlen, kvseqlen: sequences, query rows and keys of each.
        seed: of the generator. Numbers differ between kinds of device, as generators do.
        num_heads: query heads.
        device: where; None: :data:`DEVICE`, or a GPU if there is one.

    Returns:
        ``data`` as :mod:`leanmla.contest.task` describes it.
    """
    dev = torch.device(device or DEVICE or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator = torch.Generator(device=dev)
    generator.manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=dev, generator=generator)

    q = normal(batchsize * qseqlen, num_heads, QK_HEAD_DIM)
    kv = normal(batchsize * kvseqlen, NUM_KV_HEADS, QK_HEAD_DIM)
    kv_data = {"bf16": kv, "fp8": quantize_fp8(kv), "mxfp4": quantize_mxfp4(kv)}
    steps = torch.arange(batchsize + 1, dtype=torch.int32, device=dev)
    config = {
        "batch_size": batchsize,
        "num_heads": num_heads,
        "num_kv_heads": NUM_KV_HEADS,
        "qk_head_dim": QK_HEAD_DIM,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "q_seq_len": qseqlen,
        "kv_seq_len": kvseqlen,
        "sm_scale": SM_SCALE,
    }
    return q, kv_data, steps * qseqlen, steps * kvseqlen, config


def ref_kernel(data: Any) -> torch.Tensor:
    """The reference answer: q quantised to fp8 with one scale, the fp8 cache, everything after that in fp32.

    Args:
        data: see :mod:`leanmla.contest.task`. With several query rows a sequence the mask is bottom-right causal.

    Returns:
        bf16 [batch * q_len, num_heads, 512].
    """
    q, kv_data, _, _, config = data
    q8, q_scale = quantize_fp8(q)
    kv8, kv_scale = kv_data["fp8"]
    batch, q_len, kv_len, heads = (config[k] for k in ("batch_size", "q_seq_len", "kv_seq_len", "num_heads"))
    query = (q8.float() * q_scale).view(batch, q_len * heads, QK_HEAD_DIM)
    keys = kv8.view(batch, kv_len, QK_HEAD_DIM)
    hidden = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).triu(kv_len - q_len + 1)
    hidden = hidden.repeat_interleave(heads, dim=0)
    out = torch.empty(batch, q_len * heads, V_HEAD_DIM, dtype=torch.bfloat16, device=q.device)
    step = max(1, _VALUES_AT_A_TIME // (kv_len * QK_HEAD_DIM))
    for lo in range(0, batch, step):
        k = keys[lo : lo + step].float()
        logits = config["sm_scale"] * kv_scale * (query[lo : lo + step] @ k.transpose(1, 2))
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)
        out[lo : lo + step] = kv_scale * (weights.nan_to_num() @ k[..., :V_HEAD_DIM])  # a row without keys: weights 0/0, out 0
    return out.view(batch * q_len, heads, V_HEAD_DIM)


def check_implementation(data: Any, output: object) -> tuple[bool, str]:
    """Whether ``output`` is accepted for ``data``: (True, ""), or (False, one sentence).

    |output - reference| <= 0.1 + 0.1 * |reference|, except for at most 5 % of the elements; shape, dtype and device must be the
    reference's, and there may be no NaN.
    """
    return utils.compare(output, ref_kernel(data), rtol=RTOL, atol=ATOL)
