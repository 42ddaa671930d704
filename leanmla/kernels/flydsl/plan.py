"""The planner on the device: one block reads the lengths and writes the item table. split_plan.py is the definition.

Thread t weighs candidate chunk t & 31 over every eighth sequence; the best candidate then gives every sequence its splits, and a
running sum over the batch its first item. Nothing waits for the host, so a captured graph stays right while lengths change.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from ...split_plan import CHUNK_CANDIDATES, ITEM_OVERHEAD_BLOCKS
from . import ops
from .pages import kv_length
from .spec import NUM_THREADS, TILE, PlanSpec

__all__ = ["make_plan"]

NUM_CANDIDATES = 32  # the factors, and "do not split"
GROUPS = NUM_THREADS // NUM_CANDIDATES
MANY = 1 << 30  # more tiles than a sequence can have
assert len(CHUNK_CANDIDATES) == NUM_CANDIDATES - 1


def _ceil_div(a, b):
    return ops.udiv(a + b - 1, b)


def _at_least_one(x):
    return ops.maximum_int(x, 1)


def _keys(spec: PlanSpec, kv_indptr, kv_lens, sequence):
    return kv_length(spec, kv_indptr, kv_lens, fx.Int32(0), sequence)[0]


def _tiles(spec: PlanSpec, kv_indptr, kv_lens, sequence):
    return (_keys(spec, kv_indptr, kv_lens, sequence) + (TILE - 1)) >> 6


def _factor(index):
    """CHUNK_CANDIDATES[index] for a traced index."""
    factor = fx.Int32(CHUNK_CANDIDATES[0])
    for i, candidate in enumerate(CHUNK_CANDIDATES[1:], 1):
        factor = ops.select(index == i, fx.Int32(candidate), factor)
    return factor


def make_plan(spec: PlanSpec):
    """The ``@flyc.jit`` launcher of the plan kernel; arguments as in spec.PLAN_ARGS. One block of 256 threads."""
    balanced = spec.split_mode == "balanced"

    @flyc.kernel(name=spec.name, known_block_size=[NUM_THREADS, 1, 1])
    def kernel(
        kv_indptr: fx.Int64, kv_lens: fx.Int64, items: fx.Int64, first_item: fx.Int64, split_counts: fx.Int64,
        num_items: fx.Int64, batch: fx.Int32, num_workers: fx.Int32, split_size: fx.Int32, fan_log2: fx.Int32,
    ):  # fmt: skip
        lds = ops.Lds(4 * 4 * NUM_THREADS)
        thread = fx.thread_idx.x
        wave = ops.uniform(thread >> 6)
        lane = thread & 63
        zero = fx.Int32(0)
        chunk = fx.Int32(1)

        if fx.const_expr(balanced):
            # -- tiles in all, and of the longest sequence
            tiles_sum, longest = zero, zero
            for sequence in range(thread, batch, NUM_THREADS):
                own = _tiles(spec, kv_indptr, kv_lens, fx.Int32(sequence))
                tiles_sum = tiles_sum + own
                longest = ops.maximum_int(longest, own)
            for distance in fx.range_constexpr(6):
                tiles_sum = tiles_sum + ops.xor_lanes(tiles_sum, 1 << distance)
                longest = ops.maximum_int(longest, ops.xor_lanes(longest, 1 << distance))
            ops.lds_store(lds, wave * 8, tiles_sum)
            ops.lds_store(lds, wave * 8, longest, offset=4)
            ops.barrier()
            tiles_sum, longest = zero, zero
            for w in fx.range_constexpr(4):
                tiles_sum = tiles_sum + ops.lds_load(lds, zero, offset=8 * w)
                longest = ops.maximum_int(longest, ops.lds_load(lds, zero, offset=8 * w + 4))
            ops.barrier()

            # -- this thread's candidate over its share of the sequences
            candidate = lane & (NUM_CANDIDATES - 1)
            ideal = _ceil_div(tiles_sum, num_workers)
            chunk = ops.minimum(_at_least_one((ideal * _factor(candidate) + 15) >> 4), longest)
            chunk = _at_least_one(ops.select(candidate == NUM_CANDIDATES - 1, longest, chunk))
            items_sum, largest, smallest = zero, zero, fx.Int32(MANY)
            for sequence in range(thread >> 5, batch, GROUPS):
                own = _tiles(spec, kv_indptr, kv_lens, fx.Int32(sequence))
                splits = _at_least_one(_ceil_div(own, chunk))
                items_sum = items_sum + splits
                largest = ops.maximum_int(largest, _ceil_div(own, splits))
                smallest = ops.minimum(smallest, ops.udiv(own, splits))
            items_sum = items_sum + ops.xor_lanes(items_sum, 32)
            largest = ops.maximum_int(largest, ops.xor_lanes(largest, 32))
            smallest = ops.minimum(smallest, ops.xor_lanes(smallest, 32))
            ops.lds_store(lds, thread * 16, items_sum)
            ops.lds_store(lds, thread * 16, largest, offset=4)
            ops.lds_store(lds, thread * 16, smallest, offset=8)
            ops.barrier()
            items_sum, largest, smallest = zero, zero, fx.Int32(MANY)
            for w in fx.range_constexpr(4):
                items_sum = items_sum + ops.lds_load(lds, candidate * 16, offset=1024 * w)
                largest = ops.maximum_int(largest, ops.lds_load(lds, candidate * 16, offset=1024 * w + 4))
                smallest = ops.minimum(smallest, ops.lds_load(lds, candidate * 16, offset=1024 * w + 8))
            ops.barrier()

            # -- the cheapest; ties go to the later (larger) candidate
            unit = largest + ITEM_OVERHEAD_BLOCKS
            waves = _ceil_div(tiles_sum + items_sum * ITEM_OVERHEAD_BLOCKS, unit * num_workers)
            by_count = _ceil_div(items_sum, num_workers) * (smallest + ITEM_OVERHEAD_BLOCKS)
            cost = ops.maximum_int(waves * unit, by_count)
            best = cost
            for distance in fx.range_constexpr(5):
                best = ops.minimum(best, ops.xor_lanes(best, 1 << distance))
            winner = ops.select(cost == best, candidate, fx.Int32(-1))
            for distance in fx.range_constexpr(5):
                winner = ops.maximum_int(winner, ops.xor_lanes(winner, 1 << distance))
            chunk = ops.uniform(ops.shuffle_from(chunk, winner))

        # -- splits and first items, 256 sequences at a time; then their items, 2^fan_log2 threads a sequence
        base = zero
        for start in range(0, batch, NUM_THREADS):
            sequence = fx.Int32(start) + thread
            in_batch = sequence < batch
            count = zero
            if in_batch:
                keys = _keys(spec, kv_indptr, kv_lens, sequence)
                if fx.const_expr(balanced):
                    count = _at_least_one(_ceil_div((keys + (TILE - 1)) >> 6, chunk))
                else:
                    count = _at_least_one(_ceil_div(keys, split_size))
            # running sum over the block: within the wave, then of the waves before
            running = count
            for distance in fx.range_constexpr(6):
                before = ops.shuffle_from(running, lane - (1 << distance))
                running = running + ops.select(lane >= (1 << distance), before, zero)
            if lane == 63:
                ops.lds_store(lds, wave * 4, running)
            ops.barrier()
            block_sum = zero
            for w in fx.range_constexpr(4):
                wave_sum = ops.lds_load(lds, zero, offset=4 * w)
                running = running + ops.select(wave > w, wave_sum, zero)
                block_sum = block_sum + wave_sum
            ops.barrier()
            own_first = base + running - count
            ops.lds_store(lds, thread * 8, own_first)
            ops.lds_store(lds, thread * 8, count, offset=4)
            if in_batch:
                at = ops.widen(sequence) * 4
                ops.global_store(first_item + at, own_first)
                ops.global_store(split_counts + at, count)
            ops.barrier()
            place = thread >> fan_log2
            other_first = ops.lds_load(lds, place * 8)
            other_count = ops.lds_load(lds, place * 8, offset=4)
            mine = thread & ((fx.Int32(1) << fan_log2) - 1)
            for split in range(mine, other_count, fx.Int32(1) << fan_log2):
                at = ops.widen(other_first + fx.Int32(split)) * 4
                ops.global_store(items + at, fx.Int32(start) + place)
            ops.barrier()
            base = base + block_sum
        if thread == 0:
            ops.global_store(num_items, base)

    @flyc.jit
    def launch(
        kv_indptr: fx.Int64, kv_lens: fx.Int64, items: fx.Int64, first_item: fx.Int64, split_counts: fx.Int64,
        num_items: fx.Int64, batch: fx.Int32, num_workers: fx.Int32, split_size: fx.Int32, fan_log2: fx.Int32, grid: fx.Int32,
    ):  # fmt: skip
        kernel(
            kv_indptr, kv_lens, items, first_item, split_counts, num_items, batch, num_workers, split_size, fan_log2
        ).launch(grid=(grid, 1, 1), block=(NUM_THREADS, 1, 1))  # fmt: skip

    return launch
