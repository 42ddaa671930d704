"""Kernel arguments that every decode kernel shares, from a checked call."""

from __future__ import annotations

import torch

from ...problem import DecodeArgs
from .launch import HopperLaunch
from .schedule import lens_width

__all__ = ["NOT_SPECIALISED", "cache_view", "constants", "tensors"]

#: Integers that may be 1 or change from call to call: one compiled kernel serves all their values.
NOT_SPECIALISED = ["lse_stride", "ids_stride", "q_len", "batch", "workers", "splits", "tiles", "may_wait", "counters"]


def cache_view(args: DecodeArgs) -> torch.Tensor:
    """The cache as [pages, page_size, W]; a contiguous table sees one page that holds every token."""
    data = args.cache.data
    if args.table.kind != "contiguous":
        return data
    tokens = args.cache.as_tokens().data  # [num_tokens, 1, W]
    return tokens.as_strided((1, tokens.shape[0], tokens.shape[2]), (tokens.stride(0), tokens.stride(0), 1), tokens.storage_offset())


def tensors(args: DecodeArgs, launch: HopperLaunch, workspace) -> dict[str, object]:
    """Run-time arguments of a decode kernel, except the cache itself."""
    table, q, out = args.table, args.q, args.out
    lens = table.cache_seqlens if table.kind == "block_table" else table.kv_indptr
    assert lens is not None  # every kind of table has one of the two
    last = table.kv_last_page_len if table.kv_last_page_len is not None else lens
    ids = table.page_ids if table.page_ids is not None else lens
    lse = args.lse
    return dict(  # noqa: C408 - names of kernel arguments
        q_ptr=q,
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        out_ptr=out,
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        lse_ptr=workspace.part_lse if lse is None else lse,
        lse_stride=0 if lse is None else lse.stride(0),
        part_out_ptr=workspace.part_out,
        part_lse_ptr=workspace.part_lse,
        counter_ptr=workspace.counters,
        counters=(workspace.counters.numel() - 4) // 2,
        lens_ptr=lens,
        last_ptr=last,
        ids_ptr=ids,
        ids_stride=ids.stride(0) if table.kind == "block_table" else ids.numel(),
        qo_ptr=lens if args.qo_indptr is None else args.qo_indptr,
        q_len=q.shape[0] // args.problem.batch,
        batch=args.problem.batch,
        workers=launch.workers,
        splits=launch.splits,
        tiles=launch.tiles,
        sm_scale=args.sm_scale,
        logit_cap=args.problem.logit_cap,
        may_wait=int(launch.may_wait),
    )


def constants(args: DecodeArgs, launch: HopperLaunch) -> dict[str, object]:
    """Compile-time arguments that every decode kernel has."""
    problem = args.problem
    return dict(  # noqa: C408 - names of kernel arguments
        KIND=launch.kind,
        PAGE_SIZE=args.table.page_size,
        RAGGED_Q=args.qo_indptr is not None,
        LENS=lens_width(problem.batch),
        ONE_PASS=problem.batch <= lens_width(problem.batch),
        MODE=launch.mode,
        HEADS=problem.num_heads,
        ROWS=launch.rows,
        STAGES=launch.stages,
        BOX=launch.box,
        GATHER=launch.gather,
        CAUSAL=problem.causal and problem.max_q_len > 1,
        HAS_CAP=problem.logit_cap > 0.0,
        WRITE_LSE=args.lse is not None,
    )
