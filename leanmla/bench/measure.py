"""One case: prepare what competes, check each against the fp64 definition, time those that are right."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .. import backends, formats
from ..decode import DecodePlan
from ..device import describe, free_memory, last_level_cache
from ..errors import LeanMLAError
from ..reference import mla_decode_reference
from ..testing import compare
from ..testing.compare import relative_error
from .cases import BenchCase
from .data import Copy, LatentPool, bytes_of, make_copies, pick_sequences, problem_of, sequences
from .peers import Peer, result_of
from .timing import Timer, Times, context_lost, interleave, make_timer

__all__ = [
    "MAX_RELATIVE_ERROR",
    "PEER_MAX_RELATIVE_ERROR",
    "Contender",
    "Measurement",
    "copies_needed",
    "measure_case",
    "plan_for",
]

#: What a kernel of ours may be off from the definition, L2 over the output; besides a bound on every element.
MAX_RELATIVE_ERROR = 3e-3
#: Others may trade accuracy for speed; this only catches results that are plainly something else.
PEER_MAX_RELATIVE_ERROR = 5e-2
#: Cold means that all copies together are this many times the last-level cache.
COLD_FACTOR = 3
#: At least this many calls in a graph, memory permitting, so that one launch of the graph does not weigh on a call.
MIN_COPIES = 4
MAX_COPIES = 256
#: Sequences of a batch that are checked against fp64.
CHECKED_SEQUENCES = 6


@dataclass(frozen=True)
class Contender:
    """A backend of ours with one cache format, or a peer."""

    format: str
    backend: str = ""  #: name of the backend, or "auto"
    peer: Peer | None = None

    @property
    def name(self) -> str:
        return self.peer.name if self.peer is not None else f"{self.backend} {self.format}"


@dataclass
class Measurement:
    """What came out for one contender on one case; what goes into the JSON."""

    case: str
    batch: int
    kv_lens: list[int] | int  #: one number where all are equal
    num_heads: int
    q_len: int
    page_size: int
    format: str
    contender: str  #: unique within a case, the same from run to run
    peer: bool
    status: str = "ok"  #: "ok" | "wrong" | "refused" | "failed" | "skipped"
    message: str = ""
    backend: str = ""
    kernel: str = ""
    time_us: float = math.nan
    spread: float = math.nan  #: half the quartile distance, relative to the median
    samples_us: list[float] = field(default_factory=list)
    copies: int = 0
    cache_bytes: int = 0  #: bytes of the cache a step reads
    tb_s: float = math.nan
    read_share: float = math.nan  #: of the read ceiling
    relative_error: float = math.nan  #: against the exact result on the same cache
    quantisation_error: float = math.nan  #: of the exact result on this cache against that on the bf16 cache
    checked_sequences: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """The same measurement in another run has the same key."""
        return self.case, self.contender

    def document(self) -> dict:
        """As it goes into JSON."""
        return dataclasses.asdict(self)


def plan_for(case: BenchCase, format: str, device: torch.device, backend: str = "auto") -> DecodePlan:
    """A plan that holds a case."""
    problem = problem_of(case, format)
    return DecodePlan(num_heads=case.num_heads, format=format, page_size=case.page_size, max_batch=case.batch,
                      max_kv_len=problem.max_kv_len, max_q_len=case.q_len, device=device, backend=backend)  # fmt: skip


def copies_needed(case: BenchCase, format: str, device: torch.device) -> int:
    """Copies that make every call cold: together over three times the last-level cache."""
    cold = math.floor(COLD_FACTOR * last_level_cache(device) / (case.tokens * formats.get(format).bytes_per_token)) + 1
    return min(MAX_COPIES, max(cold, MIN_COPIES if device.type == "cuda" else 1))


def _fits(case: BenchCase, names: Sequence[str], counts: dict[str, int], device: torch.device, peers: bool) -> bool:
    need = sum(counts[f] * bytes_of(case, f) for f in names)
    if peers:  # dense keys, and logits, for torch
        need += 2 * counts.get("bf16", 0) * case.tokens * 1152
    return need <= 0.6 * (free_memory(device) or math.inf)


@dataclass
class _Entry:
    """A contender that is ready to run."""

    result: Measurement
    calls: list[Callable[[], torch.Tensor]]
    outs: Callable[[int], torch.Tensor]  #: computes copy i's output, complete
    checked: torch.Tensor | None = None  #: the rows of copy 0 that were compared with fp64


def measure_case(
    case: BenchCase,
    contenders: Sequence[Contender],
    pool: LatentPool,
    *,
    read_tb_s: float = math.nan,
    seconds: float = 0.15,
    min_rounds: int = 5,
    max_rounds: int = 40,
    checked_sequences: int = CHECKED_SEQUENCES,
    by_format: bool = False,
    on_step: Callable[[str], None] = lambda label: None,
) -> list[Measurement]:
    """Check, then time: all contenders in turns, or format by format where memory does not hold all.

    Args:
        contenders: whom to measure; results come in the same order.
        read_tb_s: the read ceiling, for the share of it.
        seconds: time to sample for, a contender.
        min_rounds, max_rounds: samples of each.
        checked_sequences: sequences of the batch that are compared with fp64.
        by_format: one format in memory at a time even if all fit, and one copy on a CPU.
        on_step: told what is being done.
    """
    device = pool.device
    names = list(dict.fromkeys(c.format for c in contenders))
    peers = any(c.peer is not None and c.peer.module is None for c in contenders)
    counts = {f: 1 if by_format and device.type == "cpu" else copies_needed(case, f, device) for f in names}
    while not _fits(case, names, counts, device, peers) and max(counts.values()) > 1:
        counts = {f: max(1, n // 2) for f, n in counts.items()}
    together = not by_format and _fits(case, names, counts, device, peers)
    groups = [names] if together else [[f] for f in names]
    results: dict[Contender, Measurement] = {}
    # bf16 first: what quantisation costs is measured against it.
    groups.sort(key=lambda group: "bf16" not in group)
    job = _Job(case, pool, read_tb_s, seconds, min_rounds, max_rounds, pick_sequences(case.kv_lens, checked_sequences), on_step)
    for group in groups:
        members = [c for c in contenders if c.format in group]
        if _fits(case, group, counts, device, peers):
            results.update(_measure_group(job, members, counts))
        else:
            need = sum(bytes_of(case, f) for f in group) / 2**30
            for c in members:
                results[c] = _blank(case, c, "skipped", f"needs {need:.1f} GiB for the cache, more than there is")
        if device.type == "cuda":
            gc.collect()  # graphs and plans that an exception still holds
            torch.cuda.empty_cache()
    return [results[c] for c in contenders]


def _blank(case: BenchCase, contender: Contender, status: str = "ok", message: str = "") -> Measurement:
    fmt = formats.get(contender.format)
    return Measurement(
        case=case.label, batch=case.batch, kv_lens=case.kv_lens[0] if case.uniform else list(case.kv_lens),
        num_heads=case.num_heads, q_len=case.q_len, page_size=case.page_size, format=contender.format,
        contender=contender.name, peer=contender.peer is not None, status=status, message=message,
        cache_bytes=case.bytes_read(fmt.bytes_per_token),
    )  # fmt: skip


@dataclass
class _Job:
    """What the groups of a case share."""

    case: BenchCase
    pool: LatentPool
    read_tb_s: float
    seconds: float
    min_rounds: int
    max_rounds: int
    picks: list[int]
    on_step: Callable[[str], None]
    exact: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  #: definition's (out, lse) by format


def _measure_group(job: _Job, contenders: Sequence[Contender], counts: dict[str, int]) -> dict[Contender, Measurement]:
    case, device = job.case, job.pool.device
    results = {c: _blank(case, c) for c in contenders}
    copies: dict[str, list[Copy]] = {}
    timers: dict[Contender, Timer] = {}
    entries: dict[Contender, _Entry] = {}
    for c in contenders:
        result = results[c]
        reason = _refusal(c, case, device)
        if reason is not None:
            result.status, result.message = "refused", reason
            continue
        job.on_step(f"{case.label}, {c.name}: compiling, checking")
        if c.format not in copies:
            copies[c.format] = make_copies(case, c.format, job.pool, counts[c.format])
            part = sequences(copies[c.format][0], c.format, job.picks)
            job.exact[c.format] = mla_decode_reference(part.q, part.cache, part.table, **part.options)
        try:
            entry = _prepare(c, case, copies[c.format], device, result)
            _check(entry, c, copies[c.format], job)
            if result.status == "ok":
                timers[c], entries[c] = make_timer(device, entry.calls), entry
        except LeanMLAError as error:
            result.status, result.message = "refused", str(error)
        except Exception as error:
            if context_lost(device):
                raise  # nothing after this would mean anything
            first_line = str(error).splitlines()[0] if str(error) else ""
            result.status, result.message = "failed", f"{type(error).__name__}: {first_line}"
    job.on_step(f"{case.label}: timing {len(timers)}")
    by_name = interleave({c.name: t for c, t in timers.items()}, seconds=job.seconds * len(timers), min_rounds=job.min_rounds,
                         max_rounds=job.max_rounds)  # fmt: skip
    for c, entry in entries.items():
        if c.peer is None:
            _check_timed(timers[c], entry, c, copies[c.format][0], job)
        if entry.result.status == "ok":
            _record(entry.result, by_name[c.name], counts[c.format], job.read_tb_s)
    return results


def _refusal(contender: Contender, case: BenchCase, device: torch.device) -> str | None:
    if contender.peer is not None:
        return contender.peer.refusal(case, device)
    if contender.backend == "auto":
        return None
    return backends.why_not(contender.backend, problem_of(case, contender.format), describe(device))


def _prepare(c: Contender, case: BenchCase, copies: list[Copy], device: torch.device, result: Measurement) -> _Entry:
    result.copies = len(copies)
    if c.peer is not None:
        calls = c.peer.prepare(copies)
        return _Entry(result, calls, lambda i: result_of(calls[i]))
    plan = plan_for(case, c.format, device, c.backend)
    result.backend = plan.backend.name
    result.kernel = plan.backend.launch_config(problem_of(case, c.format), describe(device)).kernel

    def call_of(copy: Copy) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            plan.run(copy.q, copy.cache, copy.table, sm_scale=case.sm_scale, out=copy.out)
            return copy.out

        return call

    ours = [call_of(copy) for copy in copies]
    return _Entry(result, ours, lambda i: ours[i]())


def _check(entry: _Entry, c: Contender, copies: list[Copy], job: _Job) -> None:
    """Some sequences of copy 0 against the definition; every output (ours: of every copy) must be there and finite."""
    result = entry.result
    for i, copy in enumerate(copies if c.peer is None else copies[:1]):
        copy.out.fill_(torch.nan)
        out = entry.outs(i)
        if not bool(torch.isfinite(out).all()):
            result.status, result.message = "wrong", f"copy {i}: an output is not finite, or was not written"
            return
        if i == 0:
            _judge(entry, c, copy, out, job)
            if result.status != "ok":
                return


def _check_timed(timer: Timer, entry: _Entry, c: Contender, copy: Copy, job: _Job) -> None:
    """What the timed calls themselves (a graph, say) leave in a fresh output must be right too."""
    copy.out.fill_(torch.nan)
    timer.run_all()
    if entry.checked is not None and torch.equal(_picked(copy, copy.out, job), entry.checked):
        return  # the bits that were checked before
    _judge(entry, c, copy, copy.out, job)
    if entry.result.status != "ok":
        entry.result.message = "in the timed calls, " + entry.result.message


def _picked(copy: Copy, out: torch.Tensor, job: _Job) -> torch.Tensor:
    """The rows of the checked sequences, copied."""
    return out.unflatten(0, (copy.case.batch, copy.case.q_len))[job.picks].flatten(0, 1)


def _judge(entry: _Entry, c: Contender, copy: Copy, out: torch.Tensor, job: _Job) -> None:
    result, picks, exact = entry.result, job.picks, job.exact[c.format]
    if "bf16" in job.exact:
        result.quantisation_error = relative_error(exact[0], job.exact["bf16"][0])
    result.checked_sequences = len(picks)
    rows = entry.checked = _picked(copy, out, job)
    if c.peer is not None:
        result.relative_error = relative_error(rows, exact[0])
        if not result.relative_error <= PEER_MAX_RELATIVE_ERROR:
            result.status, result.message = "wrong", f"relative error {result.relative_error:.2g}"
        return
    report = compare(sequences(copy, c.format, picks), rows, reference=exact, max_relative_error=MAX_RELATIVE_ERROR)
    result.relative_error = report.relative_error
    if not report.ok:
        result.status, result.message = "wrong", f"of the checked sequences {picks}: {report.message}"


def _record(result: Measurement, times: Times, copies: int, read_tb_s: float) -> None:
    result.time_us, result.spread = times.median_us, times.spread
    result.samples_us = [round(t, 4) for t in times.samples_us]
    result.tb_s = result.cache_bytes / result.time_us / 1e6
    result.read_share = result.tb_s / read_tb_s
    result.copies = copies
