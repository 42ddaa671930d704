"""MLA decode on a CPU: blocked attention with an online softmax, one pass over the keys, nothing spilled to memory.

A work item is a range of keys of one sequence and at most 128 of its query rows (row = query token * heads + head).
Per tile of 64 keys, all in the core's own cache:

1. dequantise the tile once (tiles.py); it serves as keys and as values
2. logits[key, row] = tile[key, :576] . q[row, :576]      16 keys (4 without AVX-512) x 16 rows, rows are the lanes
3. online softmax along keys: rows are the lanes, so no reduction crosses a lane
4. out[row, :] = out[row, :] * alpha[row] + sum over keys p[key, row] * tile[key, :512]   16 rows x 16 columns

Both products run on the same inner step, `block[i] += a[i] * b`: one vector of b against a column of scalars a, broadcast
from memory by the multiply itself. Two forms of it exist, chosen for the whole call:

* fp32: tile and p are fp32.
* bf16: tile and p are bf16, two products and fp32 accumulation an instruction (AVX512_BF16). q and the tile are exact
  in it; p is rounded to bf16, and the outputs are divided by the sum of the *rounded* p, so weights still sum to one.
  lse comes from the sum of the exact p.

Visibility: row r of a sequence sees its first `bound[r]` keys. A key beyond it gets logit -inf by selection, and the
product in step 4 does not run over it at all: 0 * NaN would be NaN.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .arithmetic import HIGH, LOG2E, capped, exp2_neg, round_bf16, store_row
from .calls import CALL, ITEM, MAX_ROWS, MERGE, PLAN, TILE
from .combine import merge_rows
from .plan import plan
from .simd import (
    BLOCK_ROWS,
    LANES,
    add_outer,
    add_outer_bf16,
    as_float,
    as_pointer,
    fetch_add,
    from_half,
    load_block_scaled,
    load_f,
    load_i,
    make_zero_block,
    maximum,
    scalar_f,
    scalar_i,
    scalar_i64,
    splat_f,
    splat_i,
    store_block,
    store_f,
    store_i,
    store_scalar_f,
    store_scalar_i,
    where_less,
    where_less_i,
)  # fmt: skip
from .tiles import (
    BF16,
    ROW_BF16,
    ROW_FP32,
    TABLE_BYTES,
    TOKEN_LIST_BYTES,
    TOKENS,
    even_spacing,
    find_tokens,
    load_tile,
    prefetch_half_token,
    write_e2m1_table,
)

# Scratch of one worker: byte offsets of its parts.
_TILE = 0
_LOGITS = _TILE + TILE * ROW_FP32
_Q = _LOGITS + TILE * MAX_ROWS * 4
_OUT = _Q + MAX_ROWS * ROW_FP32
_MAX = _OUT + MAX_ROWS * 2048
_SUM = _MAX + MAX_ROWS * 4
_SUM_BF16 = _SUM + MAX_ROWS * 4
_ALPHA = _SUM_BF16 + MAX_ROWS * 4
_BOUND = _ALPHA + MAX_ROWS * 4
_ROW = _BOUND + MAX_ROWS * 4
_TABLE = _ROW + ROW_FP32
_AHEAD = _TABLE + TABLE_BYTES
SCRATCH_BYTES = _AHEAD + TOKEN_LIST_BYTES

MERGE_BYTES = MERGE.itemsize

_zeros = make_zero_block(BLOCK_ROWS)


# -- 1. the query -----------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _pack_query(call, item, scratch):
    """q rows of the item to [group of 16 rows][value][row in group], fp32 or bf16 pairs; rows beyond the last are zero."""
    num_rows = item.row_end - item.row_start
    groups = (num_rows + LANES - 1) // LANES
    words = 288 if call.as_bf16 else 576
    zero = splat_f(0.0)
    for group in range(groups):
        packed = scratch + _Q + group * words * 64
        if (group + 1) * LANES > num_rows:
            for k in range(words):
                store_f(packed + k * 64, zero)
        for lane in range(min(LANES, num_rows - group * LANES)):
            row = item.row_start + group * LANES + lane
            token, head = row // call.num_heads, row % call.num_heads
            source = call.q + (item.first_query + token) * call.q_stride + head * call.q_head_stride
            if not call.as_bf16:
                for j in range(18):
                    pair = load_i(source + j * 64)
                    if call.q_is_fp16:
                        even, odd = from_half(pair), from_half(pair >> 16)
                    else:
                        even, odd = as_float(pair << 16), as_float(pair & splat_i(HIGH))
                    store_f(scratch + _ROW + j * 128, even)
                    store_f(scratch + _ROW + j * 128 + 64, odd)
                source = scratch + _ROW
            for k in range(words):
                store_scalar_i(packed + k * 64 + lane * 4, scalar_i(source + k * 4))


# -- 2. logits --------------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _logits_bf16(tile, row_stride, num_keys, q, groups, logits, ahead):
    for key in range(0, num_keys, BLOCK_ROWS):
        for group in range(groups):
            acc = _zeros()
            a, b = tile + key * row_stride, q + group * 288 * 64
            for part in range(BLOCK_ROWS):
                prefetch_half_token(ahead if group == 0 else 0, key + part)
                for k in range(part * 288 // BLOCK_ROWS, (part + 1) * 288 // BLOCK_ROWS):
                    acc = add_outer_bf16(acc, a + k * 4, row_stride, load_i(b + k * 64))
            store_block(acc, logits + key * groups * 64 + group * 64, groups * 64)


@njit(nogil=True)
def _logits_fp32(tile, num_keys, q, groups, logits, ahead):
    for key in range(0, num_keys, BLOCK_ROWS):
        for group in range(groups):
            acc = _zeros()
            a, b = tile + key * ROW_FP32, q + group * 576 * 64
            for part in range(BLOCK_ROWS):
                prefetch_half_token(ahead if group == 0 else 0, 2 * (key + part))
                prefetch_half_token(ahead if group == 0 else 0, 2 * (key + part) + 1)
                for k in range(part * 576 // BLOCK_ROWS, (part + 1) * 576 // BLOCK_ROWS):
                    acc = add_outer(acc, a + k * 4, ROW_FP32, load_f(b + k * 64))
            store_block(acc, logits + key * groups * 64 + group * 64, groups * 64)


# -- 3. softmax -------------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _softmax_tile(scratch, group, groups, start, num_keys, scale, cap, as_bf16):
    """Logits of 16 rows to p, in place (bf16: pairs of keys, packed to the front); updates maximum, sums and alpha."""
    at = group * 64
    row_bytes = groups * 64
    logits = scratch + _LOGITS + at
    minus_inf = splat_f(-np.inf)
    bound = load_i(scratch + _BOUND + at)
    old = load_f(scratch + _MAX + at)
    new = old
    for key in range(num_keys):
        s = load_f(logits + key * row_bytes) * splat_f(scale)
        if cap > 0.0:
            s = capped(s, cap)
        s = where_less_i(splat_i(start + key), bound, s, minus_inf)
        store_f(logits + key * row_bytes, s)
        new = maximum(s, new)
    # While a row has seen no key its maximum is -inf; 0 in its place makes every exp(-inf - 0) zero rather than NaN.
    base = where_less(minus_inf, new, new, splat_f(0.0))
    log2e = splat_f(LOG2E)
    alpha = exp2_neg((old - base) * log2e)
    total = load_f(scratch + _SUM + at) * alpha
    total_bf16 = load_f(scratch + _SUM_BF16 + at) * alpha
    if as_bf16:
        for key in range(0, num_keys, 2):
            p = exp2_neg((load_f(logits + key * row_bytes) - base) * log2e)
            total = total + p
            low = round_bf16(p)
            total_bf16 = total_bf16 + as_float(low)
            high = splat_i(0)
            if key + 1 < num_keys:
                p = exp2_neg((load_f(logits + (key + 1) * row_bytes) - base) * log2e)
                total = total + p
                high = round_bf16(p)
                total_bf16 = total_bf16 + as_float(high)
            store_i(logits + (key // 2) * row_bytes, (low >> 16) | high)
    else:
        for key in range(num_keys):
            p = exp2_neg((load_f(logits + key * row_bytes) - base) * log2e)
            total = total + p
            store_f(logits + key * row_bytes, p)
    store_f(scratch + _MAX + at, new)
    store_f(scratch + _ALPHA + at, alpha)
    store_f(scratch + _SUM + at, total)
    store_f(scratch + _SUM_BF16 + at, total_bf16)


# -- 4. values --------------------------------------------------------------------------------------------------------


def _make_values(zeros):
    """The product of step 4 for as many rows as ``zeros`` returns accumulators."""

    @njit(nogil=True)
    def values_bf16(p, row_bytes, tile, row_stride, num_keys, out, alpha, ahead):
        pairs = num_keys // 2
        low, high = splat_i(0xFFFF), splat_i(HIGH)
        for j in range(16):
            v = tile + j * 64
            prefetch_half_token(ahead, TILE + 4 * j)
            prefetch_half_token(ahead, TILE + 4 * j + 1)
            acc = load_block_scaled(zeros(), out + j * 128, 2048, alpha)  # even columns of 32
            for k in range(pairs):
                x, y = load_i(v + 2 * k * row_stride), load_i(v + (2 * k + 1) * row_stride)
                acc = add_outer_bf16(acc, p + k * row_bytes, 4, (x & low) | (y << 16))
            if num_keys & 1:
                acc = add_outer_bf16(acc, p + pairs * row_bytes, 4, load_i(v + 2 * pairs * row_stride) & low)
            store_block(acc, out + j * 128, 2048)
            prefetch_half_token(ahead, TILE + 4 * j + 2)
            prefetch_half_token(ahead, TILE + 4 * j + 3)
            acc = load_block_scaled(zeros(), out + j * 128 + 64, 2048, alpha)  # odd columns
            for k in range(pairs):
                x, y = load_i(v + 2 * k * row_stride), load_i(v + (2 * k + 1) * row_stride)
                acc = add_outer_bf16(acc, p + k * row_bytes, 4, (x >> 16) | (y & high))
            if num_keys & 1:
                acc = add_outer_bf16(acc, p + pairs * row_bytes, 4, load_i(v + 2 * pairs * row_stride) >> 16)
            store_block(acc, out + j * 128 + 64, 2048)

    @njit(nogil=True)
    def values_fp32(p, row_bytes, tile, num_keys, out, alpha):
        for j in range(32):
            v = tile + j * 64
            acc = load_block_scaled(zeros(), out + j * 64, 2048, alpha)
            for k in range(num_keys):
                acc = add_outer(acc, p + k * row_bytes, 4, load_f(v + k * ROW_FP32))
            store_block(acc, out + j * 64, 2048)

    return values_bf16, values_fp32


_values_bf16_block, _values_fp32_block = _make_values(_zeros)
_values_bf16_4, _values_fp32_4 = _make_values(make_zero_block(4))
_values_bf16_1, _values_fp32_1 = _make_values(make_zero_block(1))


@njit(nogil=True, inline="always")
def _accumulate(scratch, tile, row_stride, as_bf16, row_start, row_end, groups, num_keys, ahead):
    """Step 4 for some rows of the item and the first ``num_keys`` keys of the tile."""
    r = row_start
    while r < row_end:
        p, out, alpha = scratch + _LOGITS + r * 4, scratch + _OUT + r * 2048, scratch + _ALPHA + r * 4
        soon = ahead if r == 0 else 0  # the next tile is asked for once
        step = BLOCK_ROWS if row_end - r >= BLOCK_ROWS else 4 if row_end - r >= 4 else 1
        if as_bf16:
            if step == BLOCK_ROWS:
                _values_bf16_block(p, groups * 64, tile, row_stride, num_keys, out, alpha, soon)
            elif step == 4:
                _values_bf16_4(p, groups * 64, tile, row_stride, num_keys, out, alpha, soon)
            else:
                _values_bf16_1(p, groups * 64, tile, row_stride, num_keys, out, alpha, soon)
        elif step == BLOCK_ROWS:
            _values_fp32_block(p, groups * 64, tile, num_keys, out, alpha)
        elif step == 4:
            _values_fp32_4(p, groups * 64, tile, num_keys, out, alpha)
        else:
            _values_fp32_1(p, groups * 64, tile, num_keys, out, alpha)
        r += step


# -- the end ----------------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _finish(call, item, scratch):
    """Divide by the sums and write the item's rows: to out and lse, or to its partial slots."""
    for r in range(item.row_end - item.row_start):
        total = scalar_f(scratch + _SUM + r * 4)
        weight = scalar_f(scratch + _SUM_BF16 + r * 4) if call.as_bf16 else total
        lse = -np.inf
        factor = 0.0
        if total != 0.0:  # also when it is NaN
            lse = scalar_f(scratch + _MAX + r * 4) + np.log(np.float64(total))
            factor = call.tensor_scale / np.float64(weight)
        source = scratch + _OUT + r * 2048
        if item.merge >= 0:
            f = splat_f(factor)
            target = call.partial_out + (item.partial + r) * 2048
            for j in range(32):
                store_f(target + j * 64, load_f(source + j * 64) * f)
            store_scalar_f(call.partial_lse + (item.partial + r) * 4, np.float32(lse))
        else:
            token, head = (item.row_start + r) // call.num_heads, (item.row_start + r) % call.num_heads
            query = item.first_query + token
            store_row(source, factor, call.out + query * call.out_stride + head * call.out_head_stride, call.q_is_fp16)
            if call.lse != 0:
                store_scalar_f(call.lse + (query * call.num_heads + head) * 4, np.float32(lse))


