"""From a checked call to argument values of the built kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...errors import InvalidArgument
from ...problem import DecodeArgs
from .build import BuiltKernel

__all__ = ["Scratch", "make_scratch", "plan_call"]


@dataclass
class Scratch:
    """Scratch memory of a problem and of smaller ones. Only ``zeros`` needs initial values."""

    zeros: torch.Tensor  #: uint8 [1152 or more]
    items: torch.Tensor  #: int32 [max_items]
    first_item: torch.Tensor  #: int32 [batch]
    split_counts: torch.Tensor  #: int32 [batch]
    num_items: torch.Tensor  #: int32 [1]
    partial_out: torch.Tensor  #: fp32 [rows, 512]
    partial_lse: torch.Tensor  #: fp32 [rows]


def make_scratch(max_items: int, batch: int, partial_rows: int, device: torch.device | str) -> Scratch:
    """Allocate; sizes as in splits.WorkShape."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(max(1, n) for n in shape), dtype=dtype, device=device)

    return Scratch(
        zeros=torch.zeros(2048, dtype=torch.uint8, device=device),
        items=empty(max_items, dtype=torch.int32),
        first_item=empty(batch, dtype=torch.int32),
        split_counts=empty(batch, dtype=torch.int32),
        num_items=empty(1, dtype=torch.int32),
        partial_out=empty(partial_rows, 512, dtype=torch.float32),
        partial_lse=empty(partial_rows, dtype=torch.float32),
    )


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _bytes(t: torch.Tensor, dim: int) -> int:
    return t.stride(dim) * t.element_size()


def plan_call(
    args: DecodeArgs, built: BuiltKernel, scratch: Scratch
) -> Iterator[tuple[BuiltKernel, dict[str, int | float]]]:
    """The launches of a call, in order: (kernel, argument values)."""
    problem, cache, table, out = args.problem, args.cache, args.table, args.out
    block_scales = cache.scale if problem.format == "mxfp4" else None
    if block_scales is not None and (block_scales.data_ptr() | block_scales.stride(0) | block_scales.stride(1)) & 1:
        raise InvalidArgument(
            f"scale: the flydsl backend needs an even address and even strides, got strides {block_scales.stride()}. "
            "Pad the rows of scales to an even number of bytes."
        )
    values: dict[str, int | float] = {
        "q": _address(args.q),
        "kv": _address(cache.data),
        "kv_scale": _address(cache.scale),
        "page_ids": _address(table.page_ids),
        "kv_indptr": _address(table.kv_indptr),
        "kv_lens": _address(table.cache_seqlens if table.kind == "block_table" else table.kv_last_page_len),
        "qo_indptr": _address(args.qo_indptr),
        "zeros": _address(scratch.zeros),
        "items": _address(scratch.items),
        "first_item": _address(scratch.first_item),
        "split_counts": _address(scratch.split_counts),
        "num_items": _address(scratch.num_items),
        "out": _address(out),
        "lse": _address(args.lse),
        "partial_out": _address(scratch.partial_out),
        "partial_lse": _address(scratch.partial_lse),
        "kv_page_stride": _bytes(cache.data, 0),
        "kv_token_stride": _bytes(cache.data, 1),
        "scale_page_stride": 0 if block_scales is None else _bytes(block_scales, 0),
        "scale_token_stride": 0 if block_scales is None else _bytes(block_scales, 1),
        "q_row_stride": _bytes(args.q, 0),
        "q_head_stride": _bytes(args.q, 1),
        "out_row_stride": _bytes(out, 0),
        "out_head_stride": _bytes(out, 1),
        "table_stride": table.page_ids.stride(0) if table.kind == "block_table" and table.page_ids is not None else 0,
        "sm_scale": args.sm_scale,
    }
    for kernel in built.launches:
        yield kernel, values
