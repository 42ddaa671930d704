"""The contest's ``utils`` module: seeds, comparison with a reference, and a flush of the GPU's cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = [
    "MAX_OUTSIDE",
    "clear_l2_cache",
    "clear_l2_cache_large",
    "compare",
    "get_device",
    "make_match_reference",
    "match_reference",
    "set_seed",
    "verbose_allclose",
    "verbose_allequal",
]

MAX_OUTSIDE = 0.05  #: share of elements that may lie outside the tolerance


def set_seed(seed: int = 42) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_device(use_cuda: bool = True) -> torch.device:
    """The GPU if there is one and it is wanted, otherwise the CPU."""
    return torch.device("cuda" if use_cuda and torch.cuda.is_available() else "cpu")


def _outside(received: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """True where the two differ by more than the tolerance; equal infinities and paired NaN agree."""
    received, expected = received.float(), expected.float()
    agree = (received == expected) | (received.isnan() & expected.isnan())
    within = (received - expected).abs() <= atol + rtol * expected.abs()
    return ~(agree | (within & expected.isfinite()))


def compare(
    output: object, expected: torch.Tensor, *, rtol: float, atol: float, max_outside: float = MAX_OUTSIDE
) -> tuple[bool, str]:
    """Whether ``output`` may stand for ``expected``, and if not, one sentence that says why.

    Args:
        output: what a submission returned; must be a tensor of expected's shape, dtype and device, without NaN.
        expected: what the reference gives.
        rtol, atol: |output - expected| <= atol + rtol * |expected| element by element...
        max_outside: ...except for at most this share of the elements.

    Returns:
        (True, "") or (False, reason).
    """
    if not isinstance(output, torch.Tensor):
        return False, f"The output is not a tensor but a {type(output).__name__}."
    if output.shape != expected.shape:
        return False, f"The output has shape {list(output.shape)}, expected {list(expected.shape)}."
    if output.layout != torch.strided:
        return False, f"The output has layout {_short(output.layout)}, expected an ordinary (strided) tensor."
    if output.dtype != expected.dtype:
        return False, f"The output has dtype {_short(output.dtype)}, expected {_short(expected.dtype)}."
    if output.device != expected.device:
        return False, f"The output is on {output.device}, expected on {expected.device}."
    if output.numel() == 0:
        return True, ""
    nan = output.isnan() & ~expected.isnan()
    if bool(nan.any()):
        at = tuple(nan.nonzero()[0].tolist())
        return False, f"The output has {int(nan.sum())} NaN of {output.numel()} elements, the first at {at}."
    outside = _outside(output, expected, rtol, atol)
    count = int(outside.sum())
    if count <= max_outside * output.numel():
        return True, ""
    error = torch.where(outside, (output.float() - expected.float()).abs().nan_to_num(nan=torch.inf), 0.0)
    at = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    return False, (
        f"{100 * count / output.numel():.2f} % of the elements lie outside {atol:g} + {rtol:g} * |expected| (at most {100 * max_outside:g} % may); "
        f"the worst is {output[at].item():.6g} instead of {expected[at].item():.6g} at {at}."
    )


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def match_reference(
    data: Any,
    output: torch.Tensor,
    reference: Callable[[Any], torch.Tensor],
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_outside: float = MAX_OUTSIDE,
) -> tuple[bool, str]:
    """:func:`compare` with what ``reference(data)`` gives."""
    return compare(output, reference(data), rtol=rtol, atol=atol, max_outside=max_outside)


def make_match_reference(
    reference: Callable[[Any], torch.Tensor], **tolerances: float
) -> Callable[[Any, Any], tuple[bool, str]]:
    """A ``check_implementation(data, output) -> (good, message)`` for a reference; tolerances as in :func:`match_reference`."""

    def check(data: Any, output: torch.Tensor) -> tuple[bool, str]:
        return match_reference(data, output, reference, **tolerances)

    return check


def verbose_allclose(
    received: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, max_print: int = 5
) -> tuple[bool, list[str]]:
    """Whether every element is within the tolerance, and lines about those that are not."""
    return _verbose(received, expected, lambda: _outside(received, expected, rtol, atol), max_print)


def verbose_allequal(received: torch.Tensor, expected: torch.Tensor, max_print: int = 5) -> tuple[bool, list[str]]:
    """Whether every element is equal, and lines about those that are not."""
    return _verbose(received, expected, lambda: received != expected, max_print)


def _verbose(
    received: torch.Tensor, expected: torch.Tensor, find: Callable[[], torch.Tensor], max_print: int
) -> tuple[bool, list[str]]:
    if received.shape != expected.shape:
        return False, [f"shape {list(received.shape)}, expected {list(expected.shape)}"]
    positions = find().nonzero()
    if not positions.shape[0]:
        return True, []
    lines = [f"{positions.shape[0]} of {received.numel()} elements differ"]
    for position in positions[:max_print].tolist():
        at = tuple(position)
        lines.append(f"at {at}: {received[at].item()} instead of {expected[at].item()}")
    return False, lines


_flush_buffer: torch.Tensor | None = None


def clear_l2_cache() -> None:
    """Overwrite more memory than the GPU's last-level cache holds. On a CPU: nothing."""
    global _flush_buffer
    if not torch.cuda.is_available():
        return
    if _flush_buffer is None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # Three times the cache, and at least the 256 MiB of the largest last-level cache in use (MI300's Infinity Cache).
        size = max(3 * getattr(properties, "L2_cache_size", 0), 256 << 20)
        _flush_buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
    _flush_buffer.zero_()


clear_l2_cache_large = clear_l2_cache
