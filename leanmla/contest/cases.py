"""Cases: the contest's own, and those of a cases file."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidArgument

__all__ = ["RANKED", "SMALL_DIVISOR", "TESTS", "Case", "combine_seeds", "parse_cases", "read_cases"]

_PART = re.compile(r"\s*([A-Za-z_]\w*):\s*([+-]?[0-9]+)\s*")
_FIELDS = ("batchsize", "qseqlen", "kvseqlen", "seed", "num_heads")

SMALL_DIVISOR = 16  #: what "small" divides kv lengths by


@dataclass(frozen=True)
class Case:
    """Arguments of ``generate_input``; ``spec`` is the line they came from."""

    batchsize: int
    qseqlen: int
    kvseqlen: int
    seed: int
    num_heads: int | None = None
    line: str | None = None

    @property
    def spec(self) -> str:
        """The case as a line of a cases file; if it came from one, that line."""
        if self.line is not None:
            return self.line
        text = f"batchsize: {self.batchsize}; qseqlen: {self.qseqlen}; kvseqlen: {self.kvseqlen}; seed: {self.seed}"
        return text if self.num_heads is None else f"{text}; num_heads: {self.num_heads}"

    @property
    def short(self) -> str:
        """For tables: ``b4 q1 kv1024``."""
        heads = "" if self.num_heads is None else f" h{self.num_heads}"
        return f"b{self.batchsize} q{self.qseqlen} kv{self.kvseqlen}{heads}"

    @property
    def arguments(self) -> dict[str, int]:
        """Keyword arguments for ``generate_input``."""
        return {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}

    def small(self) -> Case:
        """The same case with a kv length that a CPU gets through quickly."""
        return dataclasses.replace(self, kvseqlen=max(16, self.kvseqlen // SMALL_DIVISOR), line=None)


#: What "test" runs.
TESTS: tuple[Case, ...] = (
    Case(4, 1, 1024, 4220),
    Case(32, 1, 1024, 5412),
    Case(64, 1, 8192, 1360),
    Case(256, 1, 8192, 9826),
)
#: What "benchmark" and "leaderboard" rank by: the geometric mean over these.
RANKED: tuple[Case, ...] = (
    Case(4, 1, 1024, 4217),
    Case(4, 1, 8192, 4220),
    Case(32, 1, 1024, 5412),
    Case(32, 1, 8192, 5415),
    Case(64, 1, 1024, 1357),
    Case(64, 1, 8192, 1360),
    Case(256, 1, 1024, 9823),
    Case(256, 1, 8192, 9826),
)


def combine_seeds(a: int, b: int) -> int:
    """One seed from a case's public seed ``a`` and the run's secret seed ``b`` (Cantor pairing)."""
    return a + (a + b) * (a + b + 1) // 2


def parse_cases(text: str, secret: int | None = None) -> list[Case]:
    """Cases from lines like ``batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4220``.

    Args:
        text: one case a line; ``num_heads`` may be given too.
        secret: combined into every seed by :func:`combine_seeds` when given.

    Raises:
        InvalidArgument: names the line and what is wrong with it.
    """
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        values: dict[str, int] = {}
        for part in line.split(";"):
            match = _PART.fullmatch(part)
            if match is None:
                raise InvalidArgument(
                    f"cases line {number}: expected 'name: integer' parts joined by ';', got {part!r} in {line!r}."
                )
            name, value = match[1], int(match[2])
            if name not in _FIELDS:
                raise InvalidArgument(
                    f"cases line {number}: expected names among {', '.join(_FIELDS)}, got {name!r} in {line!r}."
                )
            if name != "seed" and value < 1:
                raise InvalidArgument(f"cases line {number}: {name} must be positive, got {value} in {line!r}.")
            values[name] = value
        for name in _FIELDS[:4]:
            if name not in values:
                raise InvalidArgument(f"cases line {number}: {name} is missing in {line!r}.")
        if secret is not None:
            values["seed"] = combine_seeds(values["seed"], secret)
        cases.append(Case(**values, line=line))
    if not cases:
        raise InvalidArgument("cases: there is no case in the file.")
    return cases


def read_cases(path: str | Path, secret: int | None = None) -> list[Case]:
    """:func:`parse_cases` of a file.

    Raises:
        InvalidArgument: the file cannot be read, or as above.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cases: cannot read {path}: {error}.") from error
    return parse_cases(text, secret)
