"""What is timed: cases as values, and named sets of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..errors import InvalidArgument

__all__ = ["CASE_SETS", "BenchCase", "cases_named", "contest_cases"]


@dataclass(frozen=True)
class BenchCase:
    """One decode step to time, whatever the format."""

    kv_lens: tuple[int, ...]
    num_heads: int = 16
    q_len: int = 1
    page_size: int = 64
    name: str = ""  #: for lengths that "batch x kv" does not describe
    sm_scale: float = 576**-0.5

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def tokens(self) -> int:
        """Keys over all sequences."""
        return sum(self.kv_lens)

    @property
    def uniform(self) -> bool:
        """All sequences are equally long."""
        return len(set(self.kv_lens)) == 1

    @property
    def pages(self) -> int:
        """Pages that hold keys."""
        return sum(-(-n // self.page_size) for n in self.kv_lens)

    @property
    def label(self) -> str:
        """Short and unique within a run: ``256 x 8192``, then whatever differs from 16 heads, 1 row and pages of 64."""
        parts = [self.name or f"{self.batch} x {self.kv_lens[0]}"]
        if self.num_heads != 16:
            parts.append(f"h{self.num_heads}")
        if self.q_len != 1:
            parts.append(f"q{self.q_len}")
        if self.page_size != 64:
            parts.append(f"page{self.page_size}")
        return " ".join(parts)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products (causal rows counted in full)."""
        return 2 * (576 + 512) * self.num_heads * self.q_len * self.tokens

    def bytes_read(self, bytes_per_token: int) -> int:
        """Bytes of the cache that a step must read."""
        return self.tokens * bytes_per_token


def _uniform(batch: int, kv_len: int, **options) -> BenchCase:
    return BenchCase((kv_len,) * batch, **options)


def contest_cases() -> list[BenchCase]:
    """The ranked cases of the mixed-mla contest."""
    return [_uniform(batch, kv) for batch in (4, 32, 64, 256) for kv in (1024, 8192)]


#: What heads, rows and page sizes are varied on: small, medium and large.
_SHAPES = ((4, 1024), (32, 8192), (256, 8192))


def _ragged(batch: int, mean: int) -> BenchCase:
    draw = random.Random(batch * mean)
    lens = tuple(draw.randint(1, 2 * mean) for _ in range(batch))
    return BenchCase(lens, name=f"{batch} x 1..{2 * mean}")


def _evened(case: BenchCase) -> BenchCase:
    """As many keys in equally long sequences (to within half a key a sequence)."""
    return BenchCase((round(case.tokens / case.batch),) * case.batch, name=f"{case.name} evened")


def _sets() -> dict[str, list[BenchCase]]:
    return {
        "contest": contest_cases(),
        "heads": [_uniform(b, kv, num_heads=h) for b, kv in _SHAPES for h in (16, 32, 64, 128)],
        "qlen": [_uniform(b, kv, q_len=n) for b, kv in _SHAPES for n in (1, 2, 4)],
        "pages": [_uniform(b, kv, page_size=p) for b, kv in _SHAPES for p in (1, 16, 64)],
        "ragged": [
            _ragged(32, 1024),
            _ragged(32, 8192),
            _ragged(256, 2048),
            _evened(_ragged(256, 2048)),
            BenchCase((131072, *(1024,) * 31), name="131072 + 31 x 1024"),
        ],
        "long": [_uniform(1, kv) for kv in (8192, 65536, 262144)] + [_uniform(1, 65536, num_heads=128)],
        # What a CPU does in seconds; (4, 8192) is the case that docs/measured.md quotes.
        "small": [_uniform(1, 8192), _uniform(4, 1024), _uniform(4, 8192), _uniform(32, 1024)],
    }


#: Names that ``--cases`` takes, besides "all".
CASE_SETS: tuple[str, ...] = tuple(_sets())


def cases_named(names: str) -> list[BenchCase]:
    """The cases of some sets, each once, in order.

    Args:
        names: set names with commas between them; "all" is every set but "small". ``4x8192`` is a case by itself.

    Raises:
        InvalidArgument: there is no such set.
    """
    sets = _sets()
    cases: list[BenchCase] = []
    for name in names.split(","):
        batch, x, kv = name.strip().partition("x")
        if x and batch.isdigit() and kv.isdigit() and int(batch) and int(kv):
            cases.append(_uniform(int(batch), int(kv)))
        elif name.strip() == "all":
            cases.extend(case for key, group in sets.items() if key != "small" for case in group)
        elif name.strip() in sets:
            cases.extend(sets[name.strip()])
        else:
            raise InvalidArgument(
                f"--cases: expected some of {', '.join(sets)}, all, or BATCHxKV, with commas between them, got {name.strip()!r}."
            )
    return list(dict.fromkeys(cases))
