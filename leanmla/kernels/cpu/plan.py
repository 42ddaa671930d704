"""Cuts a call into work items: ranges of keys, as :mod:`leanmla.split_plan` defines them, times ranges of query rows.

Compiled, since the caches are full of keys when it runs: 0.05 ms where the same in numpy takes 0.5 ms.
"""

from __future__ import annotations

from numba import carray, njit

from . import cuts
from .calls import ITEM, MAX_ROWS, MERGE
from .simd import as_pointer, scalar_i

_num_tiles = njit(nogil=True)(cuts.num_tiles)
_row_chunks = njit(nogil=True)(cuts.row_chunks)
_shared_split_size = njit(nogil=True)(cuts.shared_split_size)
_num_splits = njit(nogil=True)(cuts.num_splits)
split_range = njit(nogil=True)(cuts.split_range)


@njit(nogil=True)
def _kv_len(call, b):
    if call.cache_seqlens != 0:
        return scalar_i(call.cache_seqlens + 4 * b)
    count = scalar_i(call.kv_indptr + 4 * b + 4) - scalar_i(call.kv_indptr + 4 * b)
    if call.page_size == 1 or count == 0:
        return count
    return (count - 1) * call.page_size + scalar_i(call.kv_last_page_len + 4 * b)


@njit(nogil=True)
def _first_query(call, b):
    if call.qo_indptr != 0:
        return scalar_i(call.qo_indptr + 4 * b)
    return call.total_q // call.batch * b


@njit(nogil=True)
def plan(call):
    """Fill in the items and merges of a call, and their numbers. Where there is no room for them, only the numbers.

    Items with at least half of the largest one's work come first, so that no large one is begun last.
    """
    split_size = call.split_size
    if split_size == 0 and call.num_kv_splits == 0:
        tiles = 0
        for b in range(call.batch):
            rows = (_first_query(call, b + 1) - _first_query(call, b)) * call.num_heads
            tiles += _num_tiles(_kv_len(call, b)) * _row_chunks(rows)
        split_size = _shared_split_size(tiles, call.num_threads)

    num_items = num_merges = num_slots = num_pairs = largest = 0
    for b in range(call.batch):
        kv_len, rows = _kv_len(call, b), (_first_query(call, b + 1) - _first_query(call, b)) * call.num_heads
        num_splits, chunks = _num_splits(kv_len, call.num_kv_splits, split_size), _row_chunks(rows)
        num_items += num_splits * chunks
        num_pairs += kv_len * rows
        if num_splits > 1:
            num_merges += chunks
            num_slots += num_splits * rows
        start, end = split_range(kv_len, num_splits, num_splits // 2, split_size)
        largest = max(largest, (end - start) * min(rows, MAX_ROWS))
    call.num_items, call.num_merges, call.num_slots, call.num_pairs = num_items, num_merges, num_slots, num_pairs
    if num_items > call.item_capacity or num_merges > call.merge_capacity:
        return

    items = carray(as_pointer(call.items), num_items, ITEM)
    merges = carray(as_pointer(call.merges), num_merges, MERGE)
    n = 0
    for large in (True, False):
        m = slots = 0
        for b in range(call.batch):
            first = _first_query(call, b)
            q_len = _first_query(call, b + 1) - first
            kv_len, rows = _kv_len(call, b), q_len * call.num_heads
            num_splits = _num_splits(kv_len, call.num_kv_splits, split_size)
            for row_start in range(0, rows, MAX_ROWS):
                row_end = min(row_start + MAX_ROWS, rows)
                for split in range(num_splits):
                    kv_start, kv_end = split_range(kv_len, num_splits, split, split_size)
                    if ((kv_end - kv_start) * (row_end - row_start) * 2 >= largest) != large:
                        continue
                    item = items[n]
                    item.first_query, item.q_len, item.kv_len = first, q_len, kv_len
                    item.kv_start, item.kv_end, item.row_start, item.row_end = kv_start, kv_end, row_start, row_end
                    item.page_ids, item.first_slot = 0, 0
                    if call.cache_seqlens != 0:
                        item.page_ids = call.page_ids + call.page_ids_stride * b
                    elif call.page_ids != 0:
                        item.page_ids = call.page_ids + 4 * scalar_i(call.kv_indptr + 4 * b)
                    else:
                        item.first_slot = scalar_i(call.kv_indptr + 4 * b)
                    item.partial = slots + split * rows + row_start
                    item.merge = m if num_splits > 1 else -1
                    n += 1
                if num_splits > 1:
                    if large:
                        merge = merges[m]
                        merge.first_query, merge.row_start, merge.row_end = first, row_start, row_end
                        merge.num_splits = merge.pending = num_splits
                        merge.partial, merge.split_stride = slots + row_start, rows
                    m += 1
            if num_splits > 1:
                slots += num_splits * rows
