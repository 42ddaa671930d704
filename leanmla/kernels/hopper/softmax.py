"""The online softmax over a tile of transposed scores S^T [64 keys, ROWS], shared by every cache format.

Keys lie on the M side of wgmma: a thread holds two keys (8 apart) of a few rows, so the maximum over keys goes over
registers, then eight lanes, then the four warps. The denominator stays spread over the threads until the end.
Scores are in base 2 (sm_scale times log2 e); masked scores are -inf by selection, so what they were does not matter.
"""

from .gluon_names import BlockedLayout, DistributedLinearLayout, constexpr_function, gl, gluon, thread_barrier
from .pages import BLOCK

__all__ = [
    "LOG2E", "NOTHING", "any_above", "log2", "pair_sums", "pairs_layout", "probabilities", "reciprocal", "row_limits", "visible_scores",
]  # fmt: skip

LOG2E = gl.constexpr(1.4426950408889634)
#: Reference of a row that has seen nothing: a finite one, so that hidden keys, at -inf, weigh nothing.
NOTHING = gl.constexpr(-3.0e38)


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


@constexpr_function
def pairs_layout(rows):
    """[32 key pairs, rows] where the scores' layout holds both keys of a pair, k and k + 8, in a thread."""
    registers = [[0, 1], *([0, 8 << k] for k in range((rows // 8).bit_length() - 1))]
    return DistributedLinearLayout(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [BLOCK // 2, rows])


@gluon.jit
def pair_sums(p, PAIRS: gl.constexpr):
    """Sums of the two keys that a thread holds of a row: half as many registers as the keys."""
    ROWS: gl.constexpr = p.shape[1]
    a, b = gl.split(gl.permute(gl.reshape(p, [BLOCK // 16, 2, 8, ROWS]), (0, 2, 3, 1)))
    return gl.convert_layout(gl.reshape(a + b, [BLOCK // 2, ROWS]), PAIRS, assert_trivial=True)


@gluon.jit
def any_above(x, LIMIT: gl.constexpr, votes):
    """Whether x exceeds LIMIT anywhere in a tile of scores' layout: not 0 for all threads, which meet here."""
    COLUMNS: gl.constexpr = x.shape[1] // 8
    ALL: gl.constexpr = BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    # [warp, key pair, lane, columns, lane, column pair]: what a thread holds, without its neighbours
    most = gl.max(gl.max(gl.max(gl.reshape(x, [4, 2, 8, COLUMNS, 4, 2]), 5), 3), 1)
    vote = gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [gl.reshape((most > LIMIT).to(gl.int32), [4, 32])], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    votes.store(gl.permute(vote, (1, 0)))
    thread_barrier()
    return gl.max(gl.reshape(votes.slice(0, 1).load(ALL), [4]), 0)
