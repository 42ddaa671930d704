"""The schedule of ``schedule`` in plain Python: what each worker reads, for ``leanmla explain`` and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...split_plan import SplitItem, SplitPlan
from .launch import BLOCK_KEYS, HopperLaunch

__all__ = ["GAP_BLOCKS", "HopperPlan", "host_plan", "piece_blocks"]

#: What starting a sequence costs, in blocks, where lengths differ.
GAP_BLOCKS = 3


@dataclass(frozen=True)
class HopperPlan(SplitPlan):
    """A plan whose items have fixed workers: the balanced mode cuts one line of blocks into equal pieces."""

    queues: tuple[tuple[SplitItem, ...], ...] = field(default=(), repr=False)

    def workers(self) -> list[list[SplitItem]]:
        """Items of each worker, in the order in which it runs them."""
        return [list(queue) for queue in self.queues] if self.queues else super().workers()


def piece_blocks(total_blocks: int, workers: int, min_blocks: int = 1, even: bool = True) -> int:
    """Blocks a worker takes in the balanced mode. ``even``: all sequences have as many blocks."""
    piece = max(-(-total_blocks // workers), min_blocks, 1)
    unit = 1 << max(piece.bit_length() - 1 - 4, 0) if even else 1
    return -(-piece // unit) * unit


def host_plan(kv_lens: Sequence[int], launch: HopperLaunch) -> HopperPlan:
    """The keys that every worker reads.

    Args:
        kv_lens: keys of each sequence, zeros allowed: an empty sequence has one item without keys.
        launch: as chosen for the problem.
    """
    lens = [int(n) for n in kv_lens]
    blocks = [-(-n // BLOCK_KEYS) for n in lens]
    if launch.mode == 0:
        return _balanced(lens, blocks, launch)
    count = launch.splits if launch.mode == 1 else 0
    size = 0 if launch.mode == 1 else launch.splits
    splits = [count or max(1, -(-n // size)) for n in blocks]
    items: list[SplitItem] = []
    starts: list[int] = []
    for b, (n, num_blocks, k) in enumerate(zip(lens, blocks, splits, strict=True)):
        starts.append(len(items))
        for s in range(k):
            lo, hi = (num_blocks * s // k, num_blocks * (s + 1) // k) if count else (s * size, min((s + 1) * size, num_blocks))
            items.append(SplitItem(b, s, k, min(lo * BLOCK_KEYS, n), min(hi * BLOCK_KEYS, n)))
    return HopperPlan(
        items=tuple(items), splits_per_seq=tuple(splits), partial_start=tuple(starts), granularity=BLOCK_KEYS,
        num_workers=max(1, launch.grid // launch.tiles), chunk_blocks=None, mode="fixed count" if count else "fixed size",
        kv_lens=tuple(lens),
    )  # fmt: skip


def _balanced(lens: list[int], blocks: list[int], launch: HopperLaunch) -> HopperPlan:
    counted = [max(n, 1) for n in blocks]
    even = len(set(counted)) < 2
    gap = 0 if even else GAP_BLOCKS
    piece = piece_blocks(sum(counted) + gap * len(counted), launch.workers, launch.splits, even)
    queues: list[list[SplitItem]] = [[] for _ in range(launch.workers)]
    items: list[SplitItem] = []
    starts: list[int] = []
    splits: list[int] = []
    base = 0
    for b, (n, count) in enumerate(zip(lens, counted, strict=True)):
        base += gap
        first, last = base // piece, (base + count - 1) // piece
        starts.append(len(items))
        splits.append(last - first + 1)
        for w in range(first, last + 1):
            lo = max(w * piece - base, 0)
            hi = min((w + 1) * piece - base, count)
            items.append(SplitItem(b, w - first, last - first + 1, min(lo * BLOCK_KEYS, n), min(hi * BLOCK_KEYS, n)))
            queues[w].append(items[-1])
        base += count
    return HopperPlan(
        items=tuple(items), splits_per_seq=tuple(splits), partial_start=tuple(starts), granularity=BLOCK_KEYS,
        num_workers=launch.workers, chunk_blocks=piece, mode="balanced", kv_lens=tuple(lens),
        queues=tuple(tuple(queue) for queue in queues),
    )  # fmt: skip
