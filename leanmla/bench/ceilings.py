"""What the machine can do at best, measured in the same run: reading memory, multiplying, launching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..device import describe, free_memory, last_level_cache, triton_missing
from .timing import interleave, make_timer

__all__ = ["Ceilings", "measure_ceilings"]


@dataclass(frozen=True)
class Ceilings:
    """Bounds for a decode step on this machine."""

    read_tb_s: float  #: reading memory once, TB/s
    read_by: str  #: what reached it
    matmul_tflop_s: float  #: bf16 on a GPU, fp32 on a CPU
    launch_us: float | None  #: an empty kernel in a graph; None on a CPU


def _best(
    device: torch.device, calls: Mapping[str, Callable[[], object]], *, repeat: int = 1, seconds: float = 0.4
) -> tuple[float, str]:
    """Shortest median time in microseconds, and whose."""
    timers = {name: make_timer(device, [call] * repeat) for name, call in calls.items()}
    times = interleave(timers, seconds=seconds, min_rounds=3)
    name = min(times, key=lambda n: times[n].median_us)
    return times[name].median_us, name


def measure_ceilings(device: torch.device) -> Ceilings:
    """Takes about two seconds. Whatever is fastest counts; a kernel cannot be blamed for what nothing reaches."""
    return _on_gpu(device) if device.type == "cuda" else _on_cpu(device)


def _buffer_bytes(device: torch.device, most: int) -> int:
    size = min(most, free_memory(device) // 4)
    return max(size, 2 * last_level_cache(device)) >> 20 << 20


def _on_gpu(device: torch.device) -> Ceilings:
    read_tb_s, by = _read_gpu(device)
    tiny = torch.zeros(1, device=device)
    launch: Callable[[], object] = tiny.zero_
    if triton_missing() is None:
        from .ceilings_triton import nothing

        grid = (describe(device).num_sms,)

        def launch() -> object:
            return nothing[grid](tiny)

    launch_us, _ = _best(device, {"launch": launch}, repeat=100, seconds=0.05)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    matmul_us, _ = _best(device, {"matmul": lambda: a @ a}, repeat=3, seconds=0.2)
    return Ceilings(read_tb_s, by, 2 * 8192**3 / matmul_us / 1e6, launch_us)


def _read_gpu(device: torch.device) -> tuple[float, str]:
    size = _buffer_bytes(device, 4 << 30)
    x = torch.zeros(size // 4, dtype=torch.int32, device=device)
    floats = x.view(torch.float32)
    calls: dict[str, Callable[[], object]] = {"torch.sum": lambda: floats.sum()}
    if triton_missing() is None:
        from .ceilings_triton import read_all

        sums = torch.empty(1 << 16, dtype=torch.int32, device=device)
        num_sms = describe(device).num_sms

        def reader(programs: int, block: int, warps: int) -> Callable[[], object]:
            return lambda: read_all[(programs,)](x, sums, x.numel(), BLOCK=block, num_warps=warps)

        for per_sm in (1, 2, 4, 8):
            for block, warps in ((1024, 4), (2048, 8), (4096, 8)):
                calls[f"Triton, {per_sm} programs an SM, blocks of {block}"] = reader(per_sm * num_sms, block, warps)
    read_us, by = _best(device, calls)
    return size / read_us / 1e6, by


def _on_cpu(device: torch.device) -> Ceilings:
    size = _buffer_bytes(device, 512 << 20)
    x = torch.ones(size // 4, dtype=torch.float32)
    rows, ones = x.view(-1, 4096), torch.ones(4096)
    calls = {
        "torch.sum": lambda: x.sum(),
        "torch.amax": lambda: x.amax(),
        "torch.dot": lambda: torch.dot(x, x),
        "torch.mv": lambda: torch.mv(rows, ones),
    }
    read_us, by = _best(device, calls, seconds=1.0)
    n = 1536
    a = torch.randn(n, n)
    matmul_us, _ = _best(device, {"matmul": lambda: a @ a}, seconds=0.3)
    return Ceilings(size / read_us / 1e6, by, 2 * n**3 / matmul_us / 1e6, None)
