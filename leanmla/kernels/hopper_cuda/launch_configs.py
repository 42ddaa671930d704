"""How a block of the kernel is put together: the arrangements to choose from. One is used; ``tune.py`` checks and times all of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import InvalidArgument

__all__ = ["ARRANGEMENTS", "DEFAULT", "Arrangement", "chosen", "using"]

_QUERY_BYTES = 32 * 576  #: two fp8 terms of 16 rows
_STAGE_BYTES = 64 * 512 + 16 * 64 * 2  #: values as fp8 and probabilities as f16 of 64 keys
_GROUP_BYTES = 64 * 320  #: cache rows as fetched
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
    warp_products: bool = False  #: values by mma.sync instead of wgmma (values.cuh)
    score_sums: int = 1  #: 1, 4 or 8: running sums that a score is made of (scores.cuh)
    early_query: bool = False  #: the query is asked for before the first page id, and both are guessed and prefetched before the plan
    parts: int = 8  #: partial results in flight in the merge
    fewest_tiles: int = 1  #: of 64 keys in a piece of the batch, if the batch has as many (launch.py)
    cut_shift: int = 4  #: pieces are rounded up by at most 2**-cut_shift (schedule.cuh)

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
        fixed = [field.name for field in dataclasses.fields(self) if field.name not in ("name", "fewest_tiles", "cut_shift")]
        return {**{name.upper(): int(getattr(self, name)) for name in fixed}, "BLOCK_SHARED_BYTES": self.shared_bytes}


_THREE = Arrangement("three_groups", groups=3, stages=4, blocks_per_sm=1, scorer_registers=120, summer_registers=152)
_TWO_GROUPS = Arrangement("two_groups", groups=2, stages=4, blocks_per_sm=1, scorer_registers=168, summer_registers=168)
_THREE_WARP = dataclasses.replace(_THREE, name="three_groups_warp", warp_products=True, early_query=True, parts=16)
_TWO = Arrangement(
    "two_blocks", groups=1, stages=2, blocks_per_sm=2, scorer_registers=120, summer_registers=136, early_query=True, parts=16
)
_TWO_WARP = dataclasses.replace(_TWO, name="two_blocks_warp", warp_products=True)

#: Only the first ran on a GPU (H200): 273 us at 256 sequences of 8192 keys. What the others should take is in docs/measured.md.
ARRANGEMENTS: dict[str, Arrangement] = {
    arrangement.name: arrangement
    for arrangement in (
        _THREE,
        _TWO,
        _THREE_WARP,
        _TWO_WARP,
        dataclasses.replace(_THREE, name="three_groups_early", early_query=True),
        dataclasses.replace(_THREE, name="three_groups_early_4", early_query=True, parts=4),
        _TWO_GROUPS,
        dataclasses.replace(_TWO_GROUPS, name="two_groups_early", early_query=True),
        dataclasses.replace(_TWO_GROUPS, name="two_groups_early_4", early_query=True, parts=4),
        dataclasses.replace(_TWO_GROUPS, name="two_groups_early_16", early_query=True, parts=16),
        dataclasses.replace(_THREE_WARP, name="three_groups_sums", score_sums=8),
        dataclasses.replace(_TWO_WARP, name="two_blocks_sums", score_sums=8),
        dataclasses.replace(_THREE_WARP, name="three_groups_cuts", fewest_tiles=2, cut_shift=8),
        dataclasses.replace(_TWO_WARP, name="two_blocks_cuts", fewest_tiles=2, cut_shift=8),
    )
}
DEFAULT = "three_groups"  #: what ``mla_decode`` uses


_chosen = DEFAULT


def chosen() -> Arrangement:
    """The arrangement in use."""
    return ARRANGEMENTS[_chosen]


@contextlib.contextmanager
def using(name: str) -> Iterator[Arrangement]:
    """Another arrangement for a while, in the whole process: for tests and ``tune.py``. A plan runs with the one it was made with.

    Raises:
        InvalidArgument: no arrangement of that name.
    """
    global _chosen
    if name not in ARRANGEMENTS:
        raise InvalidArgument(f"arrangement: expected one of {', '.join(ARRANGEMENTS)}, got {name!r}.")
    before, _chosen = _chosen, name
    try:
        yield chosen()
    finally:
        _chosen = before
