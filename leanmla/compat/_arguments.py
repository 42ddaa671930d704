"""What the stand-ins share: refusals under the caller's argument names, and views over a cache that comes in other shapes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch

from ..errors import InvalidArgument, InvalidDtype
from ..problem import DIMS

__all__ = ["check_tensor", "joined_view", "pages_as_bf16", "refuse", "renamed"]


@contextlib.contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Re-raise our refusals with the argument called what the caller calls it: ``renamed(out="o")``."""
    try:
        yield
    except InvalidArgument as error:
        text = str(error)
        found = re.match(r"[A-Za-z_]+", text)
        theirs = names.get(found.group()) if found else None
        if theirs is None:
            raise
        assert found is not None
        raise type(error)(theirs + text[found.end() :]) from error


def refuse(name: str, value: object, why: str) -> InvalidArgument:
    """The error for an argument of the original that has no counterpart here."""
    shown = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return InvalidArgument(f"{name}: got {shown}. {why}")


def check_tensor(
    name: str, t: object, dtype: torch.dtype, shape: Sequence[int | None], device: torch.device | None = None
) -> torch.Tensor:
    """Refuse what is not a tensor of this dtype and shape (None: any size) on this device (None: any)."""
    size = ", ".join("n" if n is None else str(n) for n in shape)
    want = f"{str(dtype).removeprefix('torch.')} [{size}]"
    if not isinstance(t, torch.Tensor):
        raise InvalidArgument(f"{name}: expected a tensor {want}, got {type(t).__name__}.")
    if t.dtype != dtype:
        raise InvalidDtype(f"{name}: expected {want}, got {str(t.dtype).removeprefix('torch.')} {list(t.shape)}.")
    if t.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, t.shape)):
        raise InvalidArgument(f"{name}: expected {want}, got {list(t.shape)}.")
    if device is not None and t.device != device:
        raise InvalidArgument(f"{name}: expected on {device}, got {t.device}.")
    return t


def joined_view(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """One view over both when they are neighbouring slices of the last dim of one buffer, else None.

    Args:
        left: [..., m]; right: [..., n], the same leading dims.

    Returns:
        [..., m + n] without a copy, or None.
    """
    width = left.shape[-1] + right.shape[-1]
    if (
        left.shape[:-1] != right.shape[:-1]
        or left.dtype != right.dtype
        or left.device != right.device
        or left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()
        or right.storage_offset() != left.storage_offset() + left.shape[-1]
        or left.stride() != right.stride()
        or left.stride(-1) != 1
        or any(size > 1 and stride < width for size, stride in zip(left.shape[:-1], left.stride()[:-1]))
    ):
        return None
    return left.as_strided((*left.shape[:-1], width), left.stride())


def pages_as_bf16(parts: tuple[torch.Tensor, ...], page_ids: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Copy the pages a batch refers to into one bf16 (or fp8) buffer of whole vectors.

    For caches that cannot be read where they are: latent and rope part in separate buffers (or fp16 values, rounded).

    Args:
        parts: tensors [num_pages, page_size, width] whose widths add up to 576.
        page_ids: int32 [n]; used: bool [n], False where an id means nothing and must not be followed.

    Returns:
        [n, page_size, 576]; page ``i`` of it is page ``page_ids[i]``.
    """
    ids = torch.where(used, page_ids, 0).long()
    # A page that no one refers to may hold anything; it is copied as page 0 and stays unread.
    dtype = parts[0].dtype if parts[0].dtype.itemsize == 1 else torch.bfloat16
    out = torch.empty(ids.numel(), parts[0].shape[1], DIMS.qk_head_dim, dtype=dtype, device=ids.device)
    at = 0
    for part in parts:
        out[..., at : at + part.shape[-1]] = part[ids]
        at += part.shape[-1]
    return out
