"""Merging the partial results of one sequence, inside the launch that made them.

Every block of a sequence stores its partial result and adds itself to the sequence's counter. Two ways on from there:

* together: blocks that have nothing else to do wait until all have arrived, then each merges its share of the rows.
  Fastest (all shares at once), but a waiting block needs the others to be running;
* the last to arrive merges everything. Always safe.

The counter says which. Its low half counts arrivals, its high half the blocks that do not wait: those with more work to do
(the schedule says how many, so everybody knows) and those whose patience ran out (a block on another stream may hold the
place that a partner needs). A block leaves by compare-and-swap, hence never after the last arrival, so the final value is the
same for whoever reads it: as the schedule expects means "together", anything else that the last arriver works alone. The last
block to be done with a counter puts it back to 0 for the next launch. Partial results are merged in an order that depends on
the number of splits alone, so repeats agree bit for bit.
"""

from .gluon_names import BlockedLayout, SliceLayout, gl, gluon, thread_barrier

__all__ = ["meet"]

#: Reads of the counter before a block stops waiting: about 50 us.
_PATIENCE = gl.constexpr(64)
_LEFT = gl.constexpr(65536)


@gluon.jit
def _arrive(counter_ptr, splits, stay, waits):
    """Count this block in, and wait if it may. Returns (role, final): role 0 nothing to do, 1 merge a share, 2 merge all.

    ``waits`` is 1 if this block may wait and 0 if it has more work to do; ``stay`` blocks of the sequence may, 0 if none.
    """
    thread_barrier()  # every thread's partial result is stored before one thread publishes it
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
        if left == 1:
            value = 0
        elif value == expected:
            role = 1
    return role, value


@gluon.jit
def _release(counter_ptr, splits, waits, role, value):
    """Done with the counter; the last block that is puts it back to 0. ``counter_ptr[1]`` counts the blocks that waited."""
    if value != 0:
        waiting = splits - value // _LEFT
        if waits == 1:
            done = gl.atomic_add(counter_ptr + 1, 1, sem="acq_rel", scope="gpu")
            if done == waiting - 1:
                gl.atomic_xchg(counter_ptr + 1, 0, sem="relaxed", scope="gpu")
                gl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
        elif (role == 2) & (waiting == 0):
            gl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")


