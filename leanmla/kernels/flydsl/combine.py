"""Merge the splits of a row: out = sum of w_s * out_s / sum of w_s with w_s = e^(lse_s - max), one block a (row, head).

A split with weight 0 (no keys: lse -inf) is skipped, never multiplied: its values were not written.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from . import ops
from .decode import LN_2, LOG2_E, NEGATIVE_INFINITY_BITS, SENTINEL
from .spec import COMBINE_THREADS, CombineSpec

__all__ = ["make_combine"]

V = fx.Vector


def make_combine(spec: CombineSpec):
    """The ``@flyc.jit`` launcher of the combine kernel; arguments as in spec.COMBINE_ARGS."""

    @flyc.kernel(name=spec.name, known_block_size=[COMBINE_THREADS, 1, 1])
    def kernel(
        partial_out: fx.Int64, partial_lse: fx.Int64, out: fx.Int64, lse: fx.Int64, out_row_stride: fx.Int64,
        out_head_stride: fx.Int64, num_rows: fx.Int32, num_splits: fx.Int32,
    ):  # fmt: skip
        row = fx.block_idx.x
        thread = fx.thread_idx.x
        first = ops.widen(row) * ops.widen(num_splits)
        values = partial_out + first * 2048 + ops.widen(thread) * 16
        weights = partial_lse + first * 4

        peak = fx.Float32(SENTINEL)
        for split in range(0, num_splits, 1):
            peak = ops.maximum(peak, ops.global_load(weights + ops.widen(fx.Int32(split)) * 4, fx.Float32, constant=True))

        total = fx.Float32(0.0)
        merged = V.filled(4, 0.0, fx.Float32)
        for split in range(0, num_splits, 1):
            at = ops.widen(fx.Int32(split))
            weight = ops.exp2((ops.global_load(weights + at * 4, fx.Float32, constant=True) - peak) * LOG2_E)
            if weight != 0.0:
                merged = merged + ops.global_load(values + at * 2048, fx.Float32, 4, align=16) * weight
                total = total + weight

        empty = total == 0.0
        inverse = ops.reciprocal(total)
        result = [ops.select(empty, fx.Float32(0.0), merged[i] * inverse) for i in range(4)]
        query_row, head = ops.udiv(row, spec.num_heads), ops.umod(row, spec.num_heads)
        address = out + ops.widen(query_row) * out_row_stride + ops.widen(head) * out_head_stride + ops.widen(thread) * 8
        ops.global_store(address, ops.pack_bf16(result), align=4)
        if (thread == 0) & (lse != 0):
            natural = peak + ops.log2(total) * LN_2
            minus_infinity = fx.Int32(NEGATIVE_INFINITY_BITS).bitcast(fx.Float32)
            ops.global_store(lse + ops.widen(row) * 4, ops.select(empty, minus_infinity, natural))

    @flyc.jit
    def launch(
        partial_out: fx.Int64, partial_lse: fx.Int64, out: fx.Int64, lse: fx.Int64, out_row_stride: fx.Int64,
        out_head_stride: fx.Int64, num_rows: fx.Int32, num_splits: fx.Int32, grid: fx.Int32,
    ):  # fmt: skip
        kernel(partial_out, partial_lse, out, lse, out_row_stride, out_head_stride, num_rows, num_splits).launch(
            grid=(grid, 1, 1), block=(COMBINE_THREADS, 1, 1)
        )

    return launch
