"""Block sizes of the Triton kernels, per architecture, as printable values.

Every odd value carries the measurement or the compiler's report it came from. Registers and shared memory are what the
offline tests (tests/triton) assert: no spills, within the architecture's limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import DeviceInfo
from ..problem import DecodeProblem

__all__ = ["CombineConfig", "TritonConfig", "candidates", "combine_config", "decode_config"]


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Shape of the decode kernel."""

    rows: int  #: query rows (tokens x heads) a tile
    row_tiles: int  #: tiles that cover a sequence's query rows
    block_kv: int  #: keys a tile
    num_warps: int
    num_stages: int  #: shared-memory buffers of the bf16 pipeline; decoded formats pipeline through registers
    blocks_per_sm: int  #: programs resident on one multiprocessor
    swapped: bool  #: keys on the M side of the matrix instructions (wgmma), else query rows (mma.sync, MFMA)
    reason: str
    raw_tiles: bool = False  #: fp8: tiles are copied to shared memory as stored and decoded on the way to the products

    def num_workers(self, device: DeviceInfo) -> int:
        """Items that run at the same time. The row tiles of an item count as one worker."""
        return max(1, device.num_sms * self.blocks_per_sm // self.row_tiles)


@dataclass(frozen=True, slots=True)
class CombineConfig:
    """Shape of the combine kernel."""

    parts: int  #: partial results read at a time
    cols: int  #: columns a program
    num_warps: int
    rows: int = 1  #: query rows a program, one after the other


def _rows(rows: int, largest: int) -> int:
    """Smallest tile of 16, 32 or 64 rows that holds ``rows``, at most ``largest``."""
    for r in (16, 32, 64):
        if r >= min(rows, largest):
            return r
    raise AssertionError(rows)


def decode_config(problem: DecodeProblem, device: DeviceInfo) -> TritonConfig:
    """Block sizes for a problem on a device: the first of :func:`candidates`."""
    return candidates(problem, device)[0]


def candidates(problem: DecodeProblem, device: DeviceInfo) -> list[TritonConfig]:
    """Block sizes worth trying, the default first; ``leanmla.kernels.triton.tune`` times them.

    H200, Triton 3.6.0, 16 heads, q_len 1, page 64, us at (batch 256, kv 8192) / (64, 8192) / (32, 1024):

    ============== ============================================= =====================
    format         rows x keys, warps, stages, blocks a SM       us
    ============== ============================================= =====================
    bf16           16 x 64, 4, 1, 2 (default)                    720 / 197 / 42
    bf16           16 x 64, 4, 2, 1                              845 / 221 / 31
    bf16           16 x 32, 4, 2, 2                              762 / 210 / 28
    bf16           16 x 32, 4, 3, 2                              772 / 214 / 29
    bf16           16 x 128, 8, 1, 1                             973 / 267 / 29
    fp8            16 x 64, 4, 1, 2 (default)                    623 / 184 / 26
    fp8            16 x 128, 8, 1, 1                             712 / 198 / 26
    fp8            16 x 32, 4, 1, 3                              926 / 266 / 39
    mxfp4          16 x 64, 4, 1, 2 (default)                    650 / 173 / 25
    mxfp4          16 x 128, 8, 1, 1                             670 / 180 / 24
    mxfp4          16 x 64, 8, 1, 1                              896 / 229 / 28
    fp8_tile128    16 x 128, 8, 1, 1 (default)                   1079 / 305 / 34
    fp8_tile128    16 x 64, 8, 1, 1                              1994 / 526 / 55
    ============== ============================================= =====================
    """
    total = max(1, problem.num_heads * problem.max_q_len)
    bf16 = problem.format == "bf16"
    fp8 = problem.format in ("fp8", "fp8_tile128")

    def config(
        rows: int, block_kv: int, warps: int, stages: int, per_sm: int, reason: str, swapped: bool = True, raw: bool = False
    ) -> TritonConfig:
        return _config(total, rows, block_kv, warps, stages, per_sm, reason, swapped, raw)

    if device.kind != "cuda":
        # 16 rows only: with 32 the register file of a wave overflows (spills seen for gfx942 and gfx950).
        return [config(16, 32, 4, 2 if bf16 else 1, 2, "MFMA", swapped=False)]
    copied = "mma.sync; tiles copied as stored, asynchronously, and decoded between shared memory and the products"
    if device.sm < 90:
        # 16 rows only, as above. Shared memory: 2 x 56 or 1 x 88 KB of an A100's 163.
        if problem.format == "fp8":
            return [config(16, 32, 4, 5, 2, copied, swapped=False, raw=True)]
        if problem.format == "fp8_tile128":
            return [config(16, 64, 8, 5, 1, copied, swapped=False, raw=True)]
        return [config(16, 32, 4, 2 if bf16 else 1, 2, "mma.sync", swapped=False)]
    # tile128 scales each partial sum: more registers, so fewer rows.
    rows = _rows(total, 32 if problem.format == "fp8_tile128" else 64)
    unswapped = config(16, 32, 4, 2 if bf16 else 1, 3 if bf16 else 2, "mma.sync, no operand padded, no fences", swapped=False)
    if bf16:
        if rows == 16:
            return [
                config(16, 32, 4, 5, 2, "mma.sync; no operand padded, no fences, two tiles in flight a block", swapped=False),
                config(16, 64, 8, 5, 1, "mma.sync; one block a multiprocessor", swapped=False),
                config(16, 64, 4, 4, 2, "mma.sync; one tile in flight", swapped=False),
                config(16, 64, 4, 1, 2, "wgmma; two blocks a multiprocessor load and compute in turns"),
                unswapped,
            ]
        room = config(rows, 32, 8, 2, 1, "wgmma; 32 keys a tile leave room for the queries")
        wide = config(32, 64, 8, 5, 1, "mma.sync; two tiles in flight", swapped=False)
        if rows == 32:
            return [wide, room, unswapped]
        return [room, wide, config(rows, 32, 8, 5, 1, "wgmma; 32 keys a tile, two in flight")]
    held = "wgmma; one decoded tile in shared memory, the next one's bytes wait in registers"
    if rows == 16 and fp8:
        raws = [
            config(16, 64, 4, 5, 2, copied, swapped=False, raw=True),
            config(16, 32, 4, 7, 3, copied, swapped=False, raw=True),
            config(16, 128, 8, 5, 1, copied, swapped=False, raw=True),
            config(16, 64, 4, 4, 2, copied, swapped=False, raw=True),
        ]
        if problem.format == "fp8":
            return [*raws, config(16, 64, 4, 1, 2, held)]
        return [config(16, 64, 8, 5, 1, copied, swapped=False, raw=True), config(16, 128, 8, 1, 1, held)]
    first = config(16, 64, 4, 1, 2, held) if rows == 16 else config(rows, 64, 8, 1, 1, held)
    if problem.format == "fp8_tile128":
        return [first, config(16, 64, 8, 5, 1, copied, swapped=False, raw=True)]
    if problem.format == "fp8":
        wide = config(32, 64, 8, 5, 1, copied, swapped=False, raw=True)
        return [wide, first] if rows == 32 else [first, wide, config(16, 64, 4, 5, 2, copied, swapped=False, raw=True)]
    return [first, unswapped]


def _config(
    total: int, rows: int, block_kv: int, warps: int, stages: int, per_sm: int, reason: str, swapped: bool, raw: bool
) -> TritonConfig:
    return TritonConfig(rows, -(-total // rows), block_kv, warps, stages, per_sm, swapped, reason, raw)


def combine_config(problem: DecodeProblem, device: DeviceInfo) -> CombineConfig:
    """Shape of the combine kernel: [parts, cols] fp32 is what a program reads at once.

    All columns of a part lie side by side in the lanes, so parts are added up in registers. Enough rows a program that all
    programs are resident at once, 8 a multiprocessor.
    """
    rows, total = 1, problem.batch * problem.num_heads * problem.max_q_len
    while rows < 16 and total > 8 * rows * device.num_sms:
        rows *= 2
    return CombineConfig(parts=16, cols=512, num_warps=4, rows=rows)
