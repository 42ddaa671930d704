"""Block sizes of the Triton kernels, per architecture, as printable values.

Every odd value carries the measurement or the compiler's report it came from. Registers and shared memory are what the
offline tests (tests/triton) assert: no spills, within the architecture's limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import DeviceInfo
from ..problem import DecodeProblem

__all__ = ["CombineConfig", "TritonConfig", "combine_config", "decode_config"]


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Shape of the decode kernel."""

    rows: int  #: query rows (tokens x heads) a tile
    row_tiles: int  #: tiles that cover a sequence's query rows
    block_kv: int  #: keys a tile
    num_warps: int
    num_stages: int  #: shared-memory buffers of the bf16 pipeline; decoded formats pipeline through registers
    blocks_per_sm: int  #: programs resident on one multiprocessor
    reason: str

    def num_workers(self, device: DeviceInfo) -> int:
        """Items that run at the same time. The row tiles of an item count as one worker."""
        return max(1, device.num_sms * self.blocks_per_sm // self.row_tiles)


@dataclass(frozen=True, slots=True)
class CombineConfig:
    """Shape of the combine kernel."""

    parts: int  #: partial results read at a time
    cols: int  #: columns a program
    num_warps: int


def _rows(rows: int, largest: int) -> int:
    """Smallest tile of 16, 32 or 64 rows that holds ``rows``, at most ``largest``."""
    for r in (16, 32, 64):
        if r >= min(rows, largest):
            return r
    raise AssertionError(rows)


def decode_config(problem: DecodeProblem, device: DeviceInfo) -> TritonConfig:
    """Block sizes for a problem on a device."""
    total = max(1, problem.num_heads * problem.max_q_len)
    if device.kind == "cuda" and device.sm >= 90:
        if problem.format == "bf16":
            rows = _rows(total, 64)
            if rows == 16:
                return _config(total, 16, 64, 4, 1, 2, "wgmma; two blocks a multiprocessor load and compute in turns")
            return _config(total, rows, 32, 8, 2, 1, "wgmma; 32 keys a tile leave room for the queries")
        # tile128 scales each partial sum: more registers, so fewer rows.
        rows = _rows(total, 32 if problem.format == "fp8_tile128" else 64)
        warps = 4 if rows == 16 and problem.format != "fp8_tile128" else 8
        return _config(
            total, rows, 64, warps, 1, 2 if warps == 4 else 1,
            "wgmma; one decoded tile in shared memory, the next one's bytes wait in registers",
        )  # fmt: skip
    rows = _rows(total, 32)
    return _config(total, rows, 32, 4, 2 if problem.format == "bf16" else 1, 2, "mma.sync / MFMA")


def _config(total: int, rows: int, block_kv: int, warps: int, stages: int, per_sm: int, reason: str) -> TritonConfig:
    return TritonConfig(rows, -(-total // rows), block_kv, warps, stages, per_sm, reason)


def combine_config(problem: DecodeProblem, device: DeviceInfo) -> CombineConfig:
    """Shape of the combine kernel: [parts, cols] fp32 is what a program reads at once."""
    return CombineConfig(parts=16, cols=256, num_warps=4)
