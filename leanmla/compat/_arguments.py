"""What the stand-ins share: refusals under the caller's argument names, and views over a cache that comes in other shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from .. import formats
from ..cache import LatentCache
from ..errors import InvalidArgument, InvalidDtype
from ..page_table import PageTable
from ..problem import DIMS

__all__ = [
    "block_page_table", "check_tensor", "csr_page_table", "joined_view", "latent_cache", "pages_as_bf16", "refuse", "reword",
]  # fmt: skip


def reword(error: InvalidArgument, names: dict[str, str]) -> None:
    """Let a refusal of ours call its argument what the caller calls it: ``reword(error, {"out": "o"})``, then ``raise``."""
    text = str(error)
    found = re.match(r"[A-Za-z_]+", text)
    if found and found.group() in names:
        error.args = (names[found.group()] + text[found.end() :],)


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


# -- wrapping a caller's tensors, call after call ----------------------------------------------------------------------
#
# Whether tensors may form a page table or a cache depends on their kinds alone (shape, strides, dtype, device). A decode step
# makes the same call once a layer, so kinds that passed the checks are not checked again.

_REMEMBERED = 256  #: kinds of tensors; beyond it all are forgotten
_passed: set[tuple] = set()


def _kinds(what: str, page_size: object, *tensors: object) -> tuple | None:
    """A key of what such checks depend on; None where they must be made."""
    if type(page_size) is not int or torch.compiler.is_compiling():
        return None
    key: list[object] = [what, page_size]
    for t in tensors:
        if type(t) is torch.Tensor:
            key += (t.shape, t.stride(), t.dtype, t.device)
        elif t is None:
            key.append(None)
        else:
            return None
    return tuple(key)


def _remember(key: tuple | None) -> None:
    if key is not None:
        if len(_passed) >= _REMEMBERED:
            _passed.clear()
        _passed.add(key)


def csr_page_table(
    kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor | None, page_size: int
) -> PageTable:
    """:meth:`leanmla.PageTable.from_csr`."""
    key = _kinds("csr", page_size, kv_indptr, kv_indices, kv_last_page_len)
    if key in _passed:
        return PageTable("csr", page_size, kv_indptr.shape[0] - 1, kv_indices, kv_indptr, kv_last_page_len, None)
    table = PageTable.from_csr(kv_indptr, kv_indices, kv_last_page_len, page_size=page_size)
    _remember(key)
    return table


def block_page_table(block_table: torch.Tensor, cache_seqlens: torch.Tensor, page_size: int) -> PageTable:
    """:meth:`leanmla.PageTable.from_block_table`."""
    key = _kinds("block_table", page_size, block_table, cache_seqlens)
    if key in _passed:
        return PageTable("block_table", page_size, block_table.shape[0], block_table, None, None, cache_seqlens)
    table = PageTable.from_block_table(block_table, cache_seqlens, page_size=page_size)
    _remember(key)
    return table


def latent_cache(pages: torch.Tensor, scale: torch.Tensor | float | None = None, *, format: str, page_size: int) -> LatentCache:
    """:meth:`leanmla.LatentCache.from_tensors` for pages [num_pages, page_size, (1,) W] without block scales."""
    key = _kinds(format, page_size, pages, scale)
    # A scale on the CPU is also checked by its value, so it goes the whole way.
    if key in _passed and (scale is None or scale.device.type != "cpu"):  # type: ignore[union-attr]
        fmt = formats.get(format)
        data = pages.squeeze(2) if pages.ndim == 4 else pages
        if data.dtype != fmt.storage_dtype:
            data = data.view(fmt.storage_dtype)
        one = None if scale is None else scale.reshape(1)  # type: ignore[union-attr]
        return LatentCache(data, one, format=fmt, mx_scale_rule="even", scale_is_set=True)
    cache = LatentCache.from_tensors(pages, scale, format=format, page_size=page_size)
    if pages.ndim == 4 or pages.shape[1] == page_size:
        _remember(key)
    return cache


def joined_view(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """One view over both when they are neighbouring slices of the last dim of one buffer, else None.

    Args:
        left: [..., m]; right: [..., n], the same leading dims.

    Returns:
        [..., m + n] without a copy, or None.
    """
    shape, strides, before = left.shape, left.stride(), left.shape[-1]
    width = before + right.shape[-1]
    if (
        shape[:-1] != right.shape[:-1]
        or strides != right.stride()
        or strides[-1] != 1
        or left.dtype != right.dtype
        or left.device != right.device
        or right.storage_offset() != left.storage_offset() + before
        or any(n > 1 and stride < width for n, stride in zip(shape[:-1], strides))
        or left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()
    ):
        return None
    return left.as_strided((*shape[:-1], width), strides)


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
