"""Kernel arguments that every decode kernel shares, from a checked call."""

from __future__ import annotations

import torch

from ... import settings
from ...problem import DecodeArgs
from .launch import HopperLaunch
from .schedule import lens_width

__all__ = ["NOT_SPECIALISED", "POINTERS", "cache_view", "constants", "pointers", "tensors"]

#: Integers that may be 1 or change from call to call: one compiled kernel serves all their values.
NOT_SPECIALISED = ["lse_stride", "ids_stride", "q_len", "batch", "workers", "splits", "tiles", "may_wait", "counters"]

#: Tensor arguments of every decode kernel beside the cache's, in the order of :func:`pointers`.
POINTERS = (
    "q_ptr", "out_ptr", "lse_ptr", "part_out_ptr", "part_lse_ptr", "counter_ptr", "lens_ptr", "last_ptr", "ids_ptr", "qo_ptr",
)  # fmt: skip


def cache_view(args: DecodeArgs) -> torch.Tensor:
    """The cache as [pages, page_size, W]; a contiguous table sees one page that holds every token."""
    data = args.cache.data
    if args.table.kind != "contiguous":
        return data
    tokens = args.cache.as_tokens().data  # [num_tokens, 1, W]
    return tokens.as_strided(
        (1, tokens.shape[0], tokens.shape[2]), (tokens.stride(0), tokens.stride(0), 1), tokens.storage_offset()
    )


def pointers(args: DecodeArgs, workspace) -> tuple[torch.Tensor, ...]:
    """The tensors called :data:`POINTERS`; where a call has no such tensor stands one that the kernel does not read."""
    table = args.table
    lens = table.cache_seqlens if table.kind == "block_table" else table.kv_indptr
    assert lens is not None  # every kind of table has one of the two
    return (
        args.q,
        args.out,
        workspace.part_lse if args.lse is None else args.lse,
        workspace.part_out,
        workspace.part_lse,
        workspace.counters,
        lens,
        lens if table.kv_last_page_len is None else table.kv_last_page_len,
        lens if table.page_ids is None else table.page_ids,
        lens if args.qo_indptr is None else args.qo_indptr,
    )


def tensors(args: DecodeArgs, launch: HopperLaunch, workspace) -> dict[str, object]:
    """Run-time arguments of a decode kernel, except the cache itself."""
    q, out, lse = args.q, args.out, args.lse
    found = dict(zip(POINTERS, pointers(args, workspace), strict=True))
    ids = found["ids_ptr"]
    return dict(
        **found,
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        lse_stride=0 if lse is None else lse.stride(0),
        counters=(workspace.counters.numel() - 4) // 2,
        ids_stride=ids.stride(0) if args.table.kind == "block_table" else ids.numel(),
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
    """Compile-time arguments and launch options that every decode kernel has."""
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
        MANY_SPLITS=launch.many_splits,
        launch_pdl=settings.programmatic_launch(),
    )
