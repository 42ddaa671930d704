"""The online softmax over a tile of transposed scores S^T [64 keys, ROWS], shared by every cache format.

Keys lie on the M side of wgmma: a thread holds two keys (8 apart) of a few rows, so the maximum over keys goes over
registers, then eight lanes, then the four warps. The denominator stays spread over the threads until the end.
Scores are in base 2 (sm_scale times log2 e); masked scores are -inf by selection, so what they were does not matter.
"""

from .gluon_names import gl, gluon

__all__ = ["cap_logits", "rescale", "row_limits"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def cap_logits(x, logit_cap):
    """logit_cap * tanh(x / logit_cap) for base-2 logits x, with tanh by one exp2; saturates without inf/inf, keeps NaN."""
    y = x * (2.0 / logit_cap)  # exp2(y * 1) with x in base 2 is e^(2 * natural logit / cap)
    return (logit_cap * LOG2E) * (1.0 - 2.0 / (gl.exp2(y) + 1.0))


@gluon.jit
def row_limits(rows, first_row, heads: gl.constexpr, q_count, kv_len, CAUSAL: gl.constexpr):
    """Keys that each row sees (bottom-right causal): row ``first_row + rows`` is query token ``row // heads``."""
    if CAUSAL:
        limit = kv_len - q_count + 1 + (first_row + rows) // heads
        limit = gl.minimum(limit, kv_len)
    else:
        limit = kv_len + 0 * rows
    return limit


@gluon.jit
def rescale(m, x):
    """New reference maximum, what to subtract from scores, and the factor for everything summed so far.

    A row that has seen nothing keeps m = -inf; its scores are then taken against 0 so that exp2(-inf - m) is 0, not NaN.
    """
    m_new = gl.maximum(m, gl.max(x, 0))
    ref = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, ref, gl.exp2(m - ref)
