"""The online softmax over a tile of transposed scores S^T [64 keys, ROWS], shared by every cache format.

Keys lie on the M side of wgmma: a thread holds two keys (8 apart) of a few rows, so the maximum over keys goes over
registers, then eight lanes, then the four warps. The denominator stays spread over the threads until the end.
Scores are in base 2 (sm_scale times log2 e); masked scores are -inf by selection, so what they were does not matter.
"""

from .gluon_names import gl, gluon

__all__ = ["LOG2E", "log2", "probabilities", "reciprocal", "row_limits", "visible_scores"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def log2(x):
    """log2 by one instruction, within 2^-22; 0 gives -inf. The end of a sequence runs once, so its instructions count as latency."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    """1 / x by one instruction, within one unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _cap_logits(x, logit_cap):
    """logit_cap * tanh(x / logit_cap) for base-2 logits x; saturates without inf/inf, keeps NaN.

    1 - 2 / (exp(2 r) + 1) down to |r| = 1/4, and the series below: there the difference would cancel, and under a large cap
    (1e5 and more) logits must come through unharmed. Relative error of the series 1e-7 at 1/4.
    """
    cap = gl.maximum(logit_cap, 1e-30)  # fp32 holds its reciprocal; a smaller cap gives no other output
    r = x * (1.0 / (cap * LOG2E))
    large = (cap * LOG2E) * (1.0 - 2.0 / (gl.exp2(r * (2.0 * LOG2E)) + 1.0))
    square = r * r
    series = -1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))
    return gl.where(gl.abs(r) < 0.25, x + x * (square * series), large)


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
def _rescale(m, x):
    """New reference maximum, what to subtract from scores, and the factor for everything summed so far.

    A row that has seen nothing keeps m = -inf; its scores are then taken against 0 so that exp2(-inf - m) is 0, not NaN.
    """
    m_new = gl.maximum(m, gl.max(x, 0))
    ref = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, ref, gl.exp2(m - ref)


@gluon.jit
def visible_scores(x, i, limit, shared_keys, logit_cap, S: gl.constexpr, HAS_CAP: gl.constexpr):
    """Base-2 scores of tile i, capped, and -inf where a row does not see the key (see :func:`probabilities`)."""
    if HAS_CAP:
        x = _cap_logits(x, logit_cap)
    if i * x.shape[0] + x.shape[0] > shared_keys:
        key = i * x.shape[0] + gl.arange(0, x.shape[0], gl.SliceLayout(1, S))
        x = gl.where(key[:, None] < limit[None, :], x, float("-inf"))
    return x


@gluon.jit
def probabilities(x, m, den, i, limit, shared_keys, logit_cap, S: gl.constexpr, HAS_CAP: gl.constexpr, P_SHIFT: gl.constexpr):
    """One step of the online softmax for the tile of keys 64 i .. 64 i + 63.

    Args: base-2 scores ``x``, running maximum ``m``, denominator ``den`` [64, ROWS] still spread over threads; row r sees keys
    below limit[r] and all rows see those below ``shared_keys``.
    Returns 2^P_SHIFT exp2(x - max), the new m and den (which is scaled alike), and the factor for what was summed before.
    """
    x = visible_scores(x, i, limit, shared_keys, logit_cap, S, HAS_CAP)
    m, ref, alpha = _rescale(m, x)
    p = gl.exp2(x - (ref - P_SHIFT)[None, :])
    return p, m, den * alpha[None, :] + p, alpha