@gluon.jit
def _merge(
    part_out_ptr,  # fp32 [slots, ROWS, 512], each divided by its own denominator
    part_lse_ptr,  # fp32 [slots, ROWS], base 2, -inf for a split without keys
    out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    first_slot, next_slot, slot_step, splits, row, rows, first_token, first_row, HEADS: gl.constexpr,
    ROWS: gl.constexpr, WRITE_LSE: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, VEC: gl.constexpr,
    WARPS_ROW: gl.constexpr,
):  # fmt: skip
    """Merge rows ``row : row + WIDTH``, GROUP splits at a time. Split 0 is in first_slot, split s in next_slot + (s-1)*slot_step.

    Splits lie in registers, rows on warps (or all warps on one row), the 512 values on lanes.
    """
    L: gl.constexpr = BlockedLayout([1, 1, VEC], [1, 1, 32], [1, WARPS_ROW, gl.num_warps() // WARPS_ROW], [2, 1, 0])
    LR: gl.constexpr = SliceLayout(2, L)  # [splits, rows]
    r = row + gl.arange(0, WIDTH, SliceLayout(0, LR))
    d = gl.arange(0, 512, SliceLayout(0, SliceLayout(0, L)))
    m = gl.full([WIDTH], float("-inf"), gl.float32, SliceLayout(0, LR))
    den = gl.zeros([WIDTH], gl.float32, SliceLayout(0, LR))
    acc = gl.zeros([WIDTH, 512], gl.float32, SliceLayout(0, L))
    for at in range(0, splits, GROUP):
        s = at + gl.arange(0, GROUP, SliceLayout(1, LR))
        ok = (s < splits)[:, None] & (r < ROWS)[None, :]
        slot = gl.where(s == 0, first_slot, next_slot + (s - 1) * slot_step).to(gl.int64)
        at_row = (slot * ROWS)[:, None] + r[None, :]
        # .cg: other multiprocessors wrote these
        lse = gl.load(part_lse_ptr + at_row, mask=ok, other=float("-inf"), cache_modifier=".cg")
        ptr = gl.expand_dims(part_out_ptr + at_row * 512, 2) + gl.expand_dims(gl.expand_dims(d, 0), 0)
        x = gl.load(ptr, mask=gl.expand_dims(ok, 2), other=0.0, cache_modifier=".cg")
        x = gl.where(gl.expand_dims(lse == float("-inf"), 2), 0.0, x)
        m_new = gl.maximum(m, gl.max(lse, 0))
        ref = gl.where(m_new == float("-inf"), 0.0, m_new)
        w = gl.exp2(lse - ref[None, :])
        old = gl.exp2(m - ref)
        acc = acc * gl.convert_layout(old, SliceLayout(1, SliceLayout(0, L)), assert_trivial=True)[:, None] + gl.sum(gl.expand_dims(w, 2) * x, 0)
        den = den * old + gl.sum(w, 0)
        m = m_new
    empty = den == 0.0
    token = (first_token + (first_row + r) // HEADS).to(gl.int64)
    head = (first_row + r) % HEADS
    inv = gl.convert_layout(1.0 / gl.where(empty, 1.0, den), SliceLayout(1, SliceLayout(0, L)), assert_trivial=True)
    out_row = gl.convert_layout(out_ptr + token * out_stride_token + head * out_stride_head, SliceLayout(1, SliceLayout(0, L)), assert_trivial=True)
    ok_row = gl.convert_layout(r < rows, SliceLayout(1, SliceLayout(0, L)), assert_trivial=True)
    # an empty row has acc = 0 and inv = 1
    gl.store(out_row[:, None] + d[None, :], (acc * inv[:, None]).to(out_ptr.dtype.element_ty), mask=ok_row[:, None])
    if WRITE_LSE:
        lse_out = gl.where(empty, float("-inf"), (m + gl.log2(gl.where(empty, 1.0, den))) * 0.6931471805599453)
        gl.store(lse_ptr + token * lse_stride + head, lse_out, mask=r < rows)


@gluon.jit
def _merge_rows(
    part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    first_slot, next_slot, slot_step, splits, rank, stay, role, rows, first_token, first_row, HEADS: gl.constexpr,
    ROWS: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """Merge this block's share of ``rows`` rows (role 1: every ``stay``-th group of rows from ``rank`` on; role 2: all of them).

    Up to four splits: a row a warp, all splits at once; more: one row, sixteen splits at a time. The choice depends on the
    number of splits alone, because it decides in which order they are added.
    """
    W: gl.constexpr = gl.num_warps()
    begin = 0
    step = 1
    if role == 1:
        begin = rank
        step = stay
    if splits <= 4:
        for row in range(begin * W, rows, step * W):
            _merge(part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                   first_slot, next_slot, slot_step, splits, row, rows, first_token, first_row, HEADS,
                   ROWS, WRITE_LSE, W, 4, 4, W)  # fmt: skip
    else:
        for row in range(begin, rows, step):
            _merge(part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                   first_slot, next_slot, slot_step, splits, row, rows, first_token, first_row, HEADS,
                   ROWS, WRITE_LSE, 1, 16, 16 // W, 1)  # fmt: skip


@gluon.jit
def meet(
    counter_ptr,  # int32 [2], this sequence's and row tile's
    waits,  # 1 if this block may wait for the others
    part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
    first_slot, next_slot, slot_step, splits, rank, stay, rows, first_token, first_row, HEADS: gl.constexpr,
    ROWS: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """Called by every block of a sequence once its partial result is stored; the output is complete when all have returned."""
    role, final = _arrive(counter_ptr, splits, stay, waits)
    if role != 0:
        _merge_rows(part_out_ptr, part_lse_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride,
                    first_slot, next_slot, slot_step, splits, rank, stay, role, rows, first_token, first_row, HEADS,
                    ROWS, WRITE_LSE)  # fmt: skip
    _release(counter_ptr, splits, waits, role, final)
