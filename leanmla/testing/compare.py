"""Compare a result with the fp64 definition: every element of out and lse, and the worst position in words.

The bound for an element is twice the error that the same computation makes in PyTorch at a kernel's precision (16-bit
query, keys and probabilities, fp32 accumulation) anywhere in its row, plus a rounding floor of the output dtype. Probabilities are
taken against four references within an octave above the row's largest logit, and the largest error counts: how a weight is rounded depends on
the reference, and against the largest logit itself the heaviest key weighs exactly 1 and is not rounded at all, which is luck, not precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..problem import DIMS
from ..reference import mla_decode_reference, query_rows
from .inputs import DecodeInputs

__all__ = ["Report", "compare", "relative_error", "torch_at_kernel_precision"]

#: How far, in octaves, references of the probabilities lie above the row's largest logit.
REFERENCES = (0.0, 0.25, 0.5, 0.75)
LSE_FLOOR = 2e-4  #: absolute, plus 1e-6 of |lse|: fp32 sums of exact products


@dataclass(frozen=True)
class Report:
    """How far a result is from the definition."""

    ok: bool
    relative_error: float  #: L2 over the whole out
    worst_ratio: float  #: largest error over its bound; ok means <= 1
    max_lse_error: float
    message: str  #: where and what, if not ok

    def __bool__(self) -> bool:
        return self.ok


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in fp64; 0 if both are zero; NaN stays NaN."""
    difference = (got.double() - want.double()).norm()
    size = want.double().norm()
    return float(difference / size) if size > 0 else float(difference)


def torch_at_kernel_precision(inputs: DecodeInputs) -> torch.Tensor:
    """The operator in plain PyTorch with 16-bit keys and probabilities and fp32 accumulation, against each of :data:`REFERENCES`.

    Returns:
        fp32 [references, total_q, H, 512]. Sums are divided by that of the rounded probabilities, as kernels with a lagging reference
        do, but with the first reference by the exact one.
    """
    q, case = inputs.q, inputs.case
    cache = inputs.cache.as_tokens() if inputs.table.kind == "contiguous" else inputs.cache
    out = torch.zeros(len(REFERENCES), *q.shape[:2], DIMS.v_head_dim, dtype=torch.float32, device=q.device)
    above = torch.tensor(REFERENCES, device=q.device).mul(math.log(2)).view(-1, 1, 1)
    for b, (first, end) in enumerate(query_rows(q.shape[0], inputs.table.batch, inputs.qo_indptr)):
        keys = cache.gather(inputs.table.slots(b)).to(torch.bfloat16).float()
        n, q_len = keys.shape[0], end - first
        for i in range(q_len):
            visible = max(0, n - q_len + i + 1) if case.causal else n
            if visible:
                logits = q[first + i].float() @ keys[:visible].T * case.sm_scale
                if case.logit_cap > 0:
                    logits = case.logit_cap * torch.tanh(logits / case.logit_cap)
                p = torch.exp(logits - logits.amax(-1, keepdim=True) - above)
                rounded = p.to(torch.bfloat16).float()
                total = rounded.sum(-1, keepdim=True)
                total[0] = p[0].sum(-1, keepdim=True)
                out[:, first + i] = rounded @ keys[:visible, : DIMS.v_head_dim] / total
    return out


def compare(
    inputs: DecodeInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_relative_error: float = 3e-3,
) -> Report:
    """Check ``out`` (and ``lse``) of a call on ``inputs``.

    Args:
        reference: (out, lse) of the definition, if already at hand.
        max_relative_error: bound on the L2 error of the whole output, besides the bound on every element.
    """
    want, want_lse = reference or mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    problems = []
    if out.shape != want.shape:
        return Report(
            False, float("nan"), float("inf"), float("nan"), f"out has shape {list(out.shape)}, expected {list(want.shape)}"
        )
    if not out.numel():
        return Report(True, 0.0, 0.0, 0.0, "")

    error = (out.double() - want).abs()
    unit = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11
    spread = torch.zeros(*out.shape[:2], 1, dtype=torch.float64, device=out.device)
    for rough in torch_at_kernel_precision(inputs):
        spread = torch.maximum(spread, (rough.double() - want).abs().amax(-1, keepdim=True))
    scale = want.abs().amax(-1, keepdim=True)
    bound = 2 * spread + unit * want.abs() + 2.0**-9 * 0.25 * scale
    ratio = torch.where(error == 0, 0.0, error / bound)
    ratio = torch.where(torch.isnan(error) & ~torch.isnan(want), torch.inf, ratio)
    ratio = torch.where(torch.isnan(want), torch.where(torch.isnan(out), 0.0, torch.inf), ratio)
    worst = int(ratio.argmax())
    worst_ratio = float(ratio.flatten()[worst])
    total = relative_error(torch.nan_to_num(out.float()), torch.nan_to_num(want))
    if worst_ratio > 1:
        row, head, d = torch.unravel_index(torch.tensor(worst), out.shape)
        problems.append(
            f"out[{int(row)}, {int(head)}, {int(d)}] = {float(out.flatten()[worst]):.6g}, expected {float(want.flatten()[worst]):.6g} "
            f"({worst_ratio:.3g} times the bound {float(bound.expand_as(want).flatten()[worst]):.2g})"
        )
    if total > max_relative_error:
        problems.append(f"relative L2 error {total:.2e} > {max_relative_error:.1e}")

    max_lse_error = 0.0
    if lse is not None:
        empty = want_lse == -torch.inf
        lse_error = torch.where(empty, torch.where(lse == -torch.inf, 0.0, torch.inf), (lse.double() - want_lse).abs())
        both_nan = torch.isnan(want_lse) & torch.isnan(lse)
        lse_error = torch.where(both_nan, 0.0, torch.nan_to_num(lse_error, nan=torch.inf))
        lse_bound = LSE_FLOOR + 1e-6 * want_lse.abs().nan_to_num(posinf=0.0)
        max_lse_error = float(lse_error.max())
        if bool((lse_error > lse_bound).any()):
            at = int((lse_error - lse_bound).argmax())
            lse_row, lse_head = divmod(at, lse.shape[1])
            problems.append(
                f"lse[{lse_row}, {lse_head}] = {float(lse.flatten()[at]):.7g}, expected {float(want_lse.flatten()[at]):.7g}"
            )
    return Report(not problems, total, worst_ratio, max_lse_error, "; ".join(problems))
