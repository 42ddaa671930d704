"""The kernel's arguments from a checked call: ``Arguments`` of layout.cuh as a ctypes structure."""

from __future__ import annotations

import ctypes
import math
import struct

import torch

from ...problem import DecodeArgs
from .compiler import SCALE_ROOM
from .launch import ROWS, CudaLaunch

__all__ = ["HEADER", "Arguments", "Divisor", "fill", "refill"]

HEADER = 4  #: words before the two sets of counters, as in reduction.cuh
_LOG2E = math.log2(math.e)

_POINTERS = ("q", "out", "lse", "part_out", "part_lse", "counters", "cache", "scales", "lens", "last", "ids", "qo")
_STRIDES = (
    "q_stride_token", "q_stride_head", "out_stride_token", "out_stride_head", "lse_stride", "ids_stride",
)  # fmt: skip
_INTEGERS = (
    "num_counters", "kind", "page_size", "whole_slots", "whole_scales", "page_stride", "token_stride",
    "scale_page_stride", "scale_token_stride",
    "q_len", "batch", "heads", "tiles", "causal", "mode", "workers",
    "splits", "may_wait", "pairs",
)  # fmt: skip
_FLOATS = ("scale", "cap", "cap_inverse")


class Divisor(ctypes.Structure):
    """``n // x`` is ``n * magic >> shift`` for every n from 0 to 2**31 - 1."""

    _fields_ = [("magic", ctypes.c_uint32), ("shift", ctypes.c_uint32)]

    @classmethod
    def of(cls, x: int) -> Divisor:
        """For an x from 1 to 2**31 - 1; the magic has 32 bits."""
        shift = 31 + (x - 1).bit_length()
        return cls(-(-(1 << shift) // x), shift)


class Arguments(ctypes.Structure):
    """Field by field as in layout.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        ("by_page_size", Divisor),
        ("by_heads", Divisor),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        *((name, ctypes.c_float) for name in _FLOATS),
    ]


def _even(t: torch.Tensor) -> bool:
    return t.data_ptr() % 4 == 0 and t.stride(0) % 2 == 0 and t.stride(1) % 2 == 0


def _addresses(args: DecodeArgs, workspace) -> tuple[int, ...]:
    """In the order of ``_POINTERS``; 0 where a call has no such tensor. A view of the cache's tokens begins where the cache does."""
    table = args.table
    lens = table.cache_seqlens if table.kind == "block_table" else table.kv_indptr
    last = table.kv_last_page_len if table.kind == "csr" and table.page_size > 1 else None
    found = (
        args.q, args.out, args.lse, workspace.part_out, workspace.part_lse, workspace.counters, args.cache.data, args.cache.scale, lens,
        last, table.page_ids, args.qo_indptr,
    )  # fmt: skip
    return tuple([0 if t is None else t.data_ptr() for t in found])


def _whole_scales(scale: torch.Tensor | None) -> bool:
    """Whether pages have the scales of 16 rows where they can come in one piece; see scales.cuh."""
    return scale is not None and scale.stride(1) <= SCALE_ROOM and scale.data_ptr() % 16 == 0 and scale.stride(0) % 16 == 0


def refill(filled: Arguments, args: DecodeArgs, workspace) -> Arguments:
    """A copy of a call's arguments with the addresses of a call like it."""
    copy = Arguments.from_buffer_copy(filled)
    struct.pack_into(f"{len(_POINTERS)}P", copy, 0, *_addresses(args, workspace))
    return copy


def fill(args: DecodeArgs, launch: CudaLaunch, workspace) -> Arguments:
    """Arguments of a call; they hold addresses, so the call's tensors must outlive the launch."""
    problem, table, q, out = args.problem, args.table, args.q, args.out
    contiguous = table.kind == "contiguous"
    cache = args.cache.as_tokens() if contiguous else args.cache
    data, scale = cache.data, cache.scale  # bytes: strides count them
    token_stride = data.stride(-2)
    scale_token_stride = 0 if scale is None else scale.stride(-2)
    page, ids = table.page_size, table.page_ids
    whole_slots = token_stride == data.shape[-1] and (contiguous or page % ROWS == 0)
    cap = max(problem.logit_cap, 1e-30) * _LOG2E  # fp32 holds its reciprocal; a smaller cap gives no other output
    return Arguments(
        *_addresses(args, workspace),
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        lse_stride=0 if args.lse is None else args.lse.stride(0),
        page_stride=data.stride(0),
        token_stride=token_stride,
        ids_stride=0 if ids is None else ids.stride(0) if table.kind == "block_table" else ids.numel(),
        scale_page_stride=0 if scale is None else scale.stride(0),
        scale_token_stride=scale_token_stride,
        by_page_size=Divisor.of(page),
        by_heads=Divisor.of(problem.num_heads),
        num_counters=(workspace.counters.numel() - HEADER) // 2,
        kind=launch.kind,
        page_size=page,
        whole_slots=whole_slots,
        whole_scales=whole_slots and not contiguous and _whole_scales(scale),
        q_len=q.shape[0] // problem.batch,
        batch=problem.batch,
        heads=problem.num_heads,
        tiles=launch.tiles,
        causal=problem.causal and problem.max_q_len > 1,
        mode=launch.mode,
        workers=launch.workers,
        splits=launch.splits,
        may_wait=launch.may_wait,
        pairs=_even(q) and _even(out),
        scale=args.sm_scale * _LOG2E,
        cap=cap,
        cap_inverse=1.0 / cap,
    )
