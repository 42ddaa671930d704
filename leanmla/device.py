"""The only place that asks about hardware. Tests replace its answers with :func:`override`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["DeviceInfo", "assumed", "describe", "free_memory", "last_level_cache", "missing", "override", "triton_missing"]


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
_assumed: frozenset[str] = frozenset()


@contextlib.contextmanager
def override(info: DeviceInfo | None, *, assume_installed: Iterable[str] = ()) -> Iterator[None]:
    """Make :func:`describe` answer ``info`` for every device (tests, ``explain`` for a machine one does not have).

    Args:
        info: the device to pretend; None keeps the real ones.
        assume_installed: packages that :func:`missing` takes to be there, whatever this machine has.
    """
    global _override, _assumed
    before = _override, _assumed
    _override, _assumed = info, frozenset(assume_installed)
    try:
        yield
    finally:
        _override, _assumed = before


def describe(device: torch.device | str) -> DeviceInfo:
    """Facts about a device. Cached: a device does not change while the process runs."""
    if _override is not None:
        return _override
    device = torch.device(device)
    if device.type == "cuda":
        return _describe_gpu(device.index if device.index is not None else torch.cuda.current_device())
    if device.type != "cpu":
        return DeviceInfo(device.type, f"device '{device}'", device.type, 0, 0, 0)
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


def free_memory(device: torch.device | str) -> int:
    """Bytes that can still be allocated on a device, container limits included; 0 where unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [n for n in (_meminfo_available(), _cgroup_headroom()) if n is not None]
    return min(free, default=0)


def _meminfo_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup_headroom() -> int | None:
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit, encoding="ascii") as f, open(used, encoding="ascii") as g:
                return max(0, int(f.read()) - int(g.read()))  # int("max") is a ValueError: no limit
        except (OSError, ValueError):
            continue
    return None


def last_level_cache(device: torch.device | str) -> int:
    """Bytes of the cache in front of a device's memory (a GPU's L2, a CPU's L3); 32 MiB where unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 32 << 20
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index3/size", encoding="ascii") as f:
            return int(f.read().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 32 << 20


def assumed(package: str) -> bool:
    """Whether :func:`override` takes a package to be installed, so that nothing about it is to be asked of this machine."""
    return package.partition(".")[0] in _assumed


def missing(package: str) -> str | None:
    """Why a package (or a module inside one) cannot be used, or None. Does not import it, only its parents."""
    if assumed(package):
        return None
    try:
        if importlib.util.find_spec(package) is not None:
            return None
    except ModuleNotFoundError:  # a parent is missing
        pass
    title = "Triton" if package == "triton" else package
    return f"needs {title}, which is not installed (pip install {package.partition('.')[0]})"


def triton_missing() -> str | None:
    """:func:`missing` for Triton."""
    return missing("triton")
