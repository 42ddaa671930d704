"""How many splits a problem gets, from its shapes alone: nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import DecodeProblem
from ...split_plan import choose_chunk
from .spec import TILE, row_tiles_for

__all__ = ["MI355X_COMPUTE_UNITS", "SplitChoice", "choose_splits"]

MI355X_COMPUTE_UNITS = 256
MAX_SPLITS = 64
#: Partial results of a call may take this much memory.
MAX_PARTIAL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """How every sequence is cut; see ``split_mode`` in spec.DecodeSpec."""

    mode: str
    num_splits: int
    split_keys: int
    row_blocks: int
    reason: str


def choose_splits(problem: DecodeProblem, compute_units: int = MI355X_COMPUTE_UNITS) -> SplitChoice:
    """The splits of ``problem``; ``num_kv_splits`` and ``split_size`` are taken as they are."""
    rows = problem.num_heads * problem.max_q_len
    tiles = row_tiles_for(rows)
    row_blocks = -(-rows // (16 * tiles))
    if problem.num_kv_splits is not None:
        n = problem.num_kv_splits
        return SplitChoice("one" if n == 1 else "count", n, 0, row_blocks, f"{n} splits as asked")
    if problem.split_size is not None:
        n = max(1, -(-problem.max_kv_len // problem.split_size))
        mode = "one" if n == 1 else "size"
        return SplitChoice(mode, n, problem.split_size, row_blocks, f"splits of {problem.split_size} keys as asked")
    # One block of 64 rows fills a compute unit's LDS and registers; smaller ones fit twice.
    workers = compute_units * (1 if tiles == 4 else 2)
    items = max(1, problem.batch * row_blocks)
    mean_tiles = -(-problem.total_kv // (TILE * max(1, problem.batch)))
    chunk = choose_chunk([mean_tiles] * items, num_workers=workers, max_splits=MAX_SPLITS)
    longest = -(-problem.max_kv_len // TILE)
    room = MAX_PARTIAL_BYTES // max(1, problem.total_q * problem.num_heads * 512 * 4)
    n = max(1, min(-(-longest // chunk), MAX_SPLITS, room))
    if n == 1:
        return SplitChoice("one", 1, 0, row_blocks, f"{items} row blocks for {workers} resident blocks: not split")
    return SplitChoice("chunk", n, chunk, row_blocks, f"splits of {chunk} tiles spread {items} row blocks over {workers} resident blocks")
