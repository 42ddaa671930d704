"""Small things that several commands say or ask alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["integers", "pick_device", "size", "time_unit"]


def pick_device(name: str) -> torch.device:
    """The device meant by ``--device``: "auto" is cuda if there is one.

    Raises:
        InvalidArgument: no such device here.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidArgument(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}.") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgument(f"--device: {name} is not there, torch {torch.__version__} sees no GPU. Use --device cpu.")
        if (device.index or 0) >= torch.cuda.device_count():
            raise InvalidArgument(f"--device: {name} is not there, torch sees {torch.cuda.device_count()} GPUs.")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def time_unit(kind: str) -> tuple[str, float]:
    """Unit for times on a kind of device, and its factor on microseconds."""
    return ("ms", 1e-3) if kind == "cpu" else ("µs", 1.0)


def size(num_bytes: float) -> str:
    """Bytes for people: ``37.7 MB``, decimal like bandwidths."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}" if num_bytes < 999.5 * factor else f"{num_bytes / factor:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def integers(text: str, option: str, least: int) -> tuple[int, ...]:
    """Integers with commas between them.

    Raises:
        InvalidArgument: something else, or one below ``least``.
    """
    try:
        values = tuple(int(v) for v in text.replace("_", "").split(","))
    except ValueError:
        raise InvalidArgument(f"{option}: expected integers with commas between them, got {text!r}.") from None
    if min(values) < least:
        raise InvalidArgument(f"{option}: expected integers of at least {least}, got {min(values)}.")
    return values
