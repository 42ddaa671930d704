"""How a problem is laid on the machine: number of workers, scratch memory. Plain values, no GPU needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...device import DeviceInfo
from ...problem import DecodeProblem
from .launch_configs import Arrangement, chosen

__all__ = ["KEYS", "MODES", "ROWS", "TABLE_KINDS", "CudaLaunch", "arrangement_for", "choose_launch"]

KEYS = 64  #: a tile
ROWS = 16  #: (query token, head) pairs a block works on
#: Numbers of ``TableKind`` and ``Mode`` in layout.cuh.
TABLE_KINDS = {"csr": 0, "block_table": 1, "contiguous": 2}
MODES = {"balanced": 0, "fixed count": 1, "fixed size": 2}


@dataclass(frozen=True)
class CudaLaunch:
    """Everything a launch is told apart from its tensors."""

    tiles: int  #: row tiles of a sequence
    kind: int  #: see TABLE_KINDS
    mode: int  #: see MODES
    workers: int  #: pieces of the batch, or splits of a sequence in the fixed modes
    splits: int  #: balanced: 1; otherwise splits, or tiles a split
    grid: int
    may_wait: bool  #: all blocks run at once, so they may wait for each other (with patience)
    slots: int  #: partial results


def _row_tiles(problem: DecodeProblem) -> int:
    return max(1, -(-problem.num_heads * problem.max_q_len // ROWS))


def _most_tiles(problem: DecodeProblem) -> int:
    return problem.total_kv // KEYS + max(problem.batch, 1)


def arrangement_for(problem: DecodeProblem, device: DeviceInfo) -> Arrangement:
    """How blocks are put together for ``problem``. With a split size always in one way, since the order of sums depends on it and a row
    alone must equal the row in a batch bit for bit."""
    if problem.split_size is not None:
        return chosen(problem.format, math.inf)
    return chosen(problem.format, _row_tiles(problem) * _most_tiles(problem) / max(device.num_sms, 1))


def choose_launch(problem: DecodeProblem, device: DeviceInfo, arrangement: Arrangement | None = None) -> CudaLaunch:
    """The launch for ``problem`` (by default of its own arrangement); only shapes and options matter, never the contents of a tensor."""
    arrangement = arrangement or arrangement_for(problem, device)
    resident = device.num_sms * arrangement.blocks_per_sm
    tiles = _row_tiles(problem)
    batch = max(problem.batch, 1)
    if problem.num_kv_splits is not None:
        mode, workers, splits = MODES["fixed count"], problem.num_kv_splits, problem.num_kv_splits
    elif problem.split_size is not None:
        mode, splits = MODES["fixed size"], problem.split_size // KEYS
        workers = max(1, -(-problem.max_kv_len // problem.split_size))
    else:
        mode, splits = MODES["balanced"], 1
        workers = max(1, min(resident // tiles, _most_tiles(problem)))
    balanced = mode == MODES["balanced"]
    grid = workers * tiles * (1 if balanced else batch)
    return CudaLaunch(
        tiles=tiles,
        kind=TABLE_KINDS[problem.table_kind],
        mode=mode,
        workers=workers,
        splits=splits,
        grid=grid,
        may_wait=balanced and grid <= resident,
        slots=(2 * workers + 2) * tiles if balanced else (grid if workers > 1 else 0),
    )
