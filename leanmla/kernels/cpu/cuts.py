"""How many splits a sequence's keys get, and where each begins: what the compiled planner and ``explain`` share.

Plain integer arithmetic on plain functions. :mod:`.plan` compiles these very functions; numba is not needed to call them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...problem import DecodeProblem
from ...split_plan import SplitItem, SplitPlan
from .calls import MAX_ROWS, TILE

__all__ = ["host_plan", "most", "num_splits", "num_tiles", "row_chunks", "shared_split_size", "split_range"]

#: Items a thread, where each can have at least MIN_ITEM_TILES tiles of keys. Threads take items as they become free, so
#: one that shares its core with something else does not hold up the rest.
ITEMS_PER_THREAD = 4
MIN_ITEM_TILES = 8


def num_tiles(kv_len):
    """Tiles that hold keys of a sequence."""
    return (kv_len + TILE - 1) // TILE


def row_chunks(rows):
    """Chunks of query rows of a sequence; every range of keys is an item with each."""
    return (rows + MAX_ROWS - 1) // MAX_ROWS


def shared_split_size(tiles, num_threads):
    """Keys a split where the choice is free, the same for all sequences; ``tiles``: of all sequences, times their row chunks.

    Threads take items as they become free, so items need not be equal, only small enough. 512 tiles on two threads: 8 items
    of 64 tiles.
    """
    share = num_threads * ITEMS_PER_THREAD
    return TILE * max(MIN_ITEM_TILES, (tiles + share - 1) // share)


def num_splits(kv_len, num_kv_splits, split_size):
    """Splits of a sequence. Where a count was asked for, only those that have keys: an empty one changes no result."""
    if num_kv_splits != 0:
        return max(min(num_kv_splits, (kv_len + TILE - 1) // TILE), 1)
    return max((kv_len + split_size - 1) // split_size, 1)


def split_range(kv_len, num_splits, split, split_size):
    """Keys [start, end) of a split; ``split_size`` 0: the tiles are dealt out evenly."""
    if split_size != 0:
        return split * split_size, min((split + 1) * split_size, kv_len)
    tiles = (kv_len + TILE - 1) // TILE
    return min(tiles * split // num_splits * TILE, kv_len), min(tiles * (split + 1) // num_splits * TILE, kv_len)


def host_plan(
    kv_lens: Sequence[int], rows: Sequence[int], *, num_threads: int, num_kv_splits: int | None, split_size: int | None
) -> SplitPlan:
    """The ranges of keys of a call, as :func:`.plan.plan` cuts them.

    Args:
        kv_lens: keys of each sequence.
        rows: query rows times heads of each sequence.
    """
    count, size, chunk = num_kv_splits or 0, split_size or 0, None
    if not count and not size:
        size = shared_split_size(sum(num_tiles(n) * row_chunks(r) for n, r in zip(kv_lens, rows, strict=True)), num_threads)
        chunk = size // TILE
    splits = [num_splits(n, count, size) for n in kv_lens]
    items: list[SplitItem] = []
    starts: list[int] = []
    for b, (n, k) in enumerate(zip(kv_lens, splits, strict=True)):
        starts.append(len(items))
        items += [SplitItem(b, s, k, *split_range(n, k, s, size)) for s in range(k)]
    return SplitPlan(
        items=tuple(items),
        splits_per_seq=tuple(splits),
        partial_start=tuple(starts),
        granularity=TILE,
        num_workers=num_threads,
        chunk_blocks=chunk,
        mode="fixed count" if count else "balanced" if chunk else "fixed size",
        kv_lens=tuple(kv_lens),
    )


def most(capacity: DecodeProblem, num_threads: int) -> tuple[int, int, int]:
    """(items, merges, partial slots): bounds for every call within a capacity."""
    rows = capacity.total_q * capacity.num_heads
    rows_each = min(rows, capacity.max_q_len * capacity.num_heads)
    chunks = min(capacity.batch * row_chunks(rows_each), rows // MAX_ROWS + capacity.batch)
    if capacity.num_kv_splits is not None or capacity.split_size is not None:
        splits = num_splits(capacity.max_kv_len, capacity.num_kv_splits or 0, capacity.split_size or 0)
        return splits * chunks, chunks if splits > 1 else 0, splits * rows if splits > 1 else 0
    # Free choice: splits have ``size`` keys, at least a share of all tiles. A sequence with one split has no slots; another
    # has less than twice its tiles' part of the shares, each with at most MAX_ROWS rows.
    splits = num_splits(capacity.max_kv_len, 0, TILE * MIN_ITEM_TILES)
    share = num_threads * ITEMS_PER_THREAD
    items = min(splits * chunks, share + chunks)
    if splits == 1:
        return items, 0, 0
    return items, chunks, min(splits * rows, 2 * share * min(rows_each, MAX_ROWS))
