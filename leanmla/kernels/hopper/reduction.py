"""Merging the partial results of one sequence, inside the launch that made them.

Every block of a sequence stores its partial result and adds itself to the sequence's counter. Two ways on from there:

* together: blocks that have nothing else to do wait until all have arrived, then each merges its share of the values.
  Fastest (all shares at once), but a waiting block needs the others to be running;
* the last to arrive merges everything. Always safe.

The counter says which. Its low half counts arrivals, its high half the blocks that do not wait: those with more work to do
(the schedule says how many, so everybody knows) and those whose patience ran out (a block on another stream may hold the
place that a partner needs). A block leaves by compare-and-swap, hence never after the last arrival, so the final value is the
same for whoever reads it: as the schedule expects means "together", anything else that the last arriver works alone. Partial
results are merged in an order that depends on the number of splits alone, so repeats agree bit for bit.

Counters come in two sets. A launch uses the one that word 0 names and zeroes the other, which the launch before it used; the
last block to pass :func:`turn_over` names the other set for the next launch. Nothing of this is on the way to the output.

A partial result is [512, ROWS] with its columns reordered, so that the four values that a thread of the wgmma accumulator
holds of one d lie side by side and a warp stores 16 bytes a lane, 64 bytes a d:

    column c of 16    = 4 q + 2 j + e      q = lane % 4, e = register bit 0, j = register bit of the next 8 rows
    row of the tile   = 8 j + 2 q + e

Its log-sum-exp is in columns order too, so that a thread that merges four columns loads their weights in one piece and the
splits' weights never leave it: no shuffles and no barriers.
"""

from .gluon_names import BlockedLayout, DistributedLinearLayout, SliceLayout, constexpr_function, gl, gluon, thread_barrier
from .launch import FAR_SPLITS
from .softmax import log2, reciprocal

__all__ = ["HEADER", "column_of", "counter_of", "meet", "store_columns", "turn_over"]

#: Words before the two sets of counters: which set is in use, blocks that have read it (one word a set), unused.
HEADER = gl.constexpr(4)
#: Reads of the counter before a block stops waiting: about 50 us.
_PATIENCE = gl.constexpr(64)
_LEFT = gl.constexpr(65536)
#: Splits beyond which a merge is shared out finer, in kernels compiled for it (``HopperLaunch.many_splits``).
FAR = gl.constexpr(FAR_SPLITS)


@gluon.jit
def counter_of(counter_ptr, counters, turn, group):
    """The counter of a group (a sequence's row tile) in the set that this launch uses."""
    return counter_ptr + HEADER + turn * counters + group


@gluon.jit
def turn_over(counter_ptr, counters, turn):
    """Once a block, by one warp, after ``turn`` (word 0) was read: prepares the next launch's counters."""
    lane = gl.arange(0, 32, BlockedLayout([1], [32], [gl.num_warps()], [0]))
    other = counter_ptr + HEADER + (1 - turn) * counters
    for at in range(gl.program_id(0) * 32, counters, gl.num_programs(0) * 32):
        gl.store(other + at + lane, gl.zeros_like(lane), mask=at + lane < counters)
    passed = gl.atomic_add(counter_ptr + 1 + turn, 1, sem="acq_rel", scope="gpu")
    if passed == gl.num_programs(0) - 1:
        gl.store(counter_ptr + 1 + turn, 0)
        gl.store(counter_ptr, 1 - turn)


