"""Result documents as values: what ``leanmla bench`` and ``leanmla run`` wrote, read back for pictures and reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.results import geomean, read_json
from ..errors import InvalidArgument
from ..formats import FORMATS

__all__ = ["Row", "Run", "SCHEMAS", "check_version", "digits", "load_run", "short_count"]

#: Kinds of document with timed rows.
SCHEMAS = ("leanmla-bench/", "leanmla-run/")
#: Operations per head, query row and key: both products, a multiplication and an addition each.
_FLOPS = 2 * (576 + 512)


@dataclass(frozen=True)
class Row:
    """One contender on one case."""

    case: str
    batch: int
    kv: int | None  #: keys a sequence; None where lengths differ
    num_heads: int
    q_len: int
    page_size: int
    format: str
    contender: str  #: the key across runs
    by: str  #: for people: "hopper fp8", "flash_mla bf16"
    peer: bool
    status: str
    message: str
    time_us: float
    spread: float
    tb_s: float
    read_share: float | None
    relative_error: float | None
    quantisation_error: float | None
    cache_bytes: int

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def tokens(self) -> float:
        """Keys over all sequences."""
        return self.cache_bytes / FORMATS[self.format].bytes_per_token

    @property
    def flops(self) -> float:
        """Operations of the step (causal rows counted in full)."""
        return _FLOPS * self.num_heads * self.q_len * self.tokens

    @property
    def tflop_s(self) -> float:
        return self.flops / self.time_us / 1e6

    @property
    def intensity(self) -> float:
        """Operations per byte of cache read."""
        return self.flops / self.cache_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        """What a picture keeps fixed: heads, query rows, page size."""
        return self.num_heads, self.q_len, self.page_size


@dataclass(frozen=True)
class Run:
    """A document and its rows."""

    label: str  #: short, unique among the runs that are shown together
    document: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def schema(self) -> str:
        return str(self.document["schema"])

    @property
    def device(self) -> dict[str, Any]:
        return self.document["environment"]["device"]

    @property
    def on_cpu(self) -> bool:
        return self.device["kind"] == "cpu"

    @property
    def time_unit(self) -> tuple[str, float]:
        """Unit of times, and its factor on microseconds."""
        return ("ms", 1e-3) if self.on_cpu else ("µs", 1.0)

    @property
    def rate_unit(self) -> tuple[str, float]:
        """Unit of bandwidths, and its factor on TB/s."""
        return ("GB/s", 1e3) if self.on_cpu else ("TB/s", 1.0)

    @property
    def read_tb_s(self) -> float | None:
        """The measured read ceiling, if the run measured one."""
        return (self.document.get("ceilings") or {}).get("read_tb_s")

    @property
    def matmul_tflop_s(self) -> float | None:
        """The measured compute ceiling, if the run measured one."""
        return (self.document.get("ceilings") or {}).get("matmul_tflop_s")

    @property
    def good(self) -> list[Row]:
        """Rows with a time."""
        return [r for r in self.rows if r.ok]

    def geomeans(self) -> dict[str, float]:
        """Geometric mean over the contest's grid, microseconds, of every contender that finished it, by :attr:`Row.by`."""
        names = {r.contender: r.by for r in self.good}
        means = self.document.get("geomean_contest_us") or {}
        return {names.get(key, key): value for key, value in means.items() if value is not None}

    def shapes(self) -> list[tuple[int, int, int]]:
        """(heads, query rows, page size) that occur, the most frequent first."""
        counts: dict[tuple[int, int, int], int] = {}
        for r in self.good:
            if r.kv is not None:
                counts[r.shape] = counts.get(r.shape, 0) + 1
        return sorted(counts, key=lambda s: -counts[s])


