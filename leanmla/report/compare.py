"""Two runs side by side: what became faster or slower by more than the runs' own spread, and what else differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..bench.results import geomean
from ..plots.runs import Run

__all__ = ["Comparison", "Difference", "compare_runs"]


@dataclass(frozen=True)
class Difference:
    """One contender on one case in both runs."""

    case: str
    by: str
    peer: bool
    before_us: float
    after_us: float
    noise: float  #: both runs' spreads together, relative

    @property
    def ratio(self) -> float:
        """Time after over time before; below 1 is faster."""
        return self.after_us / self.before_us

    @property
    def verdict(self) -> str:
        """ "faster", "slower" or "same", the latter within the runs' own spread."""
        if abs(self.ratio - 1) <= self.noise:
            return "same"
        return "faster" if self.ratio < 1 else "slower"

    def document(self) -> dict:
        """As it goes into JSON."""
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}


@dataclass(frozen=True)
class Comparison:
    """A run against the first one."""

    before: str
    after: str
    differences: tuple[Difference, ...]
    only_before: tuple[str, ...]  #: "case, contender" with a time in the first run only
    only_after: tuple[str, ...]
    environment: tuple[tuple[str, str, str], ...]  #: (fact, before, after) that differ

    def count(self, verdict: str) -> int:
        return sum(d.verdict == verdict for d in self.differences)

    def ratios(self) -> dict[str, float]:
        """Geometric mean of the time ratios of each contender."""
        by: dict[str, list[float]] = {}
        for d in self.differences:
            by.setdefault(d.by, []).append(d.ratio)
        return {name: geomean(values) for name, values in by.items()}

    def sentence(self) -> str:
        """The finding."""
        if not self.differences:
            return f"{self.after} and {self.before} have no case and contender in common"
        return (
            f"{self.after} against {self.before}: of {len(self.differences)} times {self.count('faster')} are faster, "
            f"{self.count('slower')} slower, {self.count('same')} the same within the runs' own spread"
        )

    def document(self) -> dict:
        """As it goes into JSON."""
        return {
            "before": self.before, "after": self.after, "sentence": self.sentence(), "geomean_ratio": self.ratios(),
            "environment": [list(e) for e in self.environment], "only_before": self.only_before, "only_after": self.only_after,
            "differences": [d.document() for d in self.differences],
        }  # fmt: skip


def compare_runs(before: Run, after: Run) -> Comparison:
    """Match the two runs' rows by case and contender.

    A contender that is "auto" in both runs may be another backend in each: it is what a caller of ``auto`` gets.
    """
    old = {(r.case, r.contender): r for r in before.good}
    new = {(r.case, r.contender): r for r in after.good}
    found = []
    for key, r in new.items():
        if key in old:
            was = old[key]
            by = r.by if r.by == was.by else f"{was.by} → {r.by}"
            found.append(Difference(r.case, by, r.peer, was.time_us, r.time_us, was.spread + r.spread))
    facts, others = dict(_facts(before.document["environment"])), dict(_facts(after.document["environment"]))
    facts["command"], others["command"] = str(before.document.get("command", "")), str(after.document.get("command", ""))
    differing = tuple(
        (k, facts.get(k, "—"), others.get(k, "—")) for k in dict.fromkeys((*facts, *others)) if facts.get(k) != others.get(k)
    )
    return Comparison(
        before.label, after.label, tuple(found), tuple(f"{r.case}, {r.by}" for k, r in old.items() if k not in new),
        tuple(f"{r.case}, {r.by}" for k, r in new.items() if k not in old), differing,
    )  # fmt: skip


def _facts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested dicts as dotted names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _facts(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)
