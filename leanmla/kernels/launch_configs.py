"""Block sizes of the Triton kernels, per architecture, as printable values.

Every odd value carries the measurement or the compiler's report it came from. Registers and shared memory are what the
offline tests (tests/triton) assert: no spills, within the architecture's limit.
"""

from __future__ import annotations

import dataclasses
import functools
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
    #: Swapped: LLVM may move what does not change out of the loop over keys, which is 64-bit matrix descriptors that registers do not
    #: suffice for. From the compiler, mxfp4, 16 rows: 200 bytes of spills and 1767 instructions a tile with, none and 1733 without.
    hoist: bool = False
    plan: str = "auto"  #: "auto", or how splits are balanced: "inline" (in the decode kernel) or "table" (a launch before it)

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


@functools.lru_cache(maxsize=1024)
def decode_config(problem: DecodeProblem, device: DeviceInfo) -> TritonConfig:
    """Block sizes for a problem on a device: the first of :func:`candidates`."""
    return candidates(problem, device)[0]


def candidates(problem: DecodeProblem, device: DeviceInfo) -> list[TritonConfig]:
    """Block sizes worth trying, the default first; ``leanmla.kernels.triton.tune`` times them.

    H200, Triton 3.6.0, q_len 1, page 64, us at (batch 256, kv 8192) / (64, 8192) / (256, 1024). "Plain" has query rows on
    the M side (mma.sync), "swapped" keys (wgmma). A plain pipeline spends half of its stages on page ids: 5 stages are two
    tiles in flight, 4 are one.

    ============== ===================================================== =====================
    format         order, rows x keys, warps, stages, blocks a SM        us
    ============== ===================================================== =====================
    bf16           plain 16 x 32, 4, 5, 2 (default)                      558 / 160 / 93
    bf16           plain 16 x 64, 8, 5, 1                                570 / 159 / 98
    bf16           plain 16 x 64, 4, 4, 2                                602 / 169 / 98
    bf16           plain 16 x 32, 4, 2, 3                                606 / 171 / 123
    bf16           swapped 16 x 64, 4, 1, 2                              1164 / 320 / 177
    fp8            plain, as stored, 16 x 64, 4, 5, 2 (default)          344 / 105 / 65
    fp8            plain, as stored, 16 x 64, 4, 4, 2                    427 / 123 / 74
    fp8            plain, as stored, 16 x 32, 4, 7, 3                    458 / 163 / 104
    fp8            plain, as stored, 16 x 128, 8, 5, 1                   479 / 136 / 88
    fp8            swapped 16 x 64, 4, 1, 2                              939 / 257 / 143
    fp8_tile128    plain, as stored, 16 x 64, 8, 5, 1 (default)          555 / 151 / 95
    fp8_tile128    swapped 16 x 128, 8, 1, 1                             1105 / - / 174
    mxfp4          swapped 16 x 64, 4, 1, 2 (default but for hoist)      623 / 169 / 98
    mxfp4          plain 16 x 32, 4, 1, 2                                744 / - / 112
    ============== ===================================================== =====================

    The swapped bf16 and fp8 kernels were faster when batches were planned inside them (735 and 677): read from a table, ptxas
    spills their matrix descriptors. 32 heads, bf16, (32, 8192) / (256, 2048): plain 32 x 64, 8, 5, 1 116 / 225, swapped
    32 x 32, 8, 2, 1 256 / 500. Tiles of 64 rows have not been timed against two of 32, nor 32 rows with fp8.
    """
    total = max(1, problem.num_heads * problem.max_q_len)
    bf16 = problem.format == "bf16"

    def config(
        rows: int, block_kv: int, warps: int, stages: int, per_sm: int, reason: str, swapped: bool = True, raw: bool = False
    ) -> TritonConfig:
        return _config(total, rows, block_kv, warps, stages, per_sm, reason, swapped, raw)

    if device.arch.startswith("gfx950"):
        # From the compiler (3.6.0), 16 x 32 and 4 warps, registers of 512 a lane: bf16 392 (276 with a cache below 2 GiB), fp8 295,
        # mxfp4 284, fp8_tile128 328, no spills, 32 to 37 KB of LDS: one block a compute unit. Held to 256 registers fp8 spills 7,
        # fp8_tile128 58, bf16 219. 64 keys take 331 to 499, 8 warps spill with 64. Nothing of it has been timed on a card.
        return [
            config(16, 32, 4, 2 if bf16 else 1, 1, "MFMA; registers leave room for one block a compute unit", swapped=False)
        ]
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
    rows = _rows(total, 64)
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
        return [wide, room, config(rows, 32, 8, 5, 1, "wgmma; 32 keys a tile, two in flight")]
    held = "wgmma; one decoded tile in shared memory, the next one's bytes wait in registers"
    if rows == 16 and problem.format == "fp8":
        raws = [
            config(16, 64, 4, 5, 2, copied, swapped=False, raw=True),
            config(16, 32, 4, 7, 3, copied, swapped=False, raw=True),
            config(16, 128, 8, 5, 1, copied, swapped=False, raw=True),
            config(16, 64, 4, 4, 2, copied, swapped=False, raw=True),
        ]
        return [*raws, config(16, 64, 4, 1, 2, held)]
    if problem.format == "fp8_tile128":
        # Scales each partial sum, which takes registers: with 32 rows the swapped kernel spills 880 bytes a thread, this one 24.
        wide = config(16, 128, 8, 1, 1, held) if rows == 16 else config(32, 64, 8, 1, 1, held)
        return [config(16, 64, 8, 5, 1, copied, swapped=False, raw=True), wide]
    first = config(16, 64, 4, 1, 2, held) if rows == 16 else config(rows, 64, 8, 1, 1, held)
    if problem.format == "fp8":
        wide = config(32, 64, 8, 5, 1, copied, swapped=False, raw=True)
        return [wide, first]
    return [
        first,
        dataclasses.replace(first, hoist=True, reason=f"{held}; matrix descriptors computed before the loop"),
        unswapped,
    ]


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
    # Light batches have about as many items as multiprocessors, so more a sequence the fewer sequences there are. H200, 8 instead
    # of 16: 38.1 instead of 40.5 us at 64 x 1024 (bf16), but 30.7 instead of 29.4 at 4 x 8192.
    return CombineConfig(parts=16 if problem.batch < 16 else 8, cols=512, num_warps=4, rows=rows)
