"""The only place that asks about hardware. Tests replace its answers with :func:`override`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["DeviceInfo", "describe", "override", "triton_missing"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What backends decide on."""

    kind: str  #: "cpu" | "cuda" | "hip"
    name: str
    arch: str  #: "cpu", "sm_90", "gfx950", ...
    num_sms: int  #: multiprocessors, compute units or CPU threads
    shared_memory: int  #: bytes of shared memory a block may use; 0 on a CPU
    total_memory: int  #: bytes; 0 where unknown

    @property
    def sm(self) -> int:
        """Compute capability as one number, 90 for sm_90; 0 where there is none."""
        return int(self.arch.removeprefix("sm_")) if self.arch.startswith("sm_") else 0


_override: DeviceInfo | None = None


@contextlib.contextmanager
def override(info: DeviceInfo) -> Iterator[None]:
    """Make :func:`describe` answer ``info`` for every device (tests, ``explain`` for a machine one does not have)."""
    global _override
    before, _override = _override, info
    try:
        yield
    finally:
        _override = before


def describe(device: torch.device | str) -> DeviceInfo:
    """Facts about a device. Cached: a device does not change while the process runs."""
    if _override is not None:
        return _override
    device = torch.device(device)
    if device.type == "cuda":
        return _describe_gpu(device.index if device.index is not None else torch.cuda.current_device())
    return _describe_cpu(torch.get_num_threads())


@functools.cache
def _describe_gpu(index: int) -> DeviceInfo:
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return DeviceInfo("hip", p.name, p.gcnArchName.split(":")[0], p.multi_processor_count, _lds_bytes(p), p.total_memory)
    shared = getattr(p, "shared_memory_per_block_optin", 0)
    return DeviceInfo("cuda", p.name, f"sm_{p.major}{p.minor}", p.multi_processor_count, shared, p.total_memory)


def _lds_bytes(p) -> int:
    # CDNA4 (gfx950) has 160 KiB of LDS a compute unit, earlier CDNA 64 KiB.
    return 163840 if p.gcnArchName.startswith("gfx950") else 65536


@functools.cache
def _describe_cpu(threads: int) -> DeviceInfo:
    return DeviceInfo("cpu", _cpu_name(), "cpu", threads, 0, _host_memory())


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _host_memory() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def triton_missing() -> str | None:
    """Why Triton cannot be used, or None. Does not import it."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed (pip install triton)"
    return None
