"""Timed calls and their statistics."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from . import utils

__all__ = ["Stats", "as_left", "geometric_mean", "settled", "summarize", "time_call"]

_Event = torch.cuda.Event  # bound here, before a submission is loaded that could replace it
_RELATIVE_ERROR = 1e-3  #: of the mean, at which more calls would tell nothing new
_LEAST_RUNS = 3


@dataclass(frozen=True)
class Stats:
    """Statistics over timed calls, nanoseconds."""

    runs: int
    mean: float
    std: float
    err: float  #: standard error of the mean
    best: float
    worst: float


def summarize(durations: Sequence[float]) -> Stats:
    """Statistics of durations in nanoseconds."""
    runs = len(durations)
    std = statistics.stdev(durations) if runs > 1 else 0.0
    return Stats(runs, statistics.fmean(durations), std, std / math.sqrt(runs), float(min(durations)), float(max(durations)))


def settled(durations: Sequence[float]) -> bool:
    """Whether the error of the mean is below 0.1 %."""
    if len(durations) < _LEAST_RUNS:
        return False
    stats = summarize(durations)
    return stats.err < _RELATIVE_ERROR * stats.mean


def as_left(result: object, device: torch.device) -> object:
    """A call's result as the current stream finds it, without waiting for others.

    On a GPU that is a copy made at once in the order of the current stream: what another stream writes later is not in it. On a
    CPU work is done when the call returns, and the result stays as it is.
    """
    return result.clone() if device.type == "cuda" and isinstance(result, torch.Tensor) else result


def time_call(call: Callable[[], object], device: torch.device) -> tuple[object, float]:
    """Run ``call`` once, cold: its result and its duration in nanoseconds.

    On a GPU the last-level cache is flushed first and device events mark begin and end, so what the host does counts only as
    far as the device waits for it; the result is what the second event finds (:func:`as_left`). On a CPU the wall clock counts
    and nothing is flushed.
    """
    if device.type != "cuda":
        begin = perf_counter_ns()
        result = call()
        return result, float(perf_counter_ns() - begin)
    start, end = _Event(enable_timing=True), _Event(enable_timing=True)
    torch.cuda.synchronize()
    utils.clear_l2_cache()
    start.record()
    result = call()
    end.record()
    left = as_left(result, device)
    torch.cuda.synchronize()
    if isinstance(result, torch.Tensor):
        # A call on the same inputs that writes the same tensor too late must not find it right already.
        with contextlib.suppress(RuntimeError), torch.inference_mode():
            result.zero_()
    return left, start.elapsed_time(end) * 1e6


def geometric_mean(values: Sequence[float]) -> float:
    """The contest's score over the cases' means."""
    return math.exp(statistics.fmean(math.log(v) for v in values)) if values else math.nan