def _row(r: dict[str, Any]) -> Row:
    kv = r["kv_lens"]
    by = r["contender"] if r["peer"] or not r.get("backend") else f"{r['backend']} {r['format']}"
    return Row(
        case=r["case"], batch=r["batch"], kv=kv if isinstance(kv, int) else None, num_heads=r["num_heads"], q_len=r["q_len"],
        page_size=r["page_size"], format=r["format"], contender=r["contender"], by=by, peer=r["peer"], status=r["status"],
        message=r.get("message") or "", time_us=r["time_us"] or float("nan"), spread=r.get("spread") or 0.0,
        tb_s=r.get("tb_s") or float("nan"), read_share=r.get("read_share"), relative_error=r.get("relative_error"),
        quantisation_error=r.get("quantisation_error"), cache_bytes=r["cache_bytes"],
    )  # fmt: skip


def check_version(document: dict[str, Any], label: str) -> None:
    """Refuse a document of another version, or without what every result has: an environment with a device, and results.

    Raises:
        InvalidArgument: says which.
    """
    kind, _, version = str(document.get("schema", "")).partition("/")
    if version != "1":
        raise InvalidArgument(
            f"{label}: was written in version {version or 'none'} of {kind}, this reads version 1. Measure again."
        )
    device = (document.get("environment") or {}).get("device") or {}
    missing = [f"environment.device.{key}" for key in ("name", "kind") if key not in device]
    missing += [] if isinstance(document.get("results"), list) else ["results"]
    if missing:
        raise InvalidArgument(f"{label}: is not a whole result of leanmla, it has no {' and no '.join(missing)}.")


def run_of(document: dict[str, Any], label: str) -> Run:
    """A document's rows.

    Raises:
        InvalidArgument: the document has none, or lacks what a result must have.
    """
    schema = str(document.get("schema", ""))
    if not schema.startswith(SCHEMAS):
        raise InvalidArgument(f"{label}: expected a result of leanmla bench or run, got one of {schema!r}.")
    check_version(document, label)
    unknown = {r.get("format") for r in document.get("results", ()) if isinstance(r, dict)} - {*FORMATS, None}
    if unknown:
        names = ", ".join(sorted(map(repr, unknown)))
        raise InvalidArgument(f"{label}: has results of cache format {names}, which this version does not know.")
    try:
        return Run(label, document, tuple(_row(r) for r in document["results"]))
    except (KeyError, TypeError) as error:
        raise InvalidArgument(f"{label}: is not a whole result of leanmla ({type(error).__name__}: {error}).") from None


def load_run(path: Path, label: str | None = None) -> Run:
    """The run in a file that ``--json`` wrote."""
    return run_of(read_json(path), label or path.stem)


def short_count(n: float) -> str:
    """Powers of two as people write them: ``8k``, ``1M``; other numbers as they are."""
    n = int(n)
    for factor, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= factor and n % factor == 0:
            return f"{n // factor}{letter}"
    return str(n)


def digits(value: float, count: int = 4) -> str:
    """A number with this many significant digits, zeros at the end kept so that columns line up: ``24.30``, ``1102``."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    whole = math.floor(math.log10(abs(float(f"{value:.{count - 1}e}"))))
    return f"{value:.{max(0, count - 1 - whole)}f}"


def best_peer(rows: Iterable[Row]) -> dict[str, Row]:
    """The fastest peer of each case."""
    best: dict[str, Row] = {}
    for r in rows:
        if r.peer and r.ok and (r.case not in best or r.time_us < best[r.case].time_us):
            best[r.case] = r
    return best


def speedups(rows: Sequence[Row], peer: str) -> dict[str, dict[str, float]]:
    """ours -> case -> peer's time / our time, over the cases that both finished."""
    theirs = {r.case: r.time_us for r in rows if r.ok and r.contender == peer}
    found: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.ok and not r.peer and r.case in theirs:
            found.setdefault(r.by, {})[r.case] = theirs[r.case] / r.time_us
    return found


def mean_speedup(values: Iterable[float]) -> float:
    """Geometric mean."""
    return geomean(values)
