"""The split-KV planner: which worker reads which keys, as plain values.

This file is the definition. Device-side planners repeat :func:`choose_chunk` in their own language and are
tested against it; everything here is integer arithmetic, so they can agree exactly.

One decode step is cut into *items*: a range of keys of one sequence. A sequence with one item writes its
output directly; a sequence with several writes partial results that a combine step merges. Three modes:

* balanced (default): the chunk is chosen so that the items fill ``num_workers`` evenly;
* ``num_kv_splits=n``: exactly ``n`` items a sequence, some possibly empty;
* ``split_size=s``: items end at multiples of ``s`` keys, whatever else is in the batch, so a row computed
  alone equals the same row in a batch bit for bit (the reproducible mode).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .errors import InvalidArgument

__all__ = ["CHUNK_CANDIDATES", "SplitItem", "SplitPlan", "choose_chunk", "plan_splits"]

#: Candidate chunks, in sixteenths of the ideal share ``ceil(total_blocks / num_workers)``. Below 16 an item is
#: smaller than the ideal share (several waves, finer balance), above it is larger (fewer, fuller workers).
#: 31 factors and the unsplit sequence make 32 candidates, one vector of a device planner.
CHUNK_CANDIDATES: tuple[int, ...] = (
    4, 5, 6, 7, 8, 10, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 32, 36, 40, 44, 48, 56, 64, 80, 128,
)  # fmt: skip

#: What starting an item costs, in blocks: fetching the query, filling the pipeline, writing a partial result.
ITEM_OVERHEAD_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class SplitItem:
    """Keys ``kv_start:kv_end`` of sequence ``seq``, as split ``split`` of ``num_splits``."""

    seq: int
    split: int
    num_splits: int
    kv_start: int
    kv_end: int

    @property
    def num_keys(self) -> int:
        return self.kv_end - self.kv_start


@dataclass(frozen=True)
class SplitPlan:
    """All items of a decode step, in sequence order, and the figures the choice came from.

    ``partial_start[b]`` is the first partial slot of sequence ``b``: item ``split`` of it owns slot
    ``partial_start[b] + split``. Sequences with one item own a slot too, which stays unused.
    """

    items: tuple[SplitItem, ...]
    splits_per_seq: tuple[int, ...]
    partial_start: tuple[int, ...]
    granularity: int
    num_workers: int
    chunk_blocks: int | None
    mode: str
    kv_lens: tuple[int, ...] = field(repr=False)

    @property
    def num_partials(self) -> int:
        """Partial slots the plan needs (one an item)."""
        return len(self.items)

    def workers(self) -> list[list[SplitItem]]:
        """Items as ``num_workers`` equal workers take them: longest first, each to whoever is free first.

        A model for display and for the balance figure; a GPU hands blocks out in grid order, which is close.
        """
        queues: list[list[SplitItem]] = [[] for _ in range(self.num_workers)]
        load = [(0, w) for w in range(self.num_workers)]
        for item in sorted(self.items, key=lambda i: (-i.num_keys, i.seq, i.split)):
            busy, w = heapq.heappop(load)
            queues[w].append(item)
            heapq.heappush(load, (busy + self._blocks(item) + ITEM_OVERHEAD_BLOCKS, w))
        return queues

    def _blocks(self, item: SplitItem) -> int:
        return -(-item.num_keys // self.granularity)

    @property
    def balance(self) -> float:
        """Mean load of a worker over the load of the busiest one, in key blocks: 1.0 is perfect."""
        loads = [sum(self._blocks(i) for i in q) for q in self.workers()]
        return sum(loads) / (max(loads) * len(loads)) if max(loads, default=0) else 1.0


def choose_chunk(blocks: Sequence[int] | np.ndarray, *, num_workers: int, max_splits: int | None = None) -> int:
    """The chunk, in blocks, for the balanced mode: a sequence of ``n`` blocks gets ``ceil(n / chunk)`` items.

    An item costs its blocks plus :data:`ITEM_OVERHEAD_BLOCKS`. For each candidate chunk the model is
    ``waves * unit``: ``unit`` is the cost of the largest item and ``waves = ceil(cost of all items / (unit * num_workers))``,
    so small items count for what they are; but some worker runs ``ceil(items / num_workers)`` items, so it is at least that
    many of the smallest. The lowest cost wins, ties go to the larger chunk (fewer partials).

    Worked example: 64 sequences of 128 blocks on 264 workers have an ideal share of ceil(8192 / 264) = 32; at 32
    each sequence gets 4 items, all 256 cost 256 * 33 <= 264 * 33: one wave of 33. At 16 it would be 512 items of 17, two
    waves, 34.

    Args:
        blocks: key blocks of each sequence.
        num_workers: items that run at the same time.
        max_splits: no sequence gets more items than this.
    """
    blocks = np.asarray(blocks, dtype=np.int64)
    total = int(blocks.sum()) if blocks.size else 0
    if total == 0:
        return 1
    ideal = -(-total // num_workers)
    longest = int(blocks.max())
    best_cost, best_chunk = None, longest
    for sixteenths in (*CHUNK_CANDIDATES, None):
        chunk = longest if sixteenths is None else min(longest, max(1, -(-ideal * sixteenths // 16)))
        splits = np.maximum(-(-blocks // chunk), 1)
        if max_splits is not None:
            splits = np.minimum(splits, max_splits)
        items = int(splits.sum())
        unit = int((-(-blocks // splits)).max()) + ITEM_OVERHEAD_BLOCKS
        smallest = int((blocks // splits).min()) + ITEM_OVERHEAD_BLOCKS
        waves = -(-(total + items * ITEM_OVERHEAD_BLOCKS) // (unit * num_workers))
        cost = max(waves * unit, -(-items // num_workers) * smallest)
        # Candidates ascend, so "<=" hands ties to the larger chunk.
        if best_cost is None or cost <= best_cost:
            best_cost, best_chunk = cost, chunk
    return best_chunk


def plan_splits(
    kv_lens: Sequence[int],
    *,
    num_workers: int,
    granularity: int = 64,
    max_splits: int | None = None,
    num_kv_splits: int | None = None,
    split_size: int | None = None,
) -> SplitPlan:
    """Cut every sequence's keys into items.

    Args:
        kv_lens: keys of each sequence, zeros allowed. An empty sequence gets one empty item, so that whoever runs
            the item also writes the sequence's output (zeros).
        num_workers: items that run at the same time (multiprocessors times resident blocks, or CPU threads).
        granularity: keys a block; in the balanced and ``num_kv_splits`` modes items begin at multiples of it.
        max_splits: most items a sequence may get in the balanced mode.
        num_kv_splits: exactly this many items a sequence.
        split_size: keys an item (reproducible mode); need not be a multiple of ``granularity``.

    Raises:
        InvalidArgument: a count is not positive, a length is negative, or two modes are asked for at once.
    """
    for name, value in (
        ("num_workers", num_workers),
        ("granularity", granularity),
        ("max_splits", max_splits),
        ("num_kv_splits", num_kv_splits),
        ("split_size", split_size),
    ):
        if value is not None and value < 1:
            raise InvalidArgument(f"{name}: expected a positive integer, got {value}.")
    if num_kv_splits is not None and split_size is not None:
        raise InvalidArgument(
            f"num_kv_splits and split_size exclude each other, got {num_kv_splits} and {split_size}. Give one of them."
        )
    lens = [int(n) for n in kv_lens]
    if lens and min(lens) < 0:
        b = min(range(len(lens)), key=lens.__getitem__)
        raise InvalidArgument(f"kv_lens: expected lengths >= 0, got {lens[b]} for sequence {b}.")

    chunk: int | None = None
    if split_size is not None:
        mode = "fixed size"
        splits = [max(1, -(-n // split_size)) for n in lens]
    elif num_kv_splits is not None:
        mode = "fixed count"
        splits = [num_kv_splits] * len(lens)
    else:
        mode = "balanced"
        blocks = [-(-n // granularity) for n in lens]
        chunk = choose_chunk(blocks, num_workers=num_workers, max_splits=max_splits)
        splits = [min(max(1, -(-n // chunk)), max_splits or max(1, n)) for n in blocks]

    items: list[SplitItem] = []
    partial_start: list[int] = []
    for b, (n, count) in enumerate(zip(lens, splits, strict=True)):
        partial_start.append(len(items))
        num_blocks = -(-n // granularity)
        for s in range(count):
            if split_size is not None:
                start, end = s * split_size, min((s + 1) * split_size, n)
            else:
                start = min(num_blocks * s // count * granularity, n)
                end = min(num_blocks * (s + 1) // count * granularity, n)
            items.append(SplitItem(b, s, count, start, end))
    return SplitPlan(
        items=tuple(items),
        splits_per_seq=tuple(splits),
        partial_start=tuple(partial_start),
        granularity=granularity,
        num_workers=num_workers,
        chunk_blocks=chunk,
        mode=mode,
        kv_lens=tuple(lens),
    )