@njit(nogil=True, inline="always")
def _find(call, item, tokens, start, end):
    find_tokens(
        tokens, start, end, call.token_bytes, call.data, call.page_stride, call.token_stride,
        call.scales, call.scale_page_stride, call.scale_token_stride, item.page_ids, item.first_slot, call.page_size,
    )  # fmt: skip


@njit(nogil=True, inline="always")
def _decode_item(call, item, scratch):
    as_bf16 = call.as_bf16 != 0
    num_rows = item.row_end - item.row_start
    groups = (num_rows + LANES - 1) // LANES
    _pack_query(call, item, scratch)
    for group in range(groups):
        store_f(scratch + _MAX + group * 64, splat_f(-np.inf))
        store_f(scratch + _SUM + group * 64, splat_f(0.0))
        store_f(scratch + _SUM_BF16 + group * 64, splat_f(0.0))
    for i in range(groups * LANES * 32):
        store_f(scratch + _OUT + i * 64, splat_f(0.0))

    # Keys that a row of query token i sees: all, or the first kv_len - q_len + i + 1 (bottom-right causal).
    first_token, last_token = item.row_start // call.num_heads, (item.row_end - 1) // call.num_heads
    step = 1 if call.causal else 0
    visible_0 = item.kv_len - (item.q_len - 1) * step
    for r in range(groups * LANES):
        token = (item.row_start + min(r, num_rows - 1)) // call.num_heads
        store_scalar_i(scratch + _BOUND + r * 4, visible_0 + token * step)
    kv_end = min(item.kv_end, visible_0 + last_token * step)
    seen_by_all = visible_0 + first_token * step

    # The tokens of the tile to come: prefetched bit by bit while the current tile is multiplied. All at once they would
    # fill the core's miss buffers and hold up the loads of the products. The bf16 form, twice as fast, asks for half of
    # them in each product (bf16 cache: 3.0 ms instead of 3.4 with all in the first); the fp32 form does so in the first
    # (6.0 ms instead of 6.5).
    ahead = scratch + _AHEAD
    start = item.kv_start
    _find(call, item, ahead, start, min(start + TILE, kv_end))
    while start < kv_end:
        end = min(start + TILE, kv_end)
        num_keys = end - start
        # A whole tile of evenly spaced bf16 rows needs no copy: both products read it where it lies.
        tile, row_stride = scratch + _TILE, ROW_BF16
        spacing = 0
        if as_bf16 and call.format == BF16 and num_keys == TILE:
            spacing = even_spacing(ahead)
        if spacing != 0:
            tile, row_stride = scalar_i64(ahead + TOKENS), spacing
        else:
            load_tile(tile, as_bf16, call.format, ahead, scratch + _TABLE)
        _find(call, item, ahead, end, min(end + TILE, kv_end))

        q, logits = scratch + _Q, scratch + _LOGITS
        if as_bf16:
            _logits_bf16(tile, row_stride, num_keys, q, groups, logits, ahead)
        else:
            _logits_fp32(tile, num_keys, q, groups, logits, ahead)
        for group in range(groups):
            _softmax_tile(
                scratch, group, groups, start, num_keys, call.sm_scale * call.tensor_scale, call.logit_cap, as_bf16
            )
        if end <= seen_by_all:
            _accumulate(scratch, tile, row_stride, as_bf16, 0, (num_rows + 3) // 4 * 4, groups, num_keys, ahead)
        else:
            for token in range(first_token, last_token + 1):
                row_start = max(token * call.num_heads, item.row_start) - item.row_start
                row_end = min((token + 1) * call.num_heads, item.row_end) - item.row_start
                visible = min(visible_0 + token * step - start, num_keys)
                if visible > 0:
                    _accumulate(scratch, tile, row_stride, as_bf16, row_start, row_end, groups, visible, ahead)
        start = end
    _finish(call, item, scratch)


@njit(nogil=True, inline="always")
def entry(address):
    """Plan the CALL at ``address``; or what each worker runs: take items off its list until none is left."""
    call = carray(as_pointer(address), 1, CALL)[0]
    if call.stage == PLAN:
        plan(call)
        return
    next_worker, next_item = address, address + 8  # the first two fields
    items = carray(as_pointer(call.items), call.num_items, ITEM)
    scratch = scalar_i64(call.scratch + fetch_add(next_worker, 1) * 8)
    write_e2m1_table(scratch + _TABLE)
    while True:
        i = fetch_add(next_item, 1)
        if i >= call.num_items:
            break
        item = items[i]
        _decode_item(call, item, scratch)
        if item.merge >= 0:
            # The last field counts down; its last user sees the partial results of all others.
            merge_address = call.merges + item.merge * MERGE_BYTES
            if fetch_add(merge_address + MERGE_BYTES - 8, -1) == 1:
                merge_rows(call, carray(as_pointer(merge_address), 1, MERGE)[0], scratch + _OUT)
