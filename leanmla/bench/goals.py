"""What a run should reach: limits on times, read from a file and held against the results (``leanmla bench --goals FILE``).

A goals file (schema ``leanmla-goals/1``; ``benchmarks/goals/h200.json`` is one) has

- ``device``: part of the device name it is meant for;
- ``tables``: limits in microseconds, one row a case, one column a cache format or several of which the fastest counts;
- ``limits``: single ones: ``us`` (at most so many microseconds), ``times`` + ``of`` (at most so many times another result),
  ``floor_times`` + ``plus_us`` (at most so many times the time of reading the cache at the run's read ceiling, plus a
  constant), ``geomean_us`` (over the contest grid).

A result counts when it was checked and timed; the fastest backend counts unless ``backend`` names one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import formats
from ..errors import InvalidArgument
from .cases import BenchCase, contest_cases
from .measure import Measurement
from .results import geomean

__all__ = ["SCHEMA", "Goal", "Goals", "Verdict", "judge", "read_goals"]

SCHEMA = "leanmla-goals/1"


@dataclass(frozen=True)
class Which:
    """Which result: the fastest of some formats on a case; ``case`` "" is the whole contest grid."""

    case: str
    formats: tuple[str, ...]
    backend: str = ""  #: "" takes any

    def time_us(self, results: Sequence[Measurement]) -> float | None:
        """Microseconds, or None if nothing of it was timed."""
        if not self.case:
            times = [Which(c.label, self.formats, self.backend).time_us(results) for c in contest_cases()]
            return None if None in times else geomean(t for t in times if t is not None)
        mine = (
            r.time_us
            for r in results
            if r.status == "ok"
            and not r.peer
            and r.case == self.case
            and r.format in self.formats
            and (not self.backend or r.backend == self.backend)
        )
        return min(mine, default=None)


@dataclass(frozen=True)
class Goal:
    """One limit."""

    table: str  #: title of the table it belongs to, "" for a single limit
    row: str
    column: str
    which: Which
    times: float = 1.0
    of: Which | None = None  #: the limit is ``times`` this result
    floor: bool = False  #: the limit is ``times`` the case's bandwidth floor
    plus_us: float = 0.0

    def limit_us(self, results: Sequence[Measurement], cases: Sequence[BenchCase], read_tb_s: float) -> float | None:
        """Microseconds; None if what it depends on was not timed."""
        if self.of is not None:
            other = self.of.time_us(results)
            return None if other is None else self.times * other + self.plus_us
        if self.floor:
            tokens = {c.label: c.tokens for c in cases}.get(self.which.case)
            if tokens is None:
                return None
            smallest = min(formats.get(f).bytes_per_token for f in self.which.formats)
            return self.times * tokens * smallest / (read_tb_s * 1e6) + self.plus_us
        return self.plus_us


@dataclass(frozen=True)
class Goals:
    """A goals file."""

    device: str
    goals: tuple[Goal, ...]


@dataclass(frozen=True)
class Verdict:
    """What a run says to a goal."""

    goal: Goal
    time_us: float | None  #: None: not timed in this run
    limit_us: float | None

    @property
    def met(self) -> bool | None:
        """None if this run cannot tell."""
        return None if self.time_us is None or self.limit_us is None else self.time_us <= self.limit_us

    def document(self) -> dict:
        """As it goes into JSON."""
        return {
            "table": self.goal.table, "row": self.goal.row, "column": self.goal.column, "case": self.goal.which.case,
            "formats": list(self.goal.which.formats), "time_us": self.time_us, "limit_us": self.limit_us, "met": self.met,
        }  # fmt: skip


def judge(goals: Goals, results: Sequence[Measurement], cases: Sequence[BenchCase], read_tb_s: float) -> list[Verdict]:
    """Every goal against the results of one run.

    Args:
        read_tb_s: the run's read ceiling, for bandwidth floors.
    """
    return [Verdict(g, g.which.time_us(results), g.limit_us(results, cases, read_tb_s)) for g in goals.goals]


def read_goals(path: Path) -> Goals:
    """A goals file.

    Raises:
        InvalidArgument: it cannot be read, or something in it is not as the module describes.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--goals: {path} cannot be read as JSON ({error}).") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        got = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise InvalidArgument(f"--goals: {path}: expected schema {SCHEMA!r}, got {got!r}. See leanmla/bench/goals.py.")
    try:
        return Goals(document["device"], tuple(_goals(document)))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"--goals: {path}: {type(error).__name__}: {error}. See leanmla/bench/goals.py.") from None


def _goals(document: dict[str, Any]) -> Iterator[Goal]:
    for table in document.get("tables", []):
        for case, row in table["rows"].items():
            if len(row) != len(table["columns"]):
                raise ValueError(f"{table['title']!r}, {case!r}: expected {len(table['columns'])} limits, got {len(row)}")
            for (column, names), limit in zip(table["columns"].items(), row, strict=True):
                if limit is not None:
                    which = _which({"case": case, "formats": names, "backend": table.get("backend", "")})
                    yield Goal(table["title"], case, column, which, plus_us=_positive(limit))
    for limit in document.get("limits", []):
        which = _which(limit)
        kind = [k for k in ("us", "times", "floor_times", "geomean_us") if k in limit]
        if len(kind) != 1:
            raise ValueError(f"{limit.get('name')!r}: expected one of us, times, floor_times, geomean_us, got {kind}")
        if (kind[0] == "geomean_us") != (not which.case):
            raise ValueError(f"{limit.get('name')!r}: geomean_us stands without a case, the others with one")
        value = _positive(limit[kind[0]])
        plus = float(limit.get("plus_us", 0.0))
        if kind[0] in ("us", "geomean_us"):
            yield Goal("", limit["name"], "", which, plus_us=value)
        elif kind[0] == "times":
            yield Goal("", limit["name"], "", which, times=value, of=_which(limit["of"]), plus_us=plus)
        else:
            yield Goal("", limit["name"], "", which, times=value, floor=True, plus_us=plus)


def _which(entry: dict[str, Any]) -> Which:
    return Which(entry.get("case", ""), tuple(formats.get(f).name for f in entry["formats"]), entry.get("backend", ""))


def _positive(value: Any) -> float:
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"expected a positive number, got {value!r}")
    return number
