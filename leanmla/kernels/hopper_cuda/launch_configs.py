"""How a block of the kernel is put together: one arrangement for small batches, one for large. ``tune.py`` checks and times both."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import InvalidArgument

__all__ = ["ARRANGEMENTS", "FEW_TILES", "Arrangement", "chosen", "using"]

_QUERY_BYTES = 32 * 576  #: two fp8 terms of 16 rows
_STAGE_BYTES = 64 * 512 + 16 * 64 * 2  #: values as fp8 and probabilities as f16 of 64 keys
_GROUP_BYTES = 64 * (288 + 48 + 4)  #: cache rows as fetched, and of mxfp4 their scales
_SMALL_BYTES = 4096  #: everything else in layout.cuh, and room to spare
_ALIGNMENT = 1024


@dataclass(frozen=True)
class Arrangement:
    """What is fixed when the kernel is compiled; the sources have the same names in capitals (layout.cuh)."""

    name: str
    groups: int  #: scoring groups of four warps beside the one summing group
    stages: int  #: tiles of values and probabilities between them, at most 8
    blocks_per_sm: int
    scorer_registers: int
    summer_registers: int
    parts: int  #: partial results in flight in the merge of more than four

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, with room to start at a multiple of 1024."""
        return _QUERY_BYTES + self.stages * _STAGE_BYTES + self.groups * _GROUP_BYTES + _SMALL_BYTES + _ALIGNMENT

    def constants(self) -> dict[str, int]:
        """Name in the sources -> value."""
        fixed = [field.name for field in dataclasses.fields(self) if field.name != "name"]
        return {**{name.upper(): int(getattr(self, name)) for name in fixed}, "BLOCK_SHARED_BYTES": self.shared_bytes}


#: Measured on an H200, docs/measured.md: three groups are 5 % faster at 248 tiles a multiprocessor, two are 5 % faster at 4. mxfp4 needs more
#: registers to score: 3 % faster with as many as the summing group has, mxfp4_row320 2 % slower.
_THREE = Arrangement("three_groups", groups=3, stages=4, blocks_per_sm=1, scorer_registers=120, summer_registers=152, parts=8)
_EVEN = Arrangement("three_groups_even", groups=3, stages=4, blocks_per_sm=1, scorer_registers=128, summer_registers=128, parts=8)
_TWO = Arrangement("two_groups", groups=2, stages=4, blocks_per_sm=1, scorer_registers=168, summer_registers=168, parts=16)
ARRANGEMENTS: dict[str, Arrangement] = {arrangement.name: arrangement for arrangement in (_THREE, _EVEN, _TWO)}
FEW_TILES = 32  #: of 64 keys, a multiprocessor: up to here two groups
_MANY = {"mxfp4_row320": _THREE, "mxfp4": _EVEN}  #: by cache format


_forced: Arrangement | None = None


def chosen(format: str, tiles_per_sm: float) -> Arrangement:
    """The arrangement for a cache format and so many tiles of 64 keys a multiprocessor."""
    return _forced or (_TWO if tiles_per_sm <= FEW_TILES else _MANY[format])


@contextlib.contextmanager
def using(name: str) -> Iterator[Arrangement]:
    """One arrangement whatever the size, in the whole process: for tests and ``tune.py``. A plan runs with the one it was made with.

    Raises:
        InvalidArgument: no arrangement of that name.
    """
    global _forced
    if name not in ARRANGEMENTS:
        raise InvalidArgument(f"arrangement: expected one of {', '.join(ARRANGEMENTS)}, got {name!r}.")
    before, _forced = _forced, ARRANGEMENTS[name]
    try:
        yield _forced
    finally:
        _forced = before
