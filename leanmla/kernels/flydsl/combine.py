"""Merge the splits of a row: out = sum of w_s * out_s / sum of w_s with w_s = e^(lse_s - max), one block a (row, head).

Grid: block = sequence * max_rows + row. A sequence with one split is written by the decode kernel and left alone here. A split
with weight 0 (no keys: lse -inf) is skipped, never multiplied: its values were not written.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from . import ops
from .decode import LN_2, LOG2_E, NEGATIVE_INFINITY_BITS, SENTINEL
from .spec import COMBINE_THREADS, CombineSpec

__all__ = ["make_combine"]

V = fx.Vector


def _splits(spec: CombineSpec, first_item, split_counts, num_splits, sequence):
    """(first item, items) of a sequence."""
    if not spec.planned:
        return sequence * num_splits, num_splits
    at = ops.widen(sequence) * 4
    return ops.global_load(first_item + at, fx.Int32, constant=True), ops.global_load(split_counts + at, fx.Int32, constant=True)


def _rows(spec: CombineSpec, qo_indptr, q_len, sequence):
    """(first query row, query rows) of a sequence."""
    if not spec.ragged_q:
        return sequence * q_len, q_len
    at = qo_indptr + ops.widen(sequence) * 4
    first = ops.global_load(at, fx.Int32, constant=True)
    return first, ops.global_load(at, fx.Int32, offset=4, constant=True) - first


def make_combine(spec: CombineSpec):
    """The ``@flyc.jit`` launcher of the combine kernel; arguments as in spec.COMBINE_ARGS."""

    @flyc.kernel(name=spec.name, known_block_size=[COMBINE_THREADS, 1, 1])
    def kernel(
        partial_out: fx.Int64, partial_lse: fx.Int64, first_item: fx.Int64, split_counts: fx.Int64, qo_indptr: fx.Int64,
        out: fx.Int64, lse: fx.Int64, out_row_stride: fx.Int64, out_head_stride: fx.Int64, max_rows: fx.Int32,
        row_capacity: fx.Int32, q_len: fx.Int32, num_splits: fx.Int32,
    ):  # fmt: skip
        block = fx.block_idx.x
        thread = fx.thread_idx.x
        sequence, row = ops.udiv(block, max_rows), ops.umod(block, max_rows)
        first, count = _splits(spec, first_item, split_counts, num_splits, sequence)
        first_query_row, rows_q = _rows(spec, qo_indptr, q_len, sequence)
        if (row < rows_q * spec.num_heads) & (count > 1):
            slot = ops.widen(first) * ops.widen(row_capacity) + ops.widen(row)
            values = partial_out + slot * 2048 + ops.widen(thread) * 16
            weights = partial_lse + slot * 4
            step = ops.widen(row_capacity)

            peak = fx.Float32(SENTINEL)
            for split in range(0, count, 1):
                at = ops.widen(fx.Int32(split)) * step
                peak = ops.maximum(peak, ops.global_load(weights + at * 4, fx.Float32, constant=True))

            total = fx.Float32(0.0)
            merged = V.filled(4, 0.0, fx.Float32)
            for split in range(0, count, 1):
                at = ops.widen(fx.Int32(split)) * step
                weight = ops.exp2((ops.global_load(weights + at * 4, fx.Float32, constant=True) - peak) * LOG2_E)
                if weight != 0.0:
                    merged = merged + ops.global_load(values + at * 2048, fx.Float32, 4, align=16) * weight
                    total = total + weight

            empty = total == 0.0
            inverse = ops.reciprocal(total)
            result = [ops.select(empty, fx.Float32(0.0), merged[i] * inverse) for i in fx.range_constexpr(4)]
            query_row, head = first_query_row + ops.udiv(row, spec.num_heads), ops.umod(row, spec.num_heads)
            address = out + ops.widen(query_row) * out_row_stride + ops.widen(head) * out_head_stride + ops.widen(thread) * 8
            ops.global_store(address, ops.pack_bf16(result), align=4)
            if (thread == 0) & (lse != 0):
                natural = peak + ops.log2(total) * LN_2
                minus_infinity = fx.Int32(NEGATIVE_INFINITY_BITS).bitcast(fx.Float32)
                flat_row = ops.widen(query_row) * spec.num_heads + ops.widen(head)
                ops.global_store(lse + flat_row * 4, ops.select(empty, minus_infinity, natural))

    @flyc.jit
    def launch(
        partial_out: fx.Int64, partial_lse: fx.Int64, first_item: fx.Int64, split_counts: fx.Int64, qo_indptr: fx.Int64,
        out: fx.Int64, lse: fx.Int64, out_row_stride: fx.Int64, out_head_stride: fx.Int64, max_rows: fx.Int32,
        row_capacity: fx.Int32, q_len: fx.Int32, num_splits: fx.Int32, grid: fx.Int32,
    ):  # fmt: skip
        kernel(
            partial_out, partial_lse, first_item, split_counts, qo_indptr, out, lse, out_row_stride, out_head_stride, max_rows,
            row_capacity, q_len, num_splits,
        ).launch(grid=(grid, 1, 1), block=(COMBINE_THREADS, 1, 1))  # fmt: skip

    return launch
