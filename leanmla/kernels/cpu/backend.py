"""The CPU backend: cuts a call into work items, hands them to threads, merges what was split."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import torch

from ... import settings
from ...device import DeviceInfo
from ...problem import DIMS, DecodeArgs, DecodeProblem, LaunchConfig
from ...reference import query_rows
from ...split_plan import plan_splits
from .workers import Scratch, run_on_workers

__all__ = ["BACKEND", "CpuBackend"]

#: Keys a tile and query rows an item; decode.py is written for them (a test compares).
TILE = 64
MAX_ROWS = 128

#: Items a thread in a balanced split, where each can have at least MIN_ITEM_BLOCKS tiles of keys. Threads take items as
#: they become free, so a thread that shares its core (torch's own threads spin for milliseconds after each operation)
#: does not hold up the rest.
ITEMS_PER_THREAD = 4
MIN_ITEM_BLOCKS = 16

#: Below this many row-key pairs a call runs on the calling thread alone: waking a thread costs more than it saves.
MIN_WORK_PER_WORKER = 4096


class Workspace:
    """Partial results of split sequences. Grows to the largest call seen and is kept."""

    def __init__(self) -> None:
        self._out = np.empty((0, DIMS.v_head_dim), dtype=np.float32)
        self._lse = np.empty(0, dtype=np.float32)

    def partials(self, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """fp32 [>= slots, 512] and [>= slots]."""
        if self._lse.size < slots:
            self._out = np.empty((slots, DIMS.v_head_dim), dtype=np.float32)
            self._lse = np.empty(slots, dtype=np.float32)
        return self._out, self._lse


class CpuBackend:
    """Fused decode on a CPU, compiled by numba.

    Args:
        bf16_dot: use bf16 products where a call allows it. None: if this machine has an instruction for them.
    """

    name = "cpu"

    def __init__(self, bf16_dot: bool | None = None) -> None:
        self._bf16_dot = bf16_dot

    def why_not(self, problem: DecodeProblem, device: DeviceInfo) -> str | None:
        if device.kind != "cpu":
            return f"runs on a CPU, this device is {device.name}"
        return _numba_missing()

    def make_workspace(self, problem: DecodeProblem, device: torch.device) -> Workspace:
        return Workspace()

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        as_bf16 = self._uses_bf16(problem)
        rows = problem.max_q_len * problem.num_heads
        return LaunchConfig(
            backend=self.name,
            kernel="kernels/cpu/decode.py",
            block_rows=min(-(-rows // 16) * 16, MAX_ROWS),
            block_kv=TILE,
            num_workers=_num_threads(),
            reason=(
                "bf16 products with fp32 sums (AVX512_BF16)"
                if as_bf16
                else "fp32 products: " + self._why_fp32(problem)
            ),
            extra=(("products", "bf16" if as_bf16 else "fp32"),),
        )

    def _why_fp32(self, problem: DecodeProblem) -> str:
        if problem.q_dtype != "bf16":
            return "fp16 queries do not fit bf16"
        if problem.format == "fp8_tile128":
            return "values times a tile scale do not fit bf16"
        return "this machine has no AVX512_BF16"

    def _uses_bf16(self, problem: DecodeProblem) -> bool:
        if problem.q_dtype != "bf16" or problem.format == "fp8_tile128":
            return False
        if self._bf16_dot is not None:
            return self._bf16_dot
        from .simd import HAS_BF16_DOT

        return HAS_BF16_DOT

    def run(self, args: DecodeArgs, workspace: Workspace) -> None:
        from .calls import CALL
        from .kernels import decode
        from .tiles import FORMAT_CODES

        problem, q, cache, out = args.problem, args.q, args.cache, args.out
        items, merges, slots, work = _work_items(args)
        if not items.size:
            return
        num_workers = max(1, min(_num_threads(), len(items), work // MIN_WORK_PER_WORKER))
        partial_out, partial_lse = workspace.partials(slots)
        call = np.zeros(1, dtype=CALL)
        c = call[0]
        c["items"], c["num_items"], c["merges"] = items.ctypes.data, len(items), merges.ctypes.data
        c["as_bf16"], c["format"] = self._uses_bf16(problem), FORMAT_CODES[problem.format]
        c["causal"], c["num_heads"], c["page_size"] = problem.causal, problem.num_heads, problem.page_size
        c["q"], c["q_stride"], c["q_head_stride"], c["q_is_fp16"] = *_address(q), problem.q_dtype == "fp16"
        c["out"], c["out_stride"], c["out_head_stride"] = _address(out)
        c["lse"] = 0 if args.lse is None else args.lse.data_ptr()
        c["partial_out"], c["partial_lse"] = partial_out.ctypes.data, partial_lse.ctypes.data
        c["data"], c["page_stride"], c["token_stride"] = _address(cache.data)
        c["token_bytes"] = cache.data.shape[2] * cache.data.element_size()
        if problem.format == "mxfp4":
            c["scales"], c["scale_page_stride"], c["scale_token_stride"] = _address(cache.scale)
        if problem.table_kind == "contiguous":  # pages of one token
            c["token_stride"], c["scale_token_stride"] = c["page_stride"], c["scale_page_stride"]
        c["sm_scale"], c["logit_cap"] = args.sm_scale, problem.logit_cap
        c["tensor_scale"] = float(cache.scale) if problem.format == "fp8" else 1.0
        buffers = _scratch().take(num_workers)
        addresses = np.array([b.ctypes.data for b in buffers], dtype=np.int64)
        c["scratch"] = addresses.ctypes.data
        run_on_workers(decode, call.ctypes.data, num_workers)
        _scratch().give_back(buffers)


def _address(t: torch.Tensor) -> tuple[int, int, int]:
    """Address and byte strides of the first two dims."""
    width = t.element_size()
    return t.data_ptr(), t.stride(0) * width, t.stride(1) * width


def _work_items(args: DecodeArgs) -> tuple[np.ndarray, np.ndarray, int, int]:
    """(ITEM records, longest first; MERGE records; partial slots; row-key pairs)."""
    from .calls import ITEM, MERGE

    problem, table = args.problem, args.table
    kv_lens = table.kv_lens().tolist()
    queries = query_rows(problem.total_q, problem.batch, args.qo_indptr)
    longest = max((end - first for first, end in queries), default=0) * problem.num_heads
    chunks = max(1, -(-longest // MAX_ROWS))
    threads = max(1, -(-_num_threads() // chunks))
    blocks = sum(-(-n // TILE) for n in kv_lens)
    plan = plan_splits(
        kv_lens,
        num_workers=threads * min(ITEMS_PER_THREAD, max(1, blocks // (threads * MIN_ITEM_BLOCKS))),
        granularity=TILE,
        num_kv_splits=problem.num_kv_splits,
        split_size=problem.split_size,
    )
    page_ids = 0 if table.page_ids is None else table.page_ids.data_ptr()
    if table.kind == "block_table":
        starts = [page_ids + 4 * table.page_ids.stride(0) * b for b in range(problem.batch)]
        first_slots = [0] * problem.batch
    else:
        indptr = table.kv_indptr.tolist()
        starts = [page_ids + 4 * n for n in indptr] if table.kind == "csr" else [0] * problem.batch
        first_slots = [0] * problem.batch if table.kind == "csr" else indptr

    items, merges = [], []
    slots = work = 0
    of_seq = [plan.items[n : n + count] for n, count in zip(plan.partial_start, plan.splits_per_seq, strict=True)]
    for b, (first, end) in enumerate(queries):
        rows = (end - first) * problem.num_heads
        work += rows * kv_lens[b]
        splits = of_seq[b]
        for row in range(0, rows, MAX_ROWS):
            row_end = min(row + MAX_ROWS, rows)
            merge = -1
            if len(splits) > 1:
                merge = len(merges)
                merges.append((first, row, row_end, len(splits), slots + row, rows, len(splits)))
            for s in splits:
                items.append(
                    (first, end - first, kv_lens[b], s.kv_start, s.kv_end, row, row_end, starts[b], first_slots[b],
                     slots + s.split * rows + row, merge)
                )  # fmt: skip
        if len(splits) > 1:
            slots += len(splits) * rows
    items.sort(key=lambda i: (i[3] - i[4]) * (i[6] - i[5]))
    return np.array(items, dtype=ITEM), np.array(merges, dtype=MERGE), slots, work


def _num_threads() -> int:
    return settings.cpu_threads() or torch.get_num_threads()


@functools.cache
def _scratch() -> Scratch:
    from .decode import SCRATCH_BYTES

    return Scratch(SCRATCH_BYTES)


@functools.cache
def _numba_missing() -> str | None:
    """Why numba cannot be used, or None. Does not import it."""
    if importlib.util.find_spec("numba") is None:
        return "needs numba, which is not installed (pip install numba)"
    return None


BACKEND = CpuBackend()
