"""A whole benchmark run: ceilings, cases within a time limit, geometric means, comparison with an earlier run."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .. import backends, formats
from ..device import describe
from ..errors import BackendUnavailable, InvalidArgument
from .cases import BenchCase, contest_cases
from .ceilings import Ceilings, measure_ceilings
from .data import LatentPool, problem_of
from .environment import command_line, environment
from .measure import COLD_FACTOR, MAX_RELATIVE_ERROR, PEER_MAX_RELATIVE_ERROR, Contender, Measurement, measure_case
from .peers import Peer
from .results import geomean

__all__ = ["SCHEMA", "BenchRun", "contenders_for", "earlier_times", "formats_named", "run_bench"]

SCHEMA = "leanmla-bench/1"


@dataclass
class BenchRun:
    """Everything a run found."""

    environment: dict
    command: str
    started: str
    ceilings: Ceilings
    results: list[Measurement] = field(default_factory=list)
    seconds: float = 0.0
    not_run: list[str] = field(default_factory=list)  #: cases that the time limit left out
    aborted: str = ""  #: why the run ended early

    @property
    def wrong(self) -> list[Measurement]:
        """Ours that gave a wrong result or failed."""
        return [r for r in self.results if not r.peer and r.status in ("wrong", "failed")]

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.aborted

    def geomeans(self) -> dict[str, float]:
        """Geometric mean over the contest grid, of every contender that finished all of it, microseconds."""
        grid = [c.label for c in contest_cases()]
        times: dict[str, dict[str, float]] = {}
        for r in self.results:
            if r.status == "ok" and r.case in grid:
                times.setdefault(r.contender, {})[r.case] = r.time_us
        return {name: geomean(t.values()) for name, t in times.items() if len(t) == len(grid)}

    def document(self) -> dict:
        """As it goes into JSON."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "started": self.started,
            "seconds": round(self.seconds, 1),
            "complete": not self.not_run and not self.aborted,
            "ok": self.ok,
            "not_run": self.not_run,
            "aborted": self.aborted,
            "environment": self.environment,
            "protocol": _protocol(self.environment["device"]["kind"]),
            "ceilings": dataclasses.asdict(self.ceilings),
            "geomean_contest_us": self.geomeans(),
            "results": [r.document() for r in self.results],
        }


def _protocol(kind: str) -> dict:
    graph = kind != "cpu"
    return {
        "check": f"some sequences of each batch against fp64 on the same cache, element by element; relative L2 error at most "
        f"{MAX_RELATIVE_ERROR:g} (peers {PEER_MAX_RELATIVE_ERROR:g}); a wrong kernel is not timed",
        "cold": f"each call reads its own copy of the cache; copies together exceed {COLD_FACTOR} x the last-level cache",
        "timing": (
            "one CUDA graph holds one call a copy; a sample is one replay (device events) divided by the calls"
            if graph
            else "a sample is one call by time.perf_counter, on the next copy"
        ),
        "figure": "median of the samples; contenders take turns; spread is half the quartile distance over the median",
        "data": "standard normal bf16 q and latents; rows of 16384 latents repeat; pages shuffled",
    }


def formats_named(names: Sequence[str], cases: Sequence[BenchCase], device: torch.device) -> list[str]:
    """Names of cache formats; "all" stands for those that a kernel on ``device`` reads, which leaves out what only reference decodes.

    Raises:
        InvalidArgument: no such format.
    """
    info = describe(device)

    def has_kernel(fmt: str) -> bool:
        return any(backends.choose(problem_of(c, fmt), info).name != "reference" for c in cases)

    every = [fmt for fmt in formats.FORMATS if has_kernel(fmt)] if "all" in names else []
    return list(dict.fromkeys(f for name in names for f in (every if name == "all" else [formats.get(name).name])))


def contenders_for(
    cases: Sequence[BenchCase], names: Sequence[str], backend: str, peers: Sequence[Peer], device: torch.device
) -> list[Contender]:
    """Backends times formats, and the peers of those formats.

    Args:
        names: cache formats, or "all", see :func:`formats_named`.
        backend: "auto" (chosen case by case), "all" that can run some case, or names with commas.

    Raises:
        InvalidArgument: no such backend. BackendUnavailable: one asked for by name can run none of it.
    """
    info = describe(device)

    def some_case(name: str, fmt: str) -> bool:
        return any(backends.why_not(name, problem_of(c, fmt), info) is None for c in cases)

    names = formats_named(names, cases, device)
    if backend == "all":
        own = [n for n in backends.NAMES if n != "reference" and any(some_case(n, f) for f in names)]
        if not own:
            raise BackendUnavailable(f"--backend: none but reference runs any of these cases on {info.name}. See leanmla info.")
    elif backend == "auto":
        own = ["auto"]
    else:
        own = [n.strip() for n in backend.split(",")]
        for name in own:
            if not any(some_case(name, f) for f in names):
                backends.choose(problem_of(cases[0], names[0]), info, name)  # raises, with the reason
    chosen: list[Contender] = []
    for fmt in names:
        chosen += [Contender(fmt, n) for n in own]
        chosen += [
            Contender(fmt, peer=p) for p in peers if p.format == fmt and any(p.refusal(c, device) is None for c in cases)
        ]
    return chosen


def run_bench(
    cases: Sequence[BenchCase],
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    time_limit: float = math.inf,
    seconds: float = 0.15,
    commit: str | None = None,
    on_step: Callable[[str], None] = lambda label: None,
    on_case: Callable[[], None] = lambda: None,
) -> BenchRun:
    """Measure ceilings, then every case until the time limit; cases that do not fit are named in the result.

    Args:
        time_limit: seconds for everything.
        seconds: sampling time a contender.
        commit: to record where this runs outside a repository.
        on_step, on_case: told what is being done, and when a case is done.
    """
    start = time.monotonic()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    on_step("ceilings")
    run = BenchRun(environment(device, commit), command_line(), started, measure_ceilings(device))
    pool = LatentPool(device)
    slowest = 0.0
    for case in cases:
        before = time.monotonic()
        # The next case may take as long as the slowest so far (compilation included).
        if before - start + slowest > time_limit:
            run.not_run.append(case.label)
            continue
        try:
            run.results += measure_case(
                case, contenders, pool, read_tb_s=run.ceilings.read_tb_s, seconds=seconds, on_step=on_step
            )
        except RuntimeError as error:
            run.aborted = f"{case.label}: {str(error).splitlines()[0]}"
            break
        slowest = max(slowest, time.monotonic() - before)
        on_case()
    run.seconds = time.monotonic() - start
    return run


def earlier_times(document: dict) -> dict[tuple[str, str], tuple[float, float]]:
    """(case, contender) -> (time, spread) of a result file.

    Raises:
        InvalidArgument: the file is not of a benchmark.
    """
    if not str(document.get("schema", "")).startswith("leanmla-bench/"):
        raise InvalidArgument(f"--compare: expected a result of leanmla bench, got one of {document.get('schema')!r}.")
    return {(r["case"], r["contender"]): (r["time_us"], r["spread"] or 0.0) for r in document["results"] if r["status"] == "ok"}
