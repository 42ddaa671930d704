"""Devices that ``explain`` can stand in for and the support table lists, with what is known about their memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import DeviceInfo

__all__ = ["KNOWN", "KnownDevice"]


@dataclass(frozen=True)
class KnownDevice:
    """A device and its memory bandwidth."""

    info: DeviceInfo
    tb_s: float | None  #: TB/s; None: nothing general can be said
    source: str  #: where the bandwidth comes from
    packages: tuple[str, ...] = ()  #: what is taken to be installed beside such a device


_GIB = 1 << 30

KNOWN: dict[str, KnownDevice] = {
    "cpu": KnownDevice(DeviceInfo("cpu", "a CPU with 8 threads", "cpu", 8, 0, 32 * _GIB), None, "", ("numba",)),
    "a100": KnownDevice(
        DeviceInfo("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 166912, 80 * _GIB), 2.04, "data sheet", ("triton",)
    ),
    "h100": KnownDevice(
        DeviceInfo("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 232448, 80 * _GIB), 3.35, "data sheet", ("triton", "cuda")
    ),
    "h200": KnownDevice(
        DeviceInfo("cuda", "NVIDIA H200", "sm_90", 132, 232448, 141 * _GIB),
        4.66,
        "measured with a read kernel",
        ("triton", "cuda"),
    ),
    "mi300x": KnownDevice(
        DeviceInfo("hip", "AMD Instinct MI300X", "gfx942", 304, 65536, 192 * _GIB), 5.3, "data sheet", ("triton", "flydsl")
    ),
    "mi355x": KnownDevice(
        DeviceInfo("hip", "AMD Instinct MI355X", "gfx950", 256, 163840, 288 * _GIB), 8.0, "data sheet", ("triton", "flydsl")
    ),
}
