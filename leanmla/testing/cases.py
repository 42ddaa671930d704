"""Decode cases as values, and the grid of kinds that every backend and format must get right."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..formats import FORMATS

__all__ = ["KINDS", "DecodeCase", "case_grid"]


@dataclass(frozen=True)
class DecodeCase:
    """One decode step to try: shapes, options and how the logits are made."""

    kv_lens: tuple[int, ...]
    num_heads: int = 16
    q_lens: int | tuple[int, ...] = 1  #: rows a sequence; a tuple means ragged, through qo_indptr
    page_size: int = 64
    format: str = "bf16"
    table: str = "block_table"  #: "csr" | "block_table" | "contiguous"
    causal: bool = True
    logit_cap: float = 0.0
    num_kv_splits: int | None = None
    split_size: int | None = None
    q_dtype: str = "bf16"
    q_std: float = 1.0
    logit_shift: float = 0.0  #: added to every logit, through the rope part
    sm_scale: float = 576**-0.5
    cache_scale: float | None = None  #: fp8: the given scale; None takes it from the data
    strided: bool = False  #: q, cache and out are views of wider buffers
    kind: str = ""

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def rows(self) -> tuple[int, ...]:
        """Query rows of each sequence."""
        return self.q_lens if isinstance(self.q_lens, tuple) else (self.q_lens,) * self.batch

    @property
    def id(self) -> str:
        """A readable name, unique within a grid: ``b4-h16-q1-kv[0,1,63,4097]-page64-fp8``."""

        def short(values: tuple[int, ...]) -> str:
            if len(values) > 6:
                return f"[{values[0]},{values[1]}..x{len(values)},max{max(values)}]"
            return "[" + ",".join(map(str, values)) + "]"

        q = f"q{short(self.q_lens)}" if isinstance(self.q_lens, tuple) else f"q{self.q_lens}"
        parts = [f"b{self.batch}", f"h{self.num_heads}", q, f"kv{short(self.kv_lens)}", f"page{self.page_size}", self.format]
        if self.table != "block_table":
            parts.append(self.table)
        if not self.causal:
            parts.append("full")
        if self.logit_cap:
            parts.append(f"cap{self.logit_cap:g}")
        if self.num_kv_splits:
            parts.append(f"splits{self.num_kv_splits}")
        if self.split_size:
            parts.append(f"size{self.split_size}")
        if self.q_dtype != "bf16":
            parts.append(self.q_dtype)
        if self.q_std != 1.0:
            parts.append(f"qstd{self.q_std:g}")
        if self.logit_shift:
            parts.append(f"shift{self.logit_shift:g}")
        if self.sm_scale != 576**-0.5:
            parts.append(f"sm{self.sm_scale:g}")
        if self.cache_scale is not None:
            parts.append(f"scale{self.cache_scale:g}")
        if self.strided:
            parts.append("strided")
        return "-".join(parts)

    def replace(self, **changes) -> DecodeCase:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def _kinds() -> dict[str, tuple[DecodeCase, ...]]:
    c = DecodeCase
    return {
        "plain": (c((64,)), c((200, 131)), c((1000, 1000, 1000), table="csr"), c((300, 77), table="contiguous")),
        "empty and tiny": (
            c((17, 130, 64, 0)),
            c((0, 0, 0)),
            c((3,), q_lens=4),
            c((0, 1, 2, 3), q_lens=3, table="csr"),
            c((1,), num_heads=1),
        ),
        "splits": (
            c((262,), q_lens=8, num_kv_splits=4),
            c((1, 2, 33, 64), num_kv_splits=32),
            c((257, 3), q_lens=5, num_kv_splits=2, table="csr"),
            c((700,), num_kv_splits=1),
            c((500, 0, 65), split_size=128),
            c((500, 20), split_size=96, q_lens=2),
        ),
        "large logits": (
            c((300,), q_std=100.0),
            c((200, 50), logit_shift=1000.0, num_kv_splits=1),
            c((200, 50), logit_shift=1000.0, num_kv_splits=32),
            c((129,), logit_shift=-30000.0),
        ),
        "heads": tuple(c((97, 200), num_heads=h) for h in (1, 4, 6, 8, 12, 20, 24, 48, 96, 128)),
        "rows": (
            *(c((150, 64), q_lens=n) for n in (2, 3, 5, 6, 7, 8, 16)),
            c((150, 9, 64, 31), q_lens=(3, 0, 1, 7), table="csr"),
            c((40, 33), q_lens=(16, 2), causal=False),
            c((90, 300), q_lens=4, num_heads=128),
        ),
        "pages": (
            *(c((100, 33, 257), page_size=p) for p in (1, 16, 32, 128)),
            *(c((100, 33, 257), page_size=p, table="csr") for p in (1, 5, 64)),
        ),
        "options": (
            c((200, 77), logit_cap=30.0),
            c((200, 77), logit_cap=2.0, q_lens=2, q_std=8.0),
            c((200, 77), causal=False, q_lens=3),
            c((200, 77), q_dtype="fp16"),
            c((200, 77), sm_scale=0.1352337788608801),
            c((200, 77), cache_scale=0.37),
            c((200, 77), cache_scale=4.0),
            c((200, 77), strided=True),
            c((200, 77), strided=True, q_lens=2, table="csr", page_size=16),
        ),
        "skewed": (c((3000, *(1,) * 15)), c((2048, 5, 700, 0, 64, 1, 1999), table="csr", page_size=16)),
    }


#: Kinds of case, by name. Sizes are small enough for the fp64 reference on a CPU.
KINDS: dict[str, tuple[DecodeCase, ...]] = {
    name: tuple(case.replace(kind=name) for case in cases) for name, cases in _kinds().items()
}


def case_grid(formats: tuple[str, ...] | None = None, kinds: tuple[str, ...] | None = None) -> list[DecodeCase]:
    """Every kind in every format. ``cache_scale`` cases only exist where the format has such a scale."""
    grid = []
    for fmt in formats or tuple(FORMATS):
        for kind in kinds or tuple(KINDS):
            for case in KINDS[kind]:
                if case.cache_scale is not None and FORMATS[fmt].scale_kind != "per_tensor":
                    continue
                grid.append(case.replace(format=fmt))
    return grid
