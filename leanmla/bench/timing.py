"""Timers: calls captured in a CUDA graph, or a clock around calls on a CPU; contenders take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Times", "context_lost", "interleave", "make_timer"]


@dataclass(frozen=True)
class Times:
    """Microseconds a call, one sample a round."""

    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.samples_us) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return (high - low) / 2 / self.median_us


class Timer(Protocol):
    """Something that can be timed once more."""

    def sample(self) -> float:
        """Run once; microseconds a call."""

    def run_all(self) -> None:
        """Run every call once, in the way that is timed."""


class GraphTimer:
    """One CUDA graph holds all calls, each on its own copy; a sample is one replay divided by their number."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._count = len(calls)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()  # compiles, loads modules and fills caches, none of which may happen inside a capture
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            for call in calls:
                call()
        self._graph.replay()
        torch.cuda.synchronize()

    def sample(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self._count

    def run_all(self) -> None:
        self._graph.replay()
        torch.cuda.synchronize()


class ClockTimer:
    """Calls on a CPU, one a sample, each on the next copy."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls, self._next = calls, 0
        calls[0]()  # compiles

    def sample(self) -> float:
        call = self._calls[self._next]
        self._next = (self._next + 1) % len(self._calls)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def run_all(self) -> None:
        for call in self._calls:
            call()


def make_timer(device: torch.device, calls: Sequence[Callable[[], object]]) -> Timer:
    """The timer for a device, warmed up."""
    return GraphTimer(calls) if device.type == "cuda" else ClockTimer(calls)


def interleave(timers: dict[str, Timer], *, seconds: float, min_rounds: int = 5, max_rounds: int = 40) -> dict[str, Times]:
    """Sample all timers in turns, so that drift of clocks and temperature meets all alike.

    Args:
        timers: name -> timer.
        seconds: about how long to go on.
        min_rounds, max_rounds: samples of each timer, at least and at most.
    """
    samples: dict[str, list[float]] = {name: [] for name in timers}
    start = time.monotonic()
    for done in range(max_rounds):
        if done >= min_rounds and time.monotonic() - start >= seconds:
            break
        for name, timer in timers.items():
            samples[name].append(timer.sample())
    return {name: Times(tuple(values)) for name, values in samples.items()}


def context_lost(device: torch.device) -> bool:
    """Whether a GPU gives nothing but errors any more, as after an illegal access (a failed capture is harmless)."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        return bool(torch.zeros(1, device=device).item() != 0)
    except RuntimeError:
        return True
