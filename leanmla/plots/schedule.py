"""A split plan as a timetable: which worker reads what when, and what is lost to imbalance. Plain numbers, nothing drawn."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..split_plan import SplitItem, SplitPlan

__all__ = ["Bar", "ScheduleFigures", "Timetable", "timetable"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One item on a worker; times in key blocks."""

    worker: int
    start: int
    end: int
    item: SplitItem
    ends_sequence: bool  #: the last item of a split sequence to finish: from here on its partial results can be merged


@dataclass(frozen=True)
class ScheduleFigures:
    """What a timetable comes to. Times and loads in key blocks of ``block_keys`` keys; starting an item counts as nothing."""

    block_keys: int
    num_workers: int
    num_sequences: int
    num_items: int
    split_sequences: int  #: sequences with more than one item
    partials: int  #: partial results that are written and merged
    most_splits: int
    makespan: int  #: load of the busiest worker
    mean_load: float
    idle_share: float  #: of all workers' time until the busiest one ends
    idle_workers: int  #: workers without any keys
    all_busy_until: int  #: load of the least busy worker
    longest_item: int
    shortest_item: int

    @property
    def imbalance(self) -> float:
        """Load of the busiest worker over the mean; 1 is perfect."""
        return self.makespan / self.mean_load if self.mean_load else 1.0

    def document(self) -> dict:
        """As it goes into JSON."""
        return {**asdict(self), "imbalance": self.imbalance}

    def sentences(self) -> list[str]:
        """The same in words, for a terminal."""
        if not self.makespan:
            return ["there are no keys at all"]
        combine = (
            f"{self.split_sequences} of {self.num_sequences} sequences are split: {self.partials} partial results to combine, at most {self.most_splits} each"
            if self.split_sequences
            else f"none of {self.num_sequences} sequences is split: nothing to combine"
        )
        return [
            f"{self.idle_share:.1%} of the workers' time is idle: busiest {self.makespan}, mean {self.mean_load:.1f} blocks of {self.block_keys}, ratio {self.imbalance:.2f}",
            combine,
        ]


@dataclass(frozen=True)
class Timetable:
    """Bars in the order in which they are drawn: busiest worker first."""

    bars: tuple[Bar, ...]
    loads: tuple[int, ...]  #: of each row, descending
    figures: ScheduleFigures


def timetable(plan: SplitPlan) -> Timetable:
    """Lay a plan's items out on its workers, back to back."""
    size = plan.granularity

    def blocks(item: SplitItem) -> int:
        return -(-item.num_keys // size)

    queues = [[i for i in queue if i.num_keys] for queue in plan.workers()]
    queues.sort(key=lambda q: (-sum(map(blocks, q)), q[0].seq if q else -1, q[0].split if q else -1))
    spans: list[tuple[int, int, int, SplitItem]] = []
    ends: dict[int, tuple[int, int]] = {}  # sequence -> (end of its last item, that item's split)
    for row, queue in enumerate(queues):
        at = 0
        for item in queue:
            spans.append((row, at, at + blocks(item), item))
            at += blocks(item)
            if item.num_splits > 1:
                ends[item.seq] = max(ends.get(item.seq, (-1, -1)), (at, item.split))
    bars = tuple(Bar(row, start, end, i, ends.get(i.seq) == (end, i.split)) for row, start, end, i in spans)
    loads = tuple(sum(map(blocks, q)) for q in queues)
    makespan, lengths = max(loads, default=0), [blocks(i) for i in plan.items]
    mean = sum(loads) / len(loads) if loads else 0.0
    split = [n for n in plan.splits_per_seq if n > 1]
    figures = ScheduleFigures(
        block_keys=size, num_workers=plan.num_workers, num_sequences=len(plan.kv_lens), num_items=len(plan.items),
        split_sequences=len(split), partials=sum(split), most_splits=max(plan.splits_per_seq, default=0), makespan=makespan,
        mean_load=mean, idle_share=1 - mean / makespan if makespan else 0.0, idle_workers=sum(n == 0 for n in loads),
        all_busy_until=min(loads, default=0), longest_item=max(lengths, default=0), shortest_item=min(lengths, default=0),
    )  # fmt: skip
    return Timetable(bars, loads, figures)