@constexpr_function
def _columns_layout(m, rows, warps):
    """The accumulator's distribution of [m d, rows columns] with its registers in an order that stores four at a time."""
    warp_bits = warps.bit_length() - 1
    d = [[1 << k, 0] for k in range(m.bit_length() - 1)]
    registers = [[0, 1], [0, 2], *([0, 16 << k] for k in range((rows // 16).bit_length() - 1)), d[3], *d[4 + warp_bits :]]
    return DistributedLinearLayout(registers, [[0, 4], [0, 8], d[0], d[1], d[2]], d[4 : 4 + warp_bits], [], [m, rows])


@gluon.jit
def store_columns(part_ptr, acc, d, M: gl.constexpr, ROWS: gl.constexpr):
    """Store acc [M, ROWS] (wgmma accumulator layout) to columns order at rows ``d`` of a partial result: part_ptr + d * ROWS."""
    L: gl.constexpr = _columns_layout(M, ROWS, gl.num_warps())
    x = gl.permute(gl.reshape(acc, [M, ROWS // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    x = gl.convert_layout(gl.reshape(x, [M, ROWS]), L)  # renames registers
    at = gl.convert_layout(d, SliceLayout(1, L)) * ROWS
    gl.store(part_ptr + (at[:, None] + gl.arange(0, ROWS, SliceLayout(0, L))[None, :]), x)


@gluon.jit
def _arrive(counter_ptr, splits, stay, waits):
    """Count this block in, and wait if it may. Returns its role: 0 nothing to do, 1 merge a share, 2 merge all.

    ``waits`` is 1 if this block may wait and 0 if it has more work to do; ``stay`` blocks of the sequence may, 0 if none.
    """
    # Every thread's partial result is visible to the whole GPU before one thread publishes it.
    gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    thread_barrier()
    step = 1 + (1 - waits) * _LEFT
    expected = splits + (splits - stay) * _LEFT
    value = gl.atomic_add(counter_ptr, step, sem="acq_rel", scope="gpu") + step
    role = 0
    if (value & (_LEFT - 1)) == splits:
        if (value != expected) | (stay == 0):
            role = 2
        elif waits == 1:
            role = 1
    elif waits == 1:
        tries = 0
        while ((value & (_LEFT - 1)) < splits) & (tries < _PATIENCE):
            value = gl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
            tries += 1
        left = 0
        while ((value & (_LEFT - 1)) < splits) & (left == 0):
            seen = gl.atomic_cas(counter_ptr, value, value + _LEFT, sem="acq_rel", scope="gpu")
            if seen == value:
                left = 1
            value = seen
        if (left == 0) & (value == expected):
            role = 1
    return role


@gluon.jit
def _row_of(c):
    """Row of the tile that column ``c`` of a partial result holds."""
    return c // 16 * 16 + (c // 2) % 2 * 8 + (c // 4) % 4 * 2 + c % 2


@gluon.jit
def column_of(r):
    """Column of a partial result that holds row ``r`` of the tile."""
    return r // 16 * 16 + (r // 2) % 4 * 4 + (r // 8) % 2 * 2 + r % 2


@gluon.jit
def _slot_of(s, first_slot, next_slot, slot_step):
    return gl.where(s == 0, first_slot, next_slot + (s - 1) * slot_step).to(gl.int64)


@gluon.jit
def _load_splits(part_out_ptr, at, splits, first_slot, next_slot, slot_step, d0, ROWS: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr,
                 L: gl.constexpr):  # fmt: skip
    """[GROUP splits, WIDTH d, ROWS columns] of partial results from split ``at`` and d0 on; zeros past the last split."""
    s = at + gl.arange(0, GROUP, SliceLayout(1, SliceLayout(2, L)))
    d = gl.arange(0, WIDTH, SliceLayout(0, SliceLayout(2, L)))
    c = gl.arange(0, ROWS, SliceLayout(0, SliceLayout(1, L)))
    base = part_out_ptr + _slot_of(s, first_slot, next_slot, slot_step) * (512 * ROWS) + d0 * ROWS
    ptr = gl.expand_dims(gl.expand_dims(base, 1), 2) + (gl.expand_dims(gl.expand_dims(d * ROWS, 0), 2) + gl.expand_dims(gl.expand_dims(c, 0), 1))
    # .cg: other multiprocessors wrote these
    return gl.load(ptr, mask=gl.expand_dims(gl.expand_dims(s < splits, 1), 2), other=0.0, cache_modifier=".cg")


@gluon.jit
def _merge(
    part_out_ptr,  # fp32 [slots, 512, ROWS columns], each divided by its own denominator
    part_lse_ptr,  # fp32 [slots, ROWS columns], base 2, -inf for a split without keys
    out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    first_slot, next_slot, slot_step, splits, d0, rows, first_token, first_row, HEADS: gl.constexpr,
    ROWS: gl.constexpr, WRITE_LSE: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Merge d0 : d0 + WIDTH of all rows, GROUP splits at a time. Split 0 is in first_slot, split s in next_slot + (s-1)*slot_step."""
    # A lane has four columns of all splits of a group, a warp 128 / ROWS d at a time.
    L: gl.constexpr = BlockedLayout([1, 1, 4], [1, 128 // ROWS, ROWS // 4], [1, gl.num_warps(), 1], [2, 1, 0])
    LO: gl.constexpr = SliceLayout(0, L)  # [WIDTH, ROWS]
    LW: gl.constexpr = SliceLayout(1, L)  # [GROUP, ROWS]
    C: gl.constexpr = SliceLayout(0, LW)
    c = gl.arange(0, ROWS, C)
    m = gl.full([ROWS], float("-inf"), gl.float32, C)
    den = gl.zeros([ROWS], gl.float32, C)
    acc = gl.zeros([WIDTH, ROWS], gl.float32, LO)
    for at in range(0, splits, GROUP):
        s = at + gl.arange(0, GROUP, SliceLayout(1, LW))
        ptr = part_lse_ptr + (_slot_of(s, first_slot, next_slot, slot_step) * ROWS)[:, None] + c[None, :]
        lse = gl.load(ptr, mask=(s < splits)[:, None], other=float("-inf"), cache_modifier=".cg")
        x = _load_splits(part_out_ptr, at, splits, first_slot, next_slot, slot_step, d0, ROWS, WIDTH, GROUP, L)
        m_new = gl.maximum(m, gl.max(lse, 0))
        ref = gl.where(m_new == float("-inf"), 0.0, m_new)
        old = gl.exp2(m - ref)
        weight = gl.exp2(lse - ref[None, :])
        den = den * old + gl.sum(weight, 0)
        m = m_new
        # a split without keys has weight 0 and left zeros
        acc = acc * gl.convert_layout(old, SliceLayout(0, LO))[None, :] + gl.sum(gl.expand_dims(weight, 1) * x, 0)
    empty = den == 0.0
    inv = gl.where(empty, 0.0, reciprocal(den))
    acc = acc * gl.convert_layout(inv, SliceLayout(0, LO))[None, :]
    co = _row_of(gl.arange(0, ROWS, SliceLayout(0, LO)))
    do = d0 + gl.arange(0, WIDTH, SliceLayout(1, LO))
    token = (first_token + (first_row + co) // HEADS).to(gl.int64)
    row_ptr = out_ptr + token * out_stride_token + (first_row + co) % HEADS * out_stride_head
    gl.store(row_ptr[None, :] + do[:, None], acc.to(out_ptr.dtype.element_ty), mask=(co < rows)[None, :])
    if WRITE_LSE and d0 == 0:
        r = _row_of(c)
        lse_out = gl.where(empty, float("-inf"), (m + log2(den)) * 0.6931471805599453)
        token_w = (first_token + (first_row + r) // HEADS).to(gl.int64)
        gl.store(lse_ptr + token_w * lse_stride + (first_row + r) % HEADS, lse_out, mask=r < rows)


@constexpr_function
def _streams_layout(group, width, rows, warps):
    """[streams, group splits, width d, rows columns]: a stream is a warp's half, a lane has four columns of all splits of a group."""
    in_thread = [[0, 1 << k, 0, 0] for k in range(group.bit_length() - 1)]
    columns = [[0, 0, 0, 4 << k] for k in range((rows // 4).bit_length() - 1)]
    d = [[0, 0, 1 << k, 0] for k in range(width.bit_length() - 1)]
    warp_bits = [[2 << k, 0, 0, 0] for k in range(warps.bit_length() - 1)]
    return DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], *in_thread], [*columns, *d, [1, 0, 0, 0]], warp_bits, [], [2 * warps, group, width, rows]
    )


@gluon.jit
def _merge_many(
    part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    first_slot, next_slot, slot_step, splits, d0, rows, first_token, first_row, HEADS: gl.constexpr,
    ROWS: gl.constexpr, WRITE_LSE: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Like :func:`_merge` for so many splits that reading one group after the other takes longest: each half of a warp merges every
    so-many-th group on its own, and only their results are put together, once.
    """
    STREAMS: gl.constexpr = 2 * gl.num_warps()
    L: gl.constexpr = _streams_layout(GROUP, WIDTH, ROWS, gl.num_warps())
    LA: gl.constexpr = SliceLayout(1, L)  # [STREAMS, WIDTH, ROWS]
    LW: gl.constexpr = SliceLayout(2, L)  # [STREAMS, GROUP, ROWS]
    LM: gl.constexpr = SliceLayout(1, LW)  # [STREAMS, ROWS]
    LO: gl.constexpr = SliceLayout(0, LA)  # [WIDTH, ROWS]
    C: gl.constexpr = SliceLayout(0, LM)
    S: gl.constexpr = SliceLayout(2, LW)  # [STREAMS, GROUP]
    c = gl.arange(0, ROWS, C)
    d = gl.arange(0, WIDTH, SliceLayout(0, SliceLayout(0, SliceLayout(3, L))))
    c3 = gl.arange(0, ROWS, SliceLayout(0, SliceLayout(0, SliceLayout(2, L))))
    inside = gl.expand_dims(gl.expand_dims(gl.expand_dims(d0 * ROWS + d * ROWS, 0), 0), 3) + gl.expand_dims(
        gl.expand_dims(gl.expand_dims(c3, 0), 0), 2
    )
    stream = gl.arange(0, STREAMS, SliceLayout(1, S))[:, None] * GROUP + gl.arange(0, GROUP, SliceLayout(0, S))[None, :]
    m = gl.full([STREAMS, ROWS], float("-inf"), gl.float32, LM)
    den = gl.zeros([STREAMS, ROWS], gl.float32, LM)
    acc = gl.zeros([STREAMS, WIDTH, ROWS], gl.float32, LA)
    for at in range(0, splits, STREAMS * GROUP):
        s = at + stream
        slot = _slot_of(s, first_slot, next_slot, slot_step)
        ok = s < splits
        # .cg: other multiprocessors wrote these
        lse = gl.load(
            part_lse_ptr + (gl.expand_dims(slot * ROWS, 2) + gl.expand_dims(gl.expand_dims(c, 0), 1)),
            mask=gl.expand_dims(ok, 2), other=float("-inf"), cache_modifier=".cg",
        )  # fmt: skip
        base = gl.convert_layout(slot, SliceLayout(2, SliceLayout(3, L)), assert_trivial=True) * (512 * ROWS)
        ok = gl.convert_layout(ok, SliceLayout(2, SliceLayout(3, L)), assert_trivial=True)
        x = gl.load(
            part_out_ptr + (gl.expand_dims(gl.expand_dims(base, 2), 3) + inside),
            mask=gl.expand_dims(gl.expand_dims(ok, 2), 3), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        m_new = gl.maximum(m, gl.max(lse, 1))
        ref = gl.where(m_new == float("-inf"), 0.0, m_new)
        old = gl.exp2(m - ref)
        weight = gl.exp2(lse - gl.expand_dims(ref, 1))
        den = den * old + gl.sum(weight, 1)
        m = m_new
        old = gl.convert_layout(old, SliceLayout(1, LA), assert_trivial=True)
        acc = acc * gl.expand_dims(old, 1) + gl.sum(gl.expand_dims(weight, 2) * x, 1)
    top = gl.max(m, 0)
    ref = gl.where(top == float("-inf"), 0.0, top)
    share = gl.exp2(m - ref[None, :])
    total = gl.sum(den * share, 0)
    empty = total == 0.0
    share = share * gl.where(empty, 0.0, reciprocal(total))[None, :]
    share = gl.convert_layout(share, SliceLayout(1, LA), assert_trivial=True)
    merged = gl.sum(acc * gl.expand_dims(share, 1), 0)
    co = _row_of(gl.arange(0, ROWS, SliceLayout(0, LO)))
    do = d0 + gl.arange(0, WIDTH, SliceLayout(1, LO))
    token = (first_token + (first_row + co) // HEADS).to(gl.int64)
    row_ptr = out_ptr + token * out_stride_token + (first_row + co) % HEADS * out_stride_head
    gl.store(row_ptr[None, :] + do[:, None], merged.to(out_ptr.dtype.element_ty), mask=(co < rows)[None, :])
    if WRITE_LSE and d0 == 0:
        r = _row_of(c)
        lse_out = gl.where(empty, float("-inf"), (top + log2(total)) * 0.6931471805599453)
        token_w = (first_token + (first_row + r) // HEADS).to(gl.int64)
        gl.store(lse_ptr + token_w * lse_stride + (first_row + r) % HEADS, lse_out, mask=r < rows)


@gluon.jit
def meet(
    counter_ptr,  # int32 [1], this sequence's and row tile's
    waits,  # 1 if this block may wait for the others
    part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    first_slot, next_slot, slot_step, splits, rank, stay, rows, first_token, first_row, HEADS: gl.constexpr,
    ROWS: gl.constexpr, WRITE_LSE: gl.constexpr, MANY_SPLITS: gl.constexpr,
):  # fmt: skip
    """Called by every block of a sequence once its partial result is stored; the output is complete when all have returned.

    Up to four splits: wide shares, all splits at once; more: narrow shares, MANY splits at a time; more than FAR, with
    MANY_SPLITS: shares of four d, so that up to 128 blocks have one, and 128 splits at a time. The choice depends on the number of splits
    alone, because it decides in which order they are added.
    """
    UNIT: gl.constexpr = 128 * gl.num_warps() // ROWS  # d whose values give a thread four of them
    MANY: gl.constexpr = 16
    role = _arrive(counter_ptr, splits, stay, waits)
    if role != 0:
        begin = 0
        step = 1
        if role == 1:
            begin = rank
            step = stay
        if splits <= 4:
            for d0 in range(begin * (4 * UNIT), 512, step * (4 * UNIT)):
                _merge(part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                       first_slot, next_slot, slot_step, splits, d0, rows, first_token, first_row, HEADS, ROWS, WRITE_LSE, 4 * UNIT, 4)  # fmt: skip
        elif MANY_SPLITS and splits > FAR:
            for d0 in range(begin * 4, 512, step * 4):
                _merge_many(part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                            first_slot, next_slot, slot_step, splits, d0, rows, first_token, first_row, HEADS, ROWS, WRITE_LSE, 4, MANY)  # fmt: skip
        else:
            for d0 in range(begin * UNIT, 512, step * UNIT):
                _merge(part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                       first_slot, next_slot, slot_step, splits, d0, rows, first_token, first_row, HEADS, ROWS, WRITE_LSE, UNIT, MANY)  # fmt: skip
