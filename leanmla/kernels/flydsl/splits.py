"""How a problem is cut into items and blocks, from its shapes alone: nothing waits for the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...problem import DecodeProblem
from ...split_plan import CHUNK_CANDIDATES
from .spec import TILE, DecodeSpec

__all__ = ["MI355X_COMPUTE_UNITS", "WorkShape", "work_shape"]

MI355X_COMPUTE_UNITS = 256


@dataclass(frozen=True, slots=True)
class WorkShape:
    """Grid and scratch of a decode step."""

    split_mode: str  #: see spec.SPLIT_MODES
    num_splits: int  #: of every sequence, in mode "count"
    split_size: int  #: keys, in mode "size"
    num_workers: int  #: items that run at the same time
    max_items: int  #: bound on the items, from shapes
    row_blocks: int  #: blocks that share an item, each with its own rows
    row_capacity: int  #: rows of a sequence that partial results have room for
    reason: str

    @property
    def grid(self) -> int:
        """Blocks of the decode kernel."""
        return self.max_items * self.row_blocks

    @property
    def partial_rows(self) -> int:
        """Rows of partial results: 0 if nothing is split."""
        return 0 if self.split_mode == "one" else self.max_items * self.row_capacity


@functools.lru_cache(maxsize=256)
def work_shape(problem: DecodeProblem, compute_units: int = MI355X_COMPUTE_UNITS, precision: str = "16bit") -> WorkShape:
    """How ``problem`` is cut; ``num_kv_splits`` and ``split_size`` are taken as they are.

    Balanced: the planner's smallest candidate chunk is a quarter of the ideal share, so there are at most
    4 * num_workers + batch items, and never more than there are tiles (plus one an empty sequence).
    """
    spec = DecodeSpec.for_problem(problem, "balanced", precision)
    row_blocks = max(1, -(-problem.num_heads * problem.max_q_len // spec.rows))
    resident = compute_units * spec.blocks_per_cu
    workers = max(1, resident // row_blocks)
    batch = problem.batch
    num_splits, split_size = 1, 0
    if problem.num_kv_splits is not None:
        num_splits = problem.num_kv_splits
        mode = "one" if num_splits == 1 else "count"
        items, reason = batch * num_splits, f"{num_splits} splits of every sequence, as asked"
    elif problem.split_size is not None:
        mode, split_size = "size", problem.split_size
        items, reason = batch + problem.total_kv // split_size, f"splits of {split_size} keys, as asked"
    elif problem.max_kv_len <= TILE:
        mode, items, reason = "one", batch, "no sequence is longer than a tile: not split"
    else:
        finest = min(CHUNK_CANDIDATES)
        mode, items = "balanced", batch + min(-(-16 * workers // finest), problem.total_kv // TILE)
        reason = f"the device cuts the batch into items that fill {workers} workers"
    if mode in ("balanced", "size"):
        items = -(-items // 8) * 8  # row blocks of an item land on one die
    return WorkShape(mode, num_splits, split_size, workers, items, row_blocks, row_blocks * spec.rows, reason)
