"""Small things that several commands say or ask alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import InvalidArgument

if TYPE_CHECKING:
    import torch

    from ..device import DeviceInfo
    from ..problem import DecodeProblem

__all__ = ["check_seed", "check_seconds", "integers", "pick_device", "resolve_settings", "size", "time_unit"]


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


def check_seconds(value: float, option: str) -> None:
    """Seconds to spend: more than none; infinity is no limit.

    Raises:
        InvalidArgument: something else.
    """
    if math.isnan(value) or value <= 0:
        raise InvalidArgument(f"{option}: expected a positive number of seconds, got {value:g}.")


def check_seed(value: int, option: str = "--seed") -> None:
    """A seed that every generator takes, also after it was mixed with other numbers.

    Raises:
        InvalidArgument: below 0, or more than 32 bits.
    """
    if not 0 <= value < 2**32:
        raise InvalidArgument(f"{option}: expected an integer from 0 to {2**32 - 1}, got {value}.")


def resolve_settings(problems: Iterable[DecodeProblem] = (), info: DeviceInfo | None = None) -> None:
    """Refuse settings that nothing can run with, before the work: later they would look like one refusal after another.

    Args:
        problems: what ``backend="auto"`` is going to run; some of it must be possible.
        info: the device; needed with ``problems``.

    Raises:
        InvalidArgument: a variable's value is wrong; the message names it. BackendUnavailable: none of the problems can run.
    """
    from .. import backends, settings
    from ..errors import BackendUnavailable

    settings.cpu_threads()
    refusal = None
    for problem in problems:
        assert info is not None
        try:
            backends.choose(problem, info)
            return
        except BackendUnavailable as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
