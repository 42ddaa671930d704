"""From a checked call to argument values of the built kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...errors import InvalidArgument
from ...problem import DecodeArgs
from .build import BuiltKernel

__all__ = ["plan_call"]


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _bytes(t: torch.Tensor, dim: int) -> int:
    return t.stride(dim) * t.element_size()


def plan_call(
    args: DecodeArgs, built: BuiltKernel, *, zeros: torch.Tensor, partial_out: torch.Tensor, partial_lse: torch.Tensor
) -> Iterator[tuple[BuiltKernel, dict[str, int | float]]]:
    """The launches of a call, in order: (kernel, argument values)."""
    problem, cache, table, out = args.problem, args.cache, args.table, args.out
    scale = cache.scale
    block_scales = scale if problem.format == "mxfp4" else None
    if block_scales is not None and (block_scales.data_ptr() | block_scales.stride(0) | block_scales.stride(1)) & 1:
        raise InvalidArgument(
            f"scale: the flydsl backend needs an even address and even strides, got strides {block_scales.stride()}. "
            "Pad the rows of scales to an even number of bytes."
        )
    split_values = {
        "partial_out": _address(partial_out),
        "partial_lse": _address(partial_lse),
        "out": _address(out),
        "lse": _address(args.lse),
        "out_row_stride": _bytes(out, 0),
        "out_head_stride": _bytes(out, 1),
    }
    yield built, split_values | {
        "q": _address(args.q),
        "kv": _address(cache.data),
        "kv_scale": _address(scale),
        "page_ids": _address(table.page_ids),
        "kv_indptr": _address(table.kv_indptr),
        "kv_lens": _address(table.cache_seqlens if table.kind == "block_table" else table.kv_last_page_len),
        "qo_indptr": _address(args.qo_indptr),
        "zeros": _address(zeros),
        "kv_page_stride": _bytes(cache.data, 0),
        "kv_token_stride": _bytes(cache.data, 1),
        "scale_page_stride": 0 if block_scales is None else _bytes(block_scales, 0),
        "scale_token_stride": 0 if block_scales is None else _bytes(block_scales, 1),
        "q_row_stride": _bytes(args.q, 0),
        "q_head_stride": _bytes(args.q, 1),
        "table_stride": table.page_ids.stride(0) if table.kind == "block_table" and table.page_ids is not None else 0,
        "sm_scale": args.sm_scale,
    }
    if built.combine is not None:
        yield built.combine, split_values
