"""How a problem is laid on the machine: tile sizes, number of workers, scratch memory. Plain values, no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass

from ...device import DeviceInfo
from ...problem import DecodeProblem

__all__ = ["BLOCK_KEYS", "FAR_SPLITS", "HopperLaunch", "box_keys", "choose_launch"]

#: Keys a tile.
BLOCK_KEYS = 64
#: More splits than these are merged in finer shares (``reduction``).
FAR_SPLITS = 64
#: Keys in tiles from which a sequence counts as long: 32768 keys.
_LONG_BLOCKS = 512
_KINDS = {"csr": 0, "block_table": 1, "contiguous": 2}


@dataclass(frozen=True)
class HopperLaunch:
    """Everything a kernel launch is told apart from its tensors."""

    format: str
    rows: int  #: (query token, head) pairs a tile
    tiles: int  #: row tiles of a sequence
    num_warps: int  #: of the mathematicians
    stages: int
    blocks_per_sm: int
    box: int  #: keys a tensor-map box
    gather: bool  #: keys are fetched one by one
    kind: int  #: kind of page table
    mode: int  #: 0 balanced, 1 fixed number of splits, 2 fixed size of splits
    workers: int  #: pieces of the batch, or splits of a sequence in the fixed modes
    splits: int  #: see schedule.plan_piece
    grid: int
    may_wait: bool  #: all blocks run at once, so they may wait for each other (with patience)
    slots: int  #: partial results
    many_splits: bool  #: the kernel has code for merging more than 64 splits of a sequence fast

    @property
    def partial_rows(self) -> int:
        return self.slots * self.rows


def box_keys(page_size: int, table_kind: str) -> int:
    """Keys of one tensor-map box: the largest of 64, 32, 16 that tiles a page; 0 if keys must be gathered."""
    if table_kind == "contiguous":
        return BLOCK_KEYS
    return next((box for box in (64, 32, 16) if page_size % box == 0), 0)


def _tile_rows(problem: DecodeProblem) -> int:
    rows = problem.num_heads * max(problem.max_q_len, 1)
    # A bf16 cache with an fp16 query keeps two bf16 terms of the query in shared memory, which leaves room for 32 rows.
    # fp8_tile128 keeps four probability tiles, and one warpgroup holds the whole output.
    largest = 32 if problem.format == "fp8_tile128" or (problem.format == "bf16" and problem.q_dtype == "fp16") else 64
    return min(largest, next((n for n in (16, 32) if rows <= n), 64))


def _may_be_cut_finely(problem: DecodeProblem, mode: int, workers: int) -> bool:
    """Whether a sequence in more than 64 splits is to be expected. The code for it makes every other call up to 1 us slower where
    there is something to merge (it no longer fits the instruction cache), so it is there only for long contexts, for few sequences
    that get all the workers, and where the splits are given."""
    if mode == 1:
        return workers > FAR_SPLITS
    longest = problem.max_kv_len // BLOCK_KEYS
    blocks = max(problem.total_kv // BLOCK_KEYS, 1)
    return mode == 2 or longest >= _LONG_BLOCKS or longest * workers > FAR_SPLITS * blocks


def choose_launch(problem: DecodeProblem, device: DeviceInfo) -> HopperLaunch:
    """The launch for ``problem``; only shapes and options matter, never the contents of a tensor."""
    rows = _tile_rows(problem)
    tiles = max(1, -(-problem.num_heads * problem.max_q_len // rows))
    # bf16: two stages are 147 KiB, one block an SM. fp8: two stages and the query are 94 KiB, two blocks an SM hide each
    # other's softmax; from 32 rows on the accumulators alone need the registers of one block.
    # mxfp4: two expanded stages, one of nibbles and the query are 114 KiB; a worker warpgroup does the expanding.
    blocks_per_sm = 2 if problem.format != "bf16" and rows == 16 else 1
    stages = 2 if problem.format in ("bf16", "mxfp4") or blocks_per_sm == 2 else 3
    box = box_keys(problem.page_size, problem.table_kind)
    resident = device.num_sms * blocks_per_sm
    batch = max(problem.batch, 1)
    if problem.num_kv_splits is not None:
        mode, workers, splits = 1, problem.num_kv_splits, problem.num_kv_splits
    elif problem.split_size is not None:
        mode, splits = 2, problem.split_size // BLOCK_KEYS
        workers = max(1, -(-problem.max_kv_len // problem.split_size))
    else:
        mode, splits = 0, 1
        most_blocks = problem.total_kv // BLOCK_KEYS + batch
        # Few keys a worker: one block an SM, since two would share what one can read alone (4 sequences of 8192 keys, fp8:
        # 17.5 us against 22.8; 32 of 1024: 16.4 against 20.5; 64 of 1024: 23.7 against 25.4).
        if blocks_per_sm == 2 and most_blocks * tiles <= 5 * resident:
            resident = device.num_sms
        workers = max(1, min(resident // tiles, most_blocks))
    grid = workers * tiles * (1 if mode == 0 else batch)
    slots = (2 * workers + 2) * tiles if mode == 0 else (grid if workers > 1 else 0)
    return HopperLaunch(
        format=problem.format,
        rows=rows,
        tiles=tiles,
        num_warps=8 if rows == 64 or (rows == 32 and problem.format in ("fp8", "mxfp4")) else 4,
        stages=stages,
        blocks_per_sm=blocks_per_sm,
        box=box or BLOCK_KEYS,
        gather=box == 0,
        kind=_KINDS[problem.table_kind],
        mode=mode,
        workers=workers,
        splits=splits,
        grid=grid,
        may_wait=mode == 0 and grid <= resident,
        slots=slots,
        many_splits=rows == 16 and _may_be_cut_finely(problem, mode, workers),
    )
