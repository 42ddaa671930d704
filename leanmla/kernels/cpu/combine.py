"""Merges the partial results of rows whose keys were split: out = sum(w_s out_s) / sum(w_s), w_s = exp(lse_s - max)."""

from __future__ import annotations

import numpy as np
from numba import njit

from .arithmetic import store_row
from .simd import fma, load_f, scalar_f, splat_f, store_f, store_scalar_f


@njit(nogil=True)
def merge_rows(call, merge, total):
    """Merge one MERGE record; ``total`` is the address of 2048 bytes of scratch."""
    for row in range(merge.row_start, merge.row_end):
        slot = merge.partial + row - merge.row_start
        top = np.float32(-np.inf)
        for s in range(merge.num_splits):
            lse = scalar_f(call.partial_lse + (slot + s * merge.split_stride) * 4)
            if lse > top:
                top = lse
        for j in range(32):
            store_f(total + j * 64, splat_f(0.0))
        weights = 0.0
        for s in range(merge.num_splits):
            part = slot + s * merge.split_stride
            lse = scalar_f(call.partial_lse + part * 4)
            if lse == -np.inf:  # saw no key: left out, not multiplied by 0
                continue
            weight = np.exp(np.float64(lse) - np.float64(top))
            weights += weight
            w = splat_f(weight)
            for j in range(32):
                partial = load_f(call.partial_out + part * 2048 + j * 64)
                store_f(total + j * 64, fma(partial, w, load_f(total + j * 64)))
        factor, row_lse = 0.0, -np.inf
        if weights != 0.0:  # also when it is NaN
            factor, row_lse = 1.0 / weights, np.float64(top) + np.log(weights)
        query, head = merge.first_query + row // call.num_heads, row % call.num_heads
        store_row(total, factor, call.out + query * call.out_stride + head * call.out_head_stride, call.q_is_fp16)
        if call.lse != 0:
            store_scalar_f(call.lse + (query * call.num_heads + head) * 4, np.float32(row_lse))
